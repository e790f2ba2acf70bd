"""Data side of encoders with several cp ranks: spreads whole images, frames and clips over them, or their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..cost.row_sizes import SHARES_ABOVE
from ..modeling.features import (
    count_feature_tokens,
    feature_runs,
    flat_features,
    forward_arguments,
    meta_forward,
    meta_inputs,
)
from ..modeling.shared_tokens import even_parts
from ..modeling.spec import ModulePart
from ..plan import ModelSpec, ModuleSpec
from .context_tokens import ContextSharder, ContextSharding
from .skeleton import frames_are_apart, make_skeleton

VIDEO = "video"

# An *item* is what an encoder computes by itself: an image, a crop of one, a clip of sound. The ranks that compute
# features and those that take them derive the items of a chunk, and the cp rank of each, from tokens and whole numbers
# alone, so that a rank of the language model needs no pixels.


@dataclass(frozen=True, eq=False)
class Items:
    """The items of one modality in a chunk, in the order of their placeholders, and the cp rank that computes each."""

    entries: tuple[str, ...]  # of a batch that hold them, the main one first
    frames: Tensor  # int64 [rows] items that a row of a table stands for: frames of a video that attend apart, else 1
    tokens: Tensor  # int64 [items] feature tokens of each
    extents: Tensor  # int64 [items] the product of the numbers by which a table gives its extent, 1 without one
    cp_ranks: Tensor  # int64 [items]

    def select(self, batch: Mapping[str, Any], cp_rank: int) -> dict[str, Any]:
        """The entries of a batch with the items of one cp rank only."""
        own = self.cp_ranks == cp_rank
        rows = own.repeat_interleave(self.extents)  # of an entry in which all items are one after the other
        selected = {}
        for name in self.entries:
            value = batch.get(name)
            if isinstance(value, (list, tuple)) and len(value) == len(own):
                selected[name] = [row for row, is_own in zip(value, own.tolist(), strict=True) if is_own]
            elif isinstance(value, Tensor) and value.dim():
                value = _by_frame(value, self.frames)
                mask = next((mask for mask in (own, rows) if len(mask) == len(value)), None)
                if mask is None:
                    raise ValueError(
                        f"`{name}` has the shape {tuple(value.shape)}, and {len(own)} images, frames or clips can't "
                        "be told apart in it, so that cp ranks can't share them out. Use `cp_size=1`, with `dp_size` "
                        "or `tp_size` above 1 for more ranks."
                    )
                selected[name] = value[mask]
        return selected


@dataclass(frozen=True, eq=False)
class ItemSharding:
    """Distribution of the items of an encoder's chunk over its cp ranks; see [`ContextSharding`]."""

    items: Mapping[str, Items]  # by modality
    # modality -> for each of its feature tokens, its int64 cp rank and its int64 index among those on that rank
    owners: Mapping[str, tuple[Tensor, Tensor]]
    num_tokens: Mapping[str, list[int]]  # modality -> number of feature tokens of each sample
    # whether the cp ranks share the tokens of every item, so that each has all items and consecutive features
    by_tokens: bool = False

    def local(self, batch: Mapping[str, Any], cp_rank: int) -> dict[str, Any]:
        if self.by_tokens:
            return dict(batch)
        selected = [items.select(batch, cp_rank) for items in self.items.values()]
        return {**batch, **{name: value for entries in selected for name, value in entries.items()}}

    @property
    def decided(self) -> list[NDArray]:
        found = [tensor.numpy() for items in self.items.values() for tensor in (items.tokens, items.cp_ranks)]
        return [*found, np.array([self.by_tokens])]


@dataclass(frozen=True)
class ItemSharder:
    """Distributes the items of an encoder's chunks over cp ranks, alike on all ranks; can be pickled, for workers."""

    cp_size: int
    placeholders: Mapping[str, int]  # modality -> id of its placeholder token
    entries: Mapping[str, tuple[str, ...]]  # modality of the encoder -> entries of a batch, the main one first
    # operations of a layer: for each token, and for each two tokens of an item
    layer_work: tuple[int, int]
    # modality -> feature tokens of an item, where all have the same number
    item_tokens: Mapping[str, int]
    splits_frames: bool = False  # the frames of a video attend apart
    shares_tokens: bool = False  # the ranks can share the tokens of an item

    @classmethod
    def of(cls, model: PreTrainedModel, spec: ModelSpec, part: ModulePart, name: str, cp_size: int) -> ItemSharder:
        module = spec.modules[name]
        active = sum(use.num_active for use in spec.uses.get((name, 0), ()))
        entries = {modality: part.input_names(modality) for modality in part.modalities}
        work = (2 * int(active), 4 * module.hidden_size)
        tower: Any = model.get_submodule(part.tower)
        inputs = meta_inputs(tower) if isinstance(tower, PreTrainedModel) else None
        main = (inputs or {}).get(forward_arguments(tower)[0])
        tokens, splits_frames = {}, False
        if inputs is not None and isinstance(main, Tensor):
            if "grid_thw" in inputs:
                skeleton = make_skeleton(model, [part.stack for part in spec.modules.values()])
                splits_frames = frames_are_apart(skeleton, name, inputs["grid_thw"], main.shape[1])
            elif len(main) == 1:
                tokens = _equal_items(model, module, part, main)
        return cls(cp_size, spec.placeholders, entries, work, tokens, splits_frames, module.shares_tokens)

    def __call__(self, batch: Mapping[str, Any]) -> ItemSharding:
        """Distributes the items of a batch with the tokens of an encoder's samples, with or without media."""
        found = {modality: self._items(batch, modality) for modality in self.entries}
        work = np.concatenate([self._work(tokens, extents) for _, tokens, extents in found.values()])
        whole = spread(work, self.cp_size)
        busiest = np.bincount(whole, work, self.cp_size).max()
        by_tokens = self.shares_tokens and bool(busiest * self.cp_size > SHARES_ABOVE * work.sum())
        cp_ranks = torch.from_numpy(whole).split([len(tokens) for _, tokens, _ in found.values()])
        items, owners = {}, {}
        for (modality, (frames, tokens, extents)), ranks in zip(found.items(), cp_ranks, strict=True):
            items[modality] = Items(self.entries[modality], frames, tokens, extents, ranks)
            of_tokens = ranks.repeat_interleave(tokens)
            if by_tokens:
                parts = torch.tensor(even_parts(len(of_tokens), self.cp_size))
                of_tokens = torch.arange(self.cp_size).repeat_interleave(parts)
            owners[modality] = _owners(of_tokens, self.cp_size)
        return ItemSharding(items, owners, count_feature_tokens(batch, self.placeholders), by_tokens)

    def _items(self, batch: Mapping[str, Any], modality: str) -> tuple[Tensor, Tensor, Tensor]:
        """The [`Items.frames`], and the feature tokens and the extent of each item of a modality."""
        runs = torch.tensor(feature_runs(batch, self.placeholders[modality]), dtype=torch.int64)
        total, known = int(runs.sum()), self.item_tokens.get(modality)
        values = [batch[name] for name in self.entries[modality] if name in batch]
        tables = [value.cpu() for value in values if isinstance(value, Tensor) and _is_table(value)]
        if not tables:  # an item is a row of the main entry, which may be left out of the batch
            if known and total % known == 0:
                runs = torch.full((total // known,), known)
            return torch.ones_like(runs), runs, torch.ones_like(runs)
        extents = next((table for table in tables if table.shape[1:] in ((2,), (3,))), None)
        if extents is None:
            extents = torch.ones(len(tables[0]), 1, dtype=torch.int64)
        frames = extents[:, 0] if self.splits_frames and extents.shape[1] == 3 else torch.ones_like(extents[:, 0])
        extents = _by_frame(extents, frames).prod(-1)
        if len(runs) == len(extents):
            return frames, runs, extents
        shares = extents * total
        if not total or (shares % extents.sum()).any():
            raise ValueError(
                f"{len(extents)} items of `{modality}` have {total} placeholders in {len(runs)} runs, which don't "
                "say how many each has, so that cp ranks can't share them out. Put text between them, or use "
                "`cp_size=1`."
            )
        return frames, shares // extents.sum(), extents

    def _work(self, tokens: Tensor, extents: Tensor) -> NDArray:
        """Operations of a layer for each item, whole numbers."""
        lengths = torch.where(extents > 1, extents, tokens).numpy()
        per_token, per_pair = self.layer_work
        return lengths * (per_token + per_pair * lengths)


Sharder = ContextSharder | ItemSharder
Sharding = ContextSharding | ItemSharding


def spread(work: NDArray, num_ranks: int) -> NDArray:
    """int64 `[items]`: the rank of each item, the heaviest first to the rank with the least work so far."""
    ranks, loads = np.zeros(len(work), np.int64), np.zeros(num_ranks)
    for item in np.argsort(-work, kind="stable"):
        ranks[item] = loads.argmin()
        loads[ranks[item]] += work[item]
    return ranks


def _owners(cp_ranks: Tensor, cp_size: int) -> tuple[Tensor, Tensor]:
    """The cp rank of each token, and its index among the tokens on that rank."""
    here = cp_ranks[:, None] == torch.arange(cp_size)
    return cp_ranks, (here.cumsum(0) - 1)[here]


def _by_frame(table: Tensor, frames: Tensor) -> Tensor:
    """A table with a row for each frame, which is the extent of one where rows are extents."""
    if len(table) != len(frames) or (frames == 1).all():
        return table
    table = table.repeat_interleave(frames, 0)
    if table.shape[1:] == (3,):
        table[:, 0] = 1
    return table


def _is_table(value: Tensor) -> bool:
    """Whether a tensor of a batch has whole numbers, a row for each item."""
    return value.dim() > 1 and not value.is_floating_point() and not value.is_complex()


def _equal_items(model: PreTrainedModel, module: ModuleSpec, part: ModulePart, row: Tensor) -> dict[str, int]:
    """Modality -> feature tokens of an item, which is the `row` that follows from the encoder's config."""
    found = {}
    for feature in module.features:
        modality = feature.modality
        if modality not in found and modality != VIDEO:  # a row of videos has frames
            output = meta_forward(_Method(model, part.features[modality]), **{part.input_names(modality)[0]: row})
            if output is not None:
                found[modality] = flat_features(getattr(output, feature.field)).shape[0]
    return found


class _Method(nn.Module):
    """A method of a part of a model as the forward of a module with the parameters of the model."""

    def __init__(self, model: nn.Module, method: Callable[..., Any]):
        super().__init__()
        self.model, self.method = model, method

    def forward(self, **inputs: Any) -> Any:
        return self.method(**inputs)
