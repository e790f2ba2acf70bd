"""
Walks every list of a program and names what is wrong with it: what the proof of the package is tested against. It
knows the graph of a step and nothing of an order or a schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from hf_mmparallel.plan import ParallelPlan, StageKey, StepPlan, SyncGroup
from hf_mmparallel.schedule import Action, Message, Program, ProgramError, Task, TaskGraph, build_graph


class DeadlockError(ProgramError):
    """A program whose ranks wait for each other in a cycle."""


def check_program(
    plan: ParallelPlan, step: StepPlan, sync_groups: Sequence[SyncGroup], program: Program, training: bool = True
) -> None:
    """
    Checks that a program has each action of a step exactly once, and that it can't deadlock.

    Raises `ProgramError` if an action is missing, duplicated or misplaced, or if sends and receives are in different
    orders, and `DeadlockError`, with the action that each rank waits at, if ranks wait for each other.
    """
    check(plan, build_graph(plan, step, training), sync_groups if training else (), program)


def check(
    plan: ParallelPlan, graph: TaskGraph, sync_groups: Sequence[SyncGroup], program: Program, is_part: bool = False
) -> None:
    """
    Does [`check_program`] for an existing graph.

    For a [`Part`] it also checks that there is an order of its blocking actions in which the gradient sums come in the
    order of `sync_groups`. Then no program composed of such parts can deadlock: between two sums each part proceeds
    independently of the others, and all parts reach the same sums in the same order.
    """
    _Checker(plan, graph, sync_groups, program).check(in_order=is_part)


def waiting_table(waiting: Mapping[int, Action]) -> str:
    """The action that each rank waits at, one line per rank."""
    return "\n".join(f"rank {rank} waits at `{waiting[rank]}`" for rank in sorted(waiting))


class _Checker:
    """Walks every rank's list once, then looks for cycles among blocking actions."""

    def __init__(self, plan: ParallelPlan, graph: TaskGraph, sync_groups: Sequence[SyncGroup], program: Program):
        self.graph, self.sync_groups, self.program = graph, sync_groups, program
        self.task_index: dict[Task, int] = {task: index for index, task in enumerate(graph.tasks)}
        self.message_index: dict[Message, int] = {message: index for index, message in enumerate(graph.messages)}
        by_stage: dict[StageKey, tuple[int, ...]] = {
            (name, replica, index): stage.all_ranks
            for name, module in plan.modules.items()
            for replica, index, stage in module.stages()
        }
        self.ranks = [by_stage[task.stage_key] for task in graph.tasks]
        self.num_ranks = plan.world_size
        # two ranks -> one of them -> what it sends to the other and receives from it
        self.channels: dict[tuple[int, int], dict[int, list[Action]]] = {}
        # Blocking nodes, which occupy all of their ranks at once: the tasks (the first of joint ones), then the sums.
        self.node_of = list(range(len(graph.tasks))) if graph.joint is None else graph.joint.tolist()
        self.successors: list[list[int]] = [[] for _ in range(len(graph.tasks) + len(sync_groups))]
        self.blocking: dict[int, list[int]] = {}

    def check(self, in_order: bool) -> None:
        """Runs all checks; `in_order` adds the check that gradient sums can run in the order of their indices."""
        if set(self.program.actions) != set(range(self.num_ranks)):
            raise ProgramError(
                f"The program has {len(self.program.actions)} ranks, the plan has {self.num_ranks}. "
                "Make it for this plan with `build_program`."
            )
        for rank, actions in self.program.actions.items():
            self._check_rank(rank, actions)
        self._check_complete()
        for ends in self.channels.values():
            self._check_channel(ends)
        if in_order:
            for first, second in pairwise(range(len(self.graph.tasks), len(self.successors))):
                self.successors[first].append(second)
        self._check_cycles()

    def _check_rank(self, rank: int, actions: Sequence[Action]) -> None:
        """Checks one list by itself, and records its order for the other checks."""
        done: set[tuple[str, int]] = set()
        summed: set[StageKey] = set()
        blocking: list[int] = []
        for action in actions:
            number = self._number(rank, action)
            kind = "task" if action.task is not None else action.op
            if (kind, number) in done:
                raise ProgramError(f"Rank {rank} has `{action}` twice. Keep one of them.")
            done.add((kind, number))
            if kind == "task":
                self._check_task(rank, action, number, done, summed)
            elif kind == "send":
                self._check_send(rank, action, number, done, blocking)
            elif kind == "recv":
                self._check_recv(rank, action, number, done)
            else:
                summed.update(self.sync_groups[number].stages)
            if kind in ("task", "sync"):
                node = self.node_of[number] if kind == "task" else len(self.graph.tasks) + number
                if blocking:
                    self.successors[blocking[-1]].append(node)
                blocking.append(node)
        self.blocking[rank] = blocking

    def _number(self, rank: int, action: Action) -> int:
        """Index of the action's task, message or group; raises if `rank` does not take part in it."""
        if action.task is not None:
            number = self.task_index.get(action.task)
            ranks: Iterable[int] = () if number is None else self.ranks[number]
            if action.op != action.task.kind:
                raise ProgramError(f"Rank {rank} has op `{action.op}` on the task `{action.task}`. Make them equal.")
        elif action.message is not None:
            number = self.message_index.get(action.message)
            end = 0 if action.op == "send" else 1
            ranks = () if number is None else self.ranks[self.graph.ends[number][end]]
        else:
            number = action.index
            ranks = (
                self.sync_groups[number].ranks if number is not None and 0 <= number < len(self.sync_groups) else ()
            )
        if number is None or rank not in ranks:
            raise ProgramError(f"Rank {rank} has `{action}`, which is not among its actions in this step. Remove it.")
        return number

    def _check_task(
        self, rank: int, action: Action, number: int, done: set[tuple[str, int]], summed: set[StageKey]
    ) -> None:
        """Checks that a task comes after that of its chunk, and what adds gradients before the sums of its stage."""
        assert action.task is not None
        if action.op == "fwd":
            return
        if ("task", int(self.graph.after[number])) not in done:
            raise ProgramError(f"Rank {rank} has `{action}` before what it follows. Move it behind that.")
        if action.op in ("bwd", "bwd_weight") and action.task.stage_key in summed:
            raise ProgramError(f"Rank {rank} has `{action}` after the sum of its gradients. Move it before the sum.")

    def _check_send(
        self, rank: int, action: Action, number: int, done: set[tuple[str, int]], blocking: list[int]
    ) -> None:
        """Checks that a send comes after its task; its target then depends on the preceding blocking action."""
        source, target = self.graph.ends[number]
        if ("task", source) not in done:
            raise ProgramError(f"Rank {rank} has `{action}` before the task that produces it. Move it after the task.")
        self.successors[blocking[-1]].append(self.node_of[target])
        self._add_to_channels(rank, action, self.ranks[target])

    def _check_recv(self, rank: int, action: Action, number: int, done: set[tuple[str, int]]) -> None:
        """Checks that a receive is before its task, after the forward of a backward, and after the rank's own send."""
        source, target = self.graph.ends[number]
        if ("task", target) in done:
            raise ProgramError(f"Rank {rank} has `{action}` after the task that needs it. Move it before the task.")
        if (
            self.graph.tasks[target].kind in ("bwd", "bwd_input")
            and ("task", int(self.graph.after[target])) not in done
        ):
            raise ProgramError(
                f"Rank {rank} has `{action}` before the forward that sizes it. Move it after the forward."
            )
        if rank in self.ranks[source] and ("send", number) not in done:
            raise ProgramError(f"Rank {rank} has `{action}` before its own send of it. Move it after the send.")
        self._add_to_channels(rank, action, self.ranks[source])

    def _add_to_channels(self, rank: int, action: Action, others: Iterable[int]) -> None:
        for other in others:
            if other != rank:
                ends = (min(rank, other), max(rank, other))
                self.channels.setdefault(ends, {}).setdefault(rank, []).append(action)

    def _check_complete(self) -> None:
        """Checks that no action is missing; those in the lists are already known to be valid and unique."""
        counts = [0] * self.num_ranks
        for ranks in self.ranks:
            for rank in ranks:
                counts[rank] += 1
        for source, target in self.graph.ends:
            for rank in self.ranks[source]:
                counts[rank] += 1
            for rank in self.ranks[target]:
                counts[rank] += 1
        for group in self.sync_groups:
            for rank in group.ranks:
                counts[rank] += 1
        for rank, count in enumerate(counts):
            if count != len(self.program.actions[rank]):
                done = set(self.program.actions[rank])
                missing = next(action for action in self._expected(rank) if action not in done)
                raise ProgramError(f"Rank {rank} never runs `{missing}`. Add it.")

    def _expected(self, rank: int) -> Iterable[Action]:
        """All actions of one rank, unordered."""
        yield from (
            Action.run(task) for task, ranks in zip(self.graph.tasks, self.ranks, strict=True) if rank in ranks
        )
        for message, (source, target) in zip(self.graph.messages, self.graph.ends, strict=True):
            if rank in self.ranks[source]:
                yield Action("send", message=message)
            if rank in self.ranks[target]:
                yield Action("recv", message=message)
        yield from (Action("sync", index=i) for i, group in enumerate(self.sync_groups) if rank in group.ranks)

    def _check_channel(self, ends: Mapping[int, Sequence[Action]]) -> None:
        """Checks that what two ranks send each other is in one order on both."""
        (rank, own), (other, others) = ends.items()
        for mine, theirs in zip(own, others, strict=True):
            if mine.message != theirs.message:
                raise ProgramError(
                    f"Rank {rank} has `{mine}` where rank {other}, at the other end, has `{theirs}`. What two ranks "
                    "send each other has one order on both: that of the sends."
                )

    def _check_cycles(self) -> None:
        """Walks the blocking nodes in topological order; nodes that are never reached are in a cycle."""
        waits = [0] * len(self.successors)
        for targets in self.successors:
            for node in targets:
                waits[node] += 1
        queue = [node for node, count in enumerate(waits) if not count]
        reached = 0
        while queue:
            node = queue.pop()
            reached += 1
            for other in self.successors[node]:
                waits[other] -= 1
                if not waits[other]:
                    queue.append(other)
        if reached == len(waits):
            return
        waiting = {}
        for rank, nodes in self.blocking.items():
            stuck = next((node for node in nodes if waits[node]), None)
            if stuck is not None:
                waiting[rank] = self._action(stuck)
        raise DeadlockError(f"The program deadlocks:\n{waiting_table(waiting)}")

    def _action(self, node: int) -> Action:
        """The action of a blocking node."""
        if node < len(self.graph.tasks):
            return Action.run(self.graph.tasks[node])
        return Action("sync", index=node - len(self.graph.tasks))
