"""
Expert parallelism: the ranks of a group have some experts of each mixture whole, and tokens travel to theirs (Lepikhin
et al. 2020, GShard).

The ranks of a tensor-parallel group have the same tokens: each computes what its experts add to them, and the group
sums it. Groups with other tokens send each token to those ranks, one in each group, that have any of its experts, and
get back what these add to it. The experts compute by the model's own forward, which is that of transformers' modules
with `use_experts_implementation`, on pairs of a token and an expert. Experts that get every token, with zeros for
those that are not theirs, are given what is not zero as such pairs.

Axes: T tokens of this rank, R rows that it computes, P pairs, K experts of a token, E experts, D features.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ..kernels.row_exchange import Layout, RowExchange, layout_of
from ..world import run_collective
from .stacked_adapters import caller_name, own_weights, stacked_adapters
from .tp_collectives import Sum, SumGradients
from .unowned import give_own_memory, whole_shape

_MARK = "_is_expert_parallel"  # attribute of modules with `use_experts_implementation`
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of tokens and weights, by their number


@dataclass(frozen=True)
class Experts:
    """The experts of a layer that ranks can share."""

    module: Any  # each of its tensors has a slice for each of them
    adapters: tuple[Any, ...] = ()  # of its tensors, the outermost first

    @property
    def caller(self) -> Any:
        """What a model calls: the module, or the outermost adapter around it."""
        return self.adapters[0] if self.adapters else self.module

    @property
    def cuts(self) -> dict[str, tuple[int, int]]:
        """Parameter, as the caller names it -> the dimension that has the experts, and its blocks that have all."""
        count = self.module.num_experts
        blocks = {id(p): whole_shape(p)[1] // count for part in self.adapters for p in part.lora_B.parameters()}
        return {
            name: (1, blocks[id(parameter)]) if id(parameter) in blocks else (0, 1)
            for name, parameter in self.caller.named_parameters()
        }

    @property
    def adapter_ranks(self) -> dict[str, int]:
        """Parameter, as the caller names it -> the rank of its adapter."""
        prefix = "base_layer." * len(self.adapters)
        return {f"{prefix}{part.parameter_name}": next(iter(part.r.values())) for part in self.adapters}


def experts_of(model: nn.Module) -> dict[str, Experts]:
    """Name, by which a model calls them -> the experts that ranks can share."""
    modules = dict(model.named_modules())
    return {
        caller_name(name): Experts(module, tuple(stacked_adapters(modules[caller_name(name)])))
        for name, module in modules.items()
        if hasattr(module, "num_experts")
        and list(module.parameters())
        and all(whole_shape(parameter)[:1] == (module.num_experts,) for parameter in module.parameters())
        and (hasattr(module, _MARK) or takes_blocks(module))
    }


def gets_every_token(experts: nn.Module) -> bool:
    """Whether experts are not told which tokens are theirs, which all of them multiply (Llama 4)."""
    shapes = {len(whole_shape(weight)) for weight in experts.parameters(recurse=False)}
    return shapes == {3} and len(inspect.signature(type(experts).forward).parameters) == 2


def takes_blocks(experts: nn.Module) -> bool:
    """
    Whether experts take a row of each token for each of them, `[E * T, D]`, by expert, and return as many. Without
    biases they add nothing where a row is zero: the router has weighed the rows, those of other experts with zero.
    """
    if not gets_every_token(experts):
        return False
    shapes = {name: whole_shape(weight) for name, weight in experts.named_parameters(recurse=False)}
    weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    num_experts = next(iter(shapes.values()))[0]

    def keeps_shape(*shape: int) -> bool:
        try:
            rows_BD = torch.empty(shape, device="meta")
            return torch.func.functional_call(experts, weights, (rows_BD,)).shape == shape
        except (RuntimeError, AttributeError):  # what multiplies other tensors
            return False

    widths = set.intersection(*({*shape[1:]} for shape in shapes.values()))
    return any(keeps_shape(2 * num_experts, D) and not keeps_shape(2 * num_experts + 1, D) for D in widths)


def share_experts(
    model: nn.Module,
    names: Collection[str],  # of the parameters of experts
    mesh: DeviceMesh,  # of all ranks that share them, by tp group
    tp_group: dist.ProcessGroup | None,  # ranks with the same tokens, `None` for one
    row_group: dist.ProcessGroup | None,  # of this rank in each of several such groups
    has_backward: Callable[[str], bool] = lambda name: True,  # whether a pass may reach such a parameter backwards
) -> None:
    """
    Gives this rank its experts, in place: their parameters become `DTensor`s, and their forward gets and returns all
    tokens of this rank. All ranks of the mesh hold the same weights and call this.
    """
    for name, experts in experts_of(model).items():
        own = {attribute: cut for attribute, cut in experts.cuts.items() if f"{name}.{attribute}" in names}
        if not own:
            continue
        module, caller = experts.module, experts.caller
        num_experts, forward = module.num_experts, module.forward
        by_block = takes_blocks(module)
        for attribute, (dim, blocks) in own.items():
            owner, _, attribute = attribute.rpartition(".")
            parameters = caller.get_submodule(owner)._parameters
            whole = parameters[attribute]
            placement = Shard(dim) if blocks == 1 else _StridedShard(dim, split_factor=blocks)
            cut = nn.Parameter(distribute_tensor(whole, mesh, [placement], src_data_rank=None), whole.requires_grad)
            if not cut.is_meta:
                give_own_memory(cut)
            parameters[attribute] = cut
        for part in (module, *experts.adapters):
            part.num_experts //= mesh.size()
        if by_block:
            forward = functools.partial(_forward_pairs, module, forward)
        rank, reaches = mesh.get_local_rank(), has_backward(f"{name}.{next(iter(own))}")
        caller.shared = SharedExperts(experts, forward, rank, tp_group, row_group, reaches)
        caller.forward = functools.partial(_share_blocks, caller.shared, num_experts) if by_block else caller.shared


def _share_blocks(shared: SharedExperts, num_experts: int, rows_BD: Tensor) -> Tensor:
    """The forward of experts that take blocks: shares the rows that are not zero."""
    row_P = rows_BD.any(-1).nonzero()[:, 0]
    index_P1 = row_P[:, None] // max(1, len(rows_BD) // num_experts)
    hidden_PD = rows_BD[row_P]
    added_PD = shared(hidden_PD, index_P1, hidden_PD.new_ones(len(row_P), 1))
    return torch.zeros_like(rows_BD).index_copy(0, row_P, added_PD)


def _forward_pairs(
    experts: Any, forward: Callable[[Tensor], Tensor], hidden_PD: Tensor, index_P1: Tensor, weights_P1: Tensor
) -> Tensor:
    """What experts that take blocks add for pairs of a token and an expert: blocks are as high as the highest."""
    place_P1 = nn.functional.one_hot(index_P1[:, 0], experts.num_experts).cumsum(0).gather(1, index_P1) - 1
    height = int(place_P1.max()) + 1
    row_P = (index_P1 * height + place_P1)[:, 0]
    rows_BD = hidden_PD.new_zeros(experts.num_experts * height, hidden_PD.shape[1]).index_copy(0, row_P, hidden_PD)
    return forward(rows_BD)[row_P] * weights_P1


@contextmanager
def without_tokens(layers: Iterable[nn.Module]) -> Iterator[None]:
    """
    Lets layers compute nothing but what their experts have to do for the tokens of other ranks: a forward of this
    rank has none, `[0, D]`, and in its backward layers that are recomputed are so without tokens, too.
    """
    before = [(layer, layer.__dict__.get("forward")) for layer in layers]
    for layer, _ in before:
        layer.__dict__["forward"] = _ExpertsAlone(layer)
    try:
        yield
    finally:
        for layer, forward in before:
            del layer.__dict__["forward"]
            if forward is not None:
                layer.__dict__["forward"] = forward


class _ExpertsAlone:
    """The forward of a layer without tokens."""

    def __init__(self, layer: nn.Module):
        self._layer: Any = layer
        self._shared: list[Any] = [module.shared for module in layer.modules() if hasattr(module, "shared")]

    def __call__(self, hidden_TD: Tensor) -> Tensor:
        # as the forward that it stands for, see `GradientCheckpointingLayer` of transformers
        if getattr(self._layer, "gradient_checkpointing", False) and self._layer.training and torch.is_grad_enabled():
            return self._layer._gradient_checkpointing_func(self._run, hidden_TD)
        return self._run(hidden_TD)

    def _run(self, hidden_TD: Tensor) -> Tensor:
        for experts in self._shared:
            hidden_TD = experts(hidden_TD, hidden_TD.new_zeros(0, 0, dtype=torch.int64), hidden_TD.new_zeros(0, 0))
        return hidden_TD


class SharedExperts:
    """The forward of the experts of a layer, of which this rank has some."""

    def __init__(
        self,
        experts: Experts,
        forward: Callable[[Tensor, Tensor, Tensor], Tensor],  # of pairs of a token and an expert
        rank: int,  # in the group that shares them
        tp_group: dist.ProcessGroup | None,
        row_group: dist.ProcessGroup | None,
        has_backward: bool,
    ):
        self._experts, self._num_experts, self._forward = experts, experts.module.num_experts, forward
        self._tp_group, self._row_group = tp_group, row_group
        self._tp_size = 1 if tp_group is None else tp_group.size()
        self._tp_rank = rank % self._tp_size
        self._first = rank * self._num_experts
        # All ranks take part in a backward or none, whether or not what they compute needs it for itself.
        self._anchor = torch.zeros(0, requires_grad=True) if has_backward else None

    def __call__(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if self._tp_group is not None:
            hidden_TD = SumGradients.apply(hidden_TD, self._tp_group)  # type: ignore[assignment]
            weights_TK = SumGradients.apply(weights_TK, self._tp_group)  # type: ignore[assignment]
        compute = self._add_up if self._row_group is None else self._send_and_add_up
        added_TD = compute(hidden_TD, index_TK, weights_TK)
        return added_TD if self._tp_group is None else Sum.apply(added_TD, self._tp_group)  # type: ignore[return-value]

    def _add_up(self, hidden_RD: Tensor, index_RK: Tensor, weights_RK: Tensor) -> Tensor:
        """Returns what the experts of this rank add to the tokens."""
        index_RK = index_RK - self._first
        row_P, slot_P = ((index_RK >= 0) & (index_RK < self._num_experts)).nonzero(as_tuple=True)
        hidden_PD, index_P1 = hidden_RD[row_P], index_RK[row_P, slot_P, None]
        weights_P1 = weights_RK[row_P, slot_P, None]
        if not len(row_P):  # all have gradients of zeros, so that this rank takes part in the sums of those of others
            hidden_PD = hidden_RD.sum(0, keepdim=True)
            index_P1, weights_P1 = index_P1.new_zeros(1, 1), weights_P1.sum().view(1, 1)
        with own_weights(self._experts.module, self._experts.adapters):
            added_PD = self._forward(hidden_PD, index_P1, weights_P1)[: len(row_P)]
        return _sum_by_row(added_PD, row_P, len(hidden_RD)).to(hidden_RD.dtype)

    def _send_and_add_up(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The same for tokens of all rows: sends those of this rank, and returns what other ranks add to them."""
        group, num_rows = self._row_group, self._row_group.size()  # type: ignore[union-attr]
        owner_TK = index_TK // self._num_experts
        rows = torch.arange(num_rows, device=index_TK.device) * self._tp_size + self._tp_rank
        is_sent = (owner_TK[None] == rows[:, None, None]).any(-1)
        token = is_sent.nonzero()[:, 1]  # by row
        layout = layout_of((hidden_TD, index_TK, weights_TK))
        sent, received, layout_R = _agree(is_sent.sum(1), layout, group)
        tensors = [tensor[token] for tensor in (hidden_TD, index_TK, weights_TK)]
        arrived = RowExchange.apply(self._anchor, group, sent, received, layout_R, *tensors)
        added_RD = self._add_up(*arrived)  # type: ignore[misc]
        (added,) = RowExchange.apply(None, group, received, sent, layout[:1], added_RD)  # type: ignore[misc]
        return _sum_by_row(added, token, len(hidden_TD)).to(hidden_TD.dtype)


def _sum_by_row(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Sums values by their row, in float32 if they are narrower."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.new_zeros(num_rows, values.shape[1], dtype=dtype).index_add(0, row, values.to(dtype))


class ExpertLoad:
    """Counts the pairs of a token of this rank and an expert that it goes to, of experts in layers of a module."""

    def __init__(
        self,
        layers: Mapping[nn.Module, int],
        num_layers: int,
        num_experts: int,
        device: torch.device,
        evaluates: bool = False,  # whether forwards count that are not of training
    ):
        self.counts = torch.zeros(num_layers, num_experts, device=device)
        self._evaluates = evaluates
        self._hooks = [
            experts.register_forward_pre_hook(functools.partial(self._count, layer))
            for experts, layer in layers.items()
        ]

    def remove(self) -> None:
        """Counts no longer."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _count(self, layer: int, experts: nn.Module, args: tuple[Any, ...]) -> None:
        if not experts.training and not self._evaluates:
            return
        if len(args) == 1:  # blocks of rows
            self.counts[layer] += args[0].unflatten(0, (self.counts.shape[1], -1)).any(-1).sum(1)
            return
        chosen = args[1].flatten()
        self.counts[layer].index_add_(0, chosen, self.counts.new_ones(len(chosen)))


class _EnoughError(Exception):
    """Ends a forward whose experts are counted."""


@torch.no_grad()
def expert_peaks(model: Any, stack: str, batches: Iterable[Mapping[str, Any]], limit_s: float) -> dict[int, float]:
    """
    Ranks that could share the experts of a list of layers -> tokens of the busiest of them over those of the mean one:
    the mean over layers and batches, in forwards of a whole model that end after some seconds.
    """
    callers = [experts.caller for name, experts in experts_of(model).items() if name.startswith(f"{stack}.")]
    num_experts = math.gcd(*(caller.num_experts for caller in callers))
    sizes = [size for size in range(2, num_experts + 1) if num_experts % size == 0]
    load = ExpertLoad({c: i for i, c in enumerate(callers)}, len(callers), num_experts, model.device, evaluates=True)
    end, was_training = time.monotonic() + limit_s, model.training

    def stop(caller: nn.Module, *_: Any) -> None:
        if caller is callers[-1] or time.monotonic() > end:
            raise _EnoughError

    hooks = [caller.register_forward_hook(stop) for caller in callers]
    found = []
    model.eval()
    try:
        for batch in batches:
            load.counts.zero_()
            with suppress(_EnoughError):
                model(
                    **{
                        name: value.to(model.device) if hasattr(value, "to") else value
                        for name, value in batch.items()
                    }
                )
            found.append(load.counts[load.counts.sum(1) > 0])
            if time.monotonic() > end:
                break
    finally:
        model.train(was_training)
        load.remove()
        for hook in hooks:
            hook.remove()
    counts = torch.cat([*found, load.counts[:0]])
    by_size = {size: counts.unflatten(1, (size, -1)).sum(2) for size in sizes}
    return {size: float((own.amax(1) / own.mean(1)).mean()) for size, own in by_size.items()} if len(counts) else {}


def load_excess(counts: Tensor) -> float | None:
    """How much more the busiest expert of a layer has than the mean one, on average; `None` without tokens."""
    counts = counts[counts.sum(1) > 0]
    return float((counts.amax(1) / counts.mean(1)).mean() - 1) if len(counts) else None


def _agree(counts: Tensor, layout: Layout, group: Any) -> tuple[list[int], list[int], Layout]:
    """
    Returns the numbers of rows that this rank sends to each and receives, and their layout: a rank without tokens
    knows neither how many experts a token has nor the dtypes.
    """
    (width, dtype), (num_experts, index_dtype), (_, weight_dtype) = layout
    kinds = counts.new_tensor([num_experts, _DTYPES.index(dtype), _DTYPES.index(weight_dtype)])
    told = torch.cat([counts[:, None], kinds.expand(len(counts), -1)], dim=1)
    heard = torch.empty_like(told)
    run_collective(dist.all_to_all_single, heard, told, group=group)
    received = heard.tolist()
    _, num_experts, number, weight_number = max(received, key=lambda row: row[0] > 0)
    known = [(width, _DTYPES[number]), (num_experts, index_dtype), (num_experts, _DTYPES[weight_number])]
    return counts.tolist(), [row[0] for row in received], known
