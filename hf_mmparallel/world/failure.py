"""One rank's failure becomes the same sentence on all ranks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from .. import _environment
from .activity import ACTIVITY, doing
from .watcher import Watcher

# What gloo and NCCL say when a peer has gone; torch raises it as a `RuntimeError`.
_LOST_PEER = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed out waiting|socket|broken pipe|failed to recv", re.IGNORECASE
)
_LONG_SILENCE_S = 60.0  # of a rank that computes something and may hold up its other threads
_LONGEST = 4000  # characters of a sentence; some exceptions quote the tracebacks of others
_watchers: list[Watcher] = []  # of the block that this process is in: none or one
_reported_ids: set[str] = set()  # failures that this process has raised


class RemoteRankError(RuntimeError):
    """Another rank failed; the message says which and why."""


def failure_sentence(rank: int, error: BaseException) -> str:
    """What the other ranks say of an exception of `rank`."""
    return f"Another rank failed first: rank {rank}: {type(error).__name__}: {error}"


@contextlib.contextmanager
def shared_failure(what: str) -> Iterator[None]:
    """
    A block of work that all ranks do, whose first failure all of them tell.

    The exception of one rank is published in the store of the process group, and that rank stays until the others
    have read it. Ranks that then lose their connection raise it in place of what the connection says; a rank that is
    gone without an exception is named. Under NCCL, where a rank would wait for one that has failed, its collectives
    are ended. Blocks inside of others add nothing.

    Args:
        what (`str`): What this rank does in it, for the others to read.

    Raises:
        [`RemoteRankError`]: In place of a lost connection, with what is known of its cause.
    """
    watcher = None if _watchers else _make_watcher()
    if watcher is None:
        with doing(what):
            yield
        return
    ACTIVITY.now(what)
    with _known_to_launcher(watcher), _known_to_all(watcher):
        yield


@contextlib.contextmanager
def _known_to_all(watcher: Watcher) -> Iterator[None]:
    """Runs a watcher beside the outermost block, and tells its failure."""
    _watchers.append(watcher)
    try:
        watcher.start()
        yield
        if watcher.aborted and watcher.failure is not None:
            raise RemoteRankError(watcher.failure.sentence)
    except BaseException as error:
        reason = _reason(watcher, error)
        if reason is None:
            raise
        raise RemoteRankError(reason) from None  # what the connection says would only stand in the way
    finally:
        if watcher.failure is not None:
            _reported_ids.add(watcher.failure.id)
        ACTIVITY.step = None
        ACTIVITY.now("code outside of the Trainer")
        _watchers.clear()
        watcher.stop()


@contextlib.contextmanager
def _known_to_launcher(watcher: Watcher) -> Iterator[None]:
    """
    Hands the exception of the rank that failed to torchrun, whose last lines then say it instead of how to enable
    tracebacks; those of other ranks could be taken for its cause.
    """
    try:
        yield
    except Exception as error:
        failure = watcher.failure
        is_elsewhere = isinstance(error, RemoteRankError) and failure is not None and not failure.num_gone
        if not is_elsewhere:
            with contextlib.suppress(OSError):  # of a disk that is full
                get_error_handler().record_exception(error)
        raise


def check_rank_lives(rank: int) -> None:
    """
    For a rank that waits for another one without a collective.

    Args:
        rank (`int`): Whom it waits for.

    Raises:
        [`RemoteRankError`]: If a rank has failed.
        `RuntimeError`: If `rank` gives no sign of life for a minute; what is known of it replaces the message.
    """
    for watcher in _watchers:
        failure = watcher.lasting_failure()
        if failure is not None:
            raise RemoteRankError(failure.sentence)
        peer = watcher.peers.get(rank)
        if peer is not None and peer.sign is not None and peer.silence_s > max(_LONG_SILENCE_S, watcher.silent_s):
            raise RuntimeError(f"Connection closed: rank {rank} gives no sign of life.")


def _make_watcher() -> Watcher | None:
    """A watcher of the default group, `None` where there is nobody else."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    keeper = "the launcher" if _environment.launcher_keeps_store() else "rank 0"
    abort = dist.distributed_c10d._abort_process_group if "nccl" in dist.get_backend() else None
    store = dist.distributed_c10d._get_default_store()
    try:
        return Watcher(store, dist.get_rank(), dist.get_world_size(), keeper, abort, _reported_ids)
    except RuntimeError:  # the store is gone: the first collective says what it can
        return None


def _reason(watcher: Watcher, error: BaseException) -> str | None:
    """What another rank has to do with an error; `None` for this rank's own, which is published."""
    if isinstance(error, Exception) and (watcher.aborted or _is_lost_connection(error)):
        reason = watcher.reason(error)
        watcher.publish(reason)
        return reason
    own = str(error) if isinstance(error, RemoteRankError) else failure_sentence(watcher.rank, error)
    watcher.publish(own[:_LONGEST])
    return None


def _is_lost_connection(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and _LOST_PEER.search(f"{type(error).__name__}: {error}") is not None
