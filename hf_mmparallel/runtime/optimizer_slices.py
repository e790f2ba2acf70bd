"""
ZeRO: each rank's optimizer updates a slice of the parameters that several ranks hold.

A slice is an equal share of the flattened values that a rank has of one parameter. Sums of gradients end on the rank
that updates the slice. A step sends as many bytes as without: a reduce-scatter before it, an all-gather after it. In
ZeRO-3 the slices have memory of their own, and the parameters have none but between [`gather`] and [`free`].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..cost import GRADIENT_BUCKET_BYTES
from ..modeling.unowned import from_shard, give_own_memory, local
from ..plan import ParameterShards, ParameterSpec, SyncGroup
from ..schedule import in_buckets
from ..world import track_activity

# The shards of a parameter that a rank has, of which those of a smaller tp group have several.


@dataclass(frozen=True)
class Region:
    """Some of the rows or columns of a tensor."""

    dim: int
    start: int  # first index in each block
    stop: int  # one past the last index in each block
    size: int  # indices of each block
    num_blocks: int = 1  # equal blocks of the dimension

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns these elements of a tensor, in its memory; the blocks have a dimension of their own."""
        blocks = tensor.unflatten(self.dim, (self.num_blocks, self.size))
        return blocks.narrow(self.dim + 1, self.start, self.stop - self.start)

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Returns the shape of these elements of a tensor on their own, blocks one after the other."""
        size = self.num_blocks * (self.stop - self.start)
        return torch.Size((*tensor.shape[: self.dim], size, *tensor.shape[self.dim + 1 :]))

    def blank(self, elements: torch.Tensor) -> torch.Tensor:
        """Makes a tensor without values, in which `elements` have their place here."""
        shape = (*elements.shape[: self.dim], self.num_blocks * self.size, *elements.shape[self.dim + 1 :])
        return elements.new_empty(shape)

    def write(self, tensor: torch.Tensor, elements: torch.Tensor) -> None:
        """Writes elements of [`~Region.shape`] to their place in a tensor."""
        self.of(tensor).copy_(elements.unflatten(self.dim, (self.num_blocks, -1)))


Regions = Mapping[tuple[str, tuple[int, ...]], Region]
"""Parameter and holders of a shard -> where it lies in a rank's part of the parameter, if it is not all of it."""


def local_regions(
    parameters: Mapping[str, ParameterSpec], shards: Mapping[str, ParameterShards], rank: int
) -> dict[tuple[str, tuple[int, ...]], Region]:
    """Finds where the shards lie of those parameters of which a rank has several, by parameter and holders."""
    result = {}
    for name, of_parameter in shards.items():
        held = [] if of_parameter.zero_stage else of_parameter.on_rank(rank)
        if len(held) < 2:
            continue
        (cut,) = held[0].cuts
        assert cut.dim is not None
        bounds = [shard.cuts[0].bounds(parameters[name].shape[cut.dim] // cut.num_blocks) for shard in held]
        first, end = bounds[0][0], bounds[-1][1]
        for shard, (start, stop) in zip(held, bounds, strict=True):
            place = start - first, stop - first, end - first
            result[name, shard.holders] = Region(cut.dim, *place, cut.num_blocks)
    return result


@dataclass(frozen=True, eq=False)
class LocalShard:
    parameter: nn.Parameter
    region: Region | None = None  # where it lies in this rank's part of the parameter; `None` if it is all of that

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the shard of a tensor with the layout of the parameter, such as its gradient; in its memory."""
        return local(tensor) if self.region is None else self.region.of(local(tensor))

    def numel(self) -> int:
        return self.of(self.parameter).numel()


T = TypeVar("T")


def slice_length(numel: int, num_slices: int) -> int:
    """Elements of a slice of a tensor of `numel` elements, padding of the last slices included."""
    return -(-numel // num_slices)


@dataclass(frozen=True)
class FlatSlice:
    """Slice `index` of `num_slices` of a flattened tensor. All slices but the last ones have the same length."""

    index: int
    num_slices: int  # one on each rank of the group
    group: Any  # the process group of the ranks that divide the tensor

    def length(self, numel: int) -> int:
        return slice_length(numel, self.num_slices)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the slice of a contiguous tensor, one-dimensional; shares its memory."""
        length = self.length(tensor.numel())
        start = min(self.index * length, tensor.numel())
        return tensor.view(-1)[start : start + length]

    def whole(self, values: torch.Tensor, numel: int) -> torch.Tensor:
        """Gathers the flattened tensor of `numel` elements from the slices of the ranks of the group. Collective."""
        length = self.length(numel)
        gathered = values.new_empty(length * self.num_slices)
        dist.all_gather_single(gathered, pad(values, length), group=self.group)
        return gathered[:numel]


def whole_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the model's own parameter of an optimizer's entry, which may be a rank's shard or slice of it."""
    return getattr(parameter, "sharded_parameter", parameter)


def slice_of(parameter: torch.Tensor) -> FlatSlice | None:
    """Returns the slice that an optimizer's entry is of the model's parameter; `None` if it is no slice."""
    return getattr(parameter, "flat_slice", None)


def local_shard(parameter: torch.Tensor, flat_slice: FlatSlice | None = None) -> Any:
    """Makes a plain parameter that shares the memory of a rank's shard of a parameter, or of a slice of that."""
    values = local(parameter).detach()
    assert values.is_contiguous(), "an optimizer would make a copy"
    shard: Any = nn.Parameter(values if flat_slice is None else flat_slice.of(values), parameter.requires_grad)
    shard.sharded_parameter, shard.flat_slice = parameter, flat_slice
    return shard


def join(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Gives state with a value for each element of an entry the form of the model's parameter. Collective."""
    whole, flat_slice = whole_parameter(parameter), slice_of(parameter)
    if not isinstance(value, DTensor):
        value = value.to(local(whole).device)  # from the host, where it may be updated
    if flat_slice is not None:
        like = local(whole)
        value = flat_slice.whole(value, like.numel()).view(like.shape)
    return from_shard(value, whole) if isinstance(whole, DTensor) and not isinstance(value, DTensor) else value


@dataclass(frozen=True)
class SlicedGroup:
    """Parameters of this rank that the same ranks divide."""

    flat_slice: FlatSlice  # this rank's slice of each
    members: list[nn.Parameter]
    zero_stage: int

    @property
    def divided_weights(self) -> list[nn.Parameter]:
        """The parameters whose values are divided, too."""
        return self.members if self.zero_stage == 3 else []


Gathering = tuple[Any, torch.Tensor, FlatSlice, Sequence[nn.Parameter]]
"""Work, receiving buffer, slice and parameters of an all-gather in flight."""


class OptimizerSlices:
    """The slices that this rank's optimizer updates, and the gathering of weights after its step."""

    def __init__(
        self,
        sync_groups: Sequence[SyncGroup],
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        process_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    ):
        self.groups: list[SlicedGroup] = []
        self.by_parameter: dict[nn.Parameter, nn.Parameter] = {}  # parameter -> its slice
        self.freed: set[nn.Parameter] = set()  # they only have memory while they are gathered
        self._names: list[dict[str, None]] = []  # of the parameters of each group, in one order on all ranks
        self._taken: dict[str, nn.Parameter] = {}
        for sync_group in sync_groups:
            shard_group = next((ranks for ranks in sync_group.shard_groups if rank in ranks), None)
            if shard_group is None:
                continue
            flat_slice = FlatSlice(shard_group.index(rank), len(shard_group), process_groups[shard_group])
            self.groups.append(SlicedGroup(flat_slice, [], sync_group.zero_stage))
            self._names.append(dict.fromkeys(sync_group.parameters))
        self.take(parameters)

    def take(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Adds parameters whose values are on the device; those that are not divided, or known, stay as they are."""
        new = {name: parameter for name, parameter in parameters.items() if name not in self._taken}
        self._taken |= new
        for group, names in zip(self.groups, self._names, strict=True):
            members = [parameter for name, parameter in new.items() if name in names]
            if not members:
                continue
            for member in members:
                if not local(member).is_contiguous():  # such as a convolution in `channels_last`
                    give_own_memory(member)
            self.by_parameter.update((member, local_shard(member, group.flat_slice)) for member in members)
            group.members[:] = [self._taken[name] for name in names if name in self._taken]
            if group.zero_stage == 3:
                self._divide(members)  # only this rank's slices of them are kept

    @torch.no_grad()
    def _divide(self, members: Sequence[nn.Parameter]) -> None:
        """Gives slices memory of their own, and frees the parameters."""
        for member in members:
            self.freed.add(member)
            values, updated = local(member), self.by_parameter[member]
            flat_slice = slice_of(updated)
            assert flat_slice is not None
            updated.data = flat_slice.of(values).clone()
            storage = values.untyped_storage()
            if storage.nbytes() != values.nbytes or not storage.resizable():  # shared with a tensor, or a file
                give_own_memory(member)
            free([member])

    @torch.no_grad()
    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns a parameter with its values on this rank. Collective over the shard group."""
        if parameter not in self.freed:
            return parameter
        # a parameter of ZeRO-3, which has its values only while they are gathered
        return join(self.by_parameter[parameter].detach(), self.by_parameter[parameter])  # type: ignore[index]

    @torch.no_grad()
    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Gives the slices their values, by the names of parameters, and these the slices of all ranks. Collective."""
        for name, parameter in self._taken.items():
            if parameter in self.by_parameter:
                self.by_parameter[parameter].data.copy_(values[name])
        self.gather_weights()

    @contextmanager
    def rewriting(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Wraps a block that writes into parameters, after which the slices have what it wrote."""
        written = [parameter for parameter in parameters if parameter in self.by_parameter]
        freed = [parameter for parameter in written if parameter in self.freed]
        allocate(freed)
        yield
        with torch.no_grad():
            for parameter in written:
                updated = self.by_parameter[parameter]
                flat_slice = slice_of(updated)
                assert flat_slice is not None
                values = flat_slice.of(local(parameter).detach())
                updated.data = values.clone() if parameter in self.freed else values
        free(freed)

    @contextmanager
    def casting(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Wraps a block that replaces the values of parameters, which have memory in it. Collective."""
        wanted = set(parameters)
        with self.rewriting(wanted):
            for group in self.groups:
                members = [member for member in group.divided_weights if member in wanted]
                for bucket in buckets(members, lambda parameter: parameter.dtype):
                    copy_gathered(*self.gather(group.flat_slice, bucket))
            yield

    @torch.no_grad()
    def gather(self, flat_slice: FlatSlice, bucket: Sequence[nn.Parameter]) -> Gathering:
        """Starts to gather slices of one dtype; [`copy_gathered`] waits. Collective over the shard group."""
        lengths = [flat_slice.length(local(member).numel()) for member in bucket]
        slices = [pad(self.by_parameter[m], length) for m, length in zip(bucket, lengths, strict=True)]
        mine = slices[0] if len(slices) == 1 else torch.cat(slices)
        gathered = mine.new_empty(flat_slice.num_slices, mine.numel())
        work = dist.all_gather_single(gathered.view(-1), mine, group=flat_slice.group, async_op=True)
        return work, gathered, flat_slice, bucket

    def updated_tensor(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns what the optimizer updates of a parameter: its slice, or the parameter itself."""
        return self.by_parameter.get(parameter, parameter)

    @torch.no_grad()
    def gather_weights(self, *_: Any) -> None:
        """Copies the updated slices of all ranks into the parameters. Collective; called after each step."""
        with track_activity("gathering the weights", waits=True):
            self._gather_weights()

    def _gather_weights(self) -> None:
        started: deque[Gathering] = deque()
        for group in self.groups:
            if group.zero_stage == 3:
                continue
            for bucket in buckets(group.members, lambda parameter: parameter.dtype):
                started.append(self.gather(group.flat_slice, bucket))
                # two buckets at a time
                if len(started) > 1:
                    copy_gathered(*started.popleft())
        while started:
            copy_gathered(*started.popleft())


def copy_gathered(work: Any, gathered: torch.Tensor, flat_slice: FlatSlice, bucket: Sequence[nn.Parameter]) -> None:
    """Waits for a bucket of weights, `[num_slices, elements of the slices]`, and copies it into the parameters."""
    work.wait()
    lengths = [flat_slice.length(local(member).numel()) for member in bucket]
    for member, columns in zip(bucket, gathered.split(lengths, 1), strict=True):
        values = local(member).data  # autograd does not count this as a change of what a forward has saved
        values.copy_(columns.reshape(-1)[: values.numel()].view(values.shape))


def allocate(parameters: Iterable[nn.Parameter]) -> None:
    """Gives freed parameters memory again, in the storage that the graphs of forwards refer to."""
    for parameter in parameters:
        values = local(parameter)
        values.untyped_storage().resize_(values.nbytes)


def free(parameters: Iterable[nn.Parameter]) -> None:
    """Takes the memory of parameters, which keep their shapes."""
    for parameter in parameters:
        local(parameter).untyped_storage().resize_(0)


def pad(values: torch.Tensor, length: int) -> torch.Tensor:
    """Returns a one-dimensional tensor with zeros up to a length."""
    missing = length - values.numel()
    return torch.cat([values.detach(), values.new_zeros(missing)]) if missing else values.detach()


def by_slice(tensors: Sequence[torch.Tensor], num_slices: int) -> list[torch.Tensor]:
    """Shapes each tensor to a matrix of `num_slices` rows: row `i` has slice `i`, zeros fill the last slices."""
    columns = []
    for tensor in tensors:
        length = slice_length(tensor.numel(), num_slices)
        columns.append(pad(tensor.reshape(-1), length * num_slices).view(num_slices, length))
    return columns


def buckets(
    tensors: Sequence[T],
    dtype_of: Callable[[T], torch.dtype],
    numel_of: Callable[[Any], int] = lambda tensor: local(tensor).numel(),
) -> Iterator[list[T]]:
    """Groups the tensors of this rank by [`in_buckets`], in the dtype in which they are sent."""

    def bytes_of(tensor: T) -> int:
        return numel_of(tensor) * dtype_of(tensor).itemsize

    return in_buckets(tensors, dtype_of, bytes_of, GRADIENT_BUCKET_BYTES)


# Names of optimizers, and the keys of saved state: names of parameters, settings of groups, tensors of one rank.

STATE = "optimizer.pt"
MODULE = "module"  # in the settings of a group: the module whose learning rate or weight decay it has


def named_groups(model: nn.Module, optimizer: Any) -> list[list[str]]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[by_id[id(whole_parameter(p))] for p in group["params"]] for group in optimizer.param_groups]


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Returns the class with its package, such as `apollo_torch.AdamW`."""
    return f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__name__}"


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def is_rank_local(key: str) -> bool:
    """Returns whether a key of the state is only for the same rank of a tp group or shard group of the same size."""
    return "@" in key


def rank_local_suffix(parameter: torch.Tensor) -> str:
    """Returns the suffix of the keys of one rank's state of an entry; empty for a whole parameter."""
    whole, flat_slice, suffix = whole_parameter(parameter), slice_of(parameter), ""
    if isinstance(whole, DTensor):
        suffix += f"@{whole.device_mesh.get_local_rank()}of{whole.device_mesh.size()}"
    if flat_slice is not None:
        suffix += f"@zero{flat_slice.index}of{flat_slice.num_slices}"
    return suffix


def cant_be_cut(key: str, name: str) -> ValueError:
    """Returns the error for state that can only be read with the sharding that it was saved with."""
    return ValueError(
        f"The optimizer's `{key}` of `{name}` is a rank's own tensor and can't be cut anew. Resume with the same "
        f"`tp_size`, `zero_stage` and `shard_size`."
    )
