"""Training that goes on when processes die, with the numbers of the stock Trainer on one process."""

import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import chaos_runs as chaos
from benchmarks import fake_trackers
from benchmarks.chaos_runs import LAYOUTS, ROOT, ChaosRun, Death, Join, Reference, checkpoint_faults, faults
from hf_mmparallel import MultimodalTrainingArguments
from hf_mmparallel.plan import StorageSettings
from hf_mmparallel.resilience.templates import check_guarantee
from hf_mmparallel.trainer import recovery_plan
from hf_mmparallel.trainer.engine_state import newest_checkpoint
from hf_mmparallel.trainer.recovery_plan import check_survivable
from tests.hosts import Finished, TwoHosts, available
from tests.streams import Rows
from tests.trainer.contexts import arguments

TWO_HOSTS = ROOT / "examples" / "accelerate_configs" / "two_hosts_4cpu.yaml"
TIMEOUT_S = 240
SAVED_BESIDE = ["--workers", "1", "--async_save"]


def live(test: Any) -> Any:
    """Marks of a test that launches processes."""
    for mark in (pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 60)):
        test = mark(test)
    return pytest.mark.usefixtures("one_thread")(test)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def reference(adapter: bool = False, best: bool = False, own_rate: bool = False) -> Reference:
    return chaos.stock_run(adapter=adapter, best=best, own_rate=own_rate)


def _deaths(*words: str) -> list[Death]:
    rows = (word.split(":") for word in words)
    return [Death(int(member), int(step), point, way) for member, step, point, way in rows]


def _run(layout: str, folder: Path, deaths: Sequence[str], *options: str, joins: Sequence[Join] = ()) -> ChaosRun:
    run = chaos.chaos_run(LAYOUTS[layout], _deaths(*deaths), folder, TIMEOUT_S, options, joins)
    print(run.output[-8000:])
    assert run.returncode is not None, "it hung"
    assert len(run.strikes) == len(deaths)
    return run


IN_RECOVERIES = ["1:2:sum:kill", "3:2:copying:kill", "5:5:norm:kill", "6:5:laying_out:exit", "0:8:checkpoint:kill"]
IN_STEPS = ["0:2:send:exit", "4:3:evaluation:kill", "1:7:after_optimizer:stop", "2:10:sum:raise"]


@pytest.mark.parametrize(
    ("layout", "deaths", "options"),
    [
        ("four pairs", IN_RECOVERIES, ["--failures", "2", "--log_predictions"]),
        ("pipelines", IN_STEPS, SAVED_BESIDE),
    ],
)
@live
@pytest.mark.deep
def test_losses_norms_and_weights_are_those_without_failures(
    tmp_path: Path, layout: str, deaths: list[str], options: list[str]
):
    run = _run(layout, tmp_path, deaths, *options)
    assert not faults(run, LAYOUTS[layout], reference())
    lost = [member for event in run.events for member in event["lost"]]
    assert {int(death.partition(":")[0]) for death in deaths} <= set(lost)
    assert all(0 < event["total_s"] < TIMEOUT_S and event["layout"] for event in run.events)


# Layout, deaths, joins, who is lost and joins together, options
JOINS: dict[str, tuple[str, list[str], list[Join], list[tuple], list[str]]] = {
    "at the borders of epochs, and a loss between, with data workers and saves beside": (
        "two copies",
        ["1:7:norm:kill"],
        [Join(5), Join(10)],
        [((), (2,)), ((1,), ()), ((), (4,))],
        SAVED_BESIDE,
    ),
    "one whose host is lost as it joins, another in its place, then rank 0": (
        "two copies",
        ["2:4:copying:kill_host", "0:8:forward:kill"],
        [Join(3), Join(5)],
        [((2,), ()), ((), (4,)), ((0,), ())],
        ["--log_predictions"],
    ),
    "a node of two ranks, after a loss of one, tensor parallel in one copy": (
        "unlike cuts",
        ["3:2:sum:kill"],
        [Join(6, 2)],
        [((3,), ()), ((), (8, 9))],
        [],
    ),
    "a node of two copies that share optimizer state, after a loss of one, a module with a rate of its own": (
        "shared state",
        ["5:3:sum:kill"],
        [Join(7, 2)],
        [((5,), ()), ((), (6, 7))],
        ["--own_rate"],
    ),
    "LoRA, rank 0 dies as others join": (
        "own ranks",
        ["0:3:laying_out:kill"],
        [Join(3)],
        [((0,), (4,))],
        ["--adapter"],
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("case", JOINS)
@live
def test_processes_that_join_change_no_number(tmp_path: Path, case: str):
    layout, deaths, joins, expected, options = JOINS[case]
    run = _run(layout, tmp_path, deaths, *options, joins=joins)
    assert not faults(run, LAYOUTS[layout], reference("--adapter" in options, own_rate="--own_rate" in options))
    assert [(event["lost"], event["joined"]) for event in run.events] == expected
    assert all(f"hf-mmparallel launch: process{'es' if join.processes > 1 else ''} " in run.output for join in joins)
    assert (tmp_path / "run" / "recovery.png").is_file()


@pytest.mark.deep
@live
def test_ranks_that_are_asked_to_leave_do_so_between_two_steps(tmp_path: Path):
    deaths = ["1:2:forward:term", "0:6:norm:term"]  # the second one is the first rank, after the sums of its step
    run = _run("copies", tmp_path, deaths, *SAVED_BESIDE)
    assert not faults(run, LAYOUTS["copies"], reference())
    assert [(event["lost"], event["step"]) for event in run.events] == [((1,), 2), ((0,), 7)]
    assert all("SIGTERM" in reason for event in run.events for reason in event["reasons"])
    assert {result["num_tries"] for result in run.results.values()} == {chaos.STEPS}, "no step was repeated"
    assert "Traceback" not in run.output


@pytest.mark.deep
@live
def test_too_many_that_are_asked_to_leave_save_the_run(tmp_path: Path):
    run = _run("two copies", tmp_path, ["1:5:optimizer:term"])
    assert run.returncode == 1 and not run.results
    assert "TooFewNodesError: " in run.output.rstrip().splitlines()[-1]
    assert (tmp_path / "run" / "checkpoint-6" / "trainer_state.json").is_file()


@pytest.mark.deep
@live
def test_ranks_that_wait_for_each_other_meet_anew(tmp_path: Path):
    """One waits for a message that nobody sends, in a step; no rank is lost, and nobody trains on another sample."""
    layout = LAYOUTS["two copies"]
    run = chaos.chaos_run(layout, _deaths("1:4:sum:hang"), tmp_path, TIMEOUT_S, flags=["--stall_timeout", "8"])
    print(run.output[-8000:])
    assert not faults(replace(run, strikes=[]), layout, reference())
    (event,) = run.events
    assert not event["lost"] and event["step"] == 3 and "waited for each other" in event["reasons"][0]


@pytest.mark.deep
@live
def test_a_job_that_could_not_go_on_is_started_again_from_its_last_checkpoint(tmp_path: Path):
    """One of two ranks, each on a host, dies, the other saves step 6; then both die before the next one is due."""
    deaths = _deaths("1:7:forward:kill", "0:11:step_end:kill", "1:11:step_end:kill")
    layout = replace(LAYOUTS["two copies"], hosts=2)
    run = chaos.chaos_run(layout, deaths, tmp_path, TIMEOUT_S, flags=["--restart", "2"])
    print(run.output[-8000:])
    assert run.returncode == 0 and {*run.results} == {0, 1}
    assert run.output.count("hf-mmparallel launch: starting again") == 2 * layout.hosts
    for result in run.results.values():
        assert result["num_tries"] == 4, "it went on from step 8"
        logs = [row for row in result["logs"] if "loss" in row]
        assert [row["step"] for row in logs] == [*range(1, 13)]
    assert not faults(replace(run, strikes=[]), layout, reference())


two_hosts = pytest.mark.skipif((reason := available()) is not None, reason=reason or "")


@two_hosts
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.deep
@live
def test_a_host_whose_launcher_gets_a_signal_leaves(tmp_path: Path, host: int):
    deaths = _deaths(f"{2 * host}:5:forward:term_launcher")
    first, second = _on_two_hosts("copies", deaths, tmp_path)
    run = ChaosRun.of(tmp_path, first.returncode, first.output + second.output, 0.0, [second.returncode])
    print(run.output[-8000:])
    if host == 0:  # its launcher keeps the others together
        assert (first.returncode, second.returncode) == (128 + 15, 1) and not run.results
        assert any((tmp_path / "run").glob("checkpoint-[56]/trainer_state.json"))
        return
    assert {member for event in run.events for member in event["lost"]} == {2, 3}
    assert not faults(run, LAYOUTS["copies"], reference())


def _on_two_hosts(layout: str, deaths: Sequence[Death], folder: Path, meanwhile: Any = None) -> list[Finished]:
    """Runs a layout on two hosts, and a function of them beside it."""
    worker = chaos.worker_command(LAYOUTS[layout], deaths, folder)
    environment = {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    with TwoHosts() as hosts:
        launch = [sys.executable, "-m", "hf_mmparallel.cli.main", "launch", "--config_file", str(TWO_HOSTS)]
        launch += ["--host_timeout", "2", "--main_process_ip", hosts.addresses[0], "--machine_rank"]
        if meanwhile is not None:
            threading.Thread(target=meanwhile, args=(hosts,), daemon=True).start()
        return hosts.run([[*launch, str(host), *worker] for host in range(2)], timeout=TIMEOUT_S, env=environment)


@two_hosts
@pytest.mark.deep
@live
def test_a_host_that_is_cut_off_changes_no_number(tmp_path: Path):
    def pull_the_cable(hosts: TwoHosts) -> None:
        while not (tmp_path / "cut").exists():
            time.sleep(0.05)
        hosts.cut()

    deaths = _deaths("2:4:sum:cut")
    first, second = _on_two_hosts("copies", deaths, tmp_path, pull_the_cable)
    run = ChaosRun.of(tmp_path, first.returncode, first.output + second.output, 0.0)
    print(run.output[-8000:])
    assert {*run.results} == {0, 1} and second.returncode == 1
    (event,) = run.events
    assert event["lost"] == (2, 3) and all("no sign of life of the host" in reason for reason in event["reasons"])
    assert not faults(run, LAYOUTS["copies"], reference())


@live
def test_too_few_that_are_left_save_the_run_and_say_so(tmp_path: Path):
    run = _run("two copies", tmp_path, ["1:5:optimizer:raise"])
    assert run.returncode == 1 and not run.results
    last = run.output.rstrip().splitlines()[-1]
    # The step counts unless the loss is known before its norm is.
    saved = re.search(r"`(checkpoint-[45])`", last)
    assert "TooFewNodesError: " in last and "1 nodes" in last and saved is not None
    saved = tmp_path / "run" / saved[1]
    assert (saved / "trainer_state.json").is_file() and (saved / "model.safetensors").is_file()
    assert "Traceback" in run.output, "the process itself said it too"


@live
@pytest.mark.deep
def test_a_collective_that_is_aborted_without_an_error_does_not_count(tmp_path: Path):
    """The device's backend leaves any numbers in the collectives that a process aborts, as NCCL does."""
    run = _run("three copies", tmp_path, ["2:3:norm:kill"], "--nccl")
    assert not faults(run, LAYOUTS["three copies"], reference())


@live
@pytest.mark.deep
def test_trackers_go_on_where_rank_0_was_lost(tmp_path: Path):
    options = ["--trackers", "--timelines", "--average", "--best", "--async_save"]
    run = _run("three copies", tmp_path, ["0:3:after_norm:kill"], *options)
    assert not faults(run, LAYOUTS["three copies"], reference(best=True))
    assert not checkpoint_faults(tmp_path / "run", run.output, reference())
    every = {name: {0: [1, 2], 1: [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]} for name in fake_trackers.NAMES}
    assert fake_trackers.tracked(tmp_path) == every
    # The callback that draws the third step learns of the loss, and the step is still logged.
    assert (tmp_path / "run" / "timeline-5.png").is_file() and not (tmp_path / "run" / "timeline-3.png").exists()
    assert all(Path(result["best"]).is_dir() for result in run.results.values())


@live
@pytest.mark.deep
def test_a_sample_that_nobody_can_read_ends_the_run_with_its_message_and_a_checkpoint(tmp_path: Path):
    run = _run("copies", tmp_path, [], "--bad", "21", "--async_save")
    assert run.returncode == 1 and not run.results
    last = run.output.rstrip().splitlines()[-1]
    assert "RepeatedFailureError" in last and "sample 21 is broken" in last
    assert list((tmp_path / "run").glob("checkpoint-*"))
    assert not checkpoint_faults(tmp_path / "run", run.output, reference())


def test_a_job_that_is_started_again_goes_on_from_the_last_checkpoint_of_this_launch(tmp_path: Path):
    for step, saved_at in ((9, 100.0), (20, 300.0), (100, 200.0), (300, 50.0)):
        state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        state.parent.mkdir()
        state.touch()
        os.utime(state, (saved_at, saved_at))
    (tmp_path / "checkpoint-500").mkdir()  # without a state
    assert newest_checkpoint(str(tmp_path), 90.0) == str(tmp_path / "checkpoint-100")
    assert newest_checkpoint(str(tmp_path), 400.0) is None


def _arguments(**values: Any) -> MultimodalTrainingArguments:
    return arguments(**{"resilience": {}, "parallel": {}, **values})


@pytest.mark.parametrize(
    ("values", "storage", "dataset", "name"),
    [
        ({}, {"vision": StorageSettings(offload_params=True)}, [], "`offload_params` of `vision`"),
        ({"memory_limit_gib": "auto"}, {}, [], "memory_limit_gib='auto'"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, {}, [], "use_seedable_sampler=False"),
        ({"train_sampling_strategy": "group_by_length"}, {}, [], "group_by_length"),
        ({}, {}, Rows([]), "`Rows`"),
    ],
)
def test_what_a_run_could_not_go_on_with_is_refused(monkeypatch, values, storage, dataset, name):
    with pytest.raises(ValueError, match="hf-mmparallel launch"):  # by another launcher, nothing can
        check_survivable(_arguments(), {}, [])
    monkeypatch.setattr(recovery_plan._environment, "launch_settings", lambda: {"id": 0})
    check_survivable(_arguments(), {"vision": StorageSettings()}, [])
    with pytest.raises(ValueError, match=name):
        check_survivable(_arguments(**values), storage, dataset)


@pytest.mark.parametrize("settings", [{"failures": 0}, {"failures": 1.5}, {"ranks_per_node": 0}, {"failure": 1}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        _arguments(resilience=settings)


def test_a_number_of_failures_that_a_cluster_cannot_guarantee_says_which_it_can():
    with pytest.raises(ValueError, match="2 nodes.* 1 failures"):
        check_guarantee(4, 2, 2)
