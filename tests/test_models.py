"""No model of transformers trains on wrong numbers without a word, and none fails without a sentence."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import model_support
import pytest
import shrunk_models

from tests.deep_cases import deep

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

POPULAR = ("llama", "gemma4", "qwen3_vl")
QUICK = ("one process", "own ranks", "pp 2", "packed")
EVERY = shrunk_models.families()
GROUPS, TURNS = 25, 5  # of families, which differ within a group; of checks beside that on one process


def checks_of(group: int) -> tuple[str, ...]:
    """A fifth of the checks: families with neighbouring names, which are often alike, have others."""
    first, *others = model_support.CHECKS
    return first, *others[group % TURNS :: TURNS]


def found(families: Sequence[str], checks: Sequence[str], folder: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Family -> check -> outcome."""
    script = str(Path(model_support.__file__))
    arguments = ["--families", *families, "--checks", *checks, "--out", str(folder)]
    # forks, in whose threads torch's pool may not be made
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=580, env=environment)
    return json.loads((folder / "model_support.json").read_text())["families"]


@pytest.mark.parametrize(
    "families, checks",
    [
        pytest.param(POPULAR, QUICK, id="popular"),
        *(deep(EVERY[i::GROUPS], checks_of(i), id=EVERY[i]) for i in range(GROUPS)),
    ],
)
def test_no_model_is_wrong_and_none_crashes(families, checks, tmp_path):
    rows = found(families, checks, tmp_path)
    outcomes = {(family, check): rows[family][check] for family in families for check in checks}
    bad = {key: value for key, value in outcomes.items() if value["status"] in ("wrong", "crash")}
    assert not bad, bad
    if families is POPULAR:
        assert all(outcome["status"] != "not built" for outcome in outcomes.values())
