"""Sums of gradients over microbatches and replicas, their scale, and the norm over all modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..modeling.unowned import from_shard, local
from ..plan import StageKey, SyncGroup
from ..schedule import SumBucket, sum_buckets
from ..world import ReduceScatter
from .joint_passes import GradientSums, gradient_dtype, gradients_of
from .optimizer_slices import FlatSlice, LocalShard, OptimizerSlices, Regions, buckets, by_slice, slice_of


def accumulate_in_float32(parameters: Iterable[nn.Parameter]) -> None:
    """Lets autograd add up the gradients of 16-bit parameters in float32 over all chunks of a step."""
    for parameter in parameters:
        if parameter.dtype.itemsize < torch.float32.itemsize:
            _change_gradient_dtype(parameter, torch.float32)


def round_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Casts each gradient to its parameter's dtype, which is what optimizers expect; called right before the step."""
    for parameter in parameters:
        _change_gradient_dtype(parameter, parameter.dtype)


def _change_gradient_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Casts the gradient of a parameter, if there is one, and all that autograd adds to it from now on."""
    if parameter.grad_dtype != dtype:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        parameter.grad = None if gradient is None else gradient.to(dtype)


@dataclass(frozen=True)
class _Sum:
    names: tuple[str, ...]  # of the parameters
    shards: list[LocalShard]  # what this rank adds the gradients of
    group: dist.ProcessGroup  # all ranks of the sum
    shard_group: dist.ProcessGroup | None = None  # the ranks that divide it, where slices are updated
    replica_group: dist.ProcessGroup | None = None  # the ranks with the same slices
    flat_slice: FlatSlice | None = None  # this rank's, where each backward has summed it (ZeRO-2)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [shard.parameter for shard in self.shards]


@dataclass
class _StartedSum:
    of: _Sum
    works: list[Any] = field(default_factory=list)  # all-reduces
    buckets: list[tuple[list[nn.Parameter], ReduceScatter]] = field(default_factory=list)  # reduce-scatters, by bucket
    # the sums of this rank's slices
    slices: list[tuple[list[nn.Parameter], torch.Tensor]] = field(default_factory=list)
    # the sums of shards that are not all of a gradient
    copied: list[tuple[LocalShard, torch.Tensor]] = field(default_factory=list)


class GradientSync:
    """
    Sums the gradients of one step over the ranks that hold the same slice of a parameter.

    Sums of the same stages are made of buckets in the order in which a backward completes them, from the last layer to
    the first. Those of complete layers start in the last backward of the stage, the others in the program's order.
    Gradients become views of buckets that are summed in place, so that only one bucket at a time exists twice.
    """

    def __init__(
        self,
        groups: Sequence[SyncGroup],
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        process_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        slices: OptimizerSlices,
        sums: GradientSums | None = None,
        layers: Mapping[str, int] | None = None,
        regions: Regions | None = None,
    ):
        def group_among(candidates: Sequence[tuple[int, ...]]) -> dist.ProcessGroup | None:
            return next((process_groups[ranks] for ranks in candidates if rank in ranks), None)

        self.slices = slices
        regions = regions or {}
        self._index = {
            name: i for i, name in enumerate(dict.fromkeys(n for group in groups for n in group.parameters))
        }
        self.sums = {
            index: _Sum(
                group.parameters,
                [LocalShard(parameters[name], regions.get((name, group.ranks))) for name in group.parameters],
                process_groups[group.ranks],
                group_among(group.shard_groups),
                group_among(group.replica_groups),
                slice_of(slices.updated_tensor(parameters[group.parameters[0]])) if group.zero_stage >= 2 else None,
            )
            for index, group in enumerate(groups)
            if rank in group.ranks
        }
        self.in_passes = sums or GradientSums()  # sums that grow in each backward
        # -1 for those in no layer or in several
        self.layers = {p: -1 if layers is None else layers[name] for name, p in parameters.items()}
        self._same_stages: dict[tuple[StageKey, ...], list[int]] = {}
        for index in self.sums:
            if groups[index].zero_stage < 2:
                self._same_stages.setdefault(groups[index].stages, []).append(index)
        self._stages_of = {index: groups[index].stages for index in self.sums}
        self._started: dict[int, _StartedSum] = {}
        self._left: dict[tuple[StageKey, ...], list[SumBucket[LocalShard]]] = {}  # of this step, the next one last
        self._used: set[nn.Parameter] = set()  # of this step, on this rank
        self._used_names: set[str] = set()  # those of sums that have started
        self._prepared: set[nn.Parameter] = set()  # those of which a sum has started in this step

    def reach(self, stage: StageKey, layer: int) -> None:
        """Starts the sums of all layers after the one that the last backward of a stage has reached."""
        for stages in self._same_stages:
            if stage in stages:
                self._start_buckets(stages, layer)

    def start(self, index: int) -> None:
        """Starts what is left of the sum `index` of the plan; its ranks call this in the program's order."""
        of, in_passes = self.sums[index], self.in_passes
        if of.flat_slice is None:
            self._start_buckets(self._stages_of[index])
        started = self._started.setdefault(index, _StartedSum(of))
        if of.flat_slice is not None:
            started.slices += in_passes.take(of.flat_slice, of.parameters)
        used = self._used | in_passes.used
        named = zip(of.names, of.parameters, strict=True)
        self._used_names.update(name for name, parameter in named if parameter in used)
        in_passes.used.difference_update(of.parameters)

    def used(self) -> torch.Tensor:
        """uint8 `[parameters in any sum of the plan]`: whether this rank has a gradient of each."""
        result = torch.zeros(len(self._index), dtype=torch.uint8)
        result[[self._index[name] for name in self._used_names]] = 1
        return result

    def num_unused(self) -> int:
        """Counts the parameters of this rank's sums of which it has no gradient."""
        return len({name for started in self._started.values() for name in started.of.names} - self._used_names)

    def _start_buckets(self, stages: tuple[StageKey, ...], reached: int = -2) -> None:
        """Starts the sums of buckets after layer `reached`, in one order on all ranks, also without a backward."""
        if stages not in self._left:
            self._left[stages] = self._buckets(self._same_stages[stages])[::-1]
        left = self._left[stages]
        while left and left[-1].layer > reached:
            bucket = left.pop()
            of, parameters = self.sums[bucket.index], [shard.parameter for shard in bucket.parameters]
            # A parameter whose other shard came before has a gradient made of zeros if there was none.
            self._prepare([parameter for parameter in parameters if parameter not in self._prepared])
            started = self._started.setdefault(bucket.index, _StartedSum(of))
            if of.shard_group is None:
                flat = _flatten_gradients(bucket.parameters, started.copied)
                started.works.append(dist.all_reduce(flat, group=of.group, async_op=True))
            else:
                started.buckets.append((parameters, _reduce_scatter(parameters, of.shard_group)))

    def _prepare(self, parameters: Sequence[nn.Parameter]) -> None:
        """Notes which gradients this rank has, and makes them ready for the sums, once in a step."""
        self.in_passes.before_sum(parameters)
        self._prepared.update(parameters)
        self._used.update(parameter for parameter in parameters if parameter.grad is not None)

    def _buckets(self, indices: Sequence[int]) -> list[SumBucket[LocalShard]]:
        """Returns the buckets of some sums, in the order in which a backward completes them."""
        sums = {index: self.sums[index].shards for index in indices}
        return sum_buckets(
            sums,
            lambda shard: self.layers[shard.parameter],
            lambda ordered: buckets(ordered, lambda shard: gradient_dtype(shard.parameter), LocalShard.numel),
        )

    def finish(self, used: torch.Tensor | None = None) -> None:
        """
        Waits for all started sums, after which the gradients of what the optimizer updates hold them. `used` is the
        maximum of [`~GradientSync.used`] over all ranks; without it all parameters are used.
        """
        between_replicas: list[Any] = []
        for started in self._started.values():
            for work in started.works:
                work.wait()
            started.slices += [(bucket, scattered.wait()) for bucket, scattered in started.buckets]
            group = started.of.replica_group
            if group is not None:
                between_replicas += [dist.all_reduce(mine, group=group, async_op=True) for _, mine in started.slices]
        for work in between_replicas:
            work.wait()
        for started in self._started.values():
            for bucket, mine in started.slices:
                # the sum of a slice becomes its gradient, and the parameter has none any more
                self._assign(bucket, mine)
            for shard, summed in started.copied:  # regions of gradients, copied back
                shard.of(cast(torch.Tensor, shard.parameter.grad)).copy_(summed)
        if used is not None:
            self._drop_unused(used)
        for of_step in (self._started, self._left, self._used, self._used_names, self._prepared):
            of_step.clear()

    def _drop_unused(self, used: torch.Tensor) -> None:
        is_used = dict(zip(self._index, used.tolist(), strict=True))
        for started in self._started.values():
            for name, parameter in zip(started.of.names, started.of.parameters, strict=True):
                if not is_used[name]:
                    self.slices.updated_tensor(parameter).grad = None

    def _assign(self, bucket: Sequence[nn.Parameter], sums: torch.Tensor) -> None:
        """Makes the sums of a bucket's slices their gradients."""
        start = 0
        for parameter in bucket:
            updated = self.slices.updated_tensor(parameter)
            updated.grad_dtype = sums.dtype
            updated.grad = sums[start : start + updated.numel()]
            flat_slice = slice_of(updated)
            assert flat_slice is not None
            start += flat_slice.length(local(parameter).numel())


@torch.no_grad()
def _reduce_scatter(bucket: list[nn.Parameter], group: dist.ProcessGroup) -> ReduceScatter:
    """Starts the sums of the slices of a bucket, whose gradients the parameters lose."""
    result = ReduceScatter(by_slice(gradients_of(bucket), dist.get_world_size(group)), group)
    for parameter in bucket:
        parameter.grad = None
    return result


@torch.no_grad()
def _flatten_gradients(bucket: Sequence[LocalShard], copied: list[tuple[LocalShard, torch.Tensor]]) -> torch.Tensor:
    """Joins the gradients of a bucket, zeros where there is none, to one tensor that they become views of."""
    gradients = gradients_of([shard.parameter for shard in bucket])
    shards = [shard.of(gradient) for shard, gradient in zip(bucket, gradients, strict=True)]
    pieces = [piece.reshape(-1) for piece in shards]
    flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    for shard, values, view in zip(bucket, shards, flat.split([p.numel() for p in pieces]), strict=True):
        gradient: Any = shard.parameter.grad
        view = view.view(values.shape)
        if shard.region is not None:
            # regions of gradients stay where they are; one alone may be summed there
            if view.data_ptr() != values.data_ptr():
                copied.append((shard, view))
        else:
            shard.parameter.grad = from_shard(view, gradient) if isinstance(gradient, DTensor) else view
    return flat


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float | torch.Tensor) -> None:
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)  # type: ignore[attr-defined]


def gradient_square(counted: Sequence[nn.Parameter], device: torch.device) -> torch.Tensor:
    """
    Returns the square of the 2-norm of the gradients of `counted`, a float64 scalar on the device. Over all ranks each
    element is counted once, so that the sum over them is the square of the norm of the whole model's gradient.
    """
    gradients = [local(p.grad) for p in counted if p.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(gradients, 2, _norm_dtype(counted))  # type: ignore[attr-defined]
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms])).double().square()


def norm_of_square(square: torch.Tensor, counted: Sequence[nn.Parameter]) -> torch.Tensor:
    """Returns the norm of a gradient with this square over all ranks, in float32, or float64 where gradients are."""
    return square.sqrt().to(_norm_dtype(counted))


def _norm_dtype(counted: Sequence[nn.Parameter]) -> torch.dtype:
    is_double = any(p.grad is not None and p.grad.dtype == torch.float64 for p in counted)
    return torch.float64 if is_double else torch.float32


def clip_gradients(parameters: Sequence[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scales all gradients so that `norm` becomes at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does."""
    scale_gradients(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
