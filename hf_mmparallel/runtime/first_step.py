"""Checks in the first step of a run: equal copies of parameters, and the loss that the model itself has."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ..modeling import token_loss
from ..modeling.stages import ModuleStage
from ..modeling.unowned import local
from ..plan import StageKey
from ..world import World
from .groups import ProcessGroups, tp_groups
from .local_shards import LocalShard
from .sharded_model import ShardedModel
from .work import StepResult

# Parameters that each rank of a tp group holds whole, and what that means for their gradients.


@dataclass(frozen=True)
class ReplicatedParameters:
    """The parameters that each rank of a tp group holds whole."""

    ranks: tuple[int, ...]
    group: Any
    parameters: Mapping[str, nn.Parameter]  # in one order on all ranks
    modules: Mapping[str, str]  # name -> module
    partial: frozenset[str]  # those with partial gradients, which add up to the gradient


def replicated_parameters(
    sharded: ShardedModel, stages: Collection[StageKey], groups: ProcessGroups, partial: Collection[str]
) -> list[ReplicatedParameters]:
    """Finds the parameters that each rank of a tp group holds whole, for the tp groups of this rank."""
    named = dict(sharded.model.named_parameters())
    result = []
    for ranks in [ranks for ranks in tp_groups(sharded.plan) if ranks in groups.by_ranks]:
        # among `stages`, those of this rank
        own_stages = {key for key in stages if ranks in sharded.plan.stage(*key).mesh}
        modules = {}
        for name, shards in sharded.shards.items():
            module = next((key[0] for key in shards.stages if key in own_stages), None)
            if module is not None and any(all(map(shard.is_on, ranks)) for shard in shards.shards):
                modules[name] = module
        if modules:
            parameters = {name: named[name] for name in modules}
            result.append(ReplicatedParameters(ranks, groups.by_ranks[ranks], parameters, modules, frozenset(partial)))
    return result


class EqualGradients:
    """
    Gradients that each rank of a tp group has whole. They are divided by the number of ranks before the sum over all
    copies of the parameter, which then counts each microbatch once, and after which all copies have the same bits.
    """

    def __init__(self, replicated: Sequence[ReplicatedParameters]):
        self.sizes = {
            id(parameter): float(len(of_group.ranks))
            for of_group in replicated
            for name, parameter in of_group.parameters.items()
            if name not in of_group.partial
        }

    @torch.no_grad()
    def divide(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divides those among the gradients of `parameters`."""
        divided = [p for p in parameters if p.grad is not None and id(p) in self.sizes]
        if divided:
            gradients: Any = [local(p.grad) for p in divided if p.grad is not None]
            torch._foreach_div_(gradients, [self.sizes[id(p)] for p in divided])  # type: ignore[attr-defined]


_GRADIENT_TOLERANCE = 0.02  # of a gradient's norm: other orders of addition differ by less, partial gradients by more
_MIN_NORM_FRACTION = 1e-4  # of the largest norm: below it a gradient may be nothing but rounding
_LOSS_TOLERANCE = 1e-3
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FirstStepCheck:
    """
    Compares ranks once, in the first step of a run, by a few numbers for each parameter; what that step has no samples
    for, such as an encoder without images, in the first one that has some.

    A step that trains on other numbers than one process would do so without a word: a tensor-parallel plan that is
    silent about a parameter, ranks that start from different weights, or a model whose loss is not that of the next
    token.
    """

    def __init__(
        self,
        replicated: Sequence[ReplicatedParameters],
        copies: Sequence[tuple[tuple[int, ...], Any, Mapping[str, LocalShard]]],
        frozen: Mapping[tuple[int, ...], Mapping[str, LocalShard]],
        stages: Mapping[StageKey, ModuleStage],
        smooths: bool,
        world: World,
    ):
        self.replicated = replicated
        self.copies = copies  # (ranks, group, shards) of each sum, in one order on all ranks
        self.frozen = frozen  # what gets no gradient, by the ranks that hold the same
        self.stages = dict(stages)  # those that end in a loss
        self.smooths = smooths  # the loss of smoothed labels is summed, which no model has
        self.world = world
        self._gradients: dict[int, torch.Tensor] = {}
        self._is_first = True
        self._unseen = {module for shared in replicated for module in shared.modules.values()}
        self._module_of = {
            id(parameter): shared.modules[name]
            for shared in replicated
            for name, parameter in shared.parameters.items()
        }

    def start(self) -> None:
        """Lets the first microbatch with targets leave the model's own loss, of the same forward."""
        for stage in self.stages.values():
            stage.asks_own_loss = True

    @torch.no_grad()
    def note_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Adds up numbers of the gradients of this rank alone, before they are summed."""
        for parameter in parameters:
            if self._module_of.get(id(parameter)) not in self._unseen:
                continue
            gradient = torch.zeros(()) if parameter.grad is None else local(parameter.grad).detach()
            size = max(gradient.numel(), 1)
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            numbers = [gradient.norm(dtype=dtype), gradient.sum(dtype=dtype) / size**0.5]
            has_one = torch.tensor(float(parameter.grad is not None))
            noted = torch.stack([number.double().cpu() for number in (*numbers, has_one)])
            self._gradients[id(parameter)] = self._gradients.get(id(parameter), 0) + noted

    def finish(self, result: StepResult, modules: Collection[str]) -> bool:
        """
        Raises `ValueError` on all ranks with what the first of them found; returns whether all has been seen, on all
        ranks. Collective. `modules` are those that this rank had samples for.
        """
        seen = self._unseen & set(modules)
        losses = [self._loss(key, result) for key in list(self.stages)]
        weights = (*self._weights(), *self._frozen_weights()) if self._is_first else ()
        sentence = next(filter(None, (*weights, *self._partial_gradients(seen), *losses)), None)
        self._gradients.clear()
        self._unseen -= seen
        self._is_first = False
        is_left = bool(self._unseen or self.stages)
        found, is_any_left = self.world.all_reduce(torch.tensor([sentence is not None, is_left]).int(), "max").tolist()
        if found:
            raise ValueError(next(filter(None, self.world.all_gather(sentence))))
        return not is_any_left

    def _weights(self) -> Iterator[str]:
        """Yields a sentence for each set of ranks whose copies of a parameter differ by a bit or more."""
        for ranks, group, shards in self.copies:
            sums = torch.stack([_bit_sums(shard) for shard in shards.values()])
            high, low = _extremes(sums, group)
            differ = (high != low).any(-1).nonzero().flatten().tolist()
            if differ:
                yield _unequal([list(shards)[index] for index in differ], len(shards), ranks)

    def _frozen_weights(self) -> Iterator[str]:
        """Yields a sentence for the first ranks whose copies of what is frozen differ."""
        sums = {
            ranks: torch.stack([_bit_sums(shard).cpu() for shard in shards.values()])
            for ranks, shards in self.frozen.items()
        }
        # Ranks may have no group of their own: all show a digest for each set of ranks that they are in, and where
        # these differ one for each parameter.
        checksums = {ranks: zlib.crc32(own_sums.numpy().tobytes()) for ranks, own_sums in sums.items()}
        shown = self.world.all_gather(checksums)
        digests: dict[tuple[int, ...], set[int]] = {}
        for of_rank in shown:
            for ranks, digest in of_rank.items():
                digests.setdefault(ranks, set()).add(digest)
        ranks = next((ranks for ranks, of_ranks in digests.items() if len(of_ranks) > 1), None)
        if ranks is None:
            return
        tables = [table for table in self.world.all_gather(sums[ranks].tolist() if ranks in sums else None) if table]
        if ranks in sums:
            names = list(self.frozen[ranks])
            differ = [
                name for name, *copies in zip(names, *tables, strict=True) if copies.count(copies[0]) < len(copies)
            ]
            yield _unequal(differ, len(names), ranks)

    def _partial_gradients(self, modules: Collection[str]) -> Iterator[str]:
        """Yields a sentence for each partial gradient that was treated as a whole one, or the reverse."""
        for shared in self.replicated:
            gradients = self._gradients
            own = {name: id(p) for name, p in shared.parameters.items() if shared.modules[name] in modules}
            trained = {name: gradients[key] for name, key in own.items() if key in gradients}
            if not trained:
                continue
            high, low = _extremes(torch.stack(list(trained.values())).to(self.world.device), shared.group)
            rounding = _MIN_NORM_FRACTION * float(high[:, 0].max())
            for name, largest, smallest in zip(trained, high.tolist(), low.tolist(), strict=True):
                spread = max(largest[0] - smallest[0], largest[1] - smallest[1])
                is_partial = largest[2] != smallest[2] or spread > _GRADIENT_TOLERANCE * largest[0] + rounding
                if is_partial and name not in shared.partial:
                    yield (
                        f"The ranks {shared.ranks} hold `{name}` whole and have different gradients of it, of norm "
                        f"{smallest[0]:.3g} to {largest[0]:.3g}: it is used between layers that they share, which the "
                        f"model's tensor-parallel plan does not say. Use `tp_size=1` for `{shared.modules[name]}`."
                    )
                elif name in shared.partial and smallest[0] > rounding and spread == 0:
                    yield (
                        f"The ranks {shared.ranks} have equal gradients of `{name}`, which were treated as partial "
                        f"gradients and summed. Use `tp_size=1` for `{shared.modules[name]}`."
                    )

    def _loss(self, key: StageKey, result: StepResult) -> str | None:
        """Returns a sentence if the model's own loss of a microbatch is not what is summed for it."""
        stage = self.stages[key]
        if stage.asks_own_loss:
            return None  # there were no targets yet
        own_loss, stage.own_loss = stage.own_loss, None
        del self.stages[key]
        if own_loss is None:
            return None
        text = _other_function(stage.model, own_loss.mean.device)
        if text:
            return text
        sums = [(own_loss.total, own_loss.num_targets)]
        if own_loss.of_batch and not self.smooths:
            losses = (loss_and_count for task, loss_and_count in result.losses.items() if task.stage_key == key)
            sums.append(next((loss, count) for loss, count in losses if count))
        for total, count in sums:
            mean = float(total) / int(count)
            if not _equal(own_loss.mean, mean):
                return (
                    f"The loss of `{type(stage.model).__name__}` for the first microbatch is "
                    f"{float(own_loss.mean):.6g}. The mean over its {int(count)} target tokens of the loss of the "
                    f"next token, on which `parallel` trains, is {mean:.6g}. Train this model without `parallel`, or "
                    "pass labels for which the two are equal."
                )
        return None


def _other_function(model: PreTrainedModel, device: torch.device) -> str | None:
    """Returns a sentence if a model's loss function is not that of the next token."""
    # The logits of an untrained model say little: whatever the target, its loss is that of the uniform distribution.
    drawn = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(1, 16, 32, generator=drawn).to(device)
    labels = torch.randint(32, (1, 16), generator=drawn).to(device)
    own_loss = model.loss_function(logits=logits, labels=labels, vocab_size=32)
    total, count = token_loss(model, logits, labels)
    mean = float(total) / int(count)
    if _equal(own_loss, mean):
        return None
    return (
        f"The loss function of `{type(model).__name__}` gives {float(own_loss):.6g} for random logits and labels. "
        f"With the labels of the next token as `shift_labels`, on which `parallel` trains, it gives {mean:.6g}. "
        "Train this model without `parallel`, or correct its `loss_function`."
    )


def _equal(own_loss: torch.Tensor, mean: float) -> bool:
    """Returns whether two losses differ by rounding only."""
    if not (math.isfinite(float(own_loss)) or math.isfinite(mean)):
        # of losses that are not finite the Trainer warns
        return True
    tolerance = max(_LOSS_TOLERANCE, 4 * torch.finfo(own_loss.dtype).eps)  # a loss may be in half precision
    return abs(float(own_loss) - mean) <= tolerance * abs(mean)


def _unequal(names: Sequence[str], num_parameters: int, ranks: tuple[int, ...]) -> str:
    return (
        f"{len(names)} of the {num_parameters} parameters that the ranks {ranks} hold together have other values on "
        f"some of them, the first is `{names[0]}`. Change weights before the Trainer is made, in the same way on all "
        "ranks."
    )


def _bit_sums(shard: LocalShard) -> torch.Tensor:
    """Returns two sums over the bits of what this rank holds, as whole numbers, which no order of adding changes."""
    values = shard.of(shard.parameter).detach()
    bits = values.contiguous().reshape(-1).view(_BITS[values.dtype.itemsize])
    return torch.stack([bits.sum(dtype=torch.int64), bits[::2].sum(dtype=torch.int64)])


def _extremes(values: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the largest and the smallest of each value over a group, on the CPU."""
    extremes = torch.stack([values, -values])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    high, low = extremes.cpu()
    return high, -low
