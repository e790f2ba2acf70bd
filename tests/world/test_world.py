"""Ranks in a collective say that they wait; values travel where a group carries them, among some processes too."""

import pickle
import re
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_bytes import LiveBytes

import hf_mmparallel
from hf_mmparallel.data.step_batch import StreamRows
from hf_mmparallel.trainer.training_steps import SampleAgreement
from hf_mmparallel.world import ReduceScatter, World, failure, watcher
from hf_mmparallel.world.failure import raise_on_all_ranks
from hf_mmparallel.world.watcher import ACTIVITY
from tests.distributed import assert_ranks_raise, run_distributed

PACKAGE = Path(hf_mmparallel.__file__).parent
COLLECTIVES = ("all_gather_object", "gather_object", "broadcast_object_list", "barrier", "all_reduce", "all_gather")
COLLECTIVES += ("send", "recv")


def test_only_the_world_uses_the_default_group_and_knows_backends():
    calls = re.compile(
        r"dist\.(\w+_object(_list)?|barrier|get_backend|new_group|get_rank|get_world_size\(\)|is_initialized)\b"
        r"|dist\.all_reduce\((?!.*group=)|\"(nccl|gloo)\""
    )
    found = {
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "world"
        for line in path.read_text().splitlines()
        if calls.search(line)
    }
    # The command line names backends, and profiles layers on a group that is none.
    allowed = ("planning/environment.py", "planning/layer_profile.py")
    assert not {where for where in found if not where.startswith(allowed)}


def busy_in_collectives() -> tuple[list[str], list[str]]:
    """Collectives of a run that this rank entered as if it was at work; and the files that entered any."""
    from tests.trainer import runs

    busy: set[str] = set()
    seen: set[str] = set()

    def record(name: str) -> None:
        original = getattr(dist, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            caller = Path(sys._getframe(1).f_code.co_filename)
            if PACKAGE in caller.parents:
                where = str(caller.relative_to(PACKAGE))
                seen.add(where)
                if not ACTIVITY.waits and not kwargs.get("async_op"):
                    busy.add(f"{where}: {name} in `{ACTIVITY}`")
            return original(*args, **kwargs)

        setattr(dist, name, recorded)

    for name in COLLECTIVES:
        record(name)
    folder = tempfile.mkdtemp() if dist.get_rank() == 0 else None
    folder = World().broadcast(folder)
    layout = {"vision": {}, "language_model": {"tp_size": 2}}
    trainer = runs.make_trainer(
        "llava", layout, folder, max_steps=2, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2
    )
    trainer.eval_dataset = trainer.train_dataset
    trainer.train()
    trainer.save_model(str(folder))
    trainer.gather_model()
    return sorted(busy), sorted(seen)


@pytest.mark.distributed
def test_ranks_wait_in_every_collective_of_a_run():
    for busy, seen in run_distributed(busy_in_collectives, 3):
        assert not busy, busy
        assert set(seen) >= {"world/world.py"}


def everything_of(world: World) -> dict[str, Any]:
    """What each collective of a world gives."""
    mine = torch.tensor([world.rank + 1.0])
    if world.rank == 1:
        world.send(torch.arange(3), 0)
        world.send(torch.ones(0), 0)
    received = [world.receive((3,), torch.int64, 1), world.receive((0,), torch.float32, 1)] if world.is_first else []
    group = world.new_group([1, 0])
    dist.all_reduce(mine, group=group)
    world.barrier()
    found = {
        "received": [tensor.tolist() for tensor in received],
        "pair": mine.item(),
        "all": world.all_gather(world.rank),
        "first": world.gather(world.rank),
        "told": world.broadcast("first" if world.is_first else None),
        "found": world.from_first_rank(lambda: f"rank {world.rank}"),
        "sum": world.all_reduce(torch.tensor(world.rank)).item(),
        "most": world.all_reduce(torch.tensor(world.rank), "max").item(),
        "tensors": [tensor.tolist() for tensor in world.gather_tensors(torch.full((world.rank,), 1))],
    }
    try:
        world.raise_together(lambda: {}[0] if world.rank == 5 else int("x" if world.rank else "1"))
    except ValueError as error:
        found["raised"] = str(error).split(":")[0]
    world.close()
    return found


def halves() -> list[dict[str, Any]]:
    """Two worlds beside each other, whose ranks are not those of the processes, and one of all ranks after them."""
    half = (2, 0) if dist.get_rank() % 2 == 0 else (1, 3)
    worlds = [World(processes=half), World(processes=half)]  # the second one as after a failure of the first
    found = [everything_of(world) for world in worlds]
    return [*found, {"all": World().all_gather(worlds[0].rank)}]


@pytest.mark.distributed
def test_worlds_of_some_processes_are_worlds():
    expected: dict[str, Any] = {
        "pair": 3.0,
        "all": [0, 1],
        "told": "first",
        "found": "rank 0",
        "sum": 1,
        "most": 1,
        "raised": "rank 1",
    }
    first = {"received": [[0, 1, 2], []], "first": [0, 1], "tensors": [[], [1]]}
    second = {"received": [], "first": None, "tensors": []}
    for process, found in enumerate(run_distributed(halves, 4)):
        own = first if process in (2, 1) else second
        assert found == [expected | own, expected | own, {"all": [1, 0, 0, 1]}]


def nested(rank: int) -> Any:
    """Nested values of another size on each rank, with more than a message of objects should carry."""
    big = torch.arange(50_000.0) + rank
    return [{"logits": (big, torch.full((rank, 3), rank, dtype=torch.bfloat16)), "rank": rank}] * rank, rank


def gathered() -> list[Any]:
    gather_object = dist.gather_object

    def measured(given: Any, *args: Any, **kwargs: Any) -> None:
        assert len(pickle.dumps(given)) < 2_000
        gather_object(given, *args, **kwargs)

    dist.gather_object = measured
    return World().gather_tensors(nested(dist.get_rank()))


@pytest.mark.distributed
def test_tensors_are_sent_one_by_one():
    first, *others = run_distributed(gathered, 3)
    assert len(first) == 3 and others == [[], []]
    for rank, got in enumerate(first):
        torch.testing.assert_close(got, nested(rank))


class OtherBackend:
    """Stands for a backend with a reduce-scatter of its own."""

    def name(self) -> str:
        return "other"


WIDTHS = (5, 1, 0)
SCATTERED = [(ranks, is_gloo) for is_gloo in (True, False) for ranks in ((0, 1, 2, 3), (1, 3), (2,))]


def scattered() -> None:
    """Each rank gets the sum of its row, and sends no more than a ring would, over every backend."""
    for ranks, is_gloo in SCATTERED:
        group: Any = dist.new_group(ranks)
        inputs = torch.Generator().manual_seed(7)
        by_rank = [[torch.randn(len(ranks), width, generator=inputs) for width in WIDTHS] for _ in range(4)]
        if dist.get_rank() not in ranks:
            continue
        if not is_gloo:
            type(group)._get_backend = lambda *_: OtherBackend()
        with LiveBytes() as counter:
            sums = ReduceScatter(by_rank[dist.get_rank()], group).wait()
        row = ranks.index(dist.get_rank())
        columns = range(len(WIDTHS))
        torch.testing.assert_close(sums, torch.cat([sum(by_rank[rank][i][row] for rank in ranks) for i in columns]))  # type: ignore[misc]
        assert sum(counter.sent_bytes.values()) == pytest.approx(4 * sum(WIDTHS) * (len(ranks) - 1))
        assert set(counter.num_calls) == {"alltoall_base_" if is_gloo else "_reduce_scatter_base_"}


@pytest.mark.distributed
def test_each_rank_gets_the_sum_of_its_row():
    run_distributed(scattered, 4)


def test_one_process_is_a_world_without_a_group():
    world = World()
    assert (world.rank, world.size, world.is_first, world.processes) == (0, 1, True, (0,))
    assert world.all_gather(3) == world.gather(3) == [3] and world.broadcast(3) == 3
    assert world.from_first_rank(lambda: 4) == world.raise_together(lambda: 4) == 4
    assert world.all_reduce(torch.tensor(5)) == 5
    world.barrier()
    world.close()


class Nccl:
    """Stands for a backend that takes tensors on a device only."""

    options = type("Options", (), {"_timeout": timedelta(seconds=20)})

    def name(self) -> str:
        return "nccl"


def over_nccl() -> tuple[bool, list[str], list[tuple[str, bool]]]:
    """Where a world with a backend of its device sends values and tensors of the host."""
    used: list[tuple[str, bool]] = []
    group: Any = dist.distributed_c10d._get_default_group()
    type(group)._get_backend = lambda *_: Nccl()
    group.bound_device_id = torch.device("cuda", 0)
    with pytest.raises(ValueError, match="device_id"):
        World()
    group.bound_device_id = None
    world = World()
    for name in ("isend", "irecv", "all_gather_object", "broadcast_object_list", "barrier"):
        original = getattr(dist, name)

        def recorded(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            where = kwargs["group"] if "group" in kwargs else args[0] if name == "barrier" else args[2]
            used.append((name, where is world.host_group))
            return original(*args, **kwargs)

        setattr(dist, name, recorded)
    agreement = SampleAgreement(True, world)
    batch: Any = type("Batch", (), {"bad": {1: None}, "stream": StreamRows(7)})
    batch.global_batch = type("GlobalBatch", (), {"samples": [4, 5]})
    assert agreement._bad_batch_indices(batch) == [1]
    agreement._compare(batch)
    world.all_gather(1)
    world.broadcast(1)
    world.barrier()
    return world.on_device, [dist.get_backend(world.host_group)], used


@pytest.mark.distributed
def test_values_travel_in_host_memory_where_the_default_group_does_not():
    for on_device, backends, used in run_distributed(over_nccl, 2):
        assert on_device and backends == ["gloo"]
        assert len(used) >= 5 and all(is_host for _, is_host in used)


def reduced() -> None:
    """Sums are those of all ranks, the same bits on each, and so are maxima."""
    world = World()
    values = torch.randn(5, generator=torch.Generator().manual_seed(world.rank), dtype=torch.float64)
    every = torch.tensor(world.all_gather(values.tolist()), dtype=torch.float64)
    total = world.all_reduce(values.clone())
    torch.testing.assert_close(total, every.sum(0))
    assert len(set(map(tuple, world.all_gather(total.tolist())))) == 1
    assert world.all_reduce(values.clone(), "max").tolist() == every.amax(0).tolist()
    assert world.all_reduce(torch.tensor(world.rank % 3 == 1), "max") == (world.size > 1)


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [2, 3, 6])
def test_values_of_the_host_are_reduced_over_any_number_of_ranks(num_ranks):
    run_distributed(reduced, num_ranks)


def found_late() -> tuple[str, str]:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.75))
    world = World()
    return world.from_first_rank(lambda: time.sleep(3) or "found"), world.from_first_rank(lambda: "again")


@pytest.mark.deep
@pytest.mark.distributed
def test_ranks_wait_for_the_first_for_longer_than_a_collective_may_take():
    assert run_distributed(found_late, 2) == [("found", "again")] * 2


def failed_beside() -> None:
    """Rank 1 waits for what rank 0 finds, rank 0 for a sign of rank 1, and rank 2 fails."""
    watcher._RETRACTION_S = 0.5
    world = World()
    with raise_on_all_ranks("measuring samples"):
        if world.rank == 2:
            raise KeyError("lost")
        while world.is_first:
            failure.check_rank_lives(1)
            time.sleep(0.05)
        world.from_first_rank(lambda: None)


@pytest.mark.distributed
def test_ranks_that_wait_end_when_another_rank_has_failed():
    messages = assert_ranks_raise(failed_beside, 3, match="lost")
    assert all("rank 2: KeyError" in message for message in messages[:2])


def told_late() -> str:
    """Rank 0 comes late, and tells its failure when rank 1 has told its own and is in the next block."""
    watcher._INTERVAL_S, watcher._SILENCE_LIMIT_S = 0.05, 0.4
    world = World()
    if world.is_first:
        time.sleep(watcher._SILENCE_LIMIT_S + 2 * watcher._INTERVAL_S + 0.5)
    with suppress(ValueError), raise_on_all_ranks("the first block"):
        raise ValueError("one of both")
    if world.is_first:
        time.sleep(1)  # before it takes its failure back
    with raise_on_all_ranks("the next block"):
        return world.from_first_rank(lambda: "found")


@pytest.mark.distributed
def test_a_failure_that_is_told_late_does_not_end_the_next_block():
    assert run_distributed(told_late, 2) == ["found"] * 2


def join_after_a_failure() -> list[int]:
    world = World()
    rank, size = world.rank, world.size
    store = dist.distributed_c10d._get_default_store()
    world.leave()
    if rank == 0:  # the others were told of a loss before they made the group
        alone, limit = dist.PrefixStore("first", store), timedelta(milliseconds=200)
        alone.set_timeout(limit)
        with pytest.raises(RuntimeError):
            world.join(alone, rank, size, "gloo", limit)
        world.leave()
    world.join(dist.PrefixStore("second", store), rank, size, "gloo", timedelta(seconds=20))
    return world.all_gather(rank)


@pytest.mark.distributed
def test_ranks_of_which_one_could_not_make_a_group_make_the_next_one():
    assert run_distributed(join_after_a_failure, 2) == [[0, 1], [0, 1]]
