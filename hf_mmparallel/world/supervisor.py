"""The part of a launcher that watches its workers, and that keeps in touch with the other launchers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import generations as keys
from .generations import LEFT, Generation
from .launch_coordinator import Coordinator, End, anew_sentence, join_sentence, loss_sentence
from .running_job import Joining, publish_job, start_together

# Connections of launchers to that of node 0, which carry nothing: they end with the process that holds them.

_REACH_TIMEOUT_S = 5.0


class Lifelines:
    """The end of node 0 of the connections."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self._server.setblocking(False)
        self._lines: dict[socket.socket, int | None] = {}  # the launcher that holds each, once it has said so

    @property
    def port(self) -> int:
        return self._server.getsockname()[1]

    def ended(self) -> set[int]:
        """The launchers whose connections have ended since the last call; does not wait."""
        with contextlib.suppress(BlockingIOError):
            while True:
                line, _ = self._server.accept()
                line.setblocking(False)
                self._lines[line] = None
        nodes: set[int] = set()
        for line in list(self._lines):
            told = _read(line)
            if told:
                self._lines[line] = int(told)
            elif told is not None:
                line.close()
                nodes |= {node for node in [self._lines.pop(line)] if node is not None}
        return nodes

    def close(self) -> None:
        for one in (self._server, *self._lines):
            one.close()


class Lifeline:
    """The end of another launcher of its connection; without one, where it can't be made, only silence tells."""

    def __init__(self, host: str, port: int, node: int):
        self._line: socket.socket | None = None
        with contextlib.suppress(OSError):
            self._line = socket.create_connection((host, port), _REACH_TIMEOUT_S)
            self._line.sendall(str(node).encode())
            self._line.setblocking(False)

    @property
    def has_ended(self) -> bool:
        return self._line is not None and _read(self._line) == b""

    def close(self) -> None:
        if self._line is not None:
            self._line.close()


def _read(line: socket.socket) -> bytes | None:
    """What a connection has to say; nothing at its end, `None` while it is silent."""
    try:
        return line.recv(64)
    except BlockingIOError:
        return None
    except OSError:
        return b""


_POLL_S = 0.01  # interval at which workers are looked at
_SIGNS_S = 0.25  # interval at which their signs of life are read, and launchers give signs
_TOGETHER_S = 0.02  # losses so soon after another are published with it
_FENCE = 0.75  # of the time after which a host is lost: a host that is cut off stops before the others go on
_CUT_S = 2.0  # the time itself for a host whose launcher has lost its connection: its workers end in half a second
_GRACE_S = 10.0  # time for a worker that reported its error to end
_LAST_GRACE_S = 5.0  # the same at the end of the job
_CLOSING_S = 10.0  # time for launchers to tell each other of the end
# Half of the time limit of collectives by default, with which all ranks would end that wait for a process that hangs.
_LEAST_STALL_S = 900.0
_STALL_FACTOR = 20.0  # of the longest activity of its kind
_FIRST_STEPS = 2  # in which much is done for the first time
_LEAVE_S = 60.0  # time for a worker to leave the collective in which all wait for each other


@dataclass(frozen=True)
class Limits:
    """How long silence is tolerated, in seconds; 0 is no limit for the second and the third."""

    host_timeout: float = 30.0  # without a sign of life of a host, after which it is lost
    hang_timeout: float = 60.0  # without a sign of life of a worker, after which it is killed
    # of a worker in one activity without waiting for others; `None` for one by what others of its kind have taken
    stall_timeout: float | None = None

    def stall_limit_s(self, sign: Mapping[str, Any], signs: Sequence[Mapping[str, Any]]) -> float:
        """How long a worker with this sign may stand in its activity, by the signs of all workers of its host."""
        if self.stall_timeout is not None:
            return self.stall_timeout or math.inf
        if sign["num_steps"] <= _FIRST_STEPS:
            return math.inf
        longest_s = max((one["longest_s"].get(sign["kind"], 0.0) for one in signs if one), default=0.0)
        return max(_LEAST_STALL_S, _STALL_FACTOR * longest_s)


class AwakeClock:
    """A clock that stops while this process is stopped, since others, whose silence it measures, may be as well."""

    def __init__(self) -> None:
        self.now = 0.0
        self._last = time.monotonic()

    def tick(self) -> float:
        """Seconds since the start, of which each call adds one at most."""
        last, self._last = self._last, time.monotonic()
        self.now += min(1.0, self._last - last)
        return self.now


@dataclass
class Worker:
    id: int  # in the job
    process: Any  # `subprocess.Popen`
    exit_code: int | None = None  # negative for the signal that ended it; `None` while it runs
    ended: float = 0.0  # in seconds since the epoch
    reason: str = ""  # why this launcher has killed it
    sign: dict[str, Any] = field(default_factory=dict)
    sign_time: float = 0.0  # on the awake clock
    doomed: float | None = None  # when it was declared lost, on the awake clock
    step: int = 0  # of its last sign
    stuck: float | None = None  # when it was found to have waited too long for others, on the awake clock


class Supervisor:
    """
    Watches the workers of a launcher.

    Its threads: one looks at the workers, and never waits for the network; one talks to the store. In the launcher of
    node 0 a third takes the events of all launchers and workers, one after the other.
    """

    def __init__(
        self,
        address: tuple[str, int],  # of the store
        prefix: str,
        node: int,
        num_nodes: int,  # launchers that the job starts with
        limits: Limits,
        joining: Joining | None = None,  # place in a running job
        before: End | None = None,  # of the job, which is started again
    ):
        self.node = node
        self.joining = joining
        self._has_joined = joining is None
        self._before = before
        self.limits = limits
        self.workers: dict[int, Worker] = {}  # by local rank
        self.end: End | None = None
        self._address, self._prefix = address, prefix
        self._num_nodes = num_nodes
        self._folder = tempfile.TemporaryDirectory(prefix="hf_mmparallel-")
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._closing = threading.Event()
        self._answered: float | None = None  # awake time of the last request that the store has answered
        self._clock = AwakeClock()
        self._threads: list[threading.Thread] = []
        self._lost: dict[int, str] = {}  # id -> reason
        self._met_anew = 0.0  # when processes that waited for each other last met anew, on the awake clock
        self._lifelines: Lifelines | None = None  # in node 0
        self._lifeline: Lifeline | None = None  # in others
        self._cut: dict[int, float] = {}  # launchers whose connection has ended, and when
        self._num_others = self._num_informed = 0  # in node 0: live launchers, and those that know of the end

    def settings(self) -> dict[str, Any]:
        told = {"node": self.node, "prefix": self._prefix, "folder": self._folder.name}
        return told if self.joining is None else told | self.joining.settings()

    def meet_launchers(self) -> None:
        """Waits for the other launchers if the job is started again, see [`start_together`]."""
        if self._before is not None:
            start_together(self._address, self._prefix, self._num_nodes)

    def start(self, processes: Mapping[int, tuple[int, Any]]) -> None:
        """Starts to watch local rank -> (id, process)."""
        self.workers = {rank: Worker(id, process) for rank, (id, process) in processes.items()}
        self._say({"kind": "node", "node": self.node, "ids": [worker.id for worker in self.workers.values()]})
        runs: list[Callable[[], None]] = [self._watch, self._talk]
        if self.node == 0:
            runs.append(self._coordinate)
        for run in runs:
            thread = threading.Thread(target=run, name=f"hf_mmparallel {run.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Ends the threads; the launcher of node 0 first lets the others know of the end."""
        if self._closing.is_set():
            return
        if self.node == 0 and self.end is None:
            self._say({"kind": "failed", "reason": "The launcher of node 0 was ended."})
        deadline = time.monotonic() + _CLOSING_S
        while self._is_needed() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._closing.set()
        for thread in self._threads:
            thread.join(_CLOSING_S)
        for line in (self._lifelines, self._lifeline):
            if line is not None:
                line.close()
        self._folder.cleanup()

    def say_that_it_ends(self) -> None:
        """Says that this launcher ends while the job goes on, because of a signal."""
        if self.end is None:
            self._say({"kind": "leaving", "node": self.node})

    def let_workers_end(self) -> None:
        """Waits a few seconds for workers that have reported their error: they print it, and what led to it."""
        deadline = time.monotonic() + _LAST_GRACE_S
        while time.monotonic() < deadline and any(w.process.poll() is None for w in self.workers.values()):
            time.sleep(_POLL_S)

    @property
    def has_left(self) -> bool:
        """Whether no worker of this host is a member any more, since some were asked to leave."""
        reasons = [self._lost.get(worker.id) for worker in self.workers.values()]
        return self.node > 0 and LEFT in reasons and None not in reasons

    def _is_needed(self) -> bool:
        """Whether the end of workers, or of the job, may not have reached the other launchers yet."""
        if self.node == 0:
            return self.end is None or self._num_informed < self._num_others
        have_finished = self.end is None and all(worker.exit_code == 0 for worker in self.workers.values())
        return not self._events.empty() or (have_finished and not self.has_left)

    def _say(self, event: dict[str, Any]) -> None:
        self._events.put(event)

    # The thread that looks at the workers

    def _watch(self) -> None:
        next_signs = 0.0
        while not self._closing.wait(_POLL_S):
            now = self._clock.tick()
            for worker in self.workers.values():
                self._look_at(worker)
            if now >= next_signs:
                next_signs = now + _SIGNS_S
                for worker in self.workers.values():
                    if worker.exit_code is None:
                        self._read_sign(worker, now)
            self._check_store(now)
            if not self._has_joined and all(worker.exit_code is not None for worker in self.workers.values()):
                self.end = self.end or End(
                    False, "All processes of this launcher ended before they took part in the training."
                )

    def _look_at(self, worker: Worker) -> None:
        if worker.exit_code is not None or (code := worker.process.poll()) is None:
            return
        worker.ended = time.time()
        worker.exit_code = code
        if code:
            kill_group(worker.process)  # its data-loader workers, which keep its connections open
        self._say(
            {
                "kind": "ended",
                "id": worker.id,
                "node": self.node,
                "exit_code": code,
                "reason": worker.reason or exit_phrase(code),
                "time": worker.ended,
                "step": worker.step,
            }
        )

    def _read_sign(self, worker: Worker, now: float) -> None:
        """Reads a worker's sign of life, and kills it if there has been none for long."""
        sign: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            sign = json.loads(Path(self._folder.name, f"{worker.id}.json").read_text())
        if sign.get("beat") != worker.sign.get("beat") or not sign:
            worker.sign, worker.sign_time = sign, now
            worker.step = max(worker.step, sign.get("step", 0))
        silence_s, standing_s = now - worker.sign_time, sign.get("standing_s", 0.0)
        hang = self.limits.hang_timeout
        if worker.doomed is not None:
            if now - worker.doomed > _GRACE_S:
                kill_group(worker.process)
        elif hang and silence_s > hang:
            self._lose(worker, f"no sign of life for {silence_s:.1f} s, last at `{sign['doing']}`")
        elif sign and standing_s > self.limits.stall_limit_s(sign, self._signs()):
            stack = sign["stack"].rstrip()
            where = f"{standing_s:.1f} s in `{sign['doing']}`"
            has_met = worker.stuck is not None and worker.stuck < self._met_anew < now - _LEAVE_S
            if has_met or not sign["waits"]:
                self._lose(worker, f"{where}, with the stack\n{stack}\n")
            elif worker.stuck is None:
                worker.stuck = now
                self._say({"kind": "stuck", "id": worker.id, "doing": where})
        elif worker.stuck is not None:
            worker.stuck = None
            self._say({"kind": "moves", "id": worker.id})

    def _signs(self) -> list[dict[str, Any]]:
        return [worker.sign for worker in self.workers.values()]

    def _lose(self, worker: Worker, reason: str) -> None:
        """Kills a worker; its loss is known at once, as a process that waits for a device may not end."""
        worker.doomed = self._clock.now
        self._say(
            {
                "kind": "reported",
                "id": worker.id,
                "node": self.node,
                "reason": reason,
                "time": time.time(),
                "step": worker.step,
            },
        )
        self._kill(worker, reason)

    def _kill(self, worker: Worker, reason: str) -> None:
        worker.reason = reason
        kill_group(worker.process)

    def _check_store(self, now: float) -> None:
        """Ends this host's part if node 0 does not answer: the others go on without it."""
        if self._answered is None or self.end is not None or self.node == 0:
            return
        silence_s = now - self._answered
        limit_s = self.limits.host_timeout
        if silence_s > _FENCE * min(limit_s, _CUT_S) and self._lifeline is not None and self._lifeline.has_ended:
            limit_s = min(limit_s, _CUT_S)
        if silence_s > _FENCE * limit_s:
            self._leave(f"Node {self.node} has not reached node 0 for {silence_s:.1f} s.")

    def _leave(self, reason: str) -> None:
        """Kills the workers of this host, which the others go on without."""
        for worker in self.workers.values():
            if worker.exit_code is None:
                self._kill(worker, "its host was cut off")
        self.end = End(False, reason)

    # The thread that talks to the store

    def _talk(self) -> None:
        clock = AwakeClock()
        try:
            store = keys.connect(self._address, self._prefix)
            self._connect_lifelines(store)
            beats: dict[int, tuple[int, float]] = {}
            known = -1
            next_beat = 0.0
            while not (self._closing.is_set() and self._events.empty()):
                with contextlib.suppress(queue.Empty):
                    event = self._events.get(timeout=_SIGNS_S / 5)
                    store.queue_push(keys.EVENTS, json.dumps(event))
                if (now := clock.tick()) < next_beat:
                    continue
                next_beat = now + _SIGNS_S
                asked = self._clock.now
                store.add(keys.beat_key(self.node), 1)
                self._answered = asked
                known = self._read_generations(store, known)
                if self.node == 0:
                    self._listen_to_nodes(store, beats, now)
                if self.end is None and store.check([keys.END]):
                    self.end = End(**json.loads(store.get(keys.END)))
                    store.add(keys.NUM_INFORMED, self.node > 0)
        except RuntimeError as error:
            if self.end is None:
                self._leave(f"Node 0 is gone: {str(error).partition(chr(10))[0]}")

    def _connect_lifelines(self, store: Any) -> None:
        if self.node == 0:
            self._lifelines = Lifelines()
            store.set(keys.LIFELINES, str(self._lifelines.port))
        else:
            self._lifeline = Lifeline(self._address[0], int(store.get(keys.LIFELINES)), self.node)

    def _read_generations(self, store: Any, known: int) -> int:
        """Looks for workers of this host that are declared lost; returns the newest generation."""
        while store.check([keys.generation_key(known + 1)]):
            known += 1
            generation = Generation.from_json(store.get(keys.generation_key(known)))
            self._has_joined |= self.node in {member.node for member in generation.members}
            self._lost |= {loss.member.id: loss.reason for loss in generation.losses}
            self._met_anew = self._clock.now if generation.anew else self._met_anew
            for worker in self.workers.values():
                if worker.id in self._lost and worker.doomed is None:
                    worker.doomed = self._clock.now
            if self.node in {loss.member.node for loss in generation.losses if loss.reason.startswith(_SILENT)}:
                self._leave(f"Node {self.node} has been declared lost.")
        return known

    def _listen_to_nodes(self, store: Any, beats: dict[int, tuple[int, float]], now: float) -> None:
        """Reports the launchers that give no sign of life."""
        num_nodes = max(self._num_nodes, store.add(keys.NUM_NODES, 0))
        self._num_others = sum(beat > 0 for beat, _ in beats.values())
        self._num_informed = store.add(keys.NUM_INFORMED, 0)
        assert self._lifelines is not None
        self._cut |= dict.fromkeys(self._lifelines.ended(), now)
        for node in range(1, num_nodes):
            beat = store.add(keys.beat_key(node), 0)
            last, since = beats.get(node, (0, now))
            if beat != last and now - self._cut.get(node, now) > _CUT_S / 2:
                del self._cut[node]  # it lives
            limit_s = min(self.limits.host_timeout, _CUT_S) if node in self._cut else self.limits.host_timeout
            if beat != last:
                beats[node] = beat, now
            elif beat > 0 and now - since > limit_s:
                beats[node] = -1, now  # reported once
                reason = f"{_SILENT} for {now - since:.1f} s"
                self._say({"kind": "silent", "node": node, "reason": reason, "time": time.time()})

    # The thread of node 0 that decides

    def _coordinate(self) -> None:
        store = keys.connect(self._address, self._prefix)
        coordinator = Coordinator(self._num_nodes, self._before)
        waiting: list[int] = []
        told_how_to_join = told_of_end = False
        while coordinator.end is None:
            events = [json.loads(store.queue_pop(keys.EVENTS))]
            if events[0]["kind"] in ("ended", "reported", "silent"):
                time.sleep(_TOGETHER_S)
            while store.queue_len(keys.EVENTS):
                events.append(json.loads(store.queue_pop(keys.EVENTS)))
            generation = coordinator.take(events)
            if generation is not None:
                self._publish(store, generation)
                readers = [*generation.members, *(loss.member for loss in generation.losses), *coordinator.waiting]
                for member in readers:
                    store.queue_push(keys.news_key(member.id), generation.to_json())
            if coordinator.is_over and not told_of_end and coordinator.generation is not None:
                told_of_end = True
                for member in coordinator.generation.members:
                    store.queue_push(keys.news_key(member.id), json.dumps({"over": True}))
                store.compare_set(keys.meeting_key(coordinator.generation.number), "", keys.ABANDONED)
            joinable = [member.id for member in coordinator.joinable]
            if coordinator.generation is not None and (joinable != waiting or (joinable and generation is not None)):
                waiting = joinable
                for member in coordinator.generation.members:
                    store.queue_push(keys.news_key(member.id), json.dumps({"waiting": waiting}))
            if not told_how_to_join and any(event["kind"] == "registered" for event in events):
                told_how_to_join = True
                announce(how_to_join(self._address))
        store.set(keys.END, json.dumps(asdict(coordinator.end)))

    def _publish(self, store: Any, generation: Generation) -> None:
        if generation.number == 0:
            publish_job(store, self._prefix, self._num_nodes, len(generation.members))
        store.set(keys.generation_key(generation.number), generation.to_json())
        if generation.number:
            store.compare_set(keys.meeting_key(generation.number - 1), "", keys.ABANDONED)
        if generation.losses:
            announce(loss_sentence(generation))
        if generation.anew:
            announce(anew_sentence(generation))
        if generation.joined:
            announce(join_sentence(generation))


def how_to_join(address: tuple[str, int]) -> str:
    """One line about the address at which launchers join the job."""
    host, port = address
    from_others = ""
    if host == "localhost" or host.startswith("127."):
        from_others = f"; from other hosts with the name of this one, `{socket.gethostname()}`, in place of `{host}`"
    return f"more nodes join with `--join {host}:{port}`{from_others}"


_SILENT = "no sign of life of the host"


def announce(sentence: str) -> None:
    sys.stderr.write(f"hf-mmparallel launch: {sentence}\n")
    sys.stderr.flush()


def exit_phrase(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}" + ("" if code else " before the end of training")
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def kill_group(process: Any) -> None:
    """Kills a worker and what it started; each worker has a session of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
