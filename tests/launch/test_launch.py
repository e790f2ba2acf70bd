"""Processes that die, hang or are cut off under `hf-mmparallel launch`, and what the others do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hosts import TwoHosts, available

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent
CONFIGS = ROOT / "examples" / "accelerate_configs"
SCRIPT = str(Path(__file__).with_name("survivor_script.py"))
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
DETECTED_S = 10.0  # far above what it takes, far below the time limit of the groups


def _launch(config: str, *words: str) -> list[str]:
    main = [sys.executable, "-m", "hf_mmparallel.cli.main", "launch"]
    return [*main, "--config_file", str(CONFIGS / config), *words]


def _run(words: Sequence[str] = (), flags: Sequence[str] = (), env: dict[str, str] | None = None) -> tuple[int, str]:
    """Runs the script on four processes of one host; its exit code, and what it and the launcher print."""
    done = subprocess.run(
        [*_launch("one_host_4cpu.yaml", *flags), SCRIPT, *words],
        env={**os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout


def _kills(*words: str) -> list[str]:
    return [word for kill in words for word in ("--kill", kill)]


def _done(output: str) -> list[str]:
    return sorted(re.findall(r"^done (.*)$", output, re.MULTILINE))


def _losses(output: str) -> list[str]:
    return re.findall(r"^hf-mmparallel launch: lost (.*)$", output, re.MULTILINE)


def _check_times(output: str, silence_s: float = 0.0) -> None:
    """Prints how long after each death the collectives of the others were ended, and checks a generous bound."""
    deaths = [float(time) for time in re.findall(r"^dying at \S+ by \S+ at (\S+)$", output, re.MULTILINE)]
    aborts = [float(time) for time in re.findall(r"^abort in \d+ at (\S+)$", output, re.MULTILINE)]
    for death in deaths:
        detected = [abort - death for abort in aborts if abort >= death]
        if detected:
            print(f"collectives ended {1000 * min(detected):.0f} ms after a death")
            assert min(detected) < DETECTED_S + silence_s


def test_processes_that_die_one_after_the_other():
    code, output = _run(_kills("0:10:kill", "2:20:stop", "3:30:raise"), ["--hang_timeout", "2"])
    assert code == 0, output
    assert _done(output) == ["1: rank 0 of 1"], output
    killed, hung, failed = _losses(output)
    assert re.match(r"process 0 of node 0 \(killed by SIGKILL\).* 3 go on", killed)
    assert re.match(r"process 2 of node 0 \(no sign of life for 2\.\d s, .*`step \d+: a collective, .* 2 go on", hung)
    assert re.match(r"process 3 of node 0 \(raised ValueError: a bad sample\)", failed)
    _check_times(output)


@pytest.mark.deep
def test_processes_that_die_at_once_and_while_the_others_meet():
    words = _kills("1:20:kill", "2:20:exit", "3:meet:kill")
    code, output = _run([*words, "--child"])  # children of the dead hold its connections open
    assert code == 0, output
    assert _done(output) == ["0: rank 0 of 1"], output
    assert sum(loss.count("killed by SIGKILL") + loss.count("exit code 1") for loss in _losses(output)) >= 2, output
    _check_times(output)


@pytest.mark.deep
def test_processes_that_die_while_the_others_connect_and_that_leave_early():
    code, output = _run(_kills("1:init:kill", "0:20:quit"), env={"TORCH_GLOO_LAZY_INIT": "1"})
    assert code == 0, output
    assert _done(output) == ["2: rank 0 of 2", "3: rank 1 of 2"], output
    assert re.match(r"process 0 of node 0 \(ended with exit code 0 .* 2 go on", _losses(output)[1])
    _check_times(output)


@pytest.mark.deep
def test_a_process_that_stands_still_is_named_with_its_stack():
    code, output = _run(_kills("2:20:sleep"), ["--stall_timeout", "3"])
    assert code == 0, output
    assert _done(output) == ["0: rank 0 of 3", "1: rank 1 of 3", "3: rank 2 of 3"], output
    assert re.search(r"lost process 2 of node 0 \(\d\.\d s in `step 20: reading samples`", output)
    assert "time.sleep(1000)" in output


def test_without_registration_a_death_ends_all():
    code, output = _run(["--unregistered", *_kills("2:20:kill")])
    assert code == 1, output
    assert _done(output) == [] and _losses(output) == []
    assert "Process 2 of node 0: killed by SIGKILL" in output
    assert re.search(r"Root Cause[^$]*?rank +: 2 ", output), output


@pytest.mark.deep
def test_the_launch_fails_if_all_processes_die():
    code, output = _run(_kills("0:10:kill", "1:20:raise", "2:20:kill", "3:20:kill"))
    assert code == 1, output
    assert re.search(r"^hf-mmparallel launch: All processes were lost.*: (killed|raised ValueError)", output, re.M)
    assert re.search(r"Root Cause[^$]*?rank +: 0 ", output), output


@pytest.mark.deep
def test_logs_are_redirected(tmp_path):
    code, output = _run(_kills("2:20:raise"), ["--log_dir", str(tmp_path), "--tee", "3"])
    assert code == 0, output
    (log,) = tmp_path.glob("*/attempt_0/3/stdout.log")
    assert "done 3: rank 2 of 3" in log.read_text()
    assert re.search(r"^\[default3\]:done 3: rank 2 of 3", output, re.MULTILINE), output
    (error,) = tmp_path.glob("*/attempt_0/2/stderr.log")
    assert "ValueError: a bad sample" in error.read_text()


def _on_two_hosts(hosts: TwoHosts, *words: str) -> list[tuple[int, str]]:
    launch = _launch("two_hosts_4cpu.yaml", "--main_process_ip", hosts.addresses[0], "--machine_rank")
    commands = [[*launch, str(host), SCRIPT, *words] for host in range(2)]
    return [(done.returncode, done.output) for done in hosts.run(commands, timeout=100, env=ENVIRONMENT)]


two_hosts = pytest.mark.skipif((reason := available()) is not None, reason=reason or "")


@two_hosts
@pytest.mark.deep
def test_processes_that_die_on_two_hosts():
    with TwoHosts() as hosts:
        first, second = _on_two_hosts(hosts, *_kills("0:20:kill", "2:30:kill", "3:40:kill"))
    assert first[0] == second[0] == 0, first[1] + second[1]  # a host without processes waits for the others
    assert _done(first[1]) == ["1: rank 0 of 1"]
    assert _losses(first[1])[-1].startswith("process 3 of node 1 (killed by SIGKILL)")
    _check_times(first[1])


@two_hosts
def test_a_host_that_is_cut_off_ends_its_processes_and_the_others_go_on(tmp_path):
    begun = tmp_path / "begun"
    cut_times = []

    def pull_the_cable(hosts: TwoHosts) -> None:
        while not begun.exists():
            time.sleep(0.05)
        cut_times.append(time.time())
        hosts.cut()

    with TwoHosts() as hosts:
        threading.Thread(target=pull_the_cable, args=(hosts,), daemon=True).start()
        words = ["--steps", "200", "--pause", "0.02", "--touch", str(begun)]
        (code, output), (cut_code, cut_output) = _on_two_hosts(hosts, *words)
    assert code == 0, output
    assert _done(output) == ["0: rank 0 of 2", "1: rank 1 of 2"], output
    (loss,) = _losses(output)
    assert re.match(r"processes 2, 3 of node 1 \(no sign of life of the host for 2\.\d s\)", loss)
    assert cut_code == 1 and _done(cut_output) == [], cut_output
    assert "Node 1 has not reached node 0" in cut_output
    (cut,) = cut_times
    killed = [float(time) for time in re.findall(r"^alive \d+ at (\S+)$", cut_output, re.MULTILINE)]
    resumed = [float(time) for time in re.findall(r"^met .* (\S+)$", output, re.MULTILINE)]
    assert max(killed) < min(resumed), "two halves of the job ran at the same time"
    print(f"the others met {min(resumed) - cut:.1f} s after the cut")
