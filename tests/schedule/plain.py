"""
The plain way to the lists of ranks, task by task over objects: what the arrays of `schedule/` are tested against.
Everything is looked up anew where it is needed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from hf_mmparallel.plan import LANGUAGE_MODEL, ParallelPlan, StageKey, StepPlan, SyncGroup
from hf_mmparallel.plan.step_plan import turn_of
from hf_mmparallel.schedule import Action, Message, Program, Task, TaskGraph
from hf_mmparallel.schedule.in_flight import task_phases


@dataclass(frozen=True)
class PlainGraph:
    tasks: tuple[Task, ...]
    predecessors: tuple[tuple[int, ...], ...]
    messages: tuple[Message, ...]
    ends: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PlainOrder:
    """Times and numbers of the events of all tasks."""

    start_ms: tuple[float, ...]
    end_ms: tuple[float, ...]
    started: tuple[int, ...]
    finished: tuple[int, ...]

    @property
    def events(self) -> list[list[int]]:
        return [list(self.started), list(self.finished)]


def consumer_turns(step: StepPlan, module: str, replica: int, target: str) -> dict[int, int]:
    """Batch index -> the turn in which `target` consumes what a replica of `module` makes of it."""
    consumers = (step.whole or step).microbatches[target]
    takers = {
        batch_index: (index, len(microbatches))
        for microbatches in consumers
        for index, batch_indices in enumerate(microbatches)
        for batch_index in batch_indices
    }
    own = [i for i in chain.from_iterable(step.microbatches[module][replica]) if i in takers]
    turns = max((takers[i][1] for i in own), default=0)
    return {i: turn_of(*takers[i], turns) for i in own}


def chunks_of_replica(step: StepPlan, module: str, replica: int) -> list[list[list[int]]]:
    """The chunks of each microbatch of a replica: its samples by the turn in which they are consumed last."""
    targets = step.targets.get(module, ()) if module != LANGUAGE_MODEL else ()
    turns = [consumer_turns(step, module, replica, target) for target in targets]
    result = []
    for index, batch_indices in enumerate(step.microbatches[module][replica]):
        by_turn: dict[int, list[int]] = {}
        for i in batch_indices:
            by_turn.setdefault(max((turn[i] for turn in turns if i in turn), default=index), []).append(i)
        result.append([by_turn[turn] for turn in sorted(by_turn)])
    return result


def build_graph(plan: ParallelPlan, step: StepPlan, training: bool = True) -> PlainGraph:
    """The tasks and messages of a step."""
    samples = {  # of each chunk, by module, replica, microbatch and chunk
        (name, replica, index, chunk): batch_indices
        for name, module in plan.modules.items()
        for replica in module.with_stages
        for index, chunks in enumerate(chunks_of_replica(step, name, replica))
        for chunk, batch_indices in enumerate(chunks)
    }
    num_stages = {(name, d): len(replica) for name, m in plan.modules.items() for d, replica in enumerate(m.replicas)}
    tasks = [
        Task("fwd", name, replica, stage, microbatch, chunk)
        for name, replica, microbatch, chunk in samples
        for stage in range(num_stages[name, replica])
    ]
    index_of = {task: index for index, task in enumerate(tasks)}
    links = [(index - 1, index) for index, task in enumerate(tasks) if task.stage]
    for edge in plan.edges:
        takers = {i: key for key, own in samples.items() if key[0] == edge.target for i in own}
        for (name, replica, microbatch, chunk), own in samples.items():
            if name != edge.source:
                continue
            last = index_of[Task("fwd", name, replica, num_stages[name, replica] - 1, microbatch, chunk)]
            for _, taker, *place in {takers[i] for i in own if i in takers}:
                entered = (Task("fwd", edge.target, taker, stage, *place) for stage in plan.edge_stages(edge, taker))
                links.extend((last, index_of[task]) for task in entered)

    runs_back: set[int] = set()
    for index, task in enumerate(tasks):
        trainable = plan.stage(task.module, task.replica, task.stage).trainable
        if training and (trainable or any(target == index and source in runs_back for source, target in links)):
            runs_back.add(index)
    # A backward stands after all that it waits for when the forwards are walked from the last to the first; within a
    # stage the chunks keep their order.
    order = {name: index for index, name in enumerate(plan.modules)}
    back = sorted(runs_back, key=lambda i: (-order[tasks[i].module], tasks[i].replica, -tasks[i].stage, i))
    # Of stages that may split a backward, those do that send a gradient.
    split = {
        index
        for index in back
        if plan.stage(*tasks[index].stage_key).splits_backward
        and any(target == index and source in runs_back for source, target in links)
    }
    num_forwards = len(tasks)
    backward: dict[int, int] = {}
    for kind, own in (("bwd", [i for i in back if i not in split]), ("bwd_input", [i for i in back if i in split])):
        for index in own:
            backward[index] = len(tasks)
            tasks.append(Task(kind, *tasks[index].key))
    ends = links + [(backward[target], backward[source]) for source, target in links if source in backward]
    later = [(backward[index], len(tasks) + place) for place, index in enumerate(i for i in back if i in split)]
    tasks += [Task("bwd_weight", *tasks[index].key) for index, _ in later]
    predecessors: list[list[int]] = [[] for _ in tasks]
    for source, target in [*ends, *backward.items(), *later]:
        predecessors[target].append(source)
    messages = (Message("act" if s < num_forwards else "grad", tasks[s], tasks[t]) for s, t in ends)
    return PlainGraph(tuple(tasks), tuple(map(tuple, predecessors)), tuple(messages), tuple(ends))


def predecessors(graph: TaskGraph) -> list[list[int]]:
    """What each task of a graph waits for; for a backward its forward comes first."""
    result: list[list[int]] = [[] if before < 0 else [before] for before in graph.after.tolist()]
    for source, target in graph.ends:
        result[target].append(source)
    return result


def ranks_of_stages(plan: ParallelPlan) -> dict[StageKey, frozenset[int]]:
    """The ranks of each stage."""
    return {
        (name, replica, index): frozenset(stage.all_ranks)
        for name, module in plan.modules.items()
        for replica, index, stage in module.stages()
    }


def connected(sets: Sequence[frozenset[int]]) -> list[list[int]]:
    """The places of the sets in groups that have something in common, directly or through others."""
    groups: list[list[int]] = []
    for place, own in enumerate(sets):
        touching = [group for group in groups if any(own & sets[other] for other in group)]
        groups = [group for group in groups if group not in touching]
        groups.append([*chain.from_iterable(touching), place])
    return sorted(map(sorted, groups))


def virtual_stages(plan: ParallelPlan) -> dict[StageKey, tuple[StageKey, int, int]]:
    """Each stage -> the first one of its replica on the same ranks, its number there, and how many take turns."""
    result: dict[StageKey, tuple[StageKey, int, int]] = {}
    for name, module in plan.modules.items():
        for replica in module.with_stages:
            ranks = [stage.all_ranks for stage in module.replicas[replica]]
            widths = [n for n in range(2, len(ranks)) if ranks == (ranks[:n] * len(ranks))[: len(ranks)]]
            width = next(
                (n for n in widths if len(ranks) % n == 0 and len(set(map(frozenset, ranks[:n]))) == n), len(ranks)
            )
            for index in range(len(ranks)):
                result[name, replica, index] = (name, replica, index % width), index // width, width
    return result


def depths(width: int, rounds: int) -> list[int]:
    """The most microbatches on each stage of a pipeline in the order of (interleaved) 1F1B, which is written out."""
    result = [0] * (width * rounds)
    for rank in range(width):
        forwards = [(turn, group * width + m) for group in range(4) for turn in range(rounds) for m in range(width)]
        backwards = [(rounds - 1 - turn, microbatch) for turn, microbatch in forwards]
        ahead = 2 * (width - 1 - rank) + (rounds - 1) * width if rounds > 1 else width - 1 - rank
        open_: set[tuple[int, int]] = set()
        for number, forward in enumerate(forwards):
            open_.add(forward)
            stage = forward[0] * width + rank
            result[stage] = max(result[stage], sum(turn == forward[0] for turn, _ in open_))
            if number >= ahead:
                open_.remove(backwards[number - ahead])
    return result


GRADIENT = ("bwd", "bwd_input")  # kinds that send gradients


class _Simulation:
    """Ranks run the best task that they can, tasks end, others become possible."""

    def __init__(
        self,
        plan: ParallelPlan,
        graph: PlainGraph,
        times_ms: Sequence[float],
        max_in_flight: Mapping[StageKey, float],
        alternate: bool = False,
        keeps_free: float = 0.0,
        encoders_last: bool = False,
    ):
        self.graph, self.times_ms, self.limits, self.alternate = graph, times_ms, max_in_flight, alternate
        self.keeps_free = keeps_free
        self.encoders, self.encoders_last = plan.encoders, encoders_last
        self.could_go_last = False  # whether an encoder and another module of an island could start at once
        self.could_keep_free = False  # whether a weight gradient ended after something else could have started
        self.ranks = ranks_of_stages(plan)
        self.islands = [[list(self.ranks)[i] for i in group] for group in connected(list(self.ranks.values()))]
        self.tasks_of: dict[StageKey, list[int]] = {key: [] for key in self.ranks}
        for index, task in enumerate(graph.tasks):
            self.tasks_of[task.stage_key].append(index)
        self.virtual = virtual_stages(plan)
        phases = task_phases(plan)
        self.phases = [phases[task.module, task.kind] for task in graph.tasks]
        self.could_wait = False  # whether a stage took another backward, for which it would wait where it alternates
        self.is_due: dict[StageKey, bool] = dict.fromkeys(self.ranks, False)  # a forward: a backward ran last
        self.busy: set[int] = set()
        self.start_ms: dict[int, float] = {}
        self.end_ms: dict[int, float] = {}
        self.started: dict[int, int] = {}
        self.finished: dict[int, int] = {}

    def run(self, limit_ms: float = math.inf) -> PlainOrder | None:
        """
        Simulates until every task is done; `None` if stages that alternate wait for each other in a circle, or if it
        takes no less than the limit.
        """
        now, count = 0.0, len(self.graph.tasks)
        while True:
            for island in self.islands:
                self._dispatch(island, now)
            running = sorted((self.end_ms[index], index) for index in self.started if index not in self.finished)
            if len(self.finished) == count:
                columns = (self.start_ms, self.end_ms, self.started, self.finished)
                return PlainOrder(*(tuple(column[index] for index in range(count)) for column in columns))
            if (self.alternate and not running) or (running and running[0][0] >= limit_ms):
                return None
            assert running, "limits below those of `in_flight_1f1b` leave nothing to run"
            for end_ms, index in running:
                if end_ms <= running[0][0] * (1 + 1e-12) + 1e-9:
                    now = end_ms
                    self.finished[index] = len(self.started) + len(self.finished)
                    self.busy -= self.ranks[self.graph.tasks[index].stage_key]

    def _dispatch(self, island: list[StageKey], now: float) -> None:
        """Starts tasks on the island's free ranks, the best first, until none can start."""
        while True:
            candidates = [self._candidate(key, now) for key in island if not self.ranks[key] & self.busy]
            able = [i for i in candidates if i is not None]
            self.could_go_last |= len({self.graph.tasks[i].module in self.encoders for i in able}) > 1
            index = min(able, key=self._priority, default=None)
            if index is None:
                return
            key = self.graph.tasks[index].stage_key
            if self.graph.tasks[index].kind != "bwd_weight":
                self.is_due[self.virtual[key][0]] = self.graph.tasks[index].kind in GRADIENT
            self.busy |= self.ranks[key]
            self.started[index] = len(self.started) + len(self.finished)
            self.start_ms[index], self.end_ms[index] = now, now + self.times_ms[index]

    def _priority(self, index: int) -> tuple:
        task = self.graph.tasks[index]
        goes_last = self.encoders_last and task.module in self.encoders
        return task.kind == "bwd_weight", goes_last, self._turn(index)

    def _turn(self, index: int) -> tuple:
        task = self.graph.tasks[index]
        first, number, width = self.virtual[task.stage_key]
        rank = {"fwd": 1, "bwd_weight": 2}.get(task.kind, 0)
        others = task.microbatch, task.chunk, list(self.ranks).index(task.stage_key), index
        has_turns = any(own == first and other != task.stage_key for other, (own, _, _) in self.virtual.items())
        if rank == 1 and self.is_due[first]:
            rank = -1 if has_turns else 0
        if not has_turns:
            return rank, task.microbatch, 0, *others
        return rank, task.microbatch // width, number if task.kind == "fwd" else -number, *others

    def _candidate(self, key: StageKey, now: float) -> int | None:
        """The task that the stage would run next."""
        index = self._due(key)
        tasks, own = self.graph.tasks, self.tasks_of[key]
        left = [i for i in own if i not in self.started and tasks[i].kind == "bwd_weight" and self._is_ready(i)]
        if index is not None or not left:
            return index
        # in the order in which the gradients of inputs were done
        weight = min(left, key=lambda i: self.finished[self.graph.predecessors[i][0]])
        if not self._in_phase(weight):
            return None
        length_ms = self.times_ms[weight]
        if self.keeps_free:
            waits = any(self._comes_before(key, other, now + self.keeps_free * length_ms) for other in own)
            return None if waits else weight
        self.could_keep_free |= any(self._comes_before(key, other, now + length_ms) for other in own)
        return weight

    def _comes_before(self, key: StageKey, index: int, end_ms: float) -> bool:
        """Whether all that a task of the stage waits for ends before a time, and runs already."""
        tasks, needed = self.graph.tasks, self.graph.predecessors[index]
        if index in self.started or tasks[index].kind == "bwd_weight" or self._is_ready(index):
            return False
        if not all(other in self.started for other in needed):
            return False
        if tasks[index].kind == "fwd":
            left = [i for i in self.tasks_of[key] if tasks[i].kind == "fwd" and i not in self.started]
            if index != left[0] or not self._fits(key, index):
                return False
        return max(self.end_ms[other] for other in needed) * (1 + 1e-12) + 1e-9 < end_ms

    def _due(self, key: StageKey) -> int | None:
        """The task that the stage would run next without weight gradients."""
        tasks = self.graph.tasks
        left = [index for index in self.tasks_of[key] if index not in self.started]
        forward = next((index for index in left if tasks[index].kind == "fwd"), None)
        backward = next((index for index in left if tasks[index].kind in GRADIENT and self._is_ready(index)), None)
        fits = forward is not None and self._fits(key, forward)
        can_go = fits and self._is_ready(forward) and self._in_phase(forward)
        due = self.is_due[self.virtual[key][0]]
        waits = due and (fits if self.alternate else can_go)
        if backward is not None and not waits and self._in_phase(backward):
            self.could_wait |= due and fits
            return backward
        return forward if can_go else None

    def _fits(self, key: StageKey, forward: int) -> bool:
        """Whether the stage may take in the microbatch; it always may without a backward, or with a chunk of it in."""
        tasks = self.graph.tasks
        own = self.tasks_of[key]
        back, held = (
            {tasks[index].microbatch for index in own if tasks[index].kind in kinds and index not in self.finished}
            for kinds in (GRADIENT, ("bwd", "bwd_weight"))
        )
        taken = {tasks[index].microbatch for index in own if tasks[index].kind == "fwd" and index in self.started}
        task = tasks[forward]
        if task.chunk or task.microbatch not in back:
            return True
        most = max(self.limits.get(other, math.inf) for other in self.ranks if other[:2] == key[:2])
        return len(back & taken) < self.limits.get(key, math.inf) and len(held & taken) < most

    def _is_ready(self, index: int) -> bool:
        return all(other in self.finished for other in self.graph.predecessors[index])

    def _in_phase(self, index: int) -> bool:
        """Whether all earlier phases of the task's ranks are done."""
        own, ranks = self.phases[index], self.ranks[self.graph.tasks[index].stage_key]
        return not any(
            phase < own and other not in self.finished and self.ranks[self.graph.tasks[other].stage_key] & ranks
            for other, phase in enumerate(self.phases)
        )


def order_tasks(
    plan: ParallelPlan,
    graph: PlainGraph,
    times_ms: Sequence[float],
    max_in_flight: Mapping[StageKey, float],
    alternate: bool = False,
) -> PlainOrder:
    """Orders the tasks of a graph."""
    simulation = _Simulation(plan, graph, times_ms, max_in_flight)
    timeline = simulation.run()
    assert timeline is not None
    could_wait = alternate and simulation.could_wait
    could_go_last = simulation.could_go_last
    for able, *rules in (
        (simulation.could_keep_free, False, 0.5, False),
        (simulation.could_keep_free, False, 1.0, False),
        (could_wait, True, 0.0, False),
        (could_go_last, False, 0.0, True),
        (could_go_last and could_wait, True, 0.0, True),
    ):
        if not able:
            continue
        other = _Simulation(plan, graph, times_ms, max_in_flight, *rules)
        timeline = other.run(max(timeline.end_ms, default=0.0)) or timeline
    return timeline


def lower(plan: ParallelPlan, graph: PlainGraph, timeline: PlainOrder, groups: Sequence[SyncGroup]) -> Program:
    """The list of every rank."""
    of_stages, started = ranks_of_stages(plan), timeline.started
    ranks = [of_stages[task.stage_key] for task in graph.tasks]
    by_send = sorted(
        range(len(graph.messages)),
        key=lambda message: (timeline.finished[graph.ends[message][0]], started[graph.ends[message][1]]),
    )
    instants = sync_instants(graph, timeline, groups)
    actions: dict[int, tuple[Action, ...]] = {}
    for rank in range(plan.world_size):
        own = sorted((i for i in range(len(ranks)) if rank in ranks[i]), key=started.__getitem__)
        # what the rank sends or receives, in the order of the sends; a queue is cut from others that share no rank
        traffic = [(message, end) for message in by_send for end in (0, 1) if rank in ranks[graph.ends[message][end]]]
        queues = connected([ranks[graph.ends[message][1 - end]] for message, end in traffic])
        behind: dict[int, list[Action]] = {index: [] for index in own}
        ahead: dict[int, list[Action]] = {index: [] for index in own}
        for place, (message, end) in enumerate(traffic):
            source, target = graph.ends[message]
            if not end:
                behind[source].append(Action("send", message=graph.messages[message]))
                continue
            (queue,) = (row for row in queues if place in row)
            # (position of a task of the rank, whether behind it)
            wishes = [(max(own.index(target) - 1, 0), 0)]
            bounds = [(0, 0)]
            for other in queue:
                what, other_end = traffic[other]
                at = own.index(graph.ends[what][other_end])
                if not other_end:
                    (wishes if other > place else bounds).append((at, 1))
                elif other > place:
                    wishes.append((max(at - 1, 0), 0))
                if other_end and other <= place and graph.tasks[graph.ends[what][1]].kind in GRADIENT:
                    forward = Task("fwd", *graph.tasks[graph.ends[what][1]].key)
                    bounds.append((own.index(graph.tasks.index(forward)), 1))
            at, is_behind = max(max(bounds), min(wishes))
            (behind if is_behind else ahead)[own[at]].append(Action("recv", message=graph.messages[message]))
        events = [(started[i], [*ahead[i], Action.run(graph.tasks[i]), *behind[i]]) for i in own]
        for number, group in enumerate(groups):
            if rank in group.ranks:
                events.append((instants[number], [Action("sync", index=number)]))
        actions[rank] = tuple(chain.from_iterable(own for _, own in sorted(events, key=lambda event: event[0])))
    return Program(actions)


def sync_instants(graph: PlainGraph, timeline: PlainOrder, groups: Sequence[SyncGroup]) -> list[int]:
    """For each gradient sum, the event behind which it comes."""
    back = [
        (task.stage_key, end)
        for task, end in zip(graph.tasks, timeline.finished, strict=True)
        if task.kind in ("bwd", "bwd_weight")
    ]
    instants = [max((end for stage, end in back if stage in group.stages), default=-1) for group in groups]
    following = 2 * len(graph.tasks)
    for number in reversed(range(len(groups))):
        following = instants[number] = following if instants[number] < 0 else instants[number]
    return list(accumulate(instants, max))


def in_flight_1f1b(plan: ParallelPlan, step: StepPlan) -> dict[StageKey, float]:
    """How many microbatches may be in flight on each stage under 1F1B."""
    limits: dict[StageKey, float] = {}
    for name in reversed(list(plan.modules)):
        targets = [edge.target for edge in plan.edges if edge.source == name]
        for replica in plan.modules[name].with_stages:
            behind = max((_ahead(step, name, replica, target, limits) for target in targets), default=0)
            count = len(plan.modules[name].replicas[replica])
            width = virtual_stages(plan)[name, replica, 0][2]
            limits.update(
                {(name, replica, i): depth + behind for i, depth in enumerate(depths(width, count // width))}
            )
    return limits


def _ahead(step: StepPlan, name: str, replica: int, target: str, limits: Mapping[StageKey, float]) -> int:
    """The most microbatches that a replica must be ahead of its consumers; 0 if nobody waits for what it makes."""
    turn = consumer_turns(step, name, replica, target)
    if not turn:
        return 0
    fed = [d for d, own in enumerate(step.microbatches[target]) if turn.keys() & set(chain.from_iterable(own))]
    counts = {consumer: len(step.microbatches[target][consumer]) for consumer in fed}
    depth = max(math.ceil(limits[target, d, 0] * max(counts.values()) / count) for d, count in counts.items())
    turns = [{turn[i] for i in batch_indices if i in turn} for batch_indices in step.microbatches[name][replica]]
    turns = [own for own in turns if own]  # microbatches without samples have no tasks
    result = depth
    for first in range(max(turn.values()) + 1):
        wanted = max((place for place, own in enumerate(turns, 1) if min(own) < first + depth), default=0)
        result = max(result, wanted - sum(max(own) < first for own in turns))
    return result
