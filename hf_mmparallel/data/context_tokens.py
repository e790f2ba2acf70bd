"""Data side of context parallelism: distributes the tokens of a packed row over cp ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..arrange.token_assignment import BLOCK, ContextAssignment, Method, Mode
from ..arrange.token_segments import ContextCosts, assign_context
from ..cost import CostModel
from ..kernels.bitfield_attention import BitfieldMask, decode_words
from ..kernels.bitfield_attention.context_parallel import SequenceShard, shard_sequence
from ..kernels.bitfield_attention.intervals import row_bounds
from ..modeling.loss import IGNORE_INDEX
from ..plan import LANGUAGE_MODEL, ContextSettings, ParallelPlan

ChunkKey = tuple[str, int, int, int]
WORDS = "attention_words"


@dataclass(frozen=True, eq=False)
class ContextSharding:
    """Distribution of a packed row over cp ranks, alike for all values per token and features of placeholders."""

    assignment: ContextAssignment  # the cp rank of each token
    words: Tensor  # [1, length] the mask words of the row, on the CPU
    order: Tensor  # [cp_size, tokens] int64 tokens of each cp rank, -1 for padding
    # modality -> for each of its placeholder tokens, its int64 cp rank and its int64 index among those on that rank
    owners: Mapping[str, tuple[Tensor, Tensor]]
    num_tokens: Mapping[str, list[int]]  # modality -> number of placeholder tokens of each sample
    token_dims: Mapping[str, int]  # batch entry -> its token dimension
    filler: int  # id of padding tokens, which is not a placeholder

    def local(self, batch: Mapping[str, Any], cp_rank: int) -> dict[str, Any]:
        """Selects the tokens of a cp rank in a batch, without the mask words."""
        fields = {name: value for name, value in batch.items() if name not in (WORDS, "labels")}
        # the next token may be on another rank
        if "labels" in batch and "shift_labels" not in batch:
            fields["shift_labels"] = nn.functional.pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[..., 1:]
        tokens = self.order[cp_rank].to(batch["input_ids"].device)
        paddings = {"input_ids": self.filler, "shift_labels": IGNORE_INDEX}
        dims = {**self.token_dims, "shift_labels": 1}
        return {
            name: _select_tokens(value, dims[name], tokens, paddings.get(name, 0)) if name in dims else value
            for name, value in fields.items()
        }

    @property
    def decided(self) -> list[NDArray]:
        """What all ranks that know the chunk must have alike: the cp rank of each token, and the gathered blocks."""
        return [self.assignment.layout, self.assignment.blocks, self.assignment.gathered]

    def shard(self, cp_rank: int, group: Any, device: torch.device) -> SequenceShard:
        """The shard of the attention on a cp rank: this rank's index in `group`, which shares the tokens."""
        return shard_row(self.words, self.assignment, cp_rank, group, device)


def _select_tokens(value: Tensor, dim: int, tokens: Tensor, padding: int) -> Tensor:
    """Selects tokens of a tensor, with `padding` for tokens -1."""
    shape = [1] * value.dim()
    shape[dim] = -1
    return value.index_select(dim, tokens.clamp_min(0)).masked_fill((tokens < 0).view(shape), padding)


@dataclass(frozen=True)
class ContextSharder:
    """Distributes the language model's microbatches over cp ranks, alike on all ranks; can be pickled, for workers."""

    plan: ParallelPlan
    placeholders: Mapping[str, int]  # modality -> id of its placeholder token
    media: frozenset[str]  # inputs of encoders in a batch, which have no token dimension
    costs: ContextCosts | None = None  # of a layer, for the choice of a mode; the same on all ranks
    windows: Mapping[int, int] | None = None  # see [`~ModuleSpec.attention_windows`]

    @property
    def settings(self) -> ContextSettings:
        return self.plan.modules[LANGUAGE_MODEL].context

    def __call__(self, batch: Mapping[str, Any]) -> ContextSharding:
        """Distributes a packed row from [`PackingCollator`]; raises `ValueError` for any other batch."""
        words, ids = batch.get(WORDS), batch.get("input_ids")
        if not isinstance(words, Tensor) or not isinstance(ids, Tensor) or words.shape != ids.shape or len(ids) != 1:
            shapes = {name: tuple(batch[name].shape) for name in ("input_ids", WORDS) if name in batch}
            raise ValueError(
                f"Context parallelism needs one packed row with `input_ids` and `{WORDS}` of shape (1, length), but "
                f"the batch has {shapes}. Wrap the collator in a `PackingCollator`."
            )
        cp_size = self.plan.modules[LANGUAGE_MODEL].cp_size
        words, row = words.cpu(), ids[0].cpu()
        assignment = self._assign(words, cp_size)
        order = torch.from_numpy(assignment.order).view(cp_size, -1)
        dims = {
            name: dim
            for name, value in batch.items()
            if isinstance(value, Tensor) and name not in self.media and (dim := _token_dim(value, ids.shape))
        }
        own = [n for n, value in batch.items() if n not in self.media and n not in dims and _is_medium(value)]
        if own:
            raise ValueError(
                f"`cp_size={cp_size}` cuts rows with the placeholders of {own}, which `{LANGUAGE_MODEL}` reads by "
                "itself and not by an encoder, whose features could be cut alike. Use `cp_size=1`."
            )
        filler = next(token for token in count() if token not in self.placeholders.values())
        segments = decode_words(words[0]).segment
        owners, num_tokens = {}, {}
        for modality, token in self.placeholders.items():
            wanted = (row == token) & (segments > 0)
            owners[modality] = _owners_of(wanted, order)
            num_tokens[modality] = segments[wanted].bincount(minlength=int(segments.max()) + 1)[1:].tolist()
        return ContextSharding(assignment, words, order, owners, num_tokens, dims, filler)

    def _assign(self, words: Tensor, cp_size: int) -> ContextAssignment:
        """Assigns tokens to cp ranks; without costs `"auto"` gathers the whole row."""
        mode: Any = self.settings.mode
        if mode == "auto" and (self.costs is None or self.settings.method != "lpt"):
            mode = "row"
        method: Any = self.settings.method
        return cut_row(words, cp_size, self.settings.block, method, mode, self.costs, self.windows)


def _owners_of(wanted: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """For each wanted token of a row its cp rank, and its index among the wanted tokens on that rank."""
    present = wanted[order.clamp_min(0)] & (order >= 0)
    owners, indices = (torch.empty(len(wanted), dtype=torch.int64) for _ in range(2))
    owners[order[present]] = torch.arange(len(order))[:, None].expand_as(order)[present]
    indices[order[present]] = (present.cumsum(1) - 1)[present]
    return owners[wanted], indices[wanted]


def _is_medium(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.dim() > 2)  # such as codes of frames


def _token_dim(value: Tensor, shape: torch.Size) -> int | None:
    """Token dimension of an entry of a packed batch, `(1, length, ...)` or `(axes, 1, length)`."""
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
    Distributes a packed row over cp ranks: equal numbers of tokens and, as far as blocks allow, equal attention work
    according to the mask words. The result is the same on every rank.

    Args:
        words (`torch.Tensor` of shape `[1, length]`): int64 mask words of the row.
        num_ranks (`int`): Number of cp ranks.
        block (`int`, *optional*, defaults to 128): Tokens per block.
        method (`str`, *optional*, defaults to `"lpt"`): `"lpt"`, `"zigzag"`, `"contiguous"` or `"random"`.
        mode (`str`, *optional*, defaults to `"row"`):
            `"row"` gathers the keys and values of the whole row, `"segments"` those of samples on several ranks,
            `"auto"` chooses the faster mode according to `costs`.
        costs ([`ContextCosts`], *optional*): Costs of a layer, for `"auto"`.
        windows (`Mapping[int, int]`, *optional*):
            Sliding window in tokens, 0 for none -> number of layers with it. Work is then that of the mean layer.

    Raises:
        `ValueError`: If the words are not one row, and for contradicting arguments.
    """
    if words.dim() != 2 or len(words) != 1:
        raise ValueError(
            f"`words` has shape {tuple(words.shape)}, not that of one row, `[1, length]`. Pack the samples into "
            "one row."
        )
    words = words.cpu()
    first, last = _mean_bounds(BitfieldMask.from_words(words), windows or {0: 1})
    segments = decode_words(words[0]).segment.numpy()
    return assign_context(first.numpy(), last.numpy(), num_ranks, block, method, mode, segments, costs)


def _mean_bounds(mask: BitfieldMask, windows: Mapping[int, int]) -> tuple[Tensor, Tensor]:
    """First and last token visible to each token of a row in the mean layer, int64 `[length]` each."""
    bounds = [row_bounds(mask, window)[0] for window in windows]
    firsts, lasts = (torch.cat(ends).long() for ends in zip(*((b.first, b.last) for b in bounds), strict=True))
    last = lasts.amax(0)  # a window only bounds how far a token looks back
    layers = torch.tensor(list(windows.values()))[:, None]
    return last + 1 - ((lasts - firsts + 1) * layers).sum(0) // layers.sum(), last


def shard_row(
    words: Tensor, assignment: ContextAssignment, rank: int, group: Any, device: torch.device | None = None
) -> SequenceShard:
    """
    One rank's shard of a row that [`cut_row`] distributed, to pass to a model as `attention_words`.

    Args:
        words (`torch.Tensor` of shape `[1, length]`): int64 mask words of the row.
        assignment ([`ContextAssignment`]): What [`cut_row`] returned.
        rank (`int`): This rank in `group`.
        group (`torch.distributed.ProcessGroup`): The ranks that share the row; `None` for one rank.
        device (`torch.device`, *optional*): The device of the attention; that of `words` when left out.
    """
    shard = shard_sequence(
        words.cpu(),  # its values are checked, which would wait for a device
        assignment.order,
        rank,
        group,
        positions=assignment.positions,
        gathered=assignment.gathered,
        block=assignment.block,
        num_ranks=assignment.num_ranks,
    )
    return shard.to(words.device if device is None else device)


def layer_costs(costs: CostModel, plan: ParallelPlan) -> ContextCosts:
    module = costs.spec.language_model
    tp_size = plan.modules[LANGUAGE_MODEL].tp_size
    uses = [costs.spec.uses.get((LANGUAGE_MODEL, layer), ()) for layer in range(module.num_layers)]
    num_active = sum(use.num_active for layer_uses in uses for use in layer_uses)
    columns = plan.modules[LANGUAGE_MODEL].replicas[0][0].cp_groups
    attending = sum(module.attention_windows.values()) / module.num_layers
    moved = sum(map(module.moved_values, range(module.num_layers))) / module.num_layers
    of_attention = ContextCosts.of_layer(
        module.num_heads // tp_size,
        module.num_kv_heads // tp_size,
        module.head_width,
        int(num_active) // (module.num_layers * tp_size),
        costs.device.flops_per_ms,
        costs.device.link_bytes_per_ms(columns[0]),
        costs.value_bytes,
    )
    return replace(
        of_attention,
        flops_per_pair=attending * of_attention.flops_per_pair,
        bytes_per_token=attending * of_attention.bytes_per_token,
        moved_bytes_per_token=moved * costs.value_bytes,
    )
