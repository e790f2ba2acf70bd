"""What watchers make of signs of life, on a clock and a store of the test."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch.distributed as dist

from hf_mmparallel.world import failure, watcher
from hf_mmparallel.world.failure import RemoteRankError
from hf_mmparallel.world.watcher import ACTIVITY, Failure, Heartbeat, Peer, Watcher, track_activity


class CountingStore:
    """A store in memory, which watchers may share, that counts what it is asked."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.num_calls = 0

    def clone(self) -> CountingStore:
        return self

    def __getattr__(self, name: str) -> Any:
        self.num_calls += 1
        return getattr(self.store, name)


class Clock:
    """Time that passes when the test says so."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watcher.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(ACTIVITY, "step", None)  # a training on one process, which has no watcher, leaves its last
    return clock


def world(size: int) -> list[Watcher]:
    """A watcher for each rank; nothing runs until the test calls it."""
    store = CountingStore()
    return [Watcher(store, rank, size) for rank in range(size)]


def rounds(clock: Clock, watchers: list[Watcher], count: int) -> None:
    """Some exchanges of some ranks, one every half second."""
    for _ in range(count):
        clock.now += 0.5
        for each in watchers:
            each._exchange()


def test_the_lowest_rank_that_lives_speaks_for_all(clock: Clock):
    watchers = world(100)
    rounds(clock, watchers, 5)
    assert {each._leader for each in watchers} == {0}
    store = watchers[0].store
    before = store.num_calls
    rounds(clock, watchers, 1)
    assert store.num_calls - before <= 100 * (4 + 8)  # not each rank at each other
    living = watchers[21:]  # two hosts and a half have gone
    rounds(clock, living, 30)
    assert {each._leader for each in living} == {21}
    living[50]._wants_reason = True  # a connection is lost
    rounds(clock, living, 10)
    assert {each.failure.rank for each in living} == {21}
    sentence = living[3].failure.sentence
    assert sentence.startswith("21 ranks ended ") and "rank 0 has " in sentence
    assert "rank 15 has " in sentence and "rank 16" not in sentence and " 5 more" in sentence


def test_ranks_that_do_the_same_are_one_line(clock: Clock):
    zero, *others = world(6)
    with track_activity("reading samples"):
        rounds(clock, [*others, zero], 1)
        ACTIVITY.now("sums of gradients", waits=True)
        rounds(clock, [*others[:3], zero], 124)
        sentence, *rows = str(zero._stall_sentence(62)).splitlines()
        assert "62 s" in sentence and "wait for ranks 4-5" in sentence and "without a sign of life" in sentence
        assert rows == [
            "  ranks 0-3: `sums of gradients, waiting for other ranks`, for 62 s",
            "  ranks 4-5: no sign of life, last at `reading samples`, for 31 s",  # since it was first looked for
        ]
        assert all(other._stall_sentence(62) is None for other in others)
        zero.peers[1] = Peer(Heartbeat(200, "training step", False, 3.0), clock.now)
        assert zero._stall_sentence(62) is None  # rank 1 moves


def test_ranks_that_are_all_at_work_wait_for_nobody(clock: Clock):
    zero, one = world(2)
    with track_activity("preparing the model"):
        rounds(clock, [one, zero], 141)
        sentence = str(zero._stall_sentence(70))
        assert "None of them is known to wait" in sentence
        assert sentence.endswith("\n  ranks 0-1: `preparing the model`, for 70 s")
        zero.peers[1] = Peer(Heartbeat(141, "the metrics", True, 70.0), clock.now)
        assert "wait for rank 0:\n" in str(zero._stall_sentence(70))
        ACTIVITY.now("the metrics", waits=True)
        assert "wait for each other" in zero._waiting_sentence()


def test_a_failure_that_its_rank_takes_back_meanwhile_is_replaced(monkeypatch: pytest.MonkeyPatch):
    zero, one = world(2)
    zero._own = Failure(0, "an earlier failure")
    zero._exchange()
    one._reported_ids = frozenset({zero._own.id})
    swap = one._swap

    def swap_late(key: str, expected: str, value: str) -> str:
        if key == watcher._FAILURE and expected not in ("", value):
            one.store.set(key, "")  # rank 0 goes on
        return swap(key, expected, value)

    monkeypatch.setattr(one, "_swap", swap_late)
    one._own = Failure(1, "a new failure")
    one._exchange()
    assert one.failure == one._own and "a new failure" in one.store.get(watcher._FAILURE).decode()


class HeldStore(CountingStore):
    """A store whose answers the test holds back."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self.store, self.asked, self.answers = store, threading.Event(), threading.Event()

    def set(self, key: str, value: str) -> None:
        self.asked.set()
        assert self.answers.wait(60)
        self.store.set(key, value)


def test_a_slow_thread_of_an_earlier_block_does_not_retract_a_failure():
    zero, one = world(2)
    held = HeldStore(zero.store.store)
    earlier = Watcher(held, 0, 2)
    earlier.start()
    assert held.asked.wait(60)
    earlier.stop()  # its last exchange has not ended
    one.start()
    zero.start()
    zero._own = Failure(0, "no size")
    zero._exchange()
    held.answers.set()
    for thread in earlier._threads:
        thread.join(60)
    zero.stop()
    assert json.loads(held.store.get(watcher._FAILURE))["sentence"] == "no size"
    assert one.reason(ConnectionError("closed")) == "no size"
    one.stop()


def test_a_thread_that_cannot_start_leaves_no_watcher_behind(monkeypatch: pytest.MonkeyPatch):
    lone = Watcher(CountingStore(), 0, 2)

    def cannot_start() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(lone._threads[0], "start", cannot_start)
    monkeypatch.setattr(lone, "wait_until_read", lambda: None)
    with pytest.raises(RuntimeError, match="can't start new thread"), failure._report_to_ranks(lone):
        pytest.fail("the block must not run")
    assert failure._watchers == []


def test_collectives_are_ended_once_another_rank_has_failed(clock: Clock):
    ended: list[int] = []
    earlier = Watcher(CountingStore(), 1, 2)
    earlier._own = Failure(1, "an earlier failure")
    earlier._exchange()
    zero, one = Watcher(earlier.store, 0, 2, abort=lambda: ended.append(0)), Watcher(earlier.store, 1, 2)
    rounds(clock, [zero], 2)
    assert zero.failure is not None and ended == [0]  # it may have failed just before this rank came here
    zero = Watcher(earlier.store, 0, 2, abort=lambda: ended.append(0), reported_ids={zero.failure.id})
    rounds(clock, [zero, one, zero], 2)  # once told it is over, and rank 1 goes on
    assert zero.failure is None and ended == [0]
    one._own = Failure(1, "a failure")
    rounds(clock, [one, zero, zero], 2)
    assert zero.failure.sentence == "a failure" and ended == [0, 0] and zero.aborted
    own = Watcher(CountingStore(), 0, 2, abort=lambda: ended.append(1))
    rounds(clock, [own], 2)
    own._own = Failure(0, "a failure of its own")
    rounds(clock, [own], 2)
    assert own.failure is not None and ended == [0, 0]


@pytest.mark.parametrize("error", [None, ValueError("Default process group has not been initialized"), RuntimeError()])
def test_whatever_ended_collectives_raise_is_the_failure_of_the_other_rank(error: Exception | None, monkeypatch):
    ended = Watcher(CountingStore(), 0, 2)
    monkeypatch.setattr(ended, "wait_until_read", lambda: None)
    ended.failure, ended.aborted = Failure(1, "rank 1 failed"), True
    with pytest.raises(RemoteRankError, match="^rank 1 failed$"), failure._report_to_ranks(ended):
        if error is not None:
            raise error
