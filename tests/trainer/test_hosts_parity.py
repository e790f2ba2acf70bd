"""A script launched by the files of `examples/accelerate_configs` on one host and over two trains and ends cleanly."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.hosts import TwoHosts, available

from . import runs

pytestmark = [pytest.mark.distributed, pytest.mark.deep]

ROOT = Path(__file__).parent.parent.parent
CONFIGS = ROOT / "examples" / "accelerate_configs"
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _launch(config: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / config), *words]


def _script(folder: Path) -> list[str]:
    folder.mkdir()
    script = str(Path(__file__).with_name("hosts_script.py"))
    return [script, "--out", str(folder / "run.pt"), "--output_dir", str(folder / "trained")]


def _places(output: str) -> list[str]:
    return sorted(re.findall(r"(rank \d.*): trained", output))


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """The run of four processes on this host."""
    folder = tmp_path_factory.mktemp("hosts") / "one"
    command, environment = _launch("one_host_4cpu.yaml", *_script(folder)), {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert _places(done.stdout) == [f"rank {rank} of 4, local {rank}, on cpu" for rank in range(4)]
    return runs.Run(**torch.load(folder / "run.pt"))


def test_a_launched_script_trains_as_the_stock_trainer_and_exits_cleanly(one_host):
    runs.assert_same_run(one_host, runs.stock("llava"))


@pytest.mark.skipif((reason := available()) is not None, reason=reason or "")
def test_two_hosts_train_as_one(one_host, tmp_path):
    script = _script(tmp_path / "two")
    with TwoHosts() as hosts:
        launch = _launch("two_hosts_4cpu.yaml", "--main_process_ip", hosts.addresses[0], "--machine_rank")
        done = hosts.run([[*launch, str(host), *script] for host in range(2)], timeout=100, env=ENVIRONMENT)
    for host, result in enumerate(done):
        assert result.returncode == 0, result.output
        places = [f"rank {2 * host + local} of 4, local {local}, on cpu" for local in range(2)]
        assert _places(result.output) == places
    two = runs.Run(**torch.load(tmp_path / "two" / "run.pt"))
    runs.assert_same_run(two, one_host, rtol=1e-6, atol=1e-7)
    assert two.metrics["eval_loss"] == pytest.approx(one_host.metrics["eval_loss"], rel=1e-6)
