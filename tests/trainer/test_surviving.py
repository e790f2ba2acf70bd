"""Training that goes on when processes die, with the numbers of the stock Trainer on one process."""

from __future__ import annotations

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

from benchmarks.chaos_runs import (
    LAYOUTS,
    ROOT,
    ChaosRun,
    Death,
    Join,
    Reference,
    chaos_run,
    faults,
    stock_run,
    worker_command,
)
from hf_mmparallel import MultimodalTrainingArguments
from hf_mmparallel.plan import ModulePlugin
from hf_mmparallel.resilience.templates import check_guarantee
from hf_mmparallel.trainer import recovery_plan
from hf_mmparallel.trainer.recovery_plan import check_survivable
from tests.deep_cases import deep
from tests.hosts import TwoHosts, available

TWO_HOSTS = ROOT / "examples" / "accelerate_configs" / "two_hosts_4cpu.yaml"
live = pytest.mark.usefixtures("one_thread")
TIMEOUT_S = 240


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def _stock(adapter: bool = False) -> Reference:
    return stock_run(adapter=adapter)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return _stock()


def _deaths(*words: str) -> list[Death]:
    rows = (word.split(":") for word in words)
    return [Death(int(member), int(step), point, way) for member, step, point, way in rows]


def _run(layout: str, folder: Path, deaths: Sequence[str], *options: str, joins: Sequence[Join] = ()) -> ChaosRun:
    run = chaos_run(LAYOUTS[layout], _deaths(*deaths), folder, TIMEOUT_S, options, joins)
    print(run.output[-8000:])
    assert run.returncode is not None, "it hung"
    assert len(run.strikes) == len(deaths)
    return run


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("layout", "deaths", "options"),
    [
        pytest.param(
            "long pipelines",
            ["2:1:receive:raise", "0:2:forward:kill", "6:3:evaluation:kill", "4:7:send:exit", "3:9:after_norm:kill"],
            [],
            id="one after the other, rank 0 too",
        ),
        pytest.param(
            "four pairs",
            ["1:2:sum:kill", "3:2:copying:kill", "5:5:norm:kill", "6:5:laying_out:exit", "0:8:checkpoint:kill"],
            ["--failures", "2", "--log_predictions"],
            id="in recoveries",
        ),
        pytest.param(
            "pipelines",
            ["1:2:after_optimizer:stop", "4:5:step_end:kill", "0:7:forward:kill", "2:10:optimizer:kill"],
            ["--workers", "1", "--async_save"],
            id="stopped, data workers, saves beside",
        ),
        pytest.param(
            "tensor parallel",
            ["3:2:forward:kill", "6:4:checkpoint:kill"],
            [],
            id="nodes of two ranks, tensor parallel",
        ),
    ],
)
@live
@pytest.mark.deep
def test_losses_norms_and_weights_are_those_without_failures(
    tmp_path: Path, reference: Reference, layout: str, deaths: list[str], options: list[str]
):
    run = _run(layout, tmp_path, deaths, *options)
    assert not faults(run, LAYOUTS[layout], reference)
    assert run.returncode == 0
    lost = [member for event in run.events for member in event["lost"]]
    assert {int(death.partition(":")[0]) for death in deaths} <= set(lost)
    assert all(0 < event["total_s"] < TIMEOUT_S and event["layout"] for event in run.events)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("layout", "deaths", "joins", "expected", "options"),
    [
        deep("own ranks", [], [Join(3, 2)], [((), (4, 5))], [], id="without a loss"),
        pytest.param("pipelines", ["1:2:forward:kill"], [Join(4)], [((1,), ()), ((), (6,))], [], id="after a loss"),
        deep(
            "two copies",
            ["1:7:norm:kill"],
            [Join(5), Join(10)],
            [((), (2,)), ((1,), ()), ((), (4,))],
            ["--workers", "1", "--async_save"],
            id="at the borders of epochs, and a loss between, with data workers and saves beside",
        ),
        deep(
            "two copies",
            ["2:1:copying:kill", "0:8:forward:kill"],
            [Join(3), Join(5)],
            [((2,), ()), ((), (4,)), ((0,), ())],
            ["--log_predictions"],
            id="one that dies as it joins, another in its place, then rank 0",
        ),
        deep(
            "unlike cuts",
            ["3:2:sum:kill"],
            [Join(6, 2)],
            [((3,), ()), ((), (8, 9))],
            [],
            id="a node of two ranks, after a loss of one, tensor parallel in one copy",
        ),
        deep("two copies", [], [Join(4)], [((), (2,))], ["--adapter"], id="LoRA"),
        deep("own ranks", ["0:3:laying_out:kill"], [Join(3)], [((0,), (4,))], [], id="rank 0 dies as others join"),
    ],
)
@live
def test_processes_that_join_change_no_number(
    tmp_path: Path,
    layout: str,
    deaths: list[str],
    joins: list[Join],
    expected: list[tuple],
    options: list[str],
):
    run = _run(layout, tmp_path, deaths, *options, joins=joins)
    assert not faults(run, LAYOUTS[layout], _stock("--adapter" in options))
    changes = [(event["lost"], event["joined"]) for event in run.events]
    assert changes == expected
    assert all(f"hf-mmparallel launch: process{'es' if join.processes > 1 else ''} " in run.output for join in joins)
    assert (tmp_path / "run" / "recovery.png").is_file()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.skipif((reason := available()) is not None, reason=reason or "")
@pytest.mark.parametrize("point", ["sum", "forward", "after_norm", "checkpoint"])
@pytest.mark.deep
@live
def test_a_host_that_is_cut_off_changes_no_number(tmp_path: Path, reference: Reference, point: str):
    layout = LAYOUTS["copies"]
    worker = worker_command(layout, _deaths(f"2:4:{point}:cut", f"3:4:{point}:cut"), tmp_path)
    environment = {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    with TwoHosts() as hosts:
        launch = [sys.executable, "-m", "hf_mmparallel.cli.main", "launch", "--config_file", str(TWO_HOSTS)]
        launch += ["--main_process_ip", hosts.addresses[0], "--machine_rank"]

        def pull_the_cable() -> None:
            while not (tmp_path / "cut").exists():
                time.sleep(0.05)
            hosts.cut()

        threading.Thread(target=pull_the_cable, daemon=True).start()
        commands = [[*launch, str(host), *worker] for host in range(2)]
        first, second = hosts.run(commands, timeout=TIMEOUT_S, env=environment)
    run = ChaosRun.of(tmp_path, first.returncode, first.output + second.output, 0.0)
    print(run.output[-8000:])
    assert len(run.strikes) >= 1, "one process may wait for the other when the cable is pulled"
    assert {*run.results} == {0, 1} and second.returncode == 1
    (event,) = run.events
    assert event["lost"] == (2, 3) and all("no sign of life of the host" in reason for reason in event["reasons"])
    both = [{**run.strikes[0], "dies": member} for member in (2, 3)]
    assert not faults(replace(run, strikes=both), layout, reference)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@live
def test_too_few_that_are_left_save_the_run_and_say_so(tmp_path: Path):
    run = _run("copies", tmp_path, ["0:2:sum:kill", "1:5:norm:kill", "2:7:optimizer:raise"])
    assert run.returncode == 1 and not run.results
    last = run.output.rstrip().splitlines()[-1]
    assert "TooFewNodesError: " in last and "1 nodes" in last and "`checkpoint-7`" in last
    saved = tmp_path / "run" / "checkpoint-7"
    assert (saved / "trainer_state.json").is_file() and (saved / "model.safetensors").is_file()
    assert "Traceback" in run.output, "the process itself said it too"


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


def _arguments(**values: Any) -> MultimodalTrainingArguments:
    values.setdefault("resilience", {})
    return MultimodalTrainingArguments(output_dir="unused", use_cpu=True, report_to=[], parallel={}, **values)


@pytest.mark.parametrize(
    ("values", "modules", "dataset", "name"),
    [
        ({}, {"vision": ModulePlugin(offload_params=True)}, [], "`offload_params` of `vision`"),
        ({"memory_limit_gib": "auto"}, {}, [], "memory_limit_gib='auto'"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, {}, [], "use_seedable_sampler=False"),
        ({}, {}, Stream(), "`Stream`"),
    ],
)
def test_what_a_run_could_not_go_on_with_is_refused(monkeypatch, values, modules, dataset, name):
    monkeypatch.setattr(recovery_plan._environment, "launch_settings", lambda: {"id": 0})
    check_survivable(_arguments(), {"vision": ModulePlugin()}, [])
    with pytest.raises(ValueError, match=f"`resilience` .*{name}"):
        check_survivable(_arguments(**values), modules, dataset)


def test_another_launcher_is_refused():
    with pytest.raises(ValueError, match="hf-mmparallel launch"):
        check_survivable(_arguments(), {}, [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"failures": 0}, "`failures`"),
        ({"failures": 1.5}, "`failures`"),
        ({"ranks_per_node": 0}, "`ranks_per_node`"),
        ({"failure": 1}, "failure"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        _arguments(resilience=settings)


def test_a_number_of_failures_that_a_cluster_cannot_guarantee_says_which_it_can():
    with pytest.raises(ValueError, match="there are 4.* 2 nodes.* 1 failures"):
        check_guarantee(4, 2, 2)
