"""The examples of CONTRIBUTING.md apply to the code as it is, and their tests pass."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.markdown import ROOT, blocks

EXAMPLES = {
    "a schedule": "tests/schedule/test_encoder_backwards_last.py -k encoder_backwards_last",
    "a kind of work": "tests/runtime/test_check_kind.py -k check_kind",
    "an arrangement": "tests/arrange/test_heaviest_first.py -k heaviest_first",
    "a model family": "tests/modeling/test_stages.py -k vip_llava",
}
"""End of a title -> the tests that its example adds or changes."""


def _apply(section: str, folder: Path) -> None:
    """Applies the diffs and writes the files of an example in a copy of the tree."""
    for block in blocks(section, "python", "diff"):
        if block.language == "python":
            name = re.match(r"# (\S+\.py)\n", block.text)
            assert name, f"an example names no file: {block.text}"
            (folder / name[1]).write_text(block.text)
            continue
        for name, hunks in re.findall(r"^--- (\S+)\n(.*?)(?=^--- |\Z)", block.text, re.M | re.S):
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
    parts = re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M)
    sections = [part for part in parts if part.startswith("How to add ") and blocks(part, "python", "diff")]
    assert [section.partition("\n")[0] for section in sections] == [f"How to add {title}" for title in EXAMPLES]
    for section, tests in zip(sections, EXAMPLES.values(), strict=True):
        _apply(section, tmp_path)
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *tests.split()]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0 and " PASSED" in ran.stdout, ran.stdout + ran.stderr
