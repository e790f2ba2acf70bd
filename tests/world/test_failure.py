"""What all ranks say when one of them fails, and how soon."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.data.step_batch import StepBatch
from hf_mmparallel.data.step_dataset import Reader, StepDataset
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, MultimodalParallelPlugin, StepPlan, plan_for_model
from hf_mmparallel.runtime.engine import ParallelEngine
from hf_mmparallel.world import World, watcher
from hf_mmparallel.world.failure import shared_failure
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import (
    GROUP_TIMEOUT_S,
    assert_ranks_raise,
    meet_at_rank_zero,
    outcomes,
    run_distributed,
)
from tests.planned_batch import with_program

SOON_S = 0.75 * GROUP_TIMEOUT_S


def make_engine(modules: dict) -> ParallelEngine:
    model = tiny.FAMILIES["llava"]().train()
    spec = build_model_spec(model)
    plan = plan_for_model(MultimodalParallelPlugin(modules), spec, dist.get_world_size())
    return ParallelEngine(model, spec, plan, World())


def read(engine: ParallelEngine, step: StepPlan, dataset: Any) -> StepBatch:
    """The inputs and the program of a step."""
    return with_program(engine, StepDataset(Reader(dataset, tiny.collate("llava")), engine.inputs, 0).read(step))


def run_step(modules: dict, index: int, stumble: Callable[[int, Any, int], None]) -> None:
    """A step, in which `stumble` is called with the rank, the task and the number of tasks so far."""
    engine = make_engine(modules)
    numbers = itertools.count(1)
    engine.executor.functions = replace(
        engine.executor.functions, before_forward=lambda task: stumble(engine.rank, task, next(numbers))
    )
    step = contiguous_step(engine.plan, range(12), 2)
    with shared_failure("a block"):
        engine.train_step(read(engine, step, tiny.make_dataset("llava", 12)), index)


def fail_at(modules: dict, rank: int, action: int) -> None:
    """A step in which one rank raises at its n-th task."""

    def stumble(own_rank: int, task: Any, number: int) -> None:
        if own_rank == rank and number == action + 1:
            raise KeyError(f"no pixels for {task}")

    run_step(modules, 0, stumble)


def several_blocks() -> list[str]:
    """A block that ends well says nothing; failures of earlier blocks are not told again."""
    hurry()
    said = []

    def block(error: Exception | None) -> None:
        dist.barrier()
        try:
            with shared_failure("a block"):
                if error is not None:
                    raise error
                dist.barrier()
        except Exception as raised:
            said.append(f"{type(raised).__name__}: {raised}")

    block(None)
    for error in (ValueError("first"), KeyError("second")):
        block(error)
    block(RuntimeError("Connection closed by peer") if dist.get_rank() == 0 else OSError("third"))
    block(ValueError("fourth") if dist.get_rank() == 0 else RuntimeError("Connection closed by peer"))
    block(RuntimeError("Connection closed by peer"))
    return said


def error_alone() -> str:
    before = threading.active_count()
    try:
        with shared_failure("a block"):
            assert threading.active_count() == before
            raise RuntimeError("Connection closed by peer")
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"


def hurry() -> None:
    """Signs of life ten times as often."""
    watcher._INTERVAL_S, watcher._SILENT_S = 0.05, 0.4


def end_in_a_step(rank: int, own_store: bool, kill: bool) -> None:
    """One rank is killed, or raises, at its second task."""
    if own_store:
        meet_at_rank_zero()
    hurry()

    def stumble(own_rank: int, task: Any, number: int) -> None:
        if own_rank == rank and number == 2:
            time.sleep(0.2)  # it has been there for a moment
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError(f"no pixels for {task}")

    run_step(PIPELINE, 6, stumble)


def other_order(modules: dict, first_step: bool) -> None:
    """The last rank's sampler has an order of its own, from the first step of an epoch or from the second."""
    engine = make_engine(modules)
    dataset = tiny.make_dataset("llava", 12, max_items=2 if first_step else 0)  # no messages of two sizes later
    orders = [list(range(12)), list(range(12))]
    if engine.rank == dist.get_world_size() - 1:
        orders[0 if first_step else 1].reverse()
    with shared_failure("a block"):
        for index, samples in enumerate(orders):
            step = contiguous_step(engine.plan, samples, 2)
            engine.train_step(read(engine, step, dataset), index)


PIPELINE = {"vision": {}, LANGUAGE_MODEL: {"pp_size": 2}}
COPIES = {"vision": {"dp_size": 2}, LANGUAGE_MODEL: {"dp_size": 2}}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("modules", "world_size", "rank", "action"), [deep(PIPELINE, 3, 0, 1), (PIPELINE, 3, 2, 0), deep(COPIES, 4, 3, 2)]
)
def test_all_ranks_stop_with_the_sentence_of_the_first(modules, world_size, rank, action):
    start = time.monotonic()
    errors = assert_ranks_raise(fail_at, world_size, modules, rank, action, match="no pixels for", timeout=60)
    for other, error in enumerate(errors):
        if other != rank:
            assert f"rank {rank}: KeyError: " in error, error
    assert time.monotonic() - start < SOON_S + 15


def test_without_a_group_the_error_is_itself():
    with pytest.raises(ValueError, match="^mine$"), shared_failure("a block"):
        raise ValueError("mine")


@pytest.mark.distributed
def test_an_error_of_ones_own_stays_what_it_is_and_is_told_once():
    zero, one = run_distributed(several_blocks, 2)
    assert zero[:2] == one[:2] == ["ValueError: first", "KeyError: 'second'"]
    assert zero[2].startswith("RemoteRankError: ") and zero[2].endswith(" rank 1: OSError: third")
    assert one[3].startswith("RemoteRankError: ") and one[3].endswith(" rank 0: ValueError: fourth")
    assert (one[2], zero[3]) == ("OSError: third", "ValueError: fourth")
    lost = r"RemoteRankError: Rank [01] lost its connection .*signs of life"
    assert re.match(lost, zero[4]) and re.match(lost, one[4])
    assert re.search(r"closed by peer\n.*\n  ranks 0-1: `a block`, for \d s$", zero[4]), zero[4]


@pytest.mark.distributed
@pytest.mark.parametrize(("rank", "own_store"), [deep(1, False), deep(1, True), (0, True)])
def test_the_others_name_a_rank_that_is_killed(rank, own_store):
    ended = outcomes(end_in_a_step, 3, rank, own_store, True, timeout=40)
    assert ended[rank].kind == "died" and "SIGKILL" in ended[rank].details
    others = [outcome for outcome in ended if outcome.rank != rank]
    for other in others:
        assert other.error_type == "RemoteRankError", other
        assert re.search(rf"^Rank {rank} ended .*rank {rank} .*last at `step 7: fwd \w+.r0.s0 mb1.c0`", other.error)
        assert other.details.count("Traceback") == 1 and "gloo" not in other.details, other.details
        assert other.time - ended[rank].time < 10


@pytest.mark.deep
@pytest.mark.distributed
def test_all_ranks_tell_the_failure_of_the_rank_that_keeps_the_store():
    zero, *others = outcomes(end_in_a_step, 3, 0, True, False, timeout=40)
    assert zero.error_type == "KeyError"
    for other in others:
        assert "rank 0: KeyError: " in other.error and "no pixels for fwd" in other.error, other


@pytest.mark.distributed
def test_a_block_on_one_process_adds_nothing():
    assert run_distributed(error_alone, 1) == ["RuntimeError: Connection closed by peer"]


SHARED = {"vision": {"dp_size": 2}, LANGUAGE_MODEL: {"colocate_with": "vision"}}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("modules", "world_size", "first_step"), [deep(SHARED, 2, True), (SHARED, 2, False), deep(PIPELINE, 3, True)]
)
def test_ranks_with_another_order_show_the_table(modules, world_size, first_step):
    errors = assert_ranks_raise(other_order, world_size, modules, first_step, match="different global batches")
    assert all(re.search(r"checksums: rank 0: \d+, rank 1: \d+", error) for error in errors)
    assert set(errors) == {errors[0]}
