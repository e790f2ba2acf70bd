"""The examples of CONTRIBUTING.md apply to the code as it is, and their tests pass."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = ("encoder_backwards_last", "heaviest_first", "vip_llava")
"""A word in the name of each test of an example: the schedule, the arrangement, the model family."""
FILES = ("schedule/test_encoder_backwards_last.py", "arrange/test_heaviest_first.py", "modeling/test_stages.py")


def _apply(page: str, folder: Path) -> None:
    """Applies the diffs and writes the files of the examples in a copy of the tree."""
    examples = page[page.index("## How to add") :]
    for language, block in re.findall(r"^```(python|diff)\n(.*?)^```", examples, re.M | re.S):
        if language == "python":
            name = re.match(r"# (\S+\.py)\n", block)
            assert name, f"an example names no file: {block}"
            (folder / name[1]).write_text(block)
            continue
        for name, hunks in re.findall(r"^--- (\S+)\n(.*?)(?=^--- |\Z)", block, re.M | re.S):
            for hunk in hunks.split("@@\n")[1:]:
                lines = hunk.splitlines(True)
                old, new = ("".join(line[1:] for line in lines if line[0] in kind) for kind in ("- ", "+ "))
                text = (folder / name).read_text()
                assert text.count(old) == 1, f"{name} has this not once:\n{old}"
                (folder / name).write_text(text.replace(old, new))


@pytest.mark.distributed
@pytest.mark.deep
def test_the_examples_pass_their_tests(tmp_path: Path):
    for name in ("hf_mmparallel", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "setup.cfg"):
        shutil.copy(ROOT / name, tmp_path)
    _apply((ROOT / "CONTRIBUTING.md").read_text(), tmp_path)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", " or ".join(NAMES)]
    command += [f"tests/{name}" for name in FILES]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for name in NAMES:
        assert re.search(rf"{name}.* PASSED", ran.stdout), f"no test of {name} ran"
