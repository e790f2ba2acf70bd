"""Is a program right? Checked from the tasks of the step alone, whatever wrote the program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from numpy.typing import NDArray

from ..plan import ParallelPlan, StepPlan, SyncGroup
from .action_lists import ProgramRows
from .actions import Action, DeadlockError, Message, ProgramError, StageKey, Task
from .graph import TaskGraph, build_graph
from .program import Program
from .proof import Proof


def check_program(
    plan: ParallelPlan, step: StepPlan, groups: Sequence[SyncGroup], program: Program, training: bool = True
) -> None:
    """
    Checks that a program does the work of a step exactly once, and that no order of events can stop it.

    Args:
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement of the global batch.
        groups (`Sequence[SyncGroup]`): The gradient sums; not used without training.
        program (`Program`): The program.
        training (`bool`, *optional*, defaults to `True`): Whether there are backwards and gradient sums.

    Raises:
        `ProgramError`: If an action is missing, doubled or misplaced, or sends and receives come in other orders.
        `DeadlockError`: If ranks wait for each other; it names the action that each waits at.
    """
    verify(plan, build_graph(plan, step, training), groups if training else (), program)


def verify(
    plan: ParallelPlan,
    graph: TaskGraph,
    groups: Sequence[SyncGroup],
    program: Program,
    is_part: bool = False,
    order: NDArray | None = None,
) -> None:
    """
    [`check_program`] for a graph that is there already.

    Of a [`Part`] it is also checked that its ranks can do all that blocks in one order that has the gradient sums in
    that of `groups`. Then no program that is put together from such parts can deadlock: between one sum and the next
    each part does what it has there, whatever the others do, and all parts come to the same sums in the same order.

    With an order of all that blocks, see [`Proof`], the rows of a program are checked at once; a program that does not
    pass is checked list by list, which says what is wrong.
    """
    rows = program.actions.parts if isinstance(program.actions, ProgramRows) else ()
    if order is not None and len(rows) == 1:
        (written,) = rows
        if written.graph is graph and Proof(plan, graph, groups, written).holds(order, in_order=is_part):
            return
    _Checker(plan, graph, groups, program).check(in_order=is_part)


def waiting_table(waiting: Mapping[int, Action], limit: int = 32) -> str:
    """One line for each rank with the action that it waits at."""
    lines = [f"rank {rank} waits at `{waiting[rank]}`" for rank in sorted(waiting)[:limit]]
    if len(waiting) > limit:
        lines.append(f"and {len(waiting) - limit} more ranks")
    return "\n".join(lines)


class _Checker:
    """Walks every rank's list once, then looks for circles among what blocks."""

    def __init__(self, plan: ParallelPlan, graph: TaskGraph, groups: Sequence[SyncGroup], program: Program):
        self.graph, self.groups, self.program = graph, groups, program
        self.task_index: dict[Task, int] = {task: index for index, task in enumerate(graph.tasks)}
        self.message_index: dict[Message, int] = {message: index for index, message in enumerate(graph.messages)}
        by_stage: dict[StageKey, tuple[int, ...]] = {
            (name, replica, index): stage.all_ranks
            for name, module in plan.modules.items()
            for replica, index, stage in module.stages()
        }
        self.ranks = [by_stage[task.stage_key] for task in graph.tasks]
        self.num_ranks = plan.world_size
        self.sent: dict[tuple[int, int], list[int]] = {}
        self.received: dict[tuple[int, int], list[int]] = {}
        # Nodes that block, on all of their ranks at once: the tasks, then the gradient sums.
        self.successors: list[list[int]] = [[] for _ in range(len(graph.tasks) + len(groups))]
        self.blocking: dict[int, list[int]] = {}

    def check(self, in_order: bool) -> None:
        """Runs all checks, among them whether gradient sums can be in the order of their numbers if `in_order`."""
        if set(self.program.actions) != set(range(self.num_ranks)):
            raise ProgramError(
                f"The program lists {len(self.program.actions)} ranks, the plan has {self.num_ranks}. "
                "Make it for this plan with `build_program`."
            )
        for rank, actions in self.program.actions.items():
            self._check_rank(rank, actions)
        self._check_complete()
        for channel in self.sent.keys() | self.received.keys():
            self._check_channel(channel)
        if in_order:
            for first, second in pairwise(range(len(self.graph.tasks), len(self.successors))):
                self.successors[first].append(second)
        self._check_circles()

    def _check_rank(self, rank: int, actions: Sequence[Action]) -> None:
        """Checks what one list says by itself, and notes its order for the other checks."""
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
                summed.update(self.groups[number].stages)
            if kind in ("task", "sync"):
                node = number if kind == "task" else len(self.graph.tasks) + number
                if blocking:
                    self.successors[blocking[-1]].append(node)
                blocking.append(node)
        self.blocking[rank] = blocking

    def _number(self, rank: int, action: Action) -> int:
        """The place of the action's task, message or group; raises if `rank` has nothing to do with it."""
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
            ranks = self.groups[number].ranks if number is not None and 0 <= number < len(self.groups) else ()
        if number is None or rank not in ranks:
            raise ProgramError(f"Rank {rank} has `{action}`, which is none of its work in this step. Remove it.")
        return number

    def _check_task(
        self, rank: int, action: Action, number: int, done: set[tuple[str, int]], summed: set[StageKey]
    ) -> None:
        """A backward stands after its forward and before the gradient sums of its stage."""
        assert action.task is not None
        if action.op != "bwd":
            return
        if ("task", self.graph.predecessors[number][0]) not in done:
            raise ProgramError(f"Rank {rank} has `{action}` before its forward. Move it behind.")
        if action.task.stage_key in summed:
            raise ProgramError(f"Rank {rank} has `{action}` after the sum of its gradients. Move the sum behind.")

    def _check_send(
        self, rank: int, action: Action, number: int, done: set[tuple[str, int]], blocking: list[int]
    ) -> None:
        """A send stands after its task; its target waits for all that blocks before it."""
        source, target = self.graph.ends[number]
        if ("task", source) not in done:
            raise ProgramError(f"Rank {rank} has `{action}` before the task that produces it. Move it behind.")
        self.successors[blocking[-1]].append(target)
        for other in self.ranks[target]:
            self.sent.setdefault((rank, other), []).append(number)

    def _check_recv(self, rank: int, action: Action, number: int, done: set[tuple[str, int]]) -> None:
        """A receive stands before its task, after the forward of a backward, and after a send of the same rank."""
        source, target = self.graph.ends[number]
        if ("task", target) in done:
            raise ProgramError(f"Rank {rank} has `{action}` after the task that needs it. Move it before.")
        if self.graph.tasks[target].kind == "bwd" and ("task", self.graph.predecessors[target][0]) not in done:
            raise ProgramError(f"Rank {rank} has `{action}` before the forward that sizes it. Move it behind.")
        if rank in self.ranks[source] and ("send", number) not in done:
            raise ProgramError(f"Rank {rank} has `{action}` before its own send of it. Move it behind.")
        for other in self.ranks[source]:
            self.received.setdefault((other, rank), []).append(number)

    def _check_complete(self) -> None:
        """Everything is there; what is there is known to be right and single."""
        counts = [0] * self.num_ranks
        for ranks in self.ranks:
            for rank in ranks:
                counts[rank] += 1
        for source, target in self.graph.ends:
            for rank in self.ranks[source]:
                counts[rank] += 1
            for rank in self.ranks[target]:
                counts[rank] += 1
        for group in self.groups:
            for rank in group.ranks:
                counts[rank] += 1
        for rank, count in enumerate(counts):
            if count != len(self.program.actions[rank]):
                done = set(self.program.actions[rank])
                missing = next(action for action in self._expected(rank) if action not in done)
                raise ProgramError(f"Rank {rank} never does `{missing}`. Add it.")

    def _expected(self, rank: int) -> Iterable[Action]:
        """All actions of one rank, in no useful order."""
        yield from (
            Action.run(task) for task, ranks in zip(self.graph.tasks, self.ranks, strict=True) if rank in ranks
        )
        for message, (source, target) in zip(self.graph.messages, self.graph.ends, strict=True):
            if rank in self.ranks[source]:
                yield Action("send", message=message)
            if rank in self.ranks[target]:
                yield Action("recv", message=message)
        yield from (Action("sync", index=i) for i, group in enumerate(self.groups) if rank in group.ranks)

    def _check_channel(self, channel: tuple[int, int]) -> None:
        """What one rank sends another arrives in the order in which it is received."""
        sent, received = self.sent.get(channel, []), self.received.get(channel, [])
        if sent != received:
            first = next(i for i, (a, b) in enumerate(zip(sent, received, strict=True)) if a != b)
            raise ProgramError(
                f"Rank {channel[1]} receives `{self.graph.messages[received[first]]}` from rank {channel[0]} where "
                f"that sends `{self.graph.messages[sent[first]]}`. Receive in the order of the sends."
            )

    def _check_circles(self) -> None:
        """Walks the nodes that block in dependency order; what is never reached waits for itself."""
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
