"""Folders of training runs, which go with the session of tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "HF_MMPARALLEL_TEST_RUNS"


def start() -> None:
    """Makes the folder of this session, which its workers share; ranks and scripts learn of it by the environment."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = tempfile.mkdtemp(prefix="hf_mmparallel-tests-")


def finish() -> None:
    """Removes it, where this process is not one of the workers."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ.pop(VARIABLE), ignore_errors=True)


def session_folder() -> Path:
    """The folder of this session."""
    return Path(os.environ[VARIABLE])


def run_folder() -> str:
    """A new folder for the output of one run."""
    return tempfile.mkdtemp(prefix="run-", dir=os.environ.get(VARIABLE))
