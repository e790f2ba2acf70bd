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
    "a schedule": "tests/schedule/test_encoder_backwards_last.py",
    "a kind of work": "tests/runtime/test_check_kind.py",
    "a size of a layout": "tests/planning/test_turn_size.py",
    "a flag of storage": "tests/modeling/test_narrow_activations.py",
    "an arrangement": "tests/arrange/test_heaviest_first.py",
    "a model family": "tests/modeling/test_stages.py",
}
"""End of a title -> the file of tests that its example adds or changes."""
WITH_OTHERS = ("tests/modeling/test_stages.py",)  # files that have tests of others, too
MOST_FILES = 5  # that an example changes


def _apply(section: str, folder: Path) -> set[str]:
    """Applies the diffs of an example in a copy of the tree and writes its files; returns those that it changes."""
    changed = set()
    for block in blocks(section, "python", "diff"):
        if block.language == "python":
            name = re.match(r"# (\S+\.py)\n", block.text)
            assert name, f"an example names no file: {block.text}"
            (folder / name[1]).write_text(block.text)
            continue
        for name, hunks in re.findall(r"^--- (\S+)\n(.*?)(?=^--- |\Z)", block.text, re.M | re.S):
            changed.add(name)
            for hunk in hunks.split("@@\n")[1:]:
                lines = hunk.splitlines(True)
                old, new = ("".join(line[1:] for line in lines if line[0] in kind) for kind in ("- ", "+ "))
                text = (folder / name).read_text()
                assert text.count(old) == 1, f"{name} has this not once:\n{old}"
                (folder / name).write_text(text.replace(old, new))
    return changed


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
    for section in sections:
        assert len(_apply(section, tmp_path)) <= MOST_FILES
    # one session, whose imports take longer than the tests: those of files that the examples add, and of the family
    chosen = " or ".join(["vip_llava", *(Path(name).stem for name in EXAMPLES.values() if name not in WITH_OTHERS)])
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *EXAMPLES.values(), "-k", chosen]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    passed = [name for name in EXAMPLES.values() if re.search(rf"{name}::\S+ PASSED", ran.stdout)]
    assert ran.returncode == 0 and passed == list(EXAMPLES.values()), ran.stdout + ran.stderr
