"""Minimum batch size from which batches agree on the split of ranks between modules (Entrain, algorithm 2)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from .._portable import log, weighted_sum
from ..cost import CostModel, layer_table
from ..cost.row_sizes import RowLayout
from ..plan import LANGUAGE_MODEL, ParallelPlan, SampleSizes
from .allocation import Rounding, proportional_allocations

Split = tuple[int, ...]
Draw = Callable[[int, np.random.Generator], Any]  # draws a number of independent samples
WorkOf = Callable[[Any], Mapping[str, NDArray]]  # module -> [samples]: forward and backward work, in any unit

_SIGMAS = 6.0
_CHUNK_SAMPLES = 2**20


@dataclass(frozen=True)
class BatchTrials:
    """Splits of batches of one size."""

    batch_size: int  # samples of each batch
    reference: Split  # ranks of each module for the first batch
    splits: Mapping[Split, int]  # ranks of each module -> number of batches with this split, including the first batch

    @property
    def passed(self) -> bool:
        """All trials agree with the reference."""
        return len(self.splits) == 1


@dataclass(frozen=True)
class Share:
    """A module's share of the work."""

    mean: float  # over all drawn samples, 0 to 1
    error: float  # standard error of `mean`
    # interval of the share of a single batch, with the confidence of the report; by the central limit theorem, for
    # large batches
    low: float
    high: float


@dataclass(frozen=True)
class SplitBoundary:
    """The boundary to another split of the ranks that batches cross most easily."""

    split: Split  # ranks of each module for all samples together
    neighbor: Split  # the split on the other side of the boundary
    distance: float  # share of all work that would have to move between the two modules to reach the boundary
    # standard deviation of this share for single samples; for batches of `n` samples it is divided by `sqrt(n)`
    deviation: float

    @property
    def needed_batch_size(self) -> float:
        # With this many samples, one batch in 500 million is on the other side (Entrain, appendix C.1).
        return float((_SIGMAS * self.deviation / self.distance) ** 2) if self.distance else np.inf


@dataclass(frozen=True)
class StabilityTest:
    """Settings of [`minimum_stable_batch`]."""

    confidence: float = 0.95  # of the result, `1 - alpha` in the paper
    error: float = 0.05  # maximum share of batches with another split
    start: int = 1  # first batch size; it is doubled each time
    limit: int = 2**14  # maximum batch size
    seed: int = 0  # of the drawn batches
    rounding: Rounding = "fastest"  # see `proportional_allocation`

    def __post_init__(self) -> None:
        for name in ("confidence", "error"):
            if not 0 < (value := getattr(self, name)) < 1:
                raise ValueError(f"`{name}={value}` is not a probability between 0 and 1. Use 0.95 and 0.05, say.")
        if not 1 <= self.start <= self.limit:
            raise ValueError(f"`start={self.start}` is not between 1 and `limit={self.limit}`. Use a smaller one.")

    @property
    def num_trials(self) -> int:
        """Number of batches that have to agree with the first one (Entrain, equation C.5)."""
        return math.ceil(log(1 - self.confidence) / log(1 - self.error))


@dataclass(frozen=True)
class StabilityReport:
    """The smallest batch size at which random batches agree on the ranks of each module."""

    batch_size: int | None  # `None` if no size up to the limit passed
    modules: tuple[str, ...]  # in the order of all splits
    split: Split  # ranks of each module for all samples together
    test: StabilityTest  # with `test.confidence`, at most `test.error` of the batches of that size disagree
    history: tuple[BatchTrials, ...]  # all tried sizes
    shares: Mapping[str, Share]  # of the work; intervals are those of the last size
    boundary: SplitBoundary | None  # the one that limits the size; `None` if there is only one split
    notes: tuple[str, ...]  # limitations of the result, in sentences


def draw_from(work: Mapping[str, NDArray]) -> Draw:
    """Returns a function that draws samples, from the work `[samples]` of each module, with replacement."""
    num_samples = len(next(iter(work.values())))

    def draw(num: int, rng: np.random.Generator) -> dict[str, NDArray]:
        # The test needs independent batches, and 60 batches without replacement soon cover the whole dataset: a batch
        # of all samples agrees with itself, however close the boundary is. Training draws without replacement, which
        # varies less, so that the result is conservative.
        chosen = rng.integers(num_samples, size=num)
        return {name: values[chosen] for name, values in work.items()}

    return draw


def minimum_stable_batch(
    draw: Draw,
    work_of: WorkOf | None,  # not needed for `draw_from`
    num_ranks: int,  # of all replicas
    dp_size: int,  # replicas, with equally many ranks each
    test: StabilityTest | None = None,
    dataset_size: int | None = None,  # samples in the dataset, if it is finite
) -> StabilityReport:
    """
    Finds the batch size from which every batch needs the same ranks of each module (Entrain, algorithm 2).

    At each size a first batch and 59 more (with the default confidence and error) are drawn, and the ranks of a
    replica are split in proportion to the work of the modules in each of them. If all agree, at most 5 % of the
    batches of that size disagree, with a confidence of 95 % (appendix C.2); otherwise the size is doubled.

    Beyond the paper, the report, which there is also if no size passes, has the share of each module with its
    interval, and the boundary that is crossed most easily. The paper concludes from agreeing batches that the mean
    lies inside their split, so that larger batches agree as well; if the samples do not confirm that, a note says so.

    Raises `ValueError` if replicas do not have the same number of ranks, or fewer ranks than there are modules.
    """
    if num_ranks % dp_size:
        raise ValueError(f"{num_ranks} ranks can't be split evenly over `dp_size={dp_size}` replicas. Use a divisor.")
    test = test or StabilityTest()
    sampler = _Sampler(draw, work_of or (lambda drawn: drawn), np.random.default_rng(test.seed))
    num_replica_ranks, history, batch_size = num_ranks // dp_size, [], test.start
    while batch_size <= test.limit and not (history and history[-1].passed):
        work = sampler.batches(test.num_trials + 1, batch_size)
        splits = proportional_allocations(work, num_replica_ranks, rounding=test.rounding)
        counts = Counter(map(tuple, splits.tolist()))
        history.append(BatchTrials(batch_size, tuple(splits[0].tolist()), dict(counts.most_common())))
        batch_size *= 2
    last = history[-1]
    moments = sampler.moments()
    split = proportional_allocations(moments.mean[None], num_replica_ranks, rounding=test.rounding)[0]
    boundary = _nearest_boundary(moments, split, test.rounding)
    report = StabilityReport(
        batch_size=last.batch_size if last.passed else None,
        modules=sampler.modules,
        split=tuple(split.tolist()),
        test=test,
        history=tuple(history),
        shares=_shares(sampler.modules, moments, last.batch_size, test.confidence),
        boundary=boundary,
        notes=(),
    )
    return replace(report, notes=tuple(_notes(report, moments.num_samples, dataset_size)))


@dataclass(frozen=True)
class _Moments:
    """Mean `[modules]` and covariance `[modules, modules]` of the work of samples."""

    num_samples: int
    mean: NDArray
    covariance: NDArray

    def ratio(self, weights: NDArray) -> tuple[float, float]:
        """The weighted work as a share of all work, and its standard deviation for one sample (delta method)."""
        total = self.mean.sum()
        ratio = float(weighted_sum(weights, self.mean) / total)
        gradient = (weights - ratio) / total
        return ratio, math.sqrt(max(0.0, float(weighted_sum(weighted_sum(self.covariance, gradient), gradient))))


@dataclass
class _Sampler:
    """Draws batches, and accumulates the moments of all drawn samples."""

    draw: Draw
    work_of: WorkOf
    rng: np.random.Generator
    modules: tuple[str, ...] = ()
    num_samples: int = 0
    sums: NDArray | float = 0.0
    products: NDArray | float = 0.0

    def batches(self, num_batches: int, batch_size: int) -> NDArray:
        """`[num_batches, modules]`: the work of random batches."""
        at_once = max(1, _CHUNK_SAMPLES // batch_size)
        sizes = [min(at_once, num_batches - first) for first in range(0, num_batches, at_once)]
        return np.concatenate([self._batches(size, batch_size) for size in sizes])

    def moments(self) -> _Moments:
        mean = np.asarray(self.sums / self.num_samples)
        return _Moments(self.num_samples, mean, np.asarray(self.products / self.num_samples) - np.outer(mean, mean))

    def _batches(self, num_batches: int, batch_size: int) -> NDArray:
        samples = self.work_of(self.draw(num_batches * batch_size, self.rng))
        self.modules = self.modules or tuple(samples)
        work = np.stack([np.asarray(samples[name], float) for name in self.modules])
        self.num_samples += work.shape[1]
        self.sums = self.sums + work.sum(axis=1)
        self.products = self.products + weighted_sum(work[:, None], work)
        return work.reshape(len(work), num_batches, batch_size).sum(axis=2).T


def _shares(modules: tuple[str, ...], moments: _Moments, batch_size: int, confidence: float) -> dict[str, Share]:
    """Module -> its share, with the interval for batches of `batch_size`."""
    width = float(ndtri((1 + confidence) / 2))
    shares = {}
    for name, weights in zip(modules, np.eye(len(modules)), strict=True):
        mean, deviation = moments.ratio(weights)
        reach = width * deviation / math.sqrt(batch_size)
        error = deviation / math.sqrt(moments.num_samples)
        shares[name] = Share(mean, error, max(0.0, mean - reach), min(1.0, mean + reach))
    return shares


def _nearest_boundary(moments: _Moments, split: NDArray, rounding: Rounding) -> SplitBoundary | None:
    """The boundary that batches cross most easily."""
    boundaries, num_ranks = [], int(split.sum())
    # Both roundings keep a split as long as no module improves with a rank of another one. For each pair of modules
    # that is a linear function of the work, here scaled to the work that would have to move from one to the other.
    for gains, loses in permutations(range(len(split)), 2):
        if split[loses] == 1:
            continue
        weights = np.zeros(len(split))
        if rounding == "fastest":
            weights[[gains, loses]] = 1 - split[loses], split[gains]
            scale = float(split[gains] + split[loses] - 1)
        else:
            weights[[gains, loses]] = -num_ranks, num_ranks
            weights += split[gains] - split[loses] + 1
            scale = 2.0 * num_ranks
        neighbor = split.copy()
        neighbor[[gains, loses]] += 1, -1
        distance, deviation = moments.ratio(weights / scale)
        neighbors = tuple(split.tolist()), tuple(neighbor.tolist())
        boundaries.append(SplitBoundary(*neighbors, max(0.0, distance), deviation))
    return max(boundaries, key=lambda border: (border.needed_batch_size, -border.distance), default=None)


def _notes(report: StabilityReport, num_samples: int, dataset_size: int | None) -> Iterator[str]:
    """Limitations of the result."""
    last, border = report.history[-1], report.boundary
    if dataset_size is not None and dataset_size < last.batch_size:
        yield (
            f"Batches of {last.batch_size} samples are larger than the dataset of {dataset_size}: "
            "its samples are drawn several times."
        )
    if border is None:
        return
    near = f"{_ratio(report.modules, border.split)} and {_ratio(report.modules, border.neighbor)}"
    where = f"{border.distance:.2g} of the work from the boundary between {near}"
    if report.batch_size is None:
        yield (
            f"No batch size up to {last.batch_size} passed, since the mean lies {where}; "
            f"{border.needed_batch_size:.3g} samples would be enough. Use either split, or change `dp_size` or the "
            "number of ranks."
        )
    elif border.distance < ndtri(report.test.confidence) * border.deviation / math.sqrt(num_samples):
        yield f"The mean lies {where}, less than its standard error: larger batches may be on either side of it."
    if report.batch_size is not None and last.reference != report.split:
        yield (
            f"All samples together need {_ratio(report.modules, report.split)}, the batches "
            f"{_ratio(report.modules, last.reference)}."
        )


def _ratio(modules: tuple[str, ...], split: Split) -> str:
    return ", ".join(f"{name} {ranks}" for name, ranks in zip(modules, split, strict=True))


def split_stability(costs: CostModel, plan: ParallelPlan, sizes: SampleSizes) -> StabilityReport | None:
    """
    Computes the minimum stable batch of a dataset (Entrain, algorithm 2) for the ranks of a replica of a plan; `None`
    if there is no split: modules share ranks, or have one rank each.
    """
    if shares_ranks(plan) or not sizes.num_samples:
        return None
    work = module_work(costs, sizes)
    dp_size = plan.modules[LANGUAGE_MODEL].dp_size
    dp_size = dp_size if plan.world_size % dp_size == 0 else 1
    if len(work) < 2 or plan.world_size // dp_size <= len(work) or not any(values.any() for values in work.values()):
        return None
    return minimum_stable_batch(draw_from(work), None, plan.world_size, dp_size, dataset_size=sizes.num_samples)


def shares_ranks(plan: ParallelPlan) -> bool:
    """Checks that modules share ranks instead of splitting them."""
    ranks = [{rank for _, _, stage in module.stages() for rank in stage.all_ranks} for module in plan.modules.values()]
    return sum(map(len, ranks)) > len(set().union(*ranks))


def module_work(costs: CostModel, sizes: SampleSizes) -> dict[str, np.ndarray]:
    """Module -> float64 `[samples]`: forward plus backward time of each sample on one rank, in ms."""
    work = {}
    for name in costs.spec.modules:
        squares, tokens = RowLayout.of(costs, name).of_samples(sizes, name, even=True)
        work[name] = sum(layer_table(costs, name, 1, False).sample_ms(tokens, squares))
    return work


def stability_lines(
    costs: CostModel, plan: ParallelPlan, sizes: SampleSizes, global_batch_size: int
) -> list[tuple[str, str]]:
    """
    Labels and texts about the minimum stable batch of a dataset, with a warning of a smaller global batch; none if a
    plan does not split ranks between modules.
    """
    report = split_stability(costs, plan, sizes)
    if report is None:
        return []
    test = report.test
    split = " : ".join(f"{name} {ranks}" for name, ranks in zip(report.modules, report.split, strict=True))
    what = f"the split of {sum(report.split)} GPUs by work, {split},"
    if report.batch_size is None:
        return [("Split", f"{what} is not stable. {' '.join(report.notes)}")]
    noun = "sample" if report.batch_size == 1 else "samples"
    text = (
        f"{what} is stable from batches of {report.batch_size} {noun} ({test.confidence:.0%} confidence, error "
        f"{test.error:.0%})"
    )
    lines = [("Split", f"{text}. {' '.join(report.notes)}".rstrip())]
    if global_batch_size < report.batch_size:
        warning = (
            f"A global batch of {global_batch_size} samples is smaller than {report.batch_size}, from which on "
            "batches agree on the split of ranks between modules: some steps need another split than this plan's. Use "
            f"`--global-batch-size {report.batch_size}` or more."
        )
        lines.append(("Warning", warning))
    return lines
