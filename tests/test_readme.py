"""What README says is what its commands print."""

import pytest
from PIL import Image

from hf_mmparallel.cli.main import main
from tests.markdown import ROOT, blocks, commands


def _areas(picture: Image.Image) -> dict[tuple[int, ...], int]:
    """Pixels of each color that fills a hundredth of a picture or more: those of its bars, not of its letters."""
    counts = picture.convert("RGB").getcolors(2**24) or []
    return {color: count for count, color in counts if count > picture.width * picture.height // 100}


def test_the_picture_is_of_a_plan_that_its_command_predicts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = [words for block in blocks(ROOT / "README.md", "bash") for words in commands(block.text).values()]
    (arguments,) = (rest for _, *rest in words if rest[-1:] == ["docs/images/schedule.png"])
    picture = tmp_path / "schedule.png"
    assert main([*arguments[:-1], str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "\nStep " in printed and "Does not fit" not in printed
    drawn, kept = Image.open(picture), Image.open(ROOT / "docs/images/schedule.png")
    if drawn.info["Software"] == kept.info["Software"]:
        assert picture.read_bytes() == (ROOT / "docs/images/schedule.png").read_bytes()
    else:  # another matplotlib draws letters otherwise
        assert drawn.size == kept.size and _areas(drawn) == pytest.approx(_areas(kept), rel=0.01)
