"""A worker's view of who is alive, under `hf-mmparallel launch`; `docs/failures.md` shows how a script uses it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from .. import _environment
from . import generations as keys
from .connections import GlooWaits, end_gloo_connections, shut_down
from .generations import Generation, Loss
from .watcher import ACTIVITY, Activity

SIGN_INTERVAL_S = 0.5  # between two signs of life that a worker gives its launcher
_STACK_AFTER_S = 1.0  # a main thread that has stood this long in one activity sends its stack along
_REPEAT_S = 0.05
_LATE_AFTER_S = 30.0  # after which a process that the others wait for says where it is
_JOIN_S = 2.0
_START_S = 600.0  # time for all launchers to start
_GROUP_TIMEOUT = timedelta(minutes=5)  # for keys of a process group


class Standing:
    """How long the main thread stands in its activity, and has stood in others, as far as looks have seen it."""

    def __init__(self, activity: Activity):
        self._activity = activity
        self._count, self._since = activity.count, time.monotonic()
        self._last = ("", 0.0)  # kind of activity at the last look, and for how long
        self._longest_s: dict[str, float] = {}  # by kind
        self.is_void = False  # whether all wait for each other in the current activity, whose time says nothing
        self._steps: set[int] = set()

    def look(self, now: float) -> dict[str, Any]:
        """What a sign of life says of the activity."""
        activity = self._activity
        if activity.count != self._count:
            self._count, self._since = activity.count, now
            kind, stood_s = self._last
            if not self.is_void:
                self._longest_s[kind] = max(stood_s, self._longest_s.get(kind, 0.0))
            self.is_void = False
        if activity.step is not None:
            self._steps.add(activity.step)
        self._last = re.sub(r"\d+", "", str(activity.doing)), now - self._since
        return {
            "step": activity.step or 0,
            "num_steps": len(self._steps),  # that have begun
            "doing": str(activity),
            "waits": activity.waits,
            "standing_s": self._last[1],
            "kind": self._last[0],
            "longest_s": {kind: time_s for kind, time_s in self._longest_s.items() if time_s > _STACK_AFTER_S},
        }


class LostMemberError(RuntimeError):
    """This process has been declared lost; it may not train any longer."""


class NoLossError(TimeoutError):
    """No member has been lost, although a connection was."""


class FinishedRunError(RuntimeError):
    """Another process has trained to the end, and meets this one no more: what all had to do is done."""


class Membership:
    """
    The membership of this process in the job, with the number of the process (`id`) and of its launcher (`node`), and
    the [`Generation`] that it works in; `None` in a process that joins a running job, until it enters one.
    """

    def __init__(self, settings: dict[str, Any]):
        # what the launcher says, see `_environment.launch_settings`
        self.id: int = settings["id"]
        self.node: int = settings["node"]
        self._address: tuple[str, int] = (settings["host"], settings["port"])
        self._prefix: str = settings["prefix"]
        self._sign_path = Path(settings["folder"], f"{self.id}.json")
        self.store: Any = keys.connect(self._address, self._prefix)  # of the main thread
        self._group_stores: list[Any] = []
        self._parent = os.getppid()
        self._abort: Callable[[], None] | None = None
        self._finished = False
        self._beat = 0
        self._standing = Standing(ACTIVITY)
        self._sign_lock = threading.Lock()
        self._news = threading.Condition()
        self._closing = threading.Event()
        self._ending = threading.Lock()
        self._ended = 0  # newest generation for which the collectives have been ended
        self._acknowledged = 0  # newest generation that the main thread knows of
        self._abandoned = -1  # newest generation whose members did not all meet
        self._known: list[Generation] = []
        self._waiting: tuple[int, ...] = ()
        self._asks = False  # has let others in, and waits for the generation that has them
        self._error: RuntimeError | None = None
        self._is_over = False
        self.generation: Generation | None = None
        self.store.wait([keys.generation_key(0)], timedelta(seconds=_START_S))
        first = Generation.from_json(self.store.get(keys.generation_key(0)))
        self._known.append(first)
        if self.id in first.ids:
            self.generation = first

    @classmethod
    def from_environment(cls) -> Membership | None:
        """The membership of this process; `None` if it was not started by `hf-mmparallel launch`."""
        settings = _environment.launch_settings()
        return None if settings is None else cls(settings)

    # What is known

    @property
    def newest(self) -> Generation:
        """The newest generation that this process knows of."""
        return self._known[-1]

    @property
    def is_stale(self) -> bool:
        """Whether members have been lost, or meet anew, since the generation that this process works in."""
        return bool(self.losses or self.anew)

    @property
    def losses(self) -> tuple[Loss, ...]:
        """Members lost since the generation that this process works in; none for one that has not joined yet."""
        if self.generation is None:
            return ()
        return tuple(loss for generation in self._newer() for loss in generation.losses)

    @property
    def anew(self) -> str:
        """Why members meet anew, since the generation that this process works in, although none was lost."""
        return "" if self.generation is None else "; ".join(one.anew for one in self._newer() if one.anew)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ids of processes that wait to join, as far as this one knows; [`Membership.accept_joining`] lets them in."""
        return self._waiting

    def is_newcomer(self, id: int) -> bool:
        """Whether a process joins together with this one, which has not joined yet, or after it."""
        since = [known for known in list(self._known) if self.id in known.ids]
        return any(id == member.id for known in since for member in known.joined)

    def _newer(self) -> list[Generation]:
        """Generations after the one that this process works in."""
        number = -1 if self.generation is None else self.generation.number
        return [generation for generation in list(self._known) if generation.number > number]

    # What this process says. For the main thread.

    def start(self, abort: Callable[[], None]) -> None:
        """
        Starts to listen for losses and to give signs of life, both in daemon threads. To be called once. A thread
        calls `abort`, see [`end_collectives`], once for each newer generation, as soon as members are lost.
        """
        self._abort = abort
        self._write_sign()
        threads = [
            threading.Thread(
                target=self._listen,
                args=(keys.connect(self._address, self._prefix),),
                name="hf_mmparallel listen",
                daemon=True,
            ),
            threading.Thread(target=self._give_signs, name="hf_mmparallel signs", daemon=True),
        ]
        for thread in threads:
            thread.start()
        atexit.register(self._stop, threads)

    def register(self) -> None:
        """From now on the others go on if this process dies; a process that joins waits from now on."""
        # without it the others are ended, as by `accelerate launch`
        self._push({"kind": "registered", "id": self.id, "node": self.node})

    def finish(self) -> None:
        """From now on this process ends normally, and losses of others don't concern it."""
        self._end_with({"kind": "finished"})

    def _end_with(self, event: dict[str, Any]) -> None:
        self._abort = None
        self._push({**event, "id": self.id, "node": self.node})
        with self._sign_lock:
            self._finished = True
            self._sign_path.unlink(missing_ok=True)

    def leave(self, reason: str = "") -> None:
        """From now on this process is no member. Without a reason the others go on without another generation."""
        assert self.generation is not None, "only members leave"
        event = {"kind": "left", "generation": self.generation.number, "reason": reason, "time": time.time()}
        self._end_with(event)

    def report(self, reason: str, place: str = "") -> None:
        """Says that this process is about to end because of an error, so that the others need not wait for it."""
        if self._finished:
            return
        self._abort = None
        told = {"reason": reason, "place": place, "time": time.time(), "step": ACTIVITY.step or 0}
        self._push({"kind": "reported", "id": self.id, "node": self.node, **told})

    def accept_joining(self) -> None:
        """Lets in the processes that wait and have not died, with a next generation; for one member to call."""
        self._asks = True
        self._push({"kind": "accept", "id": self.id})

    def ask_to_meet_anew(self) -> None:
        """Asks for a next generation with the same members, after a connection was lost although all are alive."""
        assert self.generation is not None
        self._push({"kind": "cut", "id": self.id, "generation": self.newest.number})

    # From one generation to the next. For the main thread.

    def next_generation(self, timeout_s: float | None) -> Generation:
        """
        Waits, for `timeout_s` or without a limit, for a generation newer than the one that this process works in, and
        than those that have not all met. Raises [`LostMemberError`] if this process is not among its members,
        [`FinishedRunError`] if a member has finished, [`NoLossError`] if there is none, as no member has been lost,
        and `RuntimeError` if the launcher of node 0 is gone.
        """
        with self._news:
            self._news.wait_for(lambda: self._error or self._is_over or self._is_decided(), timeout_s)
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise FinishedRunError("Another process has finished, and meets no more.")
            if not self._is_decided():
                raise NoLossError(
                    f"The launcher has reported no lost process within {timeout_s:g} s: all "
                    f"{len(self.newest.members)} processes are alive. A connection that is lost although nobody died "
                    "points to the network."
                )
            newest, self._asks = self.newest, False
        self._end_once(newest.number)
        with self._ending:
            self._acknowledged = newest.number
        if self.id not in newest.ids:
            raise self._lost_error()
        return newest

    def _is_decided(self) -> bool:
        """Whether there is a newer generation: with this process if it joins, as an answer if it lets others in."""
        newer = [generation for generation in self._newer() if generation.number > self._abandoned]
        if self._asks:
            newer = newer if any(self.id in generation.answered for generation in newer) else []
        return bool(newer) and (self.generation is not None or self.id in newer[-1].ids)

    def meet(self, generation: Generation) -> bool:
        """
        Waits for all members of a generation. The result is the same for all of them: whether all have come, `False`
        if there is a newer generation, or a member has finished.
        """
        number = generation.number
        if self.store.add(f"arrivals/{number}", 1) == len(generation.members):
            self.store.compare_set(keys.meeting_key(number), "", keys.MET)
        self.store.wait([keys.meeting_key(number)], keys.FOREVER)
        has_met = self.store.get(keys.meeting_key(number)).decode() == keys.MET
        if not has_met:  # what takes its place, a newer generation or the end, may not have arrived here yet
            self._abandoned = number
        return has_met

    def enter(self, generation: Generation) -> None:
        with self._news:
            self.generation = generation

    def new_store(self) -> Any:
        """Returns a store for this generation's process group; its connection ends when members are lost."""
        assert self.generation is not None, "a process group needs a generation"
        prefix = f"{self._prefix}/group/{self.generation.number}"
        store = keys.connect(self._address, prefix, _GROUP_TIMEOUT)
        # so that a main thread that waits for keys of the store raises
        with self._news:
            self._group_stores = [store.underlying_store]
        if self.is_stale:
            self._end_group_stores()
        return store

    def _end_group_stores(self) -> None:
        with self._news:
            stores, self._group_stores = self._group_stores, []
        for store in stores:
            descriptor = re.search(r"\bfd=(\d+)", repr(store))  # torch has no function for it
            if descriptor is not None:
                shut_down(int(descriptor[1]))

    def _lost_error(self) -> LostMemberError:
        reasons = [loss.reason for known in list(self._known) for loss in known.losses if loss.member.id == self.id]
        return LostMemberError(
            f"Process {self.id} has been declared lost ({'; '.join(reasons) or 'no reason is known'}), and the others "
            "go on without it."
        )

    def _stop(self, threads: Sequence[threading.Thread]) -> None:
        """Ends the threads: one that returns from torch while the interpreter ends aborts the process."""
        self._abort = None
        self._closing.set()
        with contextlib.suppress(RuntimeError):  # the store is gone, and so the thread has ended
            self.store.queue_push(keys.news_key(self.id), "")
        for thread in threads:
            thread.join(_JOIN_S)

    # The store

    def _push(self, event: dict[str, Any]) -> None:
        self.store.queue_push(keys.EVENTS, json.dumps(event))

    # The thread that listens

    def _listen(self, store: Any) -> None:
        """Takes generations from the queue of this process, and blocks while there is none."""
        try:
            while news := store.queue_pop(keys.news_key(self.id)):
                told = json.loads(news)
                if "waiting" in told:
                    self._waiting = tuple(told["waiting"])
                elif "over" in told:
                    with self._news:
                        self._is_over = True
                        self._news.notify_all()
                else:
                    self._take(Generation.from_json(news))
        except RuntimeError:  # the launcher of node 0, which has the store, is gone
            with self._news:
                self._error = RuntimeError("The launcher of node 0, which keeps the job together, is gone.")
                self._news.notify_all()
            self._end_once(self.newest.number + 1)

    def _take(self, generation: Generation) -> None:
        if generation.number <= self.newest.number:
            return
        was_member = self.id in self.newest.ids
        self._standing.is_void |= bool(generation.anew)
        with self._news:
            self._known.append(generation)
            self._news.notify_all()
        if was_member and self.id not in generation.ids and self._abort is not None:
            self._leave_at_once()
        elif (generation.losses or generation.anew) and self._abort is not None and self.generation is not None:
            threading.Thread(target=self._end_collectives, args=(generation.number,), daemon=True).start()

    def _end_collectives(self, number: int) -> None:
        """Ends collectives until the main thread knows of a generation: it may be connecting when members are lost."""
        self._end_once(number)
        waits, begun, is_told = GlooWaits(), time.monotonic(), False
        while True:
            with self._ending:
                if self._acknowledged >= number or self._abort is None:
                    return
                self._end_group_stores()
                end_gloo_connections(max(len(known.members) for known in self._known))
                waits.end_stuck()
            if not is_told and time.monotonic() - begun > _LATE_AFTER_S:
                is_told = True
                self._write_error(
                    f"the others wait for process {self.id}, which has not noticed for {_LATE_AFTER_S:g} s that "
                    f"processes were lost. It is in `{ACTIVITY}`:\n{_main_stack()}"
                )
            time.sleep(_REPEAT_S)

    def _end_once(self, number: int) -> None:
        with self._ending:
            abort = self._abort
            if abort is not None and self._ended < number and (self.is_stale or self._error is not None):
                self._ended = number
                self._end_group_stores()
                abort()

    def _write_error(self, sentence: str) -> None:
        sys.stderr.write(f"hf-mmparallel: {sentence}\n")
        sys.stderr.flush()

    def _leave_at_once(self) -> None:
        """Ends this process, which has been declared lost, so that two halves of the job never both train."""
        self._write_error(str(self._lost_error()))
        os.kill(os.getpid(), signal.SIGKILL)

    # The thread that gives signs of life

    def _give_signs(self) -> None:
        while not self._finished and not self._closing.wait(SIGN_INTERVAL_S):
            if os.getppid() != self._parent:  # the launcher was killed, so its node counts as lost
                os.kill(os.getpid(), signal.SIGKILL)
            self._write_sign()

    def _write_sign(self) -> None:
        with self._sign_lock, contextlib.suppress(OSError):  # the launcher removes the folder at its end
            if self._finished:
                return
            told = self._standing.look(time.monotonic())
            self._beat += 1
            stack = _main_stack() if told["standing_s"] > _STACK_AFTER_S else ""
            sign = {"beat": self._beat, **told, "stack": stack}
            new = self._sign_path.with_suffix(".new")
            new.write_text(json.dumps(sign))
            new.replace(self._sign_path)


def _main_stack() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
