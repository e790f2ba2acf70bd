"""Signals of clusters to a training under real launchers: it saves, and ends."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .test_launch import CONFIGS, ENVIRONMENT, ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = str(Path(__file__).with_name("preempted_script.py"))
FLAGS = ["--config_file", str(CONFIGS / "one_host_4cpu.yaml"), "--num_processes", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", *FLAGS]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
OURS = [sys.executable, "-m", "hf_mmparallel.cli.main", "launch", *FLAGS]


@pytest.mark.deep
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("launcher", "number", "to_all"),
    [
        (ACCELERATE, signal.SIGTERM, True),
        (TORCHRUN, signal.SIGUSR1, False),
        (OURS, signal.SIGTERM, False),
    ],
    ids=["accelerate and its processes", "torchrun", "hf-mmparallel launch"],
)
def test_a_signal_to_a_launcher_leaves_a_checkpoint(
    tmp_path: Path, launcher: list[str], number: signal.Signals, to_all: bool
):
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    with output.open("w") as file, contextlib.ExitStack() as stack:
        job = subprocess.Popen(
            [*launcher, SCRIPT, str(folder)],
            env={**os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(_kill_all, job)
        _wait_for("step 3 begins", output, job)
        os.killpg(job.pid, number) if to_all else os.kill(job.pid, number)
        returncode = job.wait(60)
    text = output.read_text()
    print(text[-6000:], returncode)
    stopped = dict(re.findall(r"rank (\d) stopped after step (\d+)", text))
    assert set(stopped) == {"0", "1"} and len(set(stopped.values())) == 1
    (checkpoint,) = folder.glob("checkpoint-*")
    assert checkpoint.name == f"checkpoint-{stopped['0']}" and (checkpoint / "optimizer.pt").is_file()
    assert returncode == (128 + number if launcher is OURS else 1)


def _wait_for(text: str, output: Path, job: subprocess.Popen) -> None:
    """Waits until a text is printed."""
    end = time.monotonic() + 100
    while text not in output.read_text():
        assert job.poll() is None and time.monotonic() < end, output.read_text()[-6000:]
        time.sleep(0.05)


def _kill_all(job: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()
