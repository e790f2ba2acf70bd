"""Torch's agent, changed so that workers may die while others live, and installed for one launch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from .. import _environment
from .launch_coordinator import End
from .running_job import take_place
from .supervisor import Limits, Supervisor, announce

_POLL_S = 0.05
_LAST_GRACE_S = 5  # time for workers to end when the job has


@dataclass
class Outcome:
    reasons: list[str] = field(default_factory=list)  # why the job failed, once it has
    has_left: bool = False  # the workers have left a job that goes on


class SurvivingAgent(LocalElasticAgent):
    """Torch's agent of one host, whose workers may die while others live once they have registered."""

    limits = Limits()
    outcome = Outcome()  # of the launch of this class
    join: tuple[str, int] | None = None  # address of a running job that the workers join
    _supervisor: Supervisor | None = None
    _before: End | None = None  # how the job ended before it was started again
    _since: float | None = None  # when it was started first, in seconds since the epoch

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        spec = worker_group.spec
        if not spec.rdzv_handler.use_agent_store:  # worker 0 would host the store, and it may die
            announce("TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set: a process that dies ends all.")
            return super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        self._supervisor = self._new_supervisor(worker_group)
        self._supervisor.meet_launchers()
        self._since = self._since or time.time()
        _environment.set_launch_settings({**self._supervisor.settings(), "since": self._since})
        joining = self._supervisor.joining
        if joining is not None:  # each process has a group of its own until the others let it in
            for worker in worker_group.workers:
                worker.global_rank, worker.world_size = 0, 1
        pids = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]  # it is decorated
        if joining is not None:
            for worker in worker_group.workers:
                worker.global_rank = joining.first_id + worker.local_rank
        assert isinstance(self._pcontext, SubprocessContext), "accelerate starts scripts, not functions"
        handlers = self._pcontext.subprocess_handlers
        self._supervisor.start(
            {
                worker.local_rank: (worker.global_rank, handlers[worker.local_rank].proc)
                for worker in worker_group.workers
            }
        )
        return pids

    def _new_supervisor(self, worker_group: Any) -> Supervisor:
        spec = worker_group.spec
        if self.join is not None:
            joining = take_place(self.join, spec.local_world_size)
            return Supervisor(joining.address, joining.prefix, joining.node, joining.node, self.limits, joining)
        return Supervisor(
            (worker_group.master_addr, worker_group.master_port),
            f"hf_mmparallel/world/{spec.rdzv_handler.get_run_id()}/{spec.max_restarts - self._remaining_restarts}",
            worker_group.group_rank,
            worker_group.group_world_size,
            self.limits,
            before=self._before,
        )

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        supervisor, context = self._supervisor, self._pcontext
        if supervisor is None or context is None:
            return super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        if supervisor.end is None:
            return RunResult(WorkerState.HEALTHY)
        if supervisor.end.all_are_ending:
            supervisor.let_workers_end()
        if not supervisor.end.success:
            self._note_failure(supervisor.end)
        failures = self._failures(context)
        context.close(timeout=_LAST_GRACE_S)  # processes in training do not end by its signal
        if supervisor.end.success:
            finished = {
                worker.global_rank: None for worker in worker_group.workers if worker.global_rank not in failures
            }
            return RunResult(WorkerState.SUCCEEDED, finished, failures)
        return RunResult(WorkerState.FAILED, failures=failures or self._failures(context))

    def _note_failure(self, end: End) -> None:
        """Says why the job failed, and whether torch's agent starts it again."""
        self.outcome.reasons[:] = [end.reason]
        announce(end.reason)
        self._before = end
        if not end.may_restart:
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            number = self._worker_group.spec.max_restarts - self._remaining_restarts + 1
            announce(f"starting again, {number} of {self._worker_group.spec.max_restarts} times")

    def _failures(self, context: Any) -> dict[int, ProcessFailure]:
        failures = {}
        for rank, worker in self._supervisor.workers.items() if self._supervisor else ():
            code = worker.process.poll()
            if code:
                failure = ProcessFailure(rank, worker.process.pid, code, context.error_files[rank])
                failure.timestamp = worker.ended or time.time()  # type: ignore[assignment]  # finer than torch's
                failures[worker.id] = failure
        return failures

    def _exit_barrier(self) -> None:
        if self._supervisor is None:  # else the job has ended on all hosts
            super()._exit_barrier()

    def _stop_workers(self, worker_group: Any) -> None:
        super()._stop_workers(worker_group)  # pyright: ignore[reportCallIssue]
        self._stop_supervisor()

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        if self._supervisor is not None:
            self._supervisor.say_that_it_ends()
        super()._shutdown(*args, **kwargs)
        self._stop_supervisor()

    def _stop_supervisor(self) -> None:
        if self._supervisor is not None:
            self._supervisor.stop()
            self.outcome.has_left = self._supervisor.has_left


@contextlib.contextmanager
def surviving_agent(limits: Limits, join: tuple[str, int] | None = None) -> Iterator[Outcome]:
    """Lets torch's launcher use [`SurvivingAgent`] during a block; yields what becomes of the launch."""
    outcome = Outcome()
    agent = type("LocalElasticAgent", (SurvivingAgent,), {"limits": limits, "join": join, "outcome": outcome})
    with mock.patch.object(api, "LocalElasticAgent", agent):
        yield outcome
