"""Processes that die, hang or are cut off under `hf-mmparallel launch`, and what the others do."""

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


def _run(kills: str, *words: str, flags: Sequence[str] = (), env: dict[str, str] | None = None) -> tuple[int, str]:
    """Runs the script on four processes of one host; its exit code, and what it and the launcher print."""
    done = subprocess.run(
        [*_launch("one_host_4cpu.yaml", *flags), SCRIPT, *_kills(kills), *words],
        env={**os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    # without the prefix of processes whose output is redirected
    return done.returncode, re.sub(r"^\[default\d\]:", "", done.stdout, flags=re.MULTILINE)


def _kills(kills: str) -> list[str]:
    return [word for kill in kills.split() for word in ("--kill", kill)]


def _done(output: str) -> list[str]:
    return sorted(re.findall(r"^done (.*)$", output, re.MULTILINE))


def _losses(output: str) -> list[str]:
    return re.findall(r"^hf-mmparallel launch: lost (.*)$", output, re.MULTILINE)


def _check_times(output: str) -> None:
    """Prints how long after each death the collectives of the others were ended, and checks a generous bound."""
    deaths = [float(time) for time in re.findall(r"^dying at \S+ by \S+ at (\S+)$", output, re.MULTILINE)]
    aborts = [float(time) for time in re.findall(r"^abort in \d+ at (\S+)$", output, re.MULTILINE)]
    for death in deaths:
        detected = [abort - death for abort in aborts if abort >= death]
        if detected:
            print(f"collectives ended {1000 * min(detected):.0f} ms after a death")
            assert min(detected) < DETECTED_S


def test_processes_that_die_one_after_the_other_and_logs_that_are_redirected(tmp_path):
    flags = ["--hang_timeout", "2", "--log_dir", str(tmp_path), "--tee", "3"]
    code, output = _run("0:10:kill 2:20:stop 3:30:raise", flags=flags)
    assert code == 0, output
    assert _done(output) == ["1: rank 0 of 1"], output
    killed, hung, failed = _losses(output)
    assert re.match(r"process 0 of node 0 \(killed by SIGKILL\).* 3 go on", killed)
    assert re.match(r"process 2 of node 0 \(no sign of life for 2\.\d s, .*`step \d+: a collective, .* 2 go on", hung)
    assert re.match(r"process 3 of node 0 \(raised ValueError: a bad sample\)", failed)
    _check_times(output)
    (log,) = tmp_path.glob("*/attempt_0/1/stdout.log")
    (error,) = tmp_path.glob("*/attempt_0/3/stderr.log")
    assert "done 1: rank 0 of 1" in log.read_text() and "ValueError: a bad sample" in error.read_text()


@pytest.mark.deep
def test_processes_that_die_at_once_and_while_the_others_meet():
    # children of the dead hold its connections open
    code, output = _run("1:20:kill 2:20:exit 3:meet:kill", "--child")
    assert code == 0, output
    assert _done(output) == ["0: rank 0 of 1"], output
    assert sum(loss.count("killed by SIGKILL") + loss.count("exit code 1") for loss in _losses(output)) >= 2, output
    _check_times(output)


@pytest.mark.deep
def test_processes_that_die_while_the_others_connect_leave_early_and_stand_still():
    lazily = {"TORCH_GLOO_LAZY_INIT": "1"}
    code, output = _run("1:init:kill 0:20:quit 2:40:sleep", flags=["--stall_timeout", "3"], env=lazily)
    assert code == 0, output
    assert _done(output) == ["3: rank 0 of 1"], output
    _, left, stood = _losses(output)
    assert re.match(r"process 0 of node 0 \(ended with exit code 0 .* 2 go on", left)
    assert re.match(r"process 2 of node 0 \(\d\.\d s in `step 40: reading samples`", stood)
    assert "time.sleep(1000)" in output  # of its stack
    _check_times(output)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kills", "words", "said", "rank"),
    [
        ("2:20:kill", ["--unregistered"], "Process 2 of node 0: killed by SIGKILL", 2),
        ("0:10:kill 1:20:raise 2:20:kill 3:20:kill", [], "All processes were lost", 0),
    ],
    ids=["one without registration", "all"],
)
def test_the_launch_fails_if_nobody_can_go_on(kills: str, words: list[str], said: str, rank: int):
    code, output = _run(kills, *words)
    assert code == 1 and said in output, output
    assert _done(output) == [] and bool(_losses(output)) == (not words), output
    assert re.search(rf"Root Cause[^$]*?rank +: {rank} ", output), output


def _on_two_hosts(hosts: TwoHosts, *words: str, flags: Sequence[str] = ()) -> list[tuple[int, str]]:
    launch = _launch("two_hosts_4cpu.yaml", *flags, "--main_process_ip", hosts.addresses[0], "--machine_rank")
    commands = [[*launch, str(host), SCRIPT, *words] for host in range(2)]
    return [(done.returncode, done.output) for done in hosts.run(commands, timeout=100, env=ENVIRONMENT)]


two_hosts = pytest.mark.skipif((reason := available()) is not None, reason=reason or "")


@two_hosts
@pytest.mark.deep
def test_processes_that_die_on_two_hosts():
    with TwoHosts() as hosts:
        first, second = _on_two_hosts(hosts, *_kills("0:20:kill 2:30:kill 3:40:kill"))
    assert first[0] == second[0] == 0, first[1] + second[1]  # a host without processes waits for the others
    assert _done(first[1]) == ["1: rank 0 of 1"]
    assert _losses(first[1])[-1].startswith("process 3 of node 1 (killed by SIGKILL)")
    _check_times(first[1])


@two_hosts
@pytest.mark.deep
def test_a_launcher_that_is_killed_is_noticed_by_the_end_of_its_connection():
    with TwoHosts() as hosts:
        first, second = _on_two_hosts(hosts, *_kills("2:20:orphan"), flags=["--host_timeout", "1000"])
    assert first[0] == 0 and second[0] == -9, first[1] + second[1]
    assert _done(first[1]) == ["0: rank 0 of 2", "1: rank 1 of 2"]
    (loss,) = _losses(first[1])
    assert re.match(r"processes 2, 3 of node 1 \(no sign of life of the host for 2\.\d s\)", loss)


@pytest.mark.deep
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
        words = ["--steps", "100", "--pause", "0.02", "--touch", str(begun)]
        (code, output), (cut_code, cut_output) = _on_two_hosts(hosts, *words, flags=["--host_timeout", "2"])
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


@pytest.mark.skipif((reason := available()) is not None, reason=reason or "")
def test_nothing_stays_of_two_hosts_when_the_body_raises():
    def names() -> str:
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    with pytest.raises(KeyError), TwoHosts() as hosts:
        assert hosts.names[0] in names()
        raise KeyError
    assert hosts.names[0] not in names()
