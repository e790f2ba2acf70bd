"""Which templates are instantiated, and how often, on the nodes that there are (Oobleck, section 2.4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..arrange import fastest_counts
from .templates import PipelineTemplate


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
    """
    The pipelines of a cluster.

    Args:
        pipelines (`tuple[TimedPipeline, ...]`): The template or the stages of each pipeline.
        microbatches (`tuple[int, ...]`): Microbatches of each in a step.
    """

    pipelines: tuple[TimedPipeline, ...]
    microbatches: tuple[int, ...]

    @classmethod
    def of(cls, pipelines: Sequence[TimedPipeline], num_microbatches: int) -> Instantiation:
        """
        Divides the microbatches of a step such that the last pipeline is done as early as possible.

        Raises:
            `ValueError`: If there are fewer microbatches than pipelines.
        """
        fill_ms, slowest_ms = [one.fill_ms for one in pipelines], [one.slowest_ms for one in pipelines]
        return cls(tuple(pipelines), tuple(fastest_counts(fill_ms, slowest_ms, num_microbatches)))

    @property
    def num_nodes(self) -> int:
        return sum(template.num_nodes for template in self.pipelines)

    @property
    def step_ms(self) -> float:
        """Time until the last pipeline is done."""
        return max(one.step_ms(count) for one, count in zip(self.pipelines, self.microbatches, strict=True))


def best_instantiation(
    templates: Sequence[PipelineTemplate], num_nodes: int, fewest_pipelines: int, num_microbatches: int
) -> Instantiation | None:
    """
    The fastest pipelines that use all nodes; `None` if there are none.

    Within a time, a pipeline computes a known number of microbatches. The most that pipelines on a number of nodes
    compute within it follow by dynamic programming over nodes and pipelines, and the smallest time in which that is
    the whole step by bisection over the times at which any template ends a microbatch. The result is exact, without a
    list of all combinations.

    Args:
        templates (`Sequence[PipelineTemplate]`): The templates, one for each number of nodes.
        num_nodes (`int`): Nodes to use.
        fewest_pipelines (`int`): Minimum number of pipelines.
        num_microbatches (`int`): Microbatches of a step, at least one for each pipeline.
    """
    usable = [template for template in templates if template.num_nodes <= num_nodes]
    if not usable:
        return None
    most = min(num_nodes // min(template.num_nodes for template in usable), num_microbatches)
    fill_ms = np.array([template.fill_ms for template in usable])
    slowest_ms = np.array([template.slowest_ms for template in usable])
    ends = np.unique(fill_ms[:, None] + np.arange(num_microbatches) * slowest_ms[:, None])
    low, high, found = 0, len(ends) - 1, None
    while low <= high:
        middle = (low + high) // 2
        # The times are sums themselves, so that a quotient may be a rounding error below a whole number.
        capacity = np.floor((ends[middle] - fill_ms) / slowest_ms + 1e-9).astype(int) + 1
        chosen = _most_microbatches(usable, np.where(capacity > 0, capacity, -1), num_nodes, most)
        pipelines = chosen.pipelines(fewest_pipelines, num_microbatches)
        if pipelines is None:
            low = middle + 1
        else:
            high, found = middle - 1, pipelines
    return None if found is None else Instantiation.of(found, num_microbatches)


@dataclass(frozen=True, eq=False)
class _Capacities:
    """
    The most microbatches that pipelines compute within a time.

    Args:
        templates (`Sequence[PipelineTemplate]`): The templates.
        most (`np.ndarray` of shape `[nodes + 1, pipelines + 1]`):
            Microbatches by number of nodes and of pipelines; negative infinity where these can't be.
        last (`np.ndarray` of shape `[nodes + 1, pipelines + 1]`): Index of the template of one of these pipelines.
    """

    templates: Sequence[PipelineTemplate]
    most: NDArray
    last: NDArray

    def pipelines(self, fewest_pipelines: int, num_microbatches: int) -> list[PipelineTemplate] | None:
        """Pipelines on all nodes that compute all microbatches; `None` if there are none."""
        enough = np.flatnonzero(self.most[-1, fewest_pipelines:] >= num_microbatches)
        if not len(enough):
            return None
        nodes, count, result = len(self.most) - 1, fewest_pipelines + int(enough[0]), []
        while count:
            template = self.templates[int(self.last[nodes, count])]
            result.append(template)
            nodes, count = nodes - template.num_nodes, count - 1
        return sorted(result, key=lambda one: -one.num_nodes)


def _most_microbatches(
    templates: Sequence[PipelineTemplate], capacity: NDArray, num_nodes: int, most_pipelines: int
) -> _Capacities:
    """See [`_Capacities`]; a template with a negative capacity is not used."""
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
    return _Capacities(templates, most, last)
