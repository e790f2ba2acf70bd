"""Reports the failure of one rank with the same message on all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from .. import _environment
from .watcher import ACTIVITY, Watcher, track_activity

# Messages of gloo and NCCL about a lost peer, which torch raises as `RuntimeError`.
_LOST_PEER = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed out waiting|socket|broken pipe|failed to recv", re.IGNORECASE
)
_LONG_SILENCE_S = 60.0  # a busy rank may block its watcher thread for this long
_STORE_S = 10.0  # for the launcher's store to answer
_MAX_CHARACTERS = 4000  # of a failure message; some exceptions quote the tracebacks of others
_watchers: list[Watcher] = []  # the watcher of the current block, if any
_interruptions: list[Callable[[], None]] = []  # of the current block of `failures_left_to`, if any
_reported_ids: set[str] = set()  # failures that this process has already raised


class RemoteRankError(RuntimeError):
    """Another rank failed; the message says which and why."""


def failure_sentence(rank: int, error: BaseException) -> str:
    """The message that the other ranks raise for an exception of `rank`."""
    return f"Another rank failed first: rank {rank}: {type(error).__name__}: {error}"


@contextlib.contextmanager
def raise_on_all_ranks(activity: str) -> Iterator[None]:
    """
    A block that all ranks run, in which all of them report the first failure of any. Others see it as `activity`.

    The exception of a rank is published in the store of the process group, and that rank stays alive until the others
    have read it. Ranks that then lose their connection raise [`RemoteRankError`] in its place; a rank that died
    without an exception is named. Under NCCL collectives are aborted, since ranks would wait for the failed one.
    Nested blocks only set the activity.
    """
    watcher = None if _watchers or _interruptions else _make_watcher()
    if watcher is None:
        with track_activity(activity):
            yield
        return
    ACTIVITY.now(activity)
    with _report_to_launcher(watcher), _report_to_ranks(watcher):
        yield


@contextlib.contextmanager
def _report_to_ranks(watcher: Watcher) -> Iterator[None]:
    """Runs a watcher during the outermost block, and publishes the failure of the block."""
    _watchers.append(watcher)
    try:
        watcher.start()
        yield
        if _watchers and watcher.aborted and watcher.failure is not None:
            raise RemoteRankError(watcher.failure.sentence)
    except BaseException as error:
        if not _watchers:  # failures have been left to another block
            raise
        reason = _reason(watcher, error)
        if reason is None:
            raise
        raise RemoteRankError(reason) from None  # the connection error would hide the cause
    finally:
        if watcher.failure is not None:
            _reported_ids.add(watcher.failure.id)
        ACTIVITY.step = None
        ACTIVITY.now("code outside of the Trainer")
        _watchers.clear()
        watcher.stop()


@contextlib.contextmanager
def _report_to_launcher(watcher: Watcher) -> Iterator[None]:
    """Gives torchrun the exception of the failed rank, which it prints in place of a hint on tracebacks."""
    try:
        yield
    except Exception as error:
        failure = watcher.failure
        is_remote = isinstance(error, RemoteRankError) and failure is not None and not failure.num_gone
        # the exceptions of other ranks could be mistaken for the cause
        if not is_remote:
            with contextlib.suppress(OSError):  # the disk may be full
                get_error_handler().record_exception(error)
        raise


@contextlib.contextmanager
def failures_left_to(interrupt: Callable[[], None]) -> Iterator[None]:
    """A block in which [`raise_on_all_ranks`] leaves failures to its caller, which has a way to go on."""
    # The block may begin in one of `raise_on_all_ranks`, and may end after it.
    for watcher in _watchers:  # of ranks that will have other numbers
        watcher.stop()
    _watchers.clear()
    _interruptions.append(interrupt)  # raises once a rank is lost, where this one waits without a collective
    try:
        yield
    finally:
        _interruptions.remove(interrupt)


def check_rank_lives(rank: int) -> None:
    """Raises an error if a rank has failed, or if `rank`, which this one waits for without a collective, is silent."""
    for interrupt in _interruptions:
        interrupt()
    for watcher in _watchers:
        failure = watcher.lasting_failure()
        if failure is not None:
            raise RemoteRankError(failure.sentence)
        peer = watcher.peers.get(rank)
        # a minute without a sign of life
        if peer is not None and peer.heartbeat is not None and peer.silence_s > max(_LONG_SILENCE_S, watcher.silent_s):
            # `raise_on_all_ranks` replaces this message
            raise RuntimeError(f"Connection closed: rank {rank} gives no sign of life.")


@contextlib.contextmanager
def refuse_once() -> Iterator[None]:
    """
    A block of checks on all ranks. If a `ValueError` that the package raises in it ends the processes of a launch, its
    sentence is printed once, by the first of them, without tracebacks.
    """
    try:
        yield
    except ValueError as error:
        if _environment.launched_processes()[0] > 1 and _raised_by(error).startswith(__name__.partition(".")[0]):
            _print_once(error)
        raise


def _raised_by(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")


def _print_once(error: ValueError) -> None:
    """Replaces the traceback of an error that nothing catches."""
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not error:
            before(kind, value, trace)
        elif _is_first(str(error)):
            sys.stderr.write(f"{kind.__name__}: {error}\n")
            sys.stderr.flush()

    sys.excepthook = hook


def _is_first(sentence: str) -> bool:
    """Whether no other process of the launch has printed a sentence, as far as their store tells."""
    attempt = _environment.launcher_setting("TORCHELASTIC_RESTART_COUNT")
    key = f"hf_mmparallel/refused/{attempt}/{hashlib.sha256(sentence.encode()).hexdigest()}"
    try:
        store: Any = None
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        elif _environment.launcher_keeps_store():
            host, port = (_environment.launcher_setting(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_STORE_S))
        return store is None or store.add(key, 1) == 1
    except (RuntimeError, ValueError):  # the store is gone
        return True


def _make_watcher() -> Watcher | None:
    """A watcher of the default group; `None` if there is only one rank."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    keeper = "the launcher" if _environment.launcher_keeps_store() else "rank 0"
    abort = dist.distributed_c10d._abort_process_group if "nccl" in dist.get_backend() else None
    store = dist.distributed_c10d._get_default_store()
    try:
        return Watcher(store, dist.get_rank(), dist.get_world_size(), keeper, abort, _reported_ids)
    except RuntimeError:  # the store is gone; the first collective will raise
        return None


def _reason(watcher: Watcher, error: BaseException) -> str | None:
    """The failure of another rank that caused `error`; `None` if this rank caused it, which is then published."""
    if isinstance(error, Exception) and (watcher.aborted or is_lost_connection(error)):
        reason = watcher.reason(error)
        watcher.publish(reason)
        return reason
    message = str(error) if isinstance(error, RemoteRankError) else failure_sentence(watcher.rank, error)
    watcher.publish(message[:_MAX_CHARACTERS])
    return None


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error of a collective says that another rank is gone."""
    return isinstance(error, RuntimeError) and _LOST_PEER.search(f"{type(error).__name__}: {error}") is not None
