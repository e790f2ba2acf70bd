"""Ranks in a collective say that they wait, and values travel where the default group can carry them."""

from __future__ import annotations

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

import hf_mmparallel
from hf_mmparallel.runtime import collectives, failure, watcher
from hf_mmparallel.runtime.activity import ACTIVITY
from hf_mmparallel.runtime.failure import shared_failure
from hf_mmparallel.trainer.agreement import SampleAgreement
from tests.distributed import assert_ranks_raise, run_distributed

PACKAGE = Path(hf_mmparallel.__file__).parent
COLLECTIVES = ("all_gather_object", "gather_object", "broadcast_object_list", "barrier", "all_reduce", "all_gather")
POINT_TO_POINT = ("send", "recv")


def test_object_collectives_and_barriers_stand_in_one_file():
    calls = re.compile(r"dist\.(all_gather_object|gather_object|broadcast_object_list|barrier)\(")
    found = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if calls.search(p.read_text())}
    assert found == {"runtime/collectives.py", "modeling/loading.py"}  # `modeling` is below `runtime`


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

    for name in COLLECTIVES + POINT_TO_POINT:
        record(name)
    folder = tempfile.mkdtemp() if dist.get_rank() == 0 else None
    folder = collectives.broadcast_value(folder, torch.device("cpu"))
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
        assert {"runtime/collectives.py", "modeling/loading.py", "trainer/agreement.py"} <= set(seen)


def unseen_frame(folder: str) -> None:
    """Saves optimizer state where rank 1 does not see the file that rank 0 has just made."""
    from tests.trainer import runs

    trainer = runs.make_trainer("llava", {"vision": {}, "language_model": {"tp_size": 2}}, max_steps=1)
    trainer.train()
    load = torch.load

    def late(path: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return load(path, **kwargs)

    torch.load = late
    trainer._save_optimizer_and_scheduler(folder)


@pytest.mark.distributed
def test_a_rank_that_does_not_see_the_file_yet_ends_all(tmp_path: Path):
    errors = assert_ranks_raise(unseen_frame, 3, str(tmp_path), match="rank 1: .*No such file", timeout=60)
    assert all("rank 1: [Errno 2] No such file" in error for error in errors)


def test_tensors_travel_where_the_group_can_carry_them(monkeypatch: pytest.MonkeyPatch):
    cuda, sent = torch.device("cuda", 3), []
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    assert collectives.wire_device(cuda) == cuda
    monkeypatch.setattr(dist, "get_backend", lambda *_: "gloo")
    assert collectives.wire_device(cuda) == torch.device("cpu")
    monkeypatch.setattr(dist, "send", lambda tensor, target: sent.append((tensor.device.type, target)))
    monkeypatch.setattr(dist, "recv", lambda tensor, source: tensor.fill_(source))
    collectives.send_tensor(torch.ones(2), 1, cuda)
    collectives.send_tensor(torch.ones(0), 1, cuda)
    assert sent == [("cpu", 1)]
    assert collectives.receive_tensor((2,), torch.int64, 5, cuda).tolist() == [5, 5]


def test_samples_are_agreed_on_in_host_memory(monkeypatch: pytest.MonkeyPatch):
    used: list[tuple[Any, str]] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, _, group: used.append((group, tensor.device.type)))
    agreement = SampleAgreement(True, "the control group")
    batch: Any = type("Batch", (), {"bad": {1: None}, "digest": 7})
    batch.drawn = type("Draw", (), {"samples": [4, 5]})
    assert agreement._bad_slots(batch) == [1]
    agreement._compare(batch)
    assert used == [("the control group", "cpu")] * 2


def found_late(seconds: float) -> tuple[str, bool]:
    def find() -> str:
        time.sleep(seconds)
        return "found"

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds / 4))
    value = collectives.from_first_rank(find, torch.device("cpu"))
    return value, collectives.from_first_rank(lambda: "again", torch.device("cpu")) == "again"


@pytest.mark.distributed
def test_ranks_wait_for_the_first_for_longer_than_a_collective_may_take():
    assert run_distributed(found_late, 2, 5.0) == [("found", True)] * 2


@pytest.mark.distributed
def test_ranks_that_wait_end_when_another_rank_has_failed():
    messages = assert_ranks_raise(failed_beside, 3, match="lost")
    assert all("Another rank failed first: rank 2: KeyError" in message for message in messages[:2])


def failed_beside() -> None:
    def find() -> None:
        time.sleep(30)

    with shared_failure("measuring samples"):
        if dist.get_rank() == 2:
            raise KeyError("lost")
        if dist.get_rank() == 0:
            while True:
                failure.check_rank_lives(1)
                time.sleep(0.05)
        collectives.from_first_rank(find, torch.device("cpu"))


@pytest.mark.distributed
def test_a_failure_that_is_told_late_does_not_end_the_next_block():
    assert run_distributed(told_late, 2) == ["found"] * 2


def told_late() -> str:
    """Rank 0 comes late, and tells its failure when rank 1 has told its own and is in the next block."""
    if dist.get_rank() == 0:
        time.sleep(watcher._SILENT_S + 2 * watcher._INTERVAL_S + 1)
    with suppress(ValueError), shared_failure("the first block"):
        raise ValueError("one of both")
    if dist.get_rank() == 0:
        time.sleep(1)  # before it takes its failure back
    with shared_failure("the next block"):
        return collectives.from_first_rank(lambda: "found", torch.device("cpu"))
