"""A thread on each rank that gives signs of life in the store of the process group, and looks at those of others."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .activity import ACTIVITY

logger = logging.getLogger(__name__)

STALL_S = 60.0
"""How long nothing moves on any rank until one of them says so; it says it again after twice as long, and so on."""
_INTERVAL_S = 0.5
_TAKEN_BACK_S = 3.0  # in which a rank that goes on after a failure takes it back
_RANKS_PER_S = 512  # signs of life that the store takes in a second, however many ranks there are
_SILENT_S = 2.0
_WINDOW = 8  # ranks that are followed at once to find the lowest that lives; a host with so many may die at once
_SMALL_WORLD = 64  # in which every rank may look at every other
_ROWS = 16
_PREFIX = "hf_mmparallel/"
_FAILURE, _ASKED, _ABSENT = _PREFIX + "failure", _PREFIX + "asked", "absent"
_KILLED_HINT = (
    "A process that is killed, for example for lack of memory, ends so; the kernel's log (`dmesg`) and the launcher "
    "say more."
)


@dataclass(frozen=True)
class Failure:
    """
    What is published when a rank fails.

    Args:
        rank (`int`): Who publishes it.
        sentence (`str`): What the other ranks say.
        num_gone (`int`, *optional*, defaults to 0): Ranks that are not there to read it.
        id (`str`, *optional*): Tells failures with the same sentence apart.
    """

    rank: int
    sentence: str
    num_gone: int = 0
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class Sign:
    """
    A sign of life.

    Args:
        beat (`int`): How many there have been.
        doing (`str`): What the rank's main thread is doing.
        waits (`bool`): Whether it is waiting for other ranks.
        standing_s (`float`): For how long it has been doing that.
    """

    beat: int
    doing: str
    waits: bool
    standing_s: float


@dataclass(frozen=True)
class Peer:
    """The last sign of life of another rank, `None` before its first, and when it was new here."""

    sign: Sign | None
    seen: float

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self.seen


class Watcher:
    """
    Watches over one block of work that all ranks do, such as a training run.

    It has two daemon threads. One talks to the store, and hangs there while the process that keeps the store stands
    still. The other reads only what this rank knows, and says when nothing moves. The main thread waits for neither
    without a limit.

    Every rank follows the lowest rank that lives, which speaks for all: only that one looks at all ranks, so that the
    load of the store grows with the number of ranks and not with its square.

    Args:
        store (`Store`): That of the process group; the watcher makes a client of its own.
        rank (`int`): This rank.
        world_size (`int`): The number of ranks.
        keeper (`str`, *optional*, defaults to `"rank 0"`): Whose process keeps the store, in words.
        abort (`Callable`, *optional*):
            Ends the collectives of this rank when another rank fails, for backends that would wait for it.
        reported_ids (`Collection[str]`, *optional*): Failures of earlier blocks, which this process has raised.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        keeper: str = "rank 0",
        abort: Callable[[], None] | None = None,
        reported_ids: Collection[str] = (),
    ):
        self.store = store.clone()
        self.rank = rank
        self.world_size = world_size
        self.keeper = keeper
        self.abort = abort
        self.interval_s = max(_INTERVAL_S, world_size / _RANKS_PER_S)
        self.silent_s = max(_SILENT_S, 4 * self.interval_s)
        self.failure: Failure | None = None
        self.aborted = False
        self.peers: dict[int, Peer] = {}
        self._known_to = 0  # ranks that have read the failure
        self._noted_s = 0.0  # when this rank read it
        self._own: Failure | None = None
        self._reported_ids = frozenset(reported_ids)
        self._beat = 0
        self._moved = (ACTIVITY.count, time.monotonic())
        self._speaker = 0
        self._asks = False
        self._asked: str | None = None
        self._reports = 0
        self._answered = time.monotonic()
        self._lost = False
        self._closing = False
        self._news = threading.Condition()
        self._threads = [
            threading.Thread(target=run, name=f"hf_mmparallel {run.__name__}", daemon=True)
            for run in (self._talk, self._judge)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads; one that hangs in the store is left behind, which keeps no process alive."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join(self.interval_s)

    # What the main thread calls

    def publish(self, sentence: str) -> None:
        """Publishes a failure of this rank unless another was first, and stays until the others know of it."""
        with self._news:
            self._own = Failure(self.rank, sentence)
            self._news.notify_all()
        self.linger()

    def lasting_failure(self) -> Failure | None:
        """
        A failure that stands for a moment, for a rank that waits without a collective. A rank that had failed before,
        told it late and goes on takes its failure back, and this forgets it.
        """
        failure = self.failure
        if failure is None or time.monotonic() - self._noted_s < _TAKEN_BACK_S:
            return None
        said = self._read(_FAILURE)
        if said not in ("", _ABSENT) and json.loads(said)["id"] == failure.id:
            return failure
        with self._news:
            self.failure = None
        return None

    def linger(self) -> None:
        """Waits a moment for the other ranks to read the failure: the store may end with this process."""
        with self._news:
            self._asks = True
            self._news.notify_all()
            self._news.wait_for(self._is_known_to_all, self.silent_s + self.interval_s)

    def _is_known_to_all(self) -> bool:
        gone = 0 if self.failure is None else self.failure.num_gone
        return self._lost or self._known_to >= self.world_size - gone

    def reason(self, error: BaseException) -> str:
        """Why a connection was lost, in a sentence that is the same on all ranks if they are asked together."""
        with self._news:
            self._asks = True
            # This process may have stood still itself.
            self._answered = max(self._answered, time.monotonic() - self.interval_s)
            self._news.notify_all()
            self._news.wait_for(lambda: self.failure is not None or self._is_store_gone(), 3 * self.silent_s)
            if self.failure is not None:
                return self.failure.sentence
            if self._is_store_gone():
                return self._store_sentence()
            if self._silent():
                return self._gone_sentence(self._silent())
        first_line = str(error).partition("\n")[0]
        return (
            f"Rank {self.rank} lost its connection to another rank, and all ranks give signs of life: "
            f"{first_line}\nWhere the ranks are:\n{self.table()}"
        )

    def _is_store_gone(self) -> bool:
        return self._lost or time.monotonic() - self._answered > self.silent_s

    # Sentences

    def _gone_sentence(self, ranks: Sequence[int]) -> str:
        """About ranks that give no sign of life."""
        said = "; ".join(f"rank {rank} {self._last(rank)}" for rank in ranks[:_ROWS])
        more = f"; and {len(ranks) - _ROWS} more" if len(ranks) > _ROWS else ""
        which = f"Rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
        return f"{which} ended without an error message: {said}{more}. {_KILLED_HINT}"

    def _last(self, rank: int) -> str:
        """What is known of a rank that gives no sign of life."""
        peer = self.peers[rank]
        if peer.sign is None:
            return "has not come to this point"
        return f"has given no sign of life for {peer.silence_s:.1f} s, it was last at `{peer.sign.doing}`"

    def _store_sentence(self) -> str:
        """About a store that does not answer."""
        first = self.peers.get(0)
        known = first.sign if first is not None and self.keeper == "rank 0" else None
        last = "" if known is None else f"; rank 0 was last at `{known.doing}`"
        state = "ended without an error message" if self._lost else "gives no sign of life"
        return (
            f"{self.keeper.capitalize()} {state}: the store of the process group, which it keeps, has "
            f"not answered for {time.monotonic() - self._answered:.1f} s{last}. {_KILLED_HINT}"
        )

    def table(self) -> str:
        """What the ranks are doing, one line for those that do the same."""
        signs: dict[int, tuple[str, float]] = {}
        for rank, peer in list(self.peers.items()):
            if peer.sign is None:
                signs[rank] = "not here yet", peer.silence_s
            elif peer.silence_s > self.silent_s:
                signs[rank] = f"no sign of life, last at `{peer.sign.doing}`", peer.silence_s
            else:
                signs[rank] = f"`{peer.sign.doing}`", peer.sign.standing_s
        own = self._sign()
        signs[self.rank] = f"`{own.doing}`", own.standing_s
        rows: dict[str, list[int]] = {}
        for rank in sorted(signs):
            rows.setdefault(signs[rank][0], []).append(rank)
        lines = [
            f"  {_ranks(ranks)}: {what}, for {max(signs[rank][1] for rank in ranks):.0f} s"
            for what, ranks in rows.items()
        ]
        more = [f"  and {len(lines) - _ROWS} lines more"] if len(lines) > _ROWS else []
        return "\n".join([*lines[:_ROWS], *more])

    def _waiting_sentence(self) -> str:
        """Who waits for whom, as far as that can be told."""
        silent = self._silent()
        if silent:
            return f"They wait for {_ranks(silent)}, without a sign of life"
        signs = {self.rank: self._sign()}
        signs |= {rank: peer.sign for rank, peer in list(self.peers.items()) if peer.sign is not None}
        busy = sorted(rank for rank, sign in signs.items() if not sign.waits)
        if len(busy) == len(signs):  # collectives of the stock Trainer and of callbacks are not known here
            return "None of them is known to wait for another"
        return f"They wait for {_ranks(busy) if busy else 'each other'}"

    def _silent(self) -> list[int]:
        """Other ranks that have given no sign of life for a while."""
        return [rank for rank, peer in sorted(self.peers.items()) if peer.silence_s > self.silent_s]

    # The thread that talks to the store

    def _talk(self) -> None:
        """Gives signs of life and reads those of others, until the block ends or the store is gone."""
        try:
            while not self._closing:
                self._exchange()
                with self._news:
                    own, asks = self._own, self._asks
                    self._news.notify_all()
                    self._news.wait_for(
                        lambda: self._closing or (self._own, self._asks) != (own, asks),  # noqa: B023
                        self.interval_s / 5 if asks else self.interval_s,
                    )
            self._exchange()
        except RuntimeError:  # the process that keeps the store has gone
            with self._news:
                self._lost = True
                self._news.notify_all()

    def _exchange(self) -> None:
        """One round with the store."""
        self._beat += 1
        sign = self._sign()
        self.store.set(f"{_PREFIX}sign/{self.rank}", json.dumps(asdict(sign)))
        if self.failure is None:
            self._exchange_failure(self._own)
        self._follow()
        speaks, asked = self._speaker == self.rank, self._is_asked()
        if (speaks and (asked or sign.standing_s > STALL_S / 2)) or (self._asks and self.world_size <= _SMALL_WORLD):
            for rank in range(self.world_size):
                self._look_at(rank)
        silent = self._silent()
        if speaks and asked and silent and self.failure is None:
            self._exchange_failure(Failure(self.rank, self._gone_sentence(silent), len(silent)))
        if self._asks and self.failure is not None:
            self._known_to = self.store.add(f"{_PREFIX}known/{self.failure.id}", 0)
        self._answered = time.monotonic()

    def _exchange_failure(self, new: Failure | None) -> None:
        """Publishes a failure unless there is one, and takes note of the one that there is."""
        value = None if new is None else json.dumps(asdict(new))
        said = self._read(_FAILURE) if value is None else self._swap(_FAILURE, "", value)
        found = None if said in ("", _ABSENT) else Failure(**json.loads(said))
        if found is not None and found.rank == self.rank and new is None:
            self._swap(_FAILURE, said, "")  # this rank has failed before, and goes on
            return
        if found is not None and found.id in self._reported_ids and value is not None:
            # Its rank may have taken it back in between.
            said = self._swap(_FAILURE, said, value) or self._swap(_FAILURE, "", value)
            found = Failure(**json.loads(said)) if said else None
        if found is None or found.id in self._reported_ids:
            return
        self.store.add(f"{_PREFIX}known/{found.id}", 1)
        with self._news:
            self.failure, self._noted_s = found, time.monotonic()
        if self.abort is not None and self._own is None:
            self.aborted = True
            _try(self.abort)

    def _is_asked(self) -> bool:
        """Whether a rank has lost a connection in this block and asks for the cause; asks if it is this one."""
        asked = self._read(_ASKED)
        self._asked = self._asked or asked
        if self._asks and self.failure is None and asked == self._asked:
            asked = uuid.uuid4().hex
            self.store.set(_ASKED, asked)
        return asked != self._asked

    def _read(self, key: str) -> str:
        """A value of the store, without waiting for one that was never set."""
        return self._swap(key, _ABSENT, _ABSENT)

    def _swap(self, key: str, expected: str, value: str) -> str:
        """Replaces a value if it is as expected; what it is then."""
        return self.store.compare_set(key, expected, value).decode()

    def _follow(self) -> None:
        """Looks at the lowest ranks below this one, and moves on when none of them lives."""
        window = range(self._speaker - self._speaker % _WINDOW, self.rank)[:_WINDOW]
        for rank in window:
            self._look_at(rank)
        living = [rank for rank in window if self.peers[rank].silence_s <= self.silent_s]
        self._speaker = living[0] if living else min(window.stop, self.rank)

    def _look_at(self, rank: int) -> None:
        """Reads a rank's sign of life."""
        if rank == self.rank:
            return
        said = self._read(f"{_PREFIX}sign/{rank}")
        sign = None if said == _ABSENT else Sign(**json.loads(said))
        if rank not in self.peers or self.peers[rank].sign != sign:
            self.peers[rank] = Peer(sign, time.monotonic())

    def _sign(self) -> Sign:
        """This rank's sign of life."""
        if self._moved[0] != ACTIVITY.count:
            self._moved = ACTIVITY.count, time.monotonic()
        return Sign(self._beat, str(ACTIVITY), ACTIVITY.waits, time.monotonic() - self._moved[1])

    # The thread that says when nothing moves

    def _judge(self) -> None:
        """Logs a sentence when nothing moves on any rank, at growing intervals."""
        before = time.monotonic()
        while not self._closing:
            with self._news:
                self._news.wait_for(lambda: self._closing, self.interval_s)
            slept_s, before = time.monotonic() - before, time.monotonic()
            standing_s = self._sign().standing_s
            if standing_s < STALL_S:
                self._reports = 0
            elif slept_s > self.silent_s:
                continue  # this process has stood still, to which all others seem to have done so
            elif standing_s >= STALL_S * 2**self._reports and not self._closing:
                said = self._stall_sentence(standing_s)
                if said is not None:
                    self._reports += 1
                    logger.warning(said)

    def _stall_sentence(self, standing_s: float) -> str | None:
        """About ranks that stand still, on the rank that speaks for all; `None` while one of them moves."""
        if self._is_store_gone():
            speaks = self.rank == (1 if self.keeper == "rank 0" else 0)
            return f"Nothing has moved here for {standing_s:.0f} s. {self._store_sentence()}" if speaks else None
        if self._speaker != self.rank or len(self.peers) < self.world_size - 1:
            return None
        living = [peer.sign for peer in list(self.peers.values()) if peer.silence_s <= self.silent_s]
        if any(sign is not None and sign.standing_s < STALL_S for sign in living):
            return None
        said = f"Nothing has moved on any rank for {standing_s:.0f} s. {self._waiting_sentence()}"
        return f"{said}:\n{self.table()}"


def _try(abort: Callable[[], None]) -> None:
    """Ends collectives; what is raised here says less than the failure that is known."""
    try:
        abort()
    except Exception as error:
        logger.warning(f"The collectives of this rank could not be ended: {error}")


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, neighbours joined: `ranks 0-3, 6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {words}" if len(ranks) == 1 else f"ranks {words}"
