"""Context parallelism on the side of data: which tokens of a packed row each row of ranks has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..arrange import BLOCK, ContextAssignment, ContextCosts, assign_context
from ..arrange.blocks import Method
from ..arrange.context import Mode
from ..cost import CostModel
from ..kernels.bitfield_attention import BitfieldMask, decode_words
from ..kernels.bitfield_attention.context_parallel import SequenceShard, shard_sequence
from ..kernels.bitfield_attention.intervals import row_bounds
from ..modeling.loss import IGNORE_INDEX
from ..plan import LANGUAGE_MODEL, ContextSettings, ParallelPlan, StepPlan

BatchKey = tuple[str, int, int, int]
WORDS = "attention_words"


@dataclass(frozen=True, eq=False)
class ContextCut:
    """
    A packed row of tokens cut over the rows of ranks of a grid. Every entry of the batch that has a value for each
    token follows it, and so do the features that replace placeholder tokens.

    Args:
        assignment ([`ContextAssignment`]): Which token of the row is where.
        words (`torch.Tensor` of shape `[1, length]`): The mask words of the row, on the CPU.
        order (`torch.Tensor` of shape `[rows, tokens]`): int64: the token at each place of each row of ranks, -1 for
            padding.
        holders (`Mapping[str, tuple[torch.Tensor, torch.Tensor]]`):
            Modality -> for each of its placeholder tokens, int64 row of ranks that has it and int64 place among the
            placeholders of the modality there.
        rows (`Mapping[str, list[int]]`): Modality -> placeholder tokens of each sample.
        token_dims (`Mapping[str, int]`): Entry of the batch -> its dimension of tokens.
        filler (`int`): The id of padding tokens, which is no placeholder.
    """

    assignment: ContextAssignment
    words: Tensor
    order: Tensor
    holders: Mapping[str, tuple[Tensor, Tensor]]
    rows: Mapping[str, list[int]]
    token_dims: Mapping[str, int]
    filler: int

    def local(self, batch: Mapping[str, Any], row: int) -> dict[str, Any]:
        """
        What a row of ranks has of a batch, without the words. Labels become `shift_labels`: a token's successor may be
        elsewhere.
        """
        fields = {name: value for name, value in batch.items() if name not in (WORDS, "labels")}
        if "labels" in batch and "shift_labels" not in batch:
            fields["shift_labels"] = nn.functional.pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[..., 1:]
        own = self.order[row].to(batch["input_ids"].device)
        paddings = {"input_ids": self.filler, "shift_labels": IGNORE_INDEX}
        dims = {**self.token_dims, "shift_labels": 1}
        return {
            name: _taken(value, dims[name], own, paddings.get(name, 0)) if name in dims else value
            for name, value in fields.items()
        }

    def shard(self, row: int, group: Any, device: torch.device) -> SequenceShard:
        """
        What the attention of a row of ranks needs to know.

        Args:
            row (`int`): The row of ranks, which is this rank's place in `group`.
            group (`torch.distributed.ProcessGroup`): The ranks that share the tokens.
            device (`torch.device`): Where the attention computes.
        """
        return shard_row(self.words, self.assignment, row, group, device)


def _taken(value: Tensor, dim: int, own: Tensor, padding: int) -> Tensor:
    """The tokens `own` of a tensor, with `padding` where these are -1."""
    shape = [1] * value.dim()
    shape[dim] = -1
    return value.index_select(dim, own.clamp_min(0)).masked_fill((own < 0).view(shape), padding)


@dataclass(frozen=True)
class ContextCutter:
    """
    Cuts the language model's microbatches where a plan gives it several rows of ranks. Every rank that cuts a
    microbatch gets the same cut. Can be pickled, for the workers of a data loader.

    Args:
        plan (`ParallelPlan`): The plan.
        rank (`int`): This rank.
        placeholders (`Mapping[str, int]`): Modality -> id of its placeholder token.
        media (`frozenset[str]`): Entries of a batch that encoders read; they have no tokens.
        costs (`ContextCosts`, *optional*): Of a layer, for the choice of a mode; the same on all ranks.
        windows (`Mapping[int, int]`, *optional*): Sliding window in tokens, 0 for none -> layers that have it.
    """

    plan: ParallelPlan
    rank: int
    placeholders: Mapping[str, int]
    media: frozenset[str]
    costs: ContextCosts | None = None
    windows: Mapping[int, int] | None = None

    @property
    def settings(self) -> ContextSettings:
        return self.plan.modules[LANGUAGE_MODEL].context

    def keys(self, step: StepPlan) -> dict[BatchKey, tuple[int, ...]]:
        """
        (module, replica, microbatch, chunk) -> samples, of each microbatch whose cut this rank needs: those that it
        works on, and those that its encoders make features for.
        """
        if self.plan.modules[LANGUAGE_MODEL].cp_size == 1:
            return {}
        mine = {(module, replica) for module, replica, _ in self.plan.stages_of_rank(self.rank)}
        needed = set()
        for module, replica in mine:
            for index, slots in enumerate(step.microbatches[module][replica]):
                if module == LANGUAGE_MODEL:
                    needed.add((replica, index))
                else:
                    needed.update(step.places[LANGUAGE_MODEL, slot] for slot in slots)
        return {
            (LANGUAGE_MODEL, replica, index, chunk): slots
            for replica, index in sorted(needed)
            for chunk, slots in enumerate(step.chunks[LANGUAGE_MODEL, replica, index])
        }

    def __call__(self, batch: Mapping[str, Any]) -> ContextCut:
        """
        Cuts a batch.

        Args:
            batch (`Mapping[str, Any]`): A packed row, as [`PackingCollator`] makes it.

        Raises:
            `ValueError`: If the batch is no packed row.
        """
        words, ids = batch.get(WORDS), batch.get("input_ids")
        if not isinstance(words, Tensor) or not isinstance(ids, Tensor) or words.shape != ids.shape or len(ids) != 1:
            shapes = {name: tuple(batch[name].shape) for name in ("input_ids", WORDS) if name in batch}
            raise ValueError(
                f"Context parallelism cuts one packed row with `input_ids` and `{WORDS}` of shape (1, length), the "
                f"batch has {shapes}. Wrap the collator in a `PackingCollator`."
            )
        num_rows = self.plan.modules[LANGUAGE_MODEL].cp_size
        words, row = words.cpu(), ids[0].cpu()
        assignment = self._assign(words, num_rows)
        order = torch.from_numpy(assignment.order).view(num_rows, -1)
        dims = {
            name: dim
            for name, value in batch.items()
            if isinstance(value, Tensor) and name not in self.media and (dim := _token_dim(value, ids.shape))
        }
        filler = next(token for token in count() if token not in self.placeholders.values())
        segments = decode_words(words[0]).segment
        holders, rows = {}, {}
        for modality, token in self.placeholders.items():
            wanted = (row == token) & (segments > 0)
            holders[modality] = _holders(wanted, order)
            rows[modality] = segments[wanted].bincount(minlength=int(segments.max()) + 1)[1:].tolist()
        return ContextCut(assignment, words, order, holders, rows, dims, filler)

    def _assign(self, words: Tensor, num_rows: int) -> ContextAssignment:
        """Which token is where; without costs `"auto"` gathers the whole row."""
        mode: Any = self.settings.mode
        if mode == "auto" and (self.costs is None or self.settings.method != "lpt"):
            mode = "row"
        method: Any = self.settings.method
        return cut_row(words, num_rows, self.settings.block, method, mode, self.costs, self.windows)


def _holders(wanted: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """The row of ranks that has each wanted token of a row, and its place among the wanted tokens there."""
    held = wanted[order.clamp_min(0)] & (order >= 0)
    owners, places = (torch.empty(len(wanted), dtype=torch.int64) for _ in range(2))
    owners[order[held]] = torch.arange(len(order))[:, None].expand_as(order)[held]
    places[order[held]] = (held.cumsum(1) - 1)[held]
    return owners[wanted], places[wanted]


def _token_dim(value: Tensor, shape: torch.Size) -> int | None:
    """The dimension of tokens of an entry of a packed batch: `(1, length, ...)` or `(axes, 1, length)`."""
    if value.shape[:2] == shape:
        return 1
    return 2 if value.shape[1:] == shape else None


def cut_row(
    words: Tensor,
    num_ranks: int,
    block: int = BLOCK,
    method: Method = "lpt",
    mode: Mode | Literal["auto"] = "row",
    costs: ContextCosts | None = None,
    windows: Mapping[int, int] | None = None,
) -> ContextAssignment:
    """
    Cuts a packed row over the ranks that share its tokens: equal tokens for each and, as far as blocks allow, equal
    attention work by what the words see. Every rank that calls it with the same arguments gets the same cut.

    Args:
        words (`torch.Tensor` of shape `[1, length]`): int64 mask words of the row.
        num_ranks (`int`): Ranks.
        block (`int`, *optional*, defaults to 128): Tokens that stay together.
        method (`str`, *optional*, defaults to `"lpt"`): `"lpt"`, `"zigzag"`, `"contiguous"` or `"random"`.
        mode (`str`, *optional*, defaults to `"row"`):
            `"row"` gathers the keys and values of the whole row, `"segments"` those of samples that lie on several
            ranks, `"auto"` takes what `costs` predict to be faster.
        costs ([`ContextCosts`], *optional*): Of a layer, for `"auto"`.
        windows (`Mapping[int, int]`, *optional*):
            Sliding window in tokens, 0 for none -> layers that have it. Work is then that of the mean layer.

    Returns:
        [`ContextAssignment`]: For [`shard_row`].

    Raises:
        `ValueError`: If the words are not one row, and for arguments that do not go together.
    """
    if words.dim() != 2 or len(words) != 1:
        raise ValueError(
            f"`words` has shape {tuple(words.shape)}; one row `[1, length]` is cut over the ranks. Pack the samples "
            "into one row."
        )
    words = words.cpu()
    first, last = _mean_bounds(BitfieldMask.from_words(words), windows or {0: 1})
    segments = decode_words(words[0]).segment.numpy()
    return assign_context(first.numpy(), last.numpy(), num_ranks, block, method, mode, segments, costs)


def _mean_bounds(mask: BitfieldMask, windows: Mapping[int, int]) -> tuple[Tensor, Tensor]:
    """The first and the last token that each token of a row sees in the mean layer, int64 `[length]`."""
    bounds = [row_bounds(mask, window)[0] for window in windows]
    firsts, lasts = (torch.cat(ends).long() for ends in zip(*((b.first, b.last) for b in bounds), strict=True))
    last = lasts.amax(0)  # a window only bounds how far a token looks back
    layers = torch.tensor(list(windows.values()))[:, None]
    return last + 1 - ((lasts - firsts + 1) * layers).sum(0) // layers.sum(), last


def layer_windows(config: Any, num_layers: int) -> dict[int, int]:
    """
    The sliding windows of a language model's layers: tokens, 0 for none -> number of layers.

    Args:
        config ([`~transformers.PreTrainedConfig`]): Of the language model.
        num_layers (`int`): Its layers.
    """
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    sliding = list(types).count("sliding_attention") if window else 0
    return {size: count for size, count in ((0, num_layers - sliding), (window, sliding)) if count}


def shard_row(
    words: Tensor, assignment: ContextAssignment, rank: int, group: Any, device: torch.device | None = None
) -> SequenceShard:
    """
    One rank's part of a row that [`cut_row`] has cut, which a model takes as `attention_words`.

    Args:
        words (`torch.Tensor` of shape `[1, length]`): int64 mask words of the row.
        assignment ([`ContextAssignment`]): Its cut.
        rank (`int`): This rank in `group`.
        group (`torch.distributed.ProcessGroup`): The ranks that share the row; `None` for one rank.
        device (`torch.device`, *optional*): Where the attention computes; that of `words` when left out.
    """
    shard = shard_sequence(
        words.cpu(),  # checked there, where looking at values waits for nothing
        assignment.order,
        rank,
        group,
        positions=assignment.positions,
        gathered=assignment.gathered,
        block=assignment.block,
        num_ranks=assignment.num_ranks,
    )
    device = words.device if device is None else device
    sent = None if shard.sent is None else shard.sent.to(device)
    return replace(shard, mask=shard.mask.to(device), order=shard.order.to(device), sent=sent)


def layer_costs(costs: CostModel, plan: ParallelPlan) -> ContextCosts:
    """
    What a layer of the language model costs on one rank.

    Args:
        costs (`CostModel`): What layers cost.
        plan (`ParallelPlan`): The plan.
    """
    module = costs.spec.language_model
    tp_size = plan.modules[LANGUAGE_MODEL].tp_size
    uses = [costs.spec.uses.get((LANGUAGE_MODEL, layer), ()) for layer in range(module.num_layers)]
    num_active = sum(use.num_active for found in uses for use in found)
    columns = plan.modules[LANGUAGE_MODEL].replicas[0][0].columns
    return ContextCosts.of_layer(
        module.num_heads // tp_size,
        module.num_kv_heads // tp_size,
        module.head_width,
        int(num_active) // (module.num_layers * tp_size),
        costs.device.flops_per_ms,
        costs.device.link_bytes_per_ms(columns[0]),
        costs.value_bytes,
    )
