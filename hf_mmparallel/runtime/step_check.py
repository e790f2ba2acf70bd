"""Checks that all ranks are about to run the same step, and that the first one is the step of one process."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ..data.context_tokens import WORDS
from ..data.fingerprint import MEDIA_ROUNDING, StepFingerprint
from ..modeling import token_loss
from ..modeling.stages import ModuleStage
from ..modeling.unowned import local
from ..plan import LANGUAGE_MODEL, StageKey, StepPlan
from ..plan.ownership import SyncGroup
from ..world import World
from .groups import ProcessGroups, tp_groups
from .optimizer_slices import LocalShard
from .sharded_model import ShardedModel
from .work import StepResult

_UNKNOWN_VALUE = torch.iinfo(torch.int64).min
_SEEDS = (
    "Several ranks read the same samples under a plan. While they do, the global generators of `random`, `numpy` and "
    "`torch` have the same seeds on all of them: a dataset or collator that augments, shuffles, or replaces what it "
    'can\'t read must draw from these and not from a generator of its own. `on_bad_sample="skip"` leaves out samples '
    "that can't be read."
)


class StepCheck:
    """
    Compares what ranks decided on their own before they exchange tensors, whose sizes and order follow from it.

    A rank knows the programs of those only that it exchanges tensors with in a step. With all others it has nothing in
    common but gradient sums, which the same plan puts in the same order on every rank at every step.
    """

    def __init__(self, world: World, num_replicas: int, sums: int):
        self.world = world
        self.num_replicas = num_replicas
        self.sums = sums  # checksum of the gradient sums of all ranks in their order

    def __call__(self, mark: StepFingerprint, step: StepPlan) -> None:
        """Raises `RuntimeError` on all ranks, with the table of ranks, if they disagree. Collective, at every step."""
        values = {0: (mark.step,), 1: (self.sums,)}
        values |= {2 + replica: (checksum,) for replica, checksum in mark.programs.items()}
        differ = self._differing(values, np.zeros(2 + self.num_replicas, np.int64))
        if 0 in differ:
            raise RuntimeError(
                f"The ranks drew different global batches, or arranged them differently ({self._table(mark.step)}). "
                "The dataset must have the same length and order on all ranks, its samples the same sizes, and "
                "`data_seed` the same value."
            )
        if 1 in differ:
            raise RuntimeError(
                f"The ranks are about to sum other gradients ({self._table(self.sums)}). Which parameters are trained "
                "must be the same on all ranks: set `requires_grad` alike, and use one version of each package."
            )
        if differ:
            checksum = mark.programs.get(differ[0] - 2)
            raise RuntimeError(
                f"The ranks ordered the tasks of the same step differently ({self._table(checksum)}). The order "
                "follows from predicted times, which processors of different kinds can round differently. Use one "
                "kind of processor and one version of each package on all hosts."
            )
        self._compare_contents(mark, step)

    def _compare_contents(self, mark: StepFingerprint, step: StepPlan) -> None:
        """Raises unless ranks that share samples or microbatches of the same step read the same of them."""
        starts: dict[tuple[str, int], int] = {}  # microbatches before those of each replica
        total = 0
        for module, replicas in step.microbatches.items():
            for replica, microbatches in enumerate(replicas):
                starts[module, replica] = total
                total += len(microbatches)
        # Places for samples, then for inputs and media of microbatches, and for the cuts that have each sample.
        num_samples = len(step.samples)
        values: dict[int, Collection[int]] = dict(mark.samples)
        for kind, numbers in enumerate((mark.inputs, mark.media)):
            first = num_samples + kind * total
            values |= {first + starts[key[:2]] + key[2]: (number,) for key, number in numbers.items()}
        first, modules = num_samples + 2 * total, list(step.microbatches)
        values |= {
            first + modules.index(module) * num_samples + batch_index: (checksum,)
            for (module, batch_index), checksum in mark.shardings.items()
        }
        slack = np.zeros(first + len(modules) * num_samples, np.int64)
        slack[num_samples + total : num_samples + 2 * total] = MEDIA_ROUNDING
        differ = self._differing(values, slack)
        if not differ:
            return
        place = differ[0]
        table = self._table(max(values.get(place, ()), default=None))
        if place < num_samples:
            raise RuntimeError(f"Sample {step.samples[place]} differs between ranks that share it ({table}). {_SEEDS}")
        if place < first:
            number = (place - num_samples) % total
            module, replica = next(
                key for key, start in starts.items() if 0 <= number - start < len(step.microbatches[key[0]][key[1]])
            )
            index = number - starts[module, replica]
            raise RuntimeError(
                f"The inputs of microbatch {index} of `{module}`, replica {replica}, differ between the ranks that "
                f"compute it together ({table}). {_SEEDS}"
            )
        number, batch_index = divmod(place - first, num_samples)
        reason = (
            '`cp_mode="auto"` the cut follows from predicted times, which processors of different kinds can round '
            'differently: use `cp_mode="row"`.'
            if modules[number] == LANGUAGE_MODEL
            else "a collator whose `without_media` leaves out more than floating-point entries, ranks can't know the "
            "images of others: keep the whole numbers that go with them, such as grids and sizes."
        )
        raise RuntimeError(
            f"The ranks cut the chunk of `{modules[number]}` with sample {step.samples[batch_index]} differently for "
            f"its cp ranks, and those of {len(differ) - 1} other samples ({table}). With {reason}"
        )

    def _differing(self, values: Mapping[int, Collection[int]], slack: np.ndarray) -> list[int]:
        """Returns the places at which the values of ranks lie farther apart than `slack`; a rank may have none."""
        extremes = np.full((2, len(slack)), _UNKNOWN_VALUE)
        for place, numbers in values.items():
            extremes[:, place] = max(numbers), -min(numbers)
        high, low = self.world.all_reduce(torch.from_numpy(extremes), "max").numpy()
        return np.flatnonzero((high != _UNKNOWN_VALUE) & (high + low > slack)).tolist()

    def _table(self, value: int | None) -> str:
        """Lists, rank by rank, the values of those that have one. Collective."""
        values = self.world.all_gather(value)
        rows = ", ".join(f"rank {rank}: {number % 2**20}" for rank, number in enumerate(values) if number is not None)
        return f"checksums: {rows}"


# The numbers of a step over all ranks.

SIGNS: tuple[str, ...] = ("was_asked_to_stop", "was_asked_to_leave", "sees_waiting", "gave_up_save")
"""
What ranks notice by themselves and tell each other with the numbers of a step, so that they decide alike: a signal
that asks all to stop, or a node to leave, processes that wait to join, and a checkpoint that was given up, since ranks
were lost.
"""


@dataclass(frozen=True)
class LossWeights:
    """How the losses of a step count: each is divided by its own targets in the global batch."""

    num_targets: Mapping[str, int] = field(default_factory=dict)  # module -> its targets, in a model with generators
    # generator -> the factor of its summed loss beside the summed loss of target tokens
    factors: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, num_targets: Mapping[str, int], weights: Mapping[str, float]) -> LossWeights:
        """The weights of a step, whose gradients are divided by the number of target tokens at its end."""
        tokens = max(num_targets[LANGUAGE_MODEL], 1)
        factors = {name: weight * tokens / max(num_targets[name], 1) for name, weight in weights.items()}
        return cls(num_targets, factors)


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks of one step."""

    # float64 scalar on the device, over the target tokens of the global batch, and generators with their factors
    loss: torch.Tensor
    num_targets: int  # target tokens
    num_tokens: int  # input tokens with padding
    num_real_tokens: int  # input tokens without padding
    # module -> its mean loss, of a model with generators
    losses: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def mean_loss(self) -> torch.Tensor:
        return self.loss / max(self.num_targets, 1)


def add_up(
    world: World,
    # module, sum and targets of each microbatch that this rank reports
    losses: Iterable[tuple[str, torch.Tensor, torch.Tensor]],
    batches: Iterable[Mapping[str, Any]],  # of each that it counts the tokens of, in host memory
    signs: Mapping[str, int],
    weighed: LossWeights,
) -> tuple[StepTotals, dict[str, int]]:
    """Adds up a step, and `signs` of what ranks have noticed, without waiting for the device. Collective."""
    names = [LANGUAGE_MODEL, *weighed.factors]
    sums = torch.zeros(len(names), dtype=torch.float64, device=world.device)
    numbers = torch.tensor([0, 0, 0, *signs.values()], dtype=torch.int64)
    for module, of_microbatch, count in losses:
        sums[names.index(module)] += of_microbatch
        numbers[0] += count if module == LANGUAGE_MODEL else 0
    for inputs in batches:
        ids = inputs["input_ids"]
        numbers[1] += ids.numel()
        words = inputs.get(WORDS)
        mask = inputs.get("attention_mask") if words is None else words != 0
        numbers[2] += ids.numel() if mask is None or mask.dim() != 2 else int(mask.sum())
    targets, tokens, real, *num_signs = world.all_reduce(numbers, activity="adding up the step").tolist()
    world.all_reduce(sums, activity="adding up the loss")
    by_module = dict(zip(names, sums, strict=True))
    loss = sums[0] + sum(factor * by_module[name] for name, factor in weighed.factors.items())
    means = {name: by_module[name] / max(count, 1) for name, count in weighed.num_targets.items()}
    return StepTotals(loss, targets, tokens, real, means), dict(zip(signs, num_signs, strict=True))


# Checks in the first step of a run: equal copies of parameters, and the loss that the model itself has.

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

    @classmethod
    def of(
        cls,
        sharded: ShardedModel,
        stages: Mapping[StageKey, ModuleStage],
        sync_groups: Iterable[SyncGroup],
        by_ranks: Mapping[tuple[int, ...], Any],
        replicated: Sequence[ReplicatedParameters],
        has_loss: bool,  # the loss is the model's own
        smooths: bool,
    ) -> FirstStepCheck:
        rank, named = sharded.world.rank, dict(sharded.model.named_parameters())

        def held(name: str, ranks: tuple[int, ...]) -> LocalShard:
            return LocalShard(named[name], sharded.regions.get((name, ranks)))

        copies = [
            (group.ranks, by_ranks[group.ranks], {name: held(name, group.ranks) for name in group.parameters})
            for group in sync_groups
            if rank in group.ranks and group.zero_stage < 3
        ]
        frozen: dict[tuple[int, ...], dict[str, LocalShard]] = {}
        for name, shards in sharded.shards.items():
            for shard in shards.on_rank(rank):
                if len(shard.holders) > 1 and not sharded.spec.parameters[name].trainable and not shard.zero_cut:
                    frozen.setdefault(shard.holders, {})[name] = held(name, shard.holders)
        has_loss = has_loss and "labels" in inspect.signature(sharded.model.forward).parameters
        with_loss = {
            key: stage
            for key, stage in stages.items()
            if has_loss and stage.module_name == LANGUAGE_MODEL and stage.is_last
        }
        return cls(replicated, copies, frozen, with_loss, smooths, sharded.world)

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
