"""A thread on each rank that writes heartbeats to the process group's store and reads those of other ranks."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# The current activity of this process's main thread, which its watcher reads.


class Activity:
    """The current activity of the main thread; an update is a few assignments, text is only made when it is read."""

    def __init__(self) -> None:
        # the current or last optimizer step; `None` before the first
        self.step: int | None = None
        self.doing: Any = "starting"  # a phrase, or an action of a program
        self.waits = False  # for other ranks
        self.count = 0  # activities started so far

    def now(self, doing: Any, waits: bool = False) -> None:
        self.doing, self.waits = doing, waits
        self.count += 1

    def __str__(self) -> str:
        step = "" if self.step is None else f"step {self.step}: "
        return f"{step}{self.doing}{', waiting for other ranks' if self.waits else ''}"


ACTIVITY = Activity()  # of this process


@contextlib.contextmanager
def track_activity(activity: str, waits: bool = False) -> Iterator[None]:
    """Sets the activity for the duration of a block, and restores the previous one."""
    before = ACTIVITY.doing, ACTIVITY.waits
    ACTIVITY.now(activity, waits)
    yield
    ACTIVITY.now(*before)


def run_collective(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a collective, or the end of one, in which this rank waits for others."""
    ACTIVITY.waits = True
    result = collective(*args, **kwargs)
    ACTIVITY.waits = False
    return result


logger = logging.getLogger(__name__)

STALL_S = 60.0  # without progress on any rank before a warning is logged; repeated after twice the time, and so on
_INTERVAL_S = 0.5
_RETRACTION_S = 3.0  # time for a rank that goes on after a failure to retract it
_RANKS_PER_S = 512  # heartbeats per second that the store receives, independent of the number of ranks
_SILENCE_LIMIT_S = 2.0
_WINDOW = 8  # ranks read at once to find the lowest live one; a host with this many ranks may die at once
_MAX_SMALL_WORLD = 64  # up to this size every rank may read the heartbeats of all others
_MAX_LINES = 16
_PREFIX = "hf_mmparallel/"
_FAILURE, _ASKED, _ABSENT = _PREFIX + "failure", _PREFIX + "asked", "absent"
_KILLED_HINT = (
    "A process that is killed, for example for lack of memory, ends so; the kernel's log (`dmesg`) and the launcher "
    "say more."
)


@dataclass(frozen=True)
class Failure:
    rank: int  # that publishes it
    sentence: str  # the error message of the other ranks
    num_gone: int = 0  # dead ranks, which will not read it
    # distinguishes failures with the same message
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class Heartbeat:
    beat: int  # its number
    doing: str  # activity of the rank's main thread
    waits: bool  # for other ranks
    activity_s: float  # since the activity started


@dataclass(frozen=True)
class Peer:
    """The last heartbeat of another rank, `None` before the first, and the local time at which it was first read."""

    heartbeat: Heartbeat | None
    seen: float

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self.seen


class Watcher:
    """
    Watches the ranks during one block of work that all of them run, such as a training run.

    Of its daemon threads one communicates with the store, and blocks while the process that hosts the store is
    stopped; the other reads local state only and reports stalls. The main thread waits for both with a time limit.
    Every rank follows the lowest live rank, the leader, which alone reads the heartbeats of all ranks, so that the
    load of the store grows linearly with their number.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        keeper: str = "rank 0",  # the process that hosts the store, for messages
        abort: Callable[[], None] | None = None,  # of collectives, for backends that would wait for a failed rank
        reported_ids: Collection[str] = (),  # failures that this process has raised in earlier blocks
    ):
        self.store = store.clone()
        self.rank = rank
        self.world_size = world_size
        self.keeper = keeper
        self.abort = abort
        self.interval_s = max(_INTERVAL_S, world_size / _RANKS_PER_S)
        self.silent_s = max(_SILENCE_LIMIT_S, 4 * self.interval_s)
        self.failure: Failure | None = None
        self.aborted = False
        self.peers: dict[int, Peer] = {}
        self._num_informed = 0  # ranks that have read the failure
        self._read_s = 0.0  # time at which this rank read it
        self._own: Failure | None = None
        self._reported_ids = frozenset(reported_ids)
        self._beat = 0
        self._activity_start = (ACTIVITY.count, time.monotonic())
        self._leader = 0
        self._wants_reason = False
        self._asked: str | None = None
        self._reports = 0
        self._answered = time.monotonic()
        self._lost = False
        self._closing = False
        self._condition = threading.Condition()
        self._threads = [
            threading.Thread(target=run, name=f"hf_mmparallel {run.__name__}", daemon=True)
            for run in (self._run_heartbeat, self._run_stall_monitor)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads. One that is blocked in the store is left behind; as a daemon it keeps no process alive."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        for thread in self._threads:
            if thread.ident is not None:  # started
                thread.join(self.interval_s)

    # Methods for the main thread

    def publish(self, sentence: str) -> None:
        """Publishes a failure of this rank, unless another was first, and waits until the others have read it."""
        with self._condition:
            self._own = Failure(self.rank, sentence)
            self._condition.notify_all()
        self.wait_until_read()

    def lasting_failure(self) -> Failure | None:
        """
        Returns the failure, for a rank that waits without a collective, once it has not been retracted for a few
        seconds: a rank that published one late and goes on retracts it.
        """
        failure = self.failure
        if failure is None or time.monotonic() - self._read_s < _RETRACTION_S:
            return None
        stored = self._read(_FAILURE)
        if stored not in ("", _ABSENT) and json.loads(stored)["id"] == failure.id:
            return failure
        with self._condition:
            self.failure = None
        return None

    def wait_until_read(self) -> None:
        """Waits briefly for the other ranks to read the failure, since the store may end with this process."""
        with self._condition:
            self._wants_reason = True
            self._condition.notify_all()
            self._condition.wait_for(self._is_known_to_all, self.silent_s + self.interval_s)

    def _is_known_to_all(self) -> bool:
        gone = 0 if self.failure is None else self.failure.num_gone
        return self._lost or self._num_informed >= self.world_size - gone

    def reason(self, error: BaseException) -> str:
        """The cause of a lost connection; the same message on all ranks if all of them ask."""
        with self._condition:
            self._wants_reason = True
            # This process itself may have been stopped.
            self._answered = max(self._answered, time.monotonic() - self.interval_s)
            self._condition.notify_all()
            self._condition.wait_for(lambda: self.failure is not None or self._is_store_gone(), 3 * self.silent_s)
            if self.failure is not None:
                return self.failure.sentence
            if self._is_store_gone():
                return self._store_sentence()
            if self._silent():
                return self._gone_sentence(self._silent())
        first_line = str(error).partition("\n")[0]
        return (
            f"Rank {self.rank} lost its connection to another rank, but all ranks give signs of life: "
            f"{first_line}\nWhere the ranks are:\n{self.table()}"
        )

    def _is_store_gone(self) -> bool:
        return self._lost or time.monotonic() - self._answered > self.silent_s

    # Messages

    def _gone_sentence(self, ranks: Sequence[int]) -> str:
        """Message about ranks without a recent heartbeat."""
        details = "; ".join(f"rank {rank} {self._last(rank)}" for rank in ranks[:_MAX_LINES])
        more = f"; and {len(ranks) - _MAX_LINES} more" if len(ranks) > _MAX_LINES else ""
        subject = f"Rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
        return f"{subject} ended without an error message: {details}{more}. {_KILLED_HINT}"

    def _last(self, rank: int) -> str:
        peer = self.peers[rank]
        if peer.heartbeat is None:
            return "has not reached this point"
        return f"has given no sign of life for {peer.silence_s:.1f} s, it was last at `{peer.heartbeat.doing}`"

    def _store_sentence(self) -> str:
        first = self.peers.get(0)
        heartbeat = first.heartbeat if first is not None and self.keeper == "rank 0" else None
        last = "" if heartbeat is None else f"; rank 0 was last at `{heartbeat.doing}`"
        state = "ended without an error message" if self._lost else "gives no sign of life"
        return (
            f"{self.keeper.capitalize()} {state}: the store of the process group, which it keeps, has "
            f"not answered for {time.monotonic() - self._answered:.1f} s{last}. {_KILLED_HINT}"
        )

    def table(self) -> str:
        """Current activities of the ranks, with one line for all ranks with the same activity."""
        signs: dict[int, tuple[str, float]] = {}
        for rank, peer in list(self.peers.items()):
            if peer.heartbeat is None:
                signs[rank] = "not here yet", peer.silence_s
            elif peer.silence_s > self.silent_s:
                signs[rank] = f"no sign of life, last at `{peer.heartbeat.doing}`", peer.silence_s
            else:
                signs[rank] = f"`{peer.heartbeat.doing}`", peer.heartbeat.activity_s
        mine = self._heartbeat()
        signs[self.rank] = f"`{mine.doing}`", mine.activity_s
        ranks_by_activity: dict[str, list[int]] = {}
        for rank in sorted(signs):
            ranks_by_activity.setdefault(signs[rank][0], []).append(rank)
        lines = [
            f"  {_ranks(ranks)}: {activity}, for {max(signs[rank][1] for rank in ranks):.0f} s"
            for activity, ranks in ranks_by_activity.items()
        ]
        more = [f"  and {len(lines) - _MAX_LINES} more lines"] if len(lines) > _MAX_LINES else []
        return "\n".join([*lines[:_MAX_LINES], *more])

    def _waiting_sentence(self) -> str:
        """Message about the ranks that the others wait for, as far as it is known."""
        silent = self._silent()
        if silent:
            return f"They wait for {_ranks(silent)}, without a sign of life"
        signs = {self.rank: self._heartbeat()}
        signs |= {rank: peer.heartbeat for rank, peer in list(self.peers.items()) if peer.heartbeat is not None}
        busy = sorted(rank for rank, heartbeat in signs.items() if not heartbeat.waits)
        if len(busy) == len(signs):  # collectives of the stock Trainer and of callbacks do not set the activity
            return "None of them is known to wait for another"
        return f"They wait for {_ranks(busy) if busy else 'each other'}"

    def _silent(self) -> list[int]:
        return [rank for rank, peer in sorted(self.peers.items()) if peer.silence_s > self.silent_s]

    # The thread that communicates with the store

    def _run_heartbeat(self) -> None:
        """Writes heartbeats and reads those of others, until the block ends or the store is gone."""
        try:
            while not self._closing:
                self._exchange()
                with self._condition:
                    own, asks = self._own, self._wants_reason
                    self._condition.notify_all()
                    self._condition.wait_for(
                        lambda: self._closing or (self._own, self._wants_reason) != (own, asks),  # noqa: B023
                        self.interval_s / 5 if asks else self.interval_s,
                    )
            self._exchange()
        except RuntimeError:  # the process that hosts the store has ended
            with self._condition:
                self._lost = True
                self._condition.notify_all()

    def _exchange(self) -> None:
        self._beat += 1
        heartbeat = self._heartbeat()
        self.store.set(f"{_PREFIX}heartbeat/{self.rank}", json.dumps(asdict(heartbeat)))
        if self.failure is None:
            self._exchange_failure(self._own)
        self._follow()
        leads, asked = self._leader == self.rank, self._is_asked()
        if (leads and (asked or heartbeat.activity_s > STALL_S / 2)) or (
            self._wants_reason and self.world_size <= _MAX_SMALL_WORLD
        ):
            for rank in range(self.world_size):
                self._look_at(rank)
        silent = self._silent()
        if leads and asked and silent and self.failure is None:
            self._exchange_failure(Failure(self.rank, self._gone_sentence(silent), len(silent)))
        if self._wants_reason and self.failure is not None:
            self._num_informed = self.store.add(f"{_PREFIX}known/{self.failure.id}", 0)
        self._answered = time.monotonic()

    def _exchange_failure(self, new: Failure | None) -> None:
        """Publishes a failure unless one is published already, and reads the published one."""
        value = None if new is None else json.dumps(asdict(new))
        stored = self._read(_FAILURE) if value is None else self._swap(_FAILURE, "", value)
        failure = None if stored in ("", _ABSENT) else Failure(**json.loads(stored))
        if failure is not None and failure.rank == self.rank and new is None:
            if not self._closing:  # a slow thread of an earlier block may read a failure of this one
                self._swap(_FAILURE, stored, "")  # this rank failed earlier and goes on: it retracts the failure
            return
        if failure is not None and failure.id in self._reported_ids and value is not None:
            # Its rank may have retracted it in between.
            stored = self._swap(_FAILURE, stored, value) or self._swap(_FAILURE, "", value)
            failure = Failure(**json.loads(stored)) if stored else None
        if failure is None or failure.id in self._reported_ids:
            return
        self.store.add(f"{_PREFIX}known/{failure.id}", 1)
        with self._condition:
            self.failure, self._read_s = failure, time.monotonic()
        if self.abort is not None and self._own is None:
            self.aborted = True
            _try(self.abort)

    def _is_asked(self) -> bool:
        """Whether a rank that lost a connection in this block asks for the cause; this rank asks itself if it did."""
        asked = self._read(_ASKED)
        self._asked = self._asked or asked
        if self._wants_reason and self.failure is None and asked == self._asked:
            asked = uuid.uuid4().hex
            self.store.set(_ASKED, asked)
        return asked != self._asked

    def _read(self, key: str) -> str:
        """Reads a value of the store; `_ABSENT`, without waiting, if it was never set."""
        return self._swap(key, _ABSENT, _ABSENT)

    def _swap(self, key: str, expected: str, value: str) -> str:
        """Replaces a value of the store if it equals `expected`; returns the resulting value."""
        return self.store.compare_set(key, expected, value).decode()

    def _follow(self) -> None:
        """Reads the heartbeats of a window of lower ranks, and moves to the next window when none of them is alive."""
        window = range(self._leader - self._leader % _WINDOW, self.rank)[:_WINDOW]
        for rank in window:
            self._look_at(rank)
        alive = [rank for rank in window if self.peers[rank].silence_s <= self.silent_s]
        self._leader = alive[0] if alive else min(window.stop, self.rank)

    def _look_at(self, rank: int) -> None:
        if rank == self.rank:
            return
        stored = self._read(f"{_PREFIX}heartbeat/{rank}")
        heartbeat = None if stored == _ABSENT else Heartbeat(**json.loads(stored))
        if rank not in self.peers or self.peers[rank].heartbeat != heartbeat:
            self.peers[rank] = Peer(heartbeat, time.monotonic())

    def _heartbeat(self) -> Heartbeat:
        if self._activity_start[0] != ACTIVITY.count:
            self._activity_start = ACTIVITY.count, time.monotonic()
        return Heartbeat(self._beat, str(ACTIVITY), ACTIVITY.waits, time.monotonic() - self._activity_start[1])

    # The thread that reports stalls

    def _run_stall_monitor(self) -> None:
        """Logs a warning, at growing intervals, while no rank makes progress."""
        before = time.monotonic()
        while not self._closing:
            with self._condition:
                self._condition.wait_for(lambda: self._closing, self.interval_s)
            slept_s, before = time.monotonic() - before, time.monotonic()
            activity_s = self._heartbeat().activity_s
            if activity_s < STALL_S:
                self._reports = 0
            elif slept_s > self.silent_s:
                continue  # this process was stopped itself, so all others seem to have stalled
            elif activity_s >= STALL_S * 2**self._reports and not self._closing:
                message = self._stall_sentence(activity_s)
                if message is not None:
                    self._reports += 1
                    logger.warning(message)

    def _stall_sentence(self, activity_s: float) -> str | None:
        """Message about stalled ranks, on the leader only; `None` while a rank makes progress."""
        if self._is_store_gone():
            leads = self.rank == (1 if self.keeper == "rank 0" else 0)
            return f"Nothing has moved here for {activity_s:.0f} s. {self._store_sentence()}" if leads else None
        if self._leader != self.rank or len(self.peers) < self.world_size - 1:
            return None
        alive = [peer.heartbeat for peer in list(self.peers.values()) if peer.silence_s <= self.silent_s]
        if any(heartbeat is not None and heartbeat.activity_s < STALL_S for heartbeat in alive):
            return None
        message = f"Nothing has moved on any rank for {activity_s:.0f} s. {self._waiting_sentence()}"
        return f"{message}:\n{self.table()}"


def _try(abort: Callable[[], None]) -> None:
    """Aborts collectives; an exception is only logged, since the failure itself is more informative."""
    try:
        abort()
    except Exception as error:
        logger.warning(f"The collectives of this rank could not be ended: {error}")


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks as text, with ranges for consecutive ones: `ranks 0-3, 6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
