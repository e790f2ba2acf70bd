"""What all ranks say when one of them fails, and how soon."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.data.loader import Reader, StepDataset
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, MultimodalParallelPlugin, plan_for_model
from hf_mmparallel.runtime.engine import ParallelEngine
from hf_mmparallel.runtime.failure import RemoteRankError, shared_failure
from tests import tiny
from tests.distributed import GROUP_TIMEOUT_S, assert_ranks_raise, run_distributed

SOON_S = 0.75 * GROUP_TIMEOUT_S


def make_engine(modules: dict) -> ParallelEngine:
    model = tiny.FAMILIES["llava"]().train()
    spec = build_model_spec(model)
    plan = plan_for_model(MultimodalParallelPlugin(modules), spec, dist.get_world_size())
    return ParallelEngine(model, spec, plan, torch.device("cpu"))


def fail_at(modules: dict, rank: int, action: int) -> None:
    """A step in which one rank raises at its n-th task."""
    engine = make_engine(modules)
    done = []

    def stumble(task) -> None:
        done.append(task)
        if engine.rank == rank and len(done) == action + 1:
            raise KeyError(f"no pixels for {task}")

    engine.executor.before_forward = stumble
    dataset = tiny.make_dataset("llava", 12)
    step = contiguous_step(engine.plan, range(12), 2)
    with shared_failure():
        engine.train_step(StepDataset(Reader(dataset, tiny.collate("llava")), engine.keys, 0).read(step), 0)


def fail_before_a_sum(rank: int) -> str:
    """Catches what the block raises: the type and the sentence."""
    try:
        with shared_failure():
            if dist.get_rank() == rank:
                raise ValueError("a broken sample")
            dist.all_reduce(torch.ones(1))
    except ValueError:
        return "own"
    except RemoteRankError as error:
        return str(error)
    return "nothing"


def two_blocks() -> list[str]:
    """A block that ends well says nothing, nor does an error before any group's."""
    with shared_failure():
        dist.barrier()
    said = []
    for error in (ValueError("first"), RuntimeError("second"), RuntimeError("Connection closed by peer")):
        try:
            with shared_failure():
                raise error
        except Exception as raised:
            said.append(f"{type(raised).__name__}: {raised}")
    dist.barrier()
    return said


def other_order(modules: dict, first_step: bool) -> None:
    """The last rank's sampler has an order of its own, from the first step of an epoch or from the second."""
    engine = make_engine(modules)
    dataset = tiny.make_dataset("llava", 12, max_items=2 if first_step else 0)  # no messages of two sizes later
    orders = [list(range(12)), list(range(12))]
    if engine.rank == dist.get_world_size() - 1:
        orders[0 if first_step else 1].reverse()
    with shared_failure():
        for index, samples in enumerate(orders):
            step = contiguous_step(engine.plan, samples, 2)
            engine.train_step(StepDataset(Reader(dataset, tiny.collate("llava")), engine.keys, 0).read(step), index)


PIPELINE = {"vision": {}, LANGUAGE_MODEL: {"pp_size": 2}}
COPIES = {"vision": {"dp_size": 2}, LANGUAGE_MODEL: {"dp_size": 2}}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("modules", "world_size", "rank", "action"), [(PIPELINE, 3, 0, 1), (PIPELINE, 3, 2, 0), (COPIES, 4, 3, 2)]
)
def test_all_ranks_stop_with_the_sentence_of_the_first(modules, world_size, rank, action):
    start = time.monotonic()
    errors = assert_ranks_raise(fail_at, world_size, modules, rank, action, match="no pixels for", timeout=60)
    for other, error in enumerate(errors):
        if other != rank:
            assert re.search(f"Another rank failed first: rank {rank}: KeyError: .*no pixels for fwd", error), error
    assert time.monotonic() - start < SOON_S + 15


def test_without_a_group_the_error_is_itself():
    with pytest.raises(ValueError, match="^mine$"), shared_failure():
        raise ValueError("mine")


@pytest.mark.distributed
def test_an_error_of_ones_own_stays_what_it_is():
    first, second, lost = run_distributed(two_blocks, 1)[0]
    assert (first, second) == ("ValueError: first", "RuntimeError: second")
    assert lost == "RemoteRankError: Another rank failed first: rank 0: ValueError: first"


SHARED = {"vision": {"dp_size": 2}, LANGUAGE_MODEL: {"colocate_with": "vision"}}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("modules", "world_size", "first_step"), [(SHARED, 2, True), (SHARED, 2, False), (PIPELINE, 3, True)]
)
def test_ranks_with_another_order_show_the_table(modules, world_size, first_step):
    errors = assert_ranks_raise(
        other_order, world_size, modules, first_step, match="The ranks drew different global batches"
    )
    assert all(re.search(r"checksums: rank 0: \d+, rank 1: \d+", error) for error in errors)
    assert set(errors) == {errors[0]}
