"""What all ranks say when one of them fails, and how soon."""

import contextlib
import io
import itertools
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.data.step_batch import StepBatch, StepData
from hf_mmparallel.data.step_dataset import Reader, StepDataset
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, MultimodalParallelPlugin, StepPlan, plan_for_model
from hf_mmparallel.plan.reading import reject_unknown_keys
from hf_mmparallel.runtime.engine import ParallelEngine
from hf_mmparallel.schedule import build_program
from hf_mmparallel.world import World, watcher
from hf_mmparallel.world.failure import raise_on_all_ranks, refuse_once
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import assert_ranks_raise, meet_at_rank_zero, outcomes, run_distributed


def with_program(engine: ParallelEngine, data: StepData) -> StepBatch:
    """The data with this rank's program of a training step."""
    return StepBatch.of(data, build_program(engine.plan, data.step, engine.sync_groups), engine.rank)


PIPELINE = {"vision": {}, LANGUAGE_MODEL: {"pp_size": 2}}
SHARED = {"vision": {"dp_size": 2}, LANGUAGE_MODEL: {"colocate_with": "vision"}}


def make_engine(modules: dict) -> ParallelEngine:
    model = tiny.FAMILIES["llava"]().train()
    spec = build_model_spec(model)
    plan = plan_for_model(MultimodalParallelPlugin(modules), spec, dist.get_world_size())
    return ParallelEngine(model, spec, plan, World())


def read(engine: ParallelEngine, step: StepPlan, dataset: Any) -> StepBatch:
    """The inputs and the program of a step."""
    return with_program(engine, StepDataset(Reader(dataset, tiny.collate("llava")), engine.inputs, 0).read(step))


def hurry() -> None:
    """Signs of life ten times as often."""
    watcher._INTERVAL_S, watcher._SILENCE_LIMIT_S = 0.05, 0.4


def end_in_a_step(rank: int, own_store: bool, kill: bool) -> None:
    """One rank is killed, or raises, at its second task."""
    if own_store:
        meet_at_rank_zero()
    hurry()
    engine = make_engine(PIPELINE)
    numbers = itertools.count(1)

    def stumble(task: Any) -> None:
        if engine.rank == rank and next(numbers) == 2:
            time.sleep(0.2)  # it has been there for a moment
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError(f"no pixels for {task}")

    engine.executor.functions = replace(engine.executor.functions, before_forward=stumble)
    step = contiguous_step(engine.plan, range(12), 2)
    with raise_on_all_ranks("a block"):
        engine.train_step(read(engine, step, tiny.make_dataset("llava", 12)), 6)


def several_blocks() -> list[str]:
    """A block that ends well says nothing; failures of earlier blocks are not told again."""
    hurry()
    said = []

    def block(error: Exception | None) -> None:
        dist.barrier()
        try:
            with raise_on_all_ranks("a block"):
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
        with raise_on_all_ranks("a block"):
            assert threading.active_count() == before
            raise RuntimeError("Connection closed by peer")
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"


def other_order(first_step: bool, training: bool) -> None:
    """The last rank's sampler has an order of its own, from the first step of an epoch or from the second."""
    engine = make_engine(SHARED)
    dataset = tiny.make_dataset("llava", 12, max_items=2 if first_step else 0)  # no messages of two sizes later
    orders = [list(range(12)), list(range(12))]
    if engine.rank == dist.get_world_size() - 1:
        orders[0 if first_step else 1].reverse()
    with raise_on_all_ranks("a block"):
        for index, samples in enumerate(orders):
            batch = read(engine, contiguous_step(engine.plan, samples, 2), dataset)
            engine.train_step(batch, index) if training else engine.evaluate_step(batch)


@pytest.mark.distributed
@pytest.mark.parametrize(("rank", "own_store"), [(2, False), deep(0, True)])
def test_all_ranks_tell_the_failure_of_the_first(rank, own_store):
    errors = assert_ranks_raise(end_in_a_step, 3, rank, own_store, False, match="no pixels for", timeout=40)
    for other, error in enumerate(errors):
        assert other == rank or f"rank {rank}: KeyError: " in error, error


def test_without_a_group_the_error_is_itself():
    with pytest.raises(ValueError, match="^mine$"), raise_on_all_ranks("a block"):
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
@pytest.mark.parametrize(("rank", "own_store"), [deep(1, False), (0, True)])
def test_the_others_name_a_rank_that_is_killed(rank, own_store):
    ended = outcomes(end_in_a_step, 3, rank, own_store, True, timeout=40)
    assert ended[rank].kind == "died" and "SIGKILL" in ended[rank].details
    others = [outcome for outcome in ended if outcome.rank != rank]
    for other in others:
        assert other.error_type == "RemoteRankError", other
        assert re.search(rf"^Rank {rank} ended .*rank {rank} .*last at `step 7: fwd \w+.r0.s0 mb1.c0`", other.error)
        assert other.details.count("Traceback") == 1 and "gloo" not in other.details, other.details
        assert other.time - ended[rank].time < 10


def refusals() -> list[str]:
    """What each rank prints when errors of several blocks end it."""
    os.environ["WORLD_SIZE"] = "2"  # as a launcher does
    printed = []
    for check in (lambda: reject_unknown_keys("The model", ["bogus"], ["vision"]), lambda: int("bogus")):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                with refuse_once():
                    check()
            except ValueError as error:
                sys.excepthook(type(error), error, error.__traceback__)
        printed.append(said.getvalue())
        dist.barrier()
    return printed


@pytest.mark.distributed
def test_a_refusal_on_all_ranks_is_printed_once_without_tracebacks():
    ours, others = zip(*run_distributed(refusals, 2), strict=True)
    assert sorted(text.count("`bogus`") for text in ours) == [0, 1] and "Traceback" not in "".join(ours)
    assert all("Traceback" in text for text in others)  # not a sentence of this package


@pytest.mark.distributed
def test_a_block_on_one_process_adds_nothing():
    assert run_distributed(error_alone, 1) == ["RuntimeError: Connection closed by peer"]


@pytest.mark.distributed
@pytest.mark.parametrize(("first_step", "training"), [deep(True, False), (False, True)])
def test_ranks_with_another_order_show_the_table(first_step, training):
    errors = assert_ranks_raise(other_order, 2, first_step, training, match="different global batches")
    assert re.search(r"checksums: rank 0: \d+, rank 1: \d+", errors[0])
    assert set(errors) == {errors[0]}
