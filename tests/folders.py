"""Folders of training runs, which go with the session of tests."""

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
VARIABLE = "HF_MMPARALLEL_TEST_RUNS"


def start() -> None:
    """Makes the folder of this session, which its workers share; ranks and scripts learn of it by the environment."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = tempfile.mkdtemp(prefix="hf_mmparallel-tests-")


def finish() -> None:
    """Removes it, where this process is not one of the workers."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ.pop(VARIABLE), ignore_errors=True)


def run_folder() -> str:
    """A new folder for the output of one run."""
    return tempfile.mkdtemp(prefix="run-", dir=os.environ.get(VARIABLE))


def made_once(name: str, make: Callable[[], T]) -> T:
    """What `make` returns, which is read from the folder of this session if one of its workers has made it before."""
    path = Path(os.environ[VARIABLE]) / f"{name}.pickle"
    if not path.exists():
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(pickle.dumps(make()))
        fresh.replace(path)
    return pickle.loads(path.read_bytes())
