"""Three ways to go on after a loss of nodes, for [`replay_trace`]: templates, a grid with checkpoints, redundancy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from policy_replay import Cause, Pace, Transition

from hf_mmparallel.resilience.pipelines import Nodes, TooFewNodesError, without_nodes
from hf_mmparallel.resilience.plan_choice import LEAST_GAIN
from hf_mmparallel.resilience.templates import (
    Instantiation,
    LayerChain,
    PipelineTemplate,
    TemplateSearch,
    fastest_instantiations,
    fewest_nodes,
    node_counts,
    step_ms,
)

NODE_BYTES_PER_S = 1.25e9  # 10 Gbit/s
Pauses = tuple[tuple[Cause, float], ...]


def fastest_template(
    chain: LayerChain, num_nodes: int, node_size: int, num_microbatches: int, most_in_flight: int = 0
) -> PipelineTemplate | None:
    """The fastest template, with memory for `most_in_flight` microbatches if these are more than those of a step."""
    search = TemplateSearch(chain, node_size, num_nodes, most_in_flight or num_microbatches)
    return search.fastest(num_nodes, num_microbatches)


def instantiations(num_nodes: int, counts: Sequence[int], fewest_pipelines: int) -> Iterator[tuple[int, ...]]:
    """
    Yields the number of pipelines of each template for all ways to use all nodes (Oobleck, equation 2.5). There are as
    many as partitions of `num_nodes`, which grow fast; [`fastest_instantiations`] finds the fastest without a list.
    """

    def extend(index: int, nodes: int) -> Iterator[tuple[int, ...]]:
        if index == len(counts):
            if nodes == 0:
                yield ()
            return
        for number in range(nodes // counts[index] + 1):
            for rest in extend(index + 1, nodes - number * counts[index]):
                yield (number, *rest)

    return (numbers for numbers in extend(0, num_nodes) if sum(numbers) >= fewest_pipelines)


@dataclass(frozen=True, eq=False)
class ReplayJob:
    """A job in numbers."""

    chain: LayerChain  # the layers of one copy of the model
    state_bytes: Sequence[float]  # parameters and optimizer state of each layer of the chain
    node_size: int  # ranks of a node
    num_microbatches: int  # of a step, of all pipelines together
    samples_per_step: int
    most_nodes: int  # that it ever runs on
    _templates: dict[int, PipelineTemplate | None] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def fewest_nodes(self) -> int | None:
        """Fewest nodes on which one copy fits; `None` if it fits on none."""
        return fewest_nodes(self.chain, self.node_size, self.most_nodes, self.num_microbatches)

    @property
    def total_bytes(self) -> float:
        """Bytes of a checkpoint: parameters and optimizer state."""
        return float(sum(self.state_bytes))

    def template(self, num_nodes: int) -> PipelineTemplate | None:
        """The fastest template of exactly this number of nodes; `None` if there is none."""
        if num_nodes not in self._templates:
            # with the share of the microbatches of a step that so many nodes compute
            share = -(-self.num_microbatches * num_nodes // self.most_nodes)
            self._templates[num_nodes] = fastest_template(self.chain, num_nodes, self.node_size, share)
        return self._templates[num_nodes]

    def templates(self, node_counts: Iterable[int]) -> list[PipelineTemplate]:
        """The templates of these numbers of nodes; those without any are left out."""
        return [found for count in node_counts if (found := self.template(count)) is not None]

    def usable_template(self, num_nodes: int) -> PipelineTemplate | None:
        """The template of most nodes up to this number: with more nodes than layers some have nothing to do."""
        found = (self.template(count) for count in range(num_nodes, 0, -1))
        return next((template for template in found if template is not None), None)

    def layers_of_nodes(self, template: PipelineTemplate) -> list[frozenset[int]]:
        """The layers that each node of a pipeline holds."""
        held: list[set[int]] = [set() for _ in range(template.num_nodes)]
        first_rank = 0
        for stage in template.stages:
            held[first_rank // self.node_size].update(range(*stage.layers))
            first_rank += stage.num_ranks
        return [frozenset(layers) for layers in held]

    def bytes_of(self, layers: Iterable[int]) -> float:
        """Parameters and optimizer state of some layers."""
        return float(sum(self.state_bytes[layer] for layer in layers))

    @cached_property
    def all_layers(self) -> frozenset[int]:
        return frozenset(range(self.chain.num_layers))


@dataclass(frozen=True)
class EventCosts:
    """What losses, joins and checkpoints cost: all that a replay assumes besides the times of layers."""

    detect_s: float = 0.5  # from a loss until all other nodes know of it
    # until nodes that go on in the same processes have a new plan and new process groups, without the copies of
    # weights
    regroup_s: float = 1.5
    copy_bytes_per_s: float = NODE_BYTES_PER_S  # what a node sends and receives while missing weights are copied
    save_s: float = 10.0  # for which a checkpoint blocks all nodes
    # from a loss until new processes have read a checkpoint: detection, end and start of processes, imports, process
    # groups, and reading
    restart_s: float = 90.0
    save_every: int = 10  # steps between two checkpoints


def copy_seconds(
    needed: dict[int, frozenset[int]], held: dict[int, frozenset[int]], job: ReplayJob, bytes_per_s: float
) -> float:
    """
    Seconds until each node has the layers that it lacks and some other holds: each layer comes from the holder that
    has sent least so far, and all nodes send and receive `bytes_per_s` at the same time.
    """
    sent, received = dict.fromkeys(held, 0.0), 0.0
    for node, layers in needed.items():
        missing = sorted(layers - held.get(node, frozenset()))
        for layer in missing:
            source = min((other for other in held if layer in held[other]), key=lambda other: sent[other])
            sent[source] += job.bytes_of([layer])
        received = max(received, job.bytes_of(missing))
    return max([received, *sent.values()]) / bytes_per_s


@dataclass(eq=False)
class TemplateRecovery:
    """
    Pipelines of templates, which are reconfigured in the same processes (Oobleck, section 2.5); raises `ValueError` if
    one copy does not fit, or the nodes are too few for `failures + 1` copies.

    A loss costs the running step, detection, new groups, and the copies of layers that nodes lack. Nodes that join are
    taken in at the end of a step. With fewer than `failures + 1` copies' nodes left it saves a checkpoint, if every
    layer is still held, and waits for nodes. If a layer is held nowhere, it starts from the last checkpoint.
    """

    job: ReplayJob
    costs: EventCosts
    failures: int  # simultaneous losses that are survived for certain
    # The fastest instantiation is taken after a loss if it does more steps until the next one, copies included, as
    # `ResilientPlanner.without` decides. By default pipelines are always what becomes of them by `without_nodes`.
    mean_time_between_failures_s: float | None = None
    alive: set[int] = field(default_factory=set, init=False)
    pipelines: list[Nodes] = field(default_factory=list, init=False)
    _held: dict[int, frozenset[int]] = field(default_factory=dict, init=False)
    _was_started: bool = field(default=False, init=False)

    def __post_init__(self):
        fewest = checked_fewest_nodes(self.job)
        self.counts = node_counts(self.job.most_nodes, fewest, self.failures)
        self.templates = self.job.templates(self.counts)

    def join(self, nodes: frozenset[int]) -> Transition | None:
        """See [`RecoveryPolicy`]."""
        self.alive |= nodes
        if len(self.alive) < (self.failures + 1) * self.counts[0]:
            return None
        was_running = bool(self.pipelines)
        self.pipelines = self._fastest()
        if was_running:
            return Transition(self._pace(self.pipelines), self._recovery(self.costs.regroup_s))
        pauses: Pauses = (("restarting", self.costs.restart_s),) if self._was_started else ()
        self._was_started = True
        return Transition(self._pace(self.pipelines), pauses)

    def lose(self, nodes: frozenset[int], waiting: frozenset[int]) -> tuple[Transition | None, bool]:
        """See [`RecoveryPolicy`]."""
        self.alive -= nodes
        for node in nodes:
            self._held.pop(node, None)
        if not self.pipelines:
            return None, False
        is_whole = frozenset().union(*self._held.values()) >= self.job.all_layers
        try:
            self.pipelines = without_nodes(self.pipelines, nodes, self.counts, self.failures)[0]
        except TooFewNodesError:
            self.pipelines = []
            if is_whole:
                return Transition(None, (("saving", self.costs.save_s),), "step"), False
            return Transition(None, (), "saved"), False
        if not is_whole:
            return Transition(self._pace(self.pipelines), (("restarting", self.costs.restart_s),), "saved"), False
        if self.mean_time_between_failures_s is not None:
            self.pipelines = self._with_most_steps(self._fastest(), self.mean_time_between_failures_s)
        pauses = self._recovery(self.costs.detect_s + self.costs.regroup_s)
        return Transition(self._pace(self.pipelines), pauses, "step"), False

    def settle(self) -> None:
        """See [`RecoveryPolicy`]."""
        self._held = self._needed(self.pipelines)

    def _fastest(self) -> list[Nodes]:
        """The fastest instantiation on all nodes."""
        num_microbatches = self.job.num_microbatches
        found = fastest_instantiations(self.templates, len(self.alive), self.failures + 1, num_microbatches, most=1)
        if not found:
            raise ValueError(
                f"{num_microbatches} microbatches can't be divided among {self.failures + 1} pipelines on "
                f"{len(self.alive)} nodes. Use a larger global batch or smaller microbatches."
            )
        return _regrouped([one.num_nodes for one in found[0].pipelines], self.pipelines, self.alive)

    def _with_most_steps(self, fastest: list[Nodes], time_s: float) -> list[Nodes]:
        """The pipelines that there are, or the fastest ones if they do more steps within a time."""
        options = (self.pipelines, fastest)
        own_s, fastest_s = (self._pace(pipelines).step_s for pipelines in options)
        if fastest_s * (1 + LEAST_GAIN) > own_s:
            return self.pipelines
        own, others = (max(time_s - self._copies_s(pipelines), 0.0) for pipelines in options)
        return fastest if others / fastest_s > own / own_s else self.pipelines

    def _pace(self, pipelines: Sequence[Nodes]) -> Pace:
        templates = [self.job.usable_template(len(nodes)) for nodes in pipelines]
        assert all(templates), pipelines
        chosen = Instantiation.of([one for one in templates if one is not None], self.job.num_microbatches)
        return Pace(chosen.step_ms / 1e3, sum(one.num_nodes for one in chosen.pipelines))

    def _recovery(self, regroup_s: float) -> Pauses:
        return (("restarting", regroup_s), ("copying", self._copies_s(self.pipelines)))

    def _copies_s(self, pipelines: Sequence[Nodes]) -> float:
        """Seconds for the copies of layers that nodes of pipelines lack."""
        return copy_seconds(self._needed(pipelines), self._held, self.job, self.costs.copy_bytes_per_s)

    def _needed(self, pipelines: Sequence[Nodes]) -> dict[int, frozenset[int]]:
        """Node -> layers that it has in pipelines."""
        result = {}
        for nodes in pipelines:
            template = self.job.usable_template(len(nodes))
            assert template is not None
            result.update(zip(nodes, self.job.layers_of_nodes(template), strict=False))
        return result


def checked_fewest_nodes(job: ReplayJob) -> int:
    """Raises `ValueError` if one copy of the model does not fit on all nodes."""
    if job.fewest_nodes is None:
        raise ValueError(
            f"One copy of the model does not fit on {job.most_nodes} nodes of {job.node_size} ranks. Use more nodes, "
            "recompute activations, or use smaller microbatches."
        )
    return job.fewest_nodes


def _regrouped(sizes: Sequence[int], pipelines: Sequence[Nodes], alive: set[int]) -> list[Nodes]:
    """Pipelines of given sizes, in which nodes stay together that were in one, and in their order."""
    before = sorted(pipelines, key=len, reverse=True)
    kept = [nodes[:size] for nodes, size in zip(before, sizes, strict=False)]
    kept += [()] * (len(sizes) - len(kept))
    left = sorted(alive - {node for nodes in kept for node in nodes})
    result = []
    for nodes, size in zip(kept, sizes, strict=True):
        more, left = left[: size - len(nodes)], left[size - len(nodes) :]
        result.append((*nodes, *more))
    return result


@dataclass(frozen=True)
class Grid:
    """Pipelines with equal numbers of nodes."""

    num_pipelines: int
    nodes_each: int
    step_s: float
    own_step_s: float  # without redundant computation

    @property
    def num_nodes(self) -> int:
        return self.num_pipelines * self.nodes_each


def grids(job: ReplayJob, num_nodes: int, redundant_share: float = 0.0) -> Iterator[Grid]:
    """
    The grids that fit on a number of nodes, with equally many microbatches for each pipeline; nodes that none
    needs are idle. Each stage computes for `redundant_share` of the next stage's time besides its own microbatch.
    """
    for nodes_each in range(1, num_nodes + 1):
        template = job.template(nodes_each)
        if template is None or (redundant_share and len(template.stages) < 2):
            continue
        num_pipelines = min(num_nodes // nodes_each, job.num_microbatches)
        count = -(-job.num_microbatches // num_pipelines)
        own = [stage.time_ms for stage in template.stages]
        both = [time_ms + redundant_share * after for time_ms, after in zip(own, own[1:] + own[:1], strict=True)]
        step_s, own_step_s = (step_ms(sum(times), max(times), count) / 1e3 for times in (both, own))
        yield Grid(num_pipelines, nodes_each, step_s, own_step_s)


@dataclass(eq=False)
class GridRestart:
    """
    A grid of pipelines and stages, and a new start from the last checkpoint after each loss (as Varuna does it).

    The grid is the fastest one for the nodes that there are; nodes that it can't use are idle, and nothing happens if
    one of them is lost. All pipelines have the same number of microbatches. Checkpoints block the job. If nodes join
    with which a grid is faster, the job saves a checkpoint at the end of the step and starts anew.
    """

    job: ReplayJob
    costs: EventCosts
    alive: set[int] = field(default_factory=set, init=False)
    used: list[int] = field(default_factory=list, init=False)
    grid: Grid | None = field(default=None, init=False)
    _was_started: bool = field(default=False, init=False)

    def join(self, nodes: frozenset[int]) -> Transition | None:
        """See [`RecoveryPolicy`]."""
        self.alive |= nodes
        found = self._best()
        if found is None or (self.grid is not None and found.step_s >= self.grid.step_s):
            return None
        saving: Pauses = (("saving", self.costs.save_s),) if self.grid is not None else ()
        starting: Pauses = (("restarting", self.costs.restart_s),) if self._was_started else ()
        self._was_started = True
        return Transition(self._use(found), saving + starting)

    def lose(self, nodes: frozenset[int], waiting: frozenset[int]) -> tuple[Transition | None, bool]:
        """See [`RecoveryPolicy`]."""
        self.alive -= nodes
        if self.grid is None or nodes.isdisjoint(self.used):
            return None, False
        self.alive |= waiting
        return Transition(self._use(self._best()), (("restarting", self.costs.restart_s),), "saved"), True

    def settle(self) -> None:
        """See [`RecoveryPolicy`]."""

    def _best(self) -> Grid | None:
        return min(grids(self.job, len(self.alive)), key=lambda grid: grid.step_s, default=None)

    def _use(self, grid: Grid | None) -> Pace | None:
        self.grid = grid
        self.used = [] if grid is None else sorted(self.alive)[: grid.num_nodes]
        if grid is None:
            return None
        return Pace(grid.step_s, grid.num_nodes, 0.0, self.costs.save_every, self.costs.save_s)


@dataclass(eq=False)
class RedundantStages:
    """
    A grid in which each node also has the state of the next stage of its pipeline and computes its forward (as Bamboo
    does it).

    When a node is lost, the one before it computes both stages, which slows its pipeline and so all of them; a grid of
    the nodes that are left is used once it is faster, for which nodes copy their new state. If a node and the one
    before it are both lost, the job starts anew from the last checkpoint, also if another pipeline had the stage.
    Checkpoints are written beside training and block nothing. All pipelines have the same number of microbatches.
    """

    job: ReplayJob  # with the state of two stages in the memory that limits its chain
    costs: EventCosts
    # Share of a forward in the time of a stage: a backward takes twice as long, if nothing is recomputed. None of it
    # hides in bubbles.
    forward_share: float = 1 / 3
    alive: set[int] = field(default_factory=set, init=False)
    pipelines: list[list[int | None]] = field(default_factory=list, init=False)
    grid: Grid | None = field(default=None, init=False)
    _was_started: bool = field(default=False, init=False)

    def join(self, nodes: frozenset[int]) -> Transition | None:
        """See [`RecoveryPolicy`]."""
        self.alive |= nodes
        found = self._best()
        if found is None or (self.grid is not None and found.step_s >= self._pace().step_s):
            return None
        was_running = self.grid is not None
        self._use(found)
        starting: Pauses = (("restarting", self.costs.restart_s),) if self._was_started else ()
        self._was_started = True
        return Transition(self._pace(), self._copies(self.costs.regroup_s) if was_running else starting)

    def lose(self, nodes: frozenset[int], waiting: frozenset[int]) -> tuple[Transition | None, bool]:
        """See [`RecoveryPolicy`]."""
        self.alive -= nodes
        if self.grid is None or all(nodes.isdisjoint(pipeline) for pipeline in self.pipelines):
            return None, False
        self.pipelines = [[None if node in nodes else node for node in pipeline] for pipeline in self.pipelines]
        if any(_has_lost_neighbours(pipeline) for pipeline in self.pipelines):
            self.alive |= waiting
            self._use(self._best())
            pace = None if self.grid is None else self._pace()
            return Transition(pace, (("restarting", self.costs.restart_s),), "saved"), True
        regroup_s, best = self.costs.detect_s + self.costs.regroup_s, self._best()
        if best is not None and best.step_s < self._pace().step_s:
            self._use(best)
            return Transition(self._pace(), self._copies(regroup_s), "step"), False
        return Transition(self._pace(), (("restarting", regroup_s),), "step"), False

    def settle(self) -> None:
        """See [`RecoveryPolicy`]."""

    def _best(self) -> Grid | None:
        found = grids(self.job, len(self.alive), self.forward_share)
        return min(found, key=lambda grid: grid.step_s, default=None)

    def _use(self, grid: Grid | None) -> None:
        self.grid = grid
        nodes = iter(sorted(self.alive))
        each = 0 if grid is None else grid.nodes_each
        self.pipelines = [[next(nodes) for _ in range(each)] for _ in range(grid.num_pipelines if grid else 0)]

    def _copies(self, regroup_s: float) -> Pauses:
        """New groups, and a new state on every node: that of its stage and of the next one."""
        assert self.grid is not None
        copied_s = 2 * self.job.total_bytes / self.grid.nodes_each / self.costs.copy_bytes_per_s
        return (("restarting", regroup_s), ("copying", copied_s))

    def _pace(self) -> Pace:
        assert self.grid is not None
        template = self.job.template(self.grid.nodes_each)
        assert template is not None
        own_ms = [stage.time_ms for stage in template.stages]
        count = -(-self.job.num_microbatches // self.grid.num_pipelines)
        step_s = max(
            step_ms(sum(times), max(times), count) / 1e3
            for pipeline in self.pipelines
            for times in [_times_with_losses(pipeline, own_ms, self.forward_share)]
        )
        num_nodes = sum(node is not None for pipeline in self.pipelines for node in pipeline)
        redundant = 1 - self.grid.own_step_s / self.grid.step_s
        return Pace(step_s, num_nodes, redundant, self.costs.save_every, 0.0)


def _has_lost_neighbours(pipeline: Sequence[int | None]) -> bool:
    """Checks that a node and the one before it are lost; the last one is before the first."""
    return any(pipeline[index] is None and pipeline[index - 1] is None for index in range(len(pipeline)))


def _times_with_losses(pipeline: Sequence[int | None], own_ms: Sequence[float], forward_share: float) -> list[float]:
    """Time of a microbatch on each node that is left: its stage, that of a lost node after it, and a forward."""
    times = []
    for index, node in enumerate(pipeline):
        if node is None:
            continue
        after = (index + 1) % len(pipeline)
        time_ms = own_ms[index]
        if pipeline[after] is None:
            time_ms += own_ms[after]
            after = (after + 1) % len(pipeline)
        times.append(time_ms + forward_share * own_ms[after])
    return times
