"""Folders of training runs, which go with the session of tests."""

from __future__ import annotations

import os
import shutil
import tempfile

VARIABLE = "HF_MMPARALLEL_TEST_RUNS"


def start() -> None:
    """Makes the folder of this session; ranks and scripts learn of it by the environment."""
    os.environ[VARIABLE] = tempfile.mkdtemp(prefix="hf_mmparallel-tests-")


def finish() -> None:
    """Removes it."""
    shutil.rmtree(os.environ.pop(VARIABLE), ignore_errors=True)


def run_folder() -> str:
    """A new folder for the output of one run."""
    return tempfile.mkdtemp(prefix="run-", dir=os.environ.get(VARIABLE))
