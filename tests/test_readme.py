"""What README says is what its commands print."""

import re
import shlex
from pathlib import Path

from hf_mmparallel.cli.main import main

ROOT = Path(__file__).parent.parent


def test_the_picture_is_of_a_plan_that_its_command_predicts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"```bash\n(hf-mmparallel plan [^`]*?--picture docs/images/schedule\.png)\n```", text)
    _, *arguments = shlex.split(command.replace("\\\n", " "))
    picture = tmp_path / "schedule.png"
    assert main([*arguments[:-1], str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "Predicted step" in printed and "Does not fit" not in printed
    assert picture.read_bytes() == (ROOT / "docs/images/schedule.png").read_bytes()
