"""
Runs a function on several ranks, each a fresh process that shares one gloo group.

The processes are forked from a server that has imported the heavy packages already, so a set of four starts in a
fraction of a second, and a rank that hangs, aborts or leaves global state behind cannot touch the next test. They meet
through a file: no port is taken, and no process that forks later hosts a store.

Inside a rank `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE` are set and the group is initialised, so
`TrainingArguments(use_cpu=True)` finds a `MULTI_CPU` world of that size. `use_cpu=True` is needed: accelerate chooses
`MULTI_CPU` only when asked for the CPU.
"""

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

GROUP_TIMEOUT_S = 20.0
"""How long a collective waits for the other ranks."""
GRACE_S = 2.0
"""How long the other ranks may still report once one rank has failed."""
TAIL_LINES = 25

PRELOADED = [
    "pytest",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "hf_mmparallel.trainer",
    "hf_mmparallel.runtime.engine",
    "tests.distributed",
    "tests.warm",
]


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message has its traceback and the last output of every rank."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank


@dataclass
class _Outcome:
    """What became of one rank; `time` is on the clock that all processes of a host share."""

    rank: int
    kind: str = "running"  # then one of: returned, raised, died, killed
    value: Any = None
    error_type: str = ""
    error: str = ""
    details: str = ""
    time: float = 0.0

    def sentence(self) -> str:
        """One line for the table of ranks."""
        if self.kind == "raised":
            return f"rank {self.rank} raised {self.error_type}: {self.error}"
        return f"rank {self.rank} {self.kind}" + (f" ({self.details})" if self.details else "")


@dataclass(frozen=True)
class _Job:
    """What every rank is told."""

    payload: bytes
    world_size: int
    folder: str
    environment: dict[str, str]
    cwd: str
    backend: str
    lifetime_s: float


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 100, backend: str = "gloo", **kwargs: Any
) -> list[Any]:
    """
    Calls `fn(*args, **kwargs)` on `world_size` ranks and returns what each returned, by rank.

    Args:
        fn (`Callable`): A top-level function of a test module.
        world_size (`int`): Number of ranks.
        timeout (`float`, *optional*, defaults to 100): Seconds after which all ranks are killed.
        backend (`str`, *optional*, defaults to `"gloo"`): Backend of the group; every other takes CUDA device `rank`.

    Raises:
        RankFailure: A rank raised, died, or was still running at the time limit.
    """
    outcomes, tails = _launch(fn, world_size, args, kwargs, timeout, GRACE_S, backend)
    failed = sorted((o for o in outcomes if o.kind != "returned"), key=_blame)
    if failed:
        raise RankFailure(_report(failed[0], outcomes, tails, timeout), failed[0].rank)
    return [outcome.value for outcome in outcomes]


def assert_ranks_raise(
    fn: Callable[..., Any], world_size: int, *args: Any, match: str, timeout: float = 100, **kwargs: Any
) -> list[str]:
    """
    Asserts that `fn` raises on every rank, without a hang, and that each message has a match for `match`.

    Returns:
        `list[str]`: The messages by rank, so that a test can compare them.
    """
    outcomes, tails = _launch(fn, world_size, args, kwargs, timeout, timeout, "gloo")
    for outcome in outcomes:
        if outcome.kind != "raised" or not re.search(match, outcome.error):
            raise RankFailure(
                f"every rank was to raise an error matching {match!r}.\n{_report(outcome, outcomes, tails, timeout)}",
                outcome.rank,
            )
    return [outcome.error for outcome in outcomes]


def outcomes(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 100, **kwargs: Any
) -> list[_Outcome]:
    """What became of each rank, for tests in which some of them die."""
    return _launch(fn, world_size, args, kwargs, timeout, timeout, "gloo")[0]


def meet_at_rank_zero() -> None:
    """Replaces the group by one whose store is kept by rank 0, as after `mp.spawn`, and goes with it."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", 0, world_size, True, timeout, wait_for_workers=False) if rank == 0 else None
    port = [store.port if store is not None else 0]
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore("127.0.0.1", port[0], world_size, False, timeout)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _blame(outcome: _Outcome) -> tuple[int, float]:
    """Sort key: a dead rank explains the errors of the others, a killed one explains nothing."""
    return ({"died": 0, "raised": 1, "killed": 2}[outcome.kind], outcome.time)


def _report(first: _Outcome, outcomes: list[_Outcome], tails: list[str], timeout: float) -> str:
    """The first failing rank's traceback, the table of ranks, the last output of each."""
    lines = [
        first.sentence() if first.kind != "killed" else f"no rank failed, but the time limit of {timeout:g} s passed"
    ]
    if first.kind == "raised":
        lines += ["", first.details.rstrip(), ""]
    lines += ["ranks:"] + [f"  {outcome.sentence()}" for outcome in outcomes]
    for rank, tail in enumerate(tails):
        if tail:
            lines += [f"last output of rank {rank}:"] + [f"  {line}" for line in tail.splitlines()]
    return "\n".join(lines)


def start_server() -> None:
    """Starts the server of ranks, which goes on importing when this returns, and lives as long as this process."""
    server_context()
    multiprocessing.forkserver.ensure_running()


def server_context() -> Any:
    """The forkserver context; without [`start_server`] the server starts with the first launch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _launch(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
    grace: float,
    backend: str,
) -> tuple[list[_Outcome], list[str]]:
    """Starts the ranks, waits for them, kills what is left; the outcome and the last output of each rank."""
    context = server_context()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _Job(
            payload=pickle.dumps((fn, args, kwargs)),
            world_size=world_size,
            folder=folder,
            environment=dict(os.environ),
            cwd=os.getcwd(),
            backend=backend,
            lifetime_s=timeout + 10,
        )
        processes, readers = [], []
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=_rank_main, args=(rank, job, writer), name=f"rank{rank}")
                process.start()
                writer.close()
                processes.append(process)
                readers.append(reader)
            outcomes = _collect(processes, readers, timeout, grace)
        finally:
            for process in processes:
                _kill(process)
            for reader in readers:
                reader.close()
        tails = [_tail(Path(folder, f"rank{rank}.log")) for rank in range(world_size)]
    return outcomes, tails


def _collect(processes: list[Any], readers: list[Any], timeout: float, grace: float) -> list[_Outcome]:
    """Waits for a report or the death of every rank, up to the time limit."""
    outcomes = [_Outcome(rank) for rank in range(len(processes))]
    waiting = dict(zip(readers, outcomes, strict=True))
    deadline = time.monotonic() + timeout
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for reader in multiprocessing.connection.wait(list(waiting), remaining):
            outcome = waiting.pop(reader)  # type: ignore[arg-type]
            try:
                vars(outcome).update(pickle.loads(reader.recv_bytes()))  # type: ignore[union-attr]
            except (EOFError, OSError):
                process = processes[outcome.rank]
                process.join(GRACE_S)
                outcome.kind, outcome.time = "died", time.monotonic()
                outcome.details = _exit_sentence(process.exitcode)
            if outcome.kind != "returned":
                deadline = min(deadline, time.monotonic() + grace)
    for outcome in waiting.values():
        outcome.kind, outcome.time = "killed", time.monotonic()
        outcome.details = "still running when the others had failed or the time was up"
    return outcomes


def _exit_sentence(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "closed its pipe without a report"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code} without a report"


def _kill(process: Any) -> None:
    """Ends a rank and what it started."""
    process.join(0.2)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join(5)
    process.close()


def _tail(path: Path) -> str:
    """The last lines of a rank's output."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-TAIL_LINES:])


def _rank_main(rank: int, job: _Job, writer: Any) -> None:
    """Body of a rank: sets up, calls, reports."""
    os.setsid()
    signal.alarm(int(job.lifetime_s) + 1)  # ends a rank whose parent was killed
    log = os.open(os.path.join(job.folder, f"rank{rank}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        _set_up(rank, job)
        fn, args, kwargs = pickle.loads(job.payload)
        report = {"kind": "returned", "value": fn(*args, **kwargs)}
        blob = pickle.dumps(report)
    except (Exception, pytest.fail.Exception, pytest.skip.Exception, SystemExit) as error:
        report = {
            "kind": "raised",
            "error_type": type(error).__name__,
            "error": str(error),
            "details": traceback.format_exc(),
            "time": time.monotonic(),
        }
        blob = pickle.dumps(report)
    sys.stdout.flush()
    sys.stderr.flush()
    writer.send_bytes(blob)
    writer.close()
    _tear_down()


def _set_up(rank: int, job: _Job) -> None:
    """The caller's environment and folder, the rank's variables, one thread, the group."""
    import torch
    import torch.distributed as dist

    gc.freeze()  # else each collection walks, and so copies, all that the server has imported
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",  # nobody connects to it: the group exists when accelerate looks
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME=job.environment.get("GLOO_SOCKET_IFNAME", "lo"),
    )
    os.chdir(job.cwd)
    torch.set_num_threads(1)
    warnings.filterwarnings("error", module="hf_mmparallel")
    # torch blames a frame of its own for a call of a deprecated collective, whoever made it.
    warnings.filterwarnings("error", message=r".*torch\.distributed\S* .*deprecated", category=FutureWarning)
    if job.backend != "gloo":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        job.backend,
        init_method=f"file://{job.folder}/rendezvous",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    dist.barrier()  # a rank that returns at once would leave while others still connect


def _tear_down() -> None:
    """Leaves the group; a failure here hides nothing, as the report is out."""
    import torch.distributed as dist

    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
