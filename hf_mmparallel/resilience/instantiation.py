"""Which templates are instantiated, and how often, on the nodes that there are (Oobleck, section 2.4.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..arrange import fastest_counts
from .templates import PipelineTemplate

# times, relative to the shortest step, within which other numbers of pipelines are sought
_NEARLY = (1.0, 1.01, 1.02, 1.05)


class TimedPipeline(Protocol):
    """A template, or other stages of a pipeline, with their predicted times."""

    @property
    def num_nodes(self) -> int: ...

    @property
    def fill_ms(self) -> float: ...

    @property
    def slowest_ms(self) -> float: ...

    def step_ms(self, num_microbatches: int) -> float:
        """Time of a step of a number of microbatches."""
        ...


@dataclass(frozen=True)
class Instantiation:
    """The pipelines of a cluster."""

    pipelines: tuple[TimedPipeline, ...]  # the template or the stages of each
    microbatches: tuple[int, ...]  # of each in a step

    @classmethod
    def of(cls, pipelines: Sequence[TimedPipeline], num_microbatches: int) -> Instantiation:
        """Divides a step to end earliest; raises `ValueError` for fewer microbatches than pipelines."""
        fill_ms, slowest_ms = [one.fill_ms for one in pipelines], [one.slowest_ms for one in pipelines]
        return cls(tuple(pipelines), tuple(fastest_counts(fill_ms, slowest_ms, num_microbatches)))

    @property
    def num_nodes(self) -> int:
        return sum(template.num_nodes for template in self.pipelines)

    @property
    def unevenness(self) -> int:
        """Nodes of the largest pipeline beyond those of the smallest one."""
        sizes = [pipeline.num_nodes for pipeline in self.pipelines]
        return max(sizes) - min(sizes)

    @property
    def step_ms(self) -> float:
        """Time until the last pipeline is done."""
        return max(one.step_ms(count) for one, count in zip(self.pipelines, self.microbatches, strict=True))


def best_instantiation(
    templates: Sequence[PipelineTemplate], num_nodes: int, fewest_pipelines: int, num_microbatches: int
) -> Instantiation | None:
    """The first of [`fastest_instantiations`]; `None` if there are none."""
    found = fastest_instantiations(templates, num_nodes, fewest_pipelines, num_microbatches, most=1)
    return found[0] if found else None


def fastest_instantiations(
    templates: Sequence[PipelineTemplate], num_nodes: int, fewest_pipelines: int, num_microbatches: int, most: int
) -> list[Instantiation]:
    """
    The fastest pipelines that use all nodes, and those with other numbers of pipelines that are nearly as fast, the
    fastest first, `most` in all; none if no pipelines use all nodes. Among equally fast ones of as many pipelines no
    two can exchange nodes to be more even.

    Within a time, a pipeline computes a known number of microbatches. The most that pipelines on a number of nodes
    compute within it follow by dynamic programming over nodes and pipelines, and the smallest time in which that is
    the whole step by bisection over the times at which any template ends a microbatch. The first result is exact,
    without a list of all combinations.
    """
    usable = [template for template in templates if template.num_nodes <= num_nodes]
    if not usable:
        return []
    most_pipelines = min(num_nodes // min(template.num_nodes for template in usable), num_microbatches)
    fill_ms = np.array([template.fill_ms for template in usable])
    slowest_ms = np.array([template.slowest_ms for template in usable])

    def within(time_ms: float) -> _Capacities:
        # The times are sums themselves, so that a quotient may be a rounding error below a whole number.
        capacity = np.floor((time_ms - fill_ms) / slowest_ms + 1e-9).astype(int) + 1
        return _most_microbatches(usable, np.where(capacity > 0, capacity, -1), num_nodes, most_pipelines)

    ends = np.unique(fill_ms[:, None] + np.arange(num_microbatches) * slowest_ms[:, None])
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high) // 2
        if within(ends[middle]).counts(fewest_pipelines, num_microbatches):
            high = middle
        else:
            low = middle + 1
    if low == len(ends):
        return []
    found: dict[int, Instantiation] = {}
    for slower in _NEARLY if most > 1 else _NEARLY[:1]:
        capacities = within(slower * ends[low])
        for count in capacities.counts(fewest_pipelines, num_microbatches):
            if count not in found:
                pipelines = capacities.pipelines(count, num_microbatches)
                found[count] = Instantiation.of(pipelines, num_microbatches)
    ranked = sorted(found.values(), key=lambda one: (_rounded(one.step_ms), one.unevenness))
    return ranked[:most]


def _rounded(time_ms: float) -> float:
    """A time without the rounding errors of sums."""
    return float(f"{time_ms:.9g}")


@dataclass(frozen=True, eq=False)
class _Capacities:
    """The most microbatches that pipelines compute within a time."""

    templates: Sequence[PipelineTemplate]
    capacity: NDArray  # [templates]: microbatches of each; those that are negative are not used
    most: NDArray  # [nodes + 1, pipelines + 1]: microbatches; negative infinity where these can't be
    last: NDArray  # [nodes + 1, pipelines + 1]: index of the template of one of these pipelines

    def counts(self, fewest_pipelines: int, num_microbatches: int) -> list[int]:
        """Numbers of pipelines that compute all microbatches on all nodes."""
        enough = np.flatnonzero(self.most[-1, fewest_pipelines:] >= num_microbatches)
        return [fewest_pipelines + index for index in enough.tolist()]

    def pipelines(self, count: int, num_microbatches: int) -> list[PipelineTemplate]:
        """So many pipelines on all nodes that compute all microbatches, the largest first."""
        sizes: Counter[int] = Counter()
        nodes = len(self.most) - 1
        while count:
            template = self.templates[int(self.last[nodes, count])]
            sizes[template.num_nodes] += 1
            nodes, count = nodes - template.num_nodes, count - 1
        while (pairs := self._more_even(sizes, num_microbatches)) is not None:
            before, after = pairs
            sizes.subtract(before)
            sizes.update(after)
        known = {template.num_nodes: template for template in self.templates}
        return [known[size] for size in sorted(sizes.elements(), reverse=True)]

    def _more_even(self, sizes: Counter[int], num_microbatches: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Nodes of two pipelines, and more even ones with which all microbatches are computed; `None` if none are."""
        computed = {
            template.num_nodes: int(number)
            for template, number in zip(self.templates, self.capacity, strict=True)
            if number > 0
        }
        spare = sum(count * computed[size] for size, count in sizes.items() if count) - num_microbatches
        used = sorted(size for size, count in sizes.items() if count)
        for large in reversed(used):
            for small in used:
                for moved in range((large - small) // 2, 0, -1):
                    after = (large - moved, small + moved)
                    if not computed.keys() >= set(after):
                        continue
                    lost = computed[large] + computed[small] - computed[after[0]] - computed[after[1]]
                    if lost <= spare:
                        return (large, small), after
        return None


def _most_microbatches(
    templates: Sequence[PipelineTemplate], capacity: NDArray, num_nodes: int, most_pipelines: int
) -> _Capacities:
    used = np.flatnonzero(capacity > 0)
    sizes = np.array([templates[index].num_nodes for index in used.tolist()])
    most = np.full((num_nodes + 1, most_pipelines + 1), -np.inf)
    last = np.zeros((num_nodes + 1, most_pipelines + 1), int)
    most[0, 0] = 0.0
    for nodes in range(1, num_nodes + 1) if len(used) else ():
        fits = sizes <= nodes
        if not fits.any():
            continue
        totals = most[nodes - sizes[fits], :-1] + capacity[used[fits], None]
        best = totals.argmax(axis=0)
        most[nodes, 1:] = totals[best, np.arange(most_pipelines)]
        last[nodes, 1:] = used[fits][best]
    return _Capacities(templates, capacity, most, last)
