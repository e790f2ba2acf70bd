"""
Layers of an encoder whose ranks share the tokens of each image or clip: a part of one each, attention over all.

What is before the first layer and behind the last one is computed for all tokens on every rank, since patches are
merged there in ways that only the model knows. A rank passes on the features that are its own: gradients that reach a
rank are those of its features, so that the gradients of all parameters are parts of a sum over the ranks.

Letters of shapes: B rows, T tokens of a row, R ranks, L tokens of a rank, H heads, D head dimension, F features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..kernels.bitfield_attention.attention import cast_like_autocast
from ..kernels.bitfield_attention.builders import bidirectional_words
from ..kernels.bitfield_attention.context_parallel import SequenceShard, context_parallel_attention, shard_sequence
from ..kernels.varlen_attention import attending_by, use_varlen_attention
from .compiled_layers import is_compiled
from .features import meta_forward, meta_inputs
from .tp_collectives import gather_rows
from .unowned import StageRun, hidden_of, whole_shape, with_hidden

TOKEN_GROUP = "token_group"  # entry of a batch: the process group of the ranks that share its tokens


def even_parts(count: int, num_ranks: int) -> list[int]:
    """Returns how many of some features are those of each rank: consecutive ones, equally many but for one."""
    return [count // num_ranks + (rank < count % num_ranks) for rank in range(num_ranks)]


def own_part(features_TF: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the features of this rank, of those that all ranks have alike."""
    return features_TF.split(even_parts(len(features_TF), group.size()))[group.rank()]


def _token_dim(value: Tensor, num_tokens: int) -> int | None:
    """Returns the dimension of tokens of an argument of a layer, `None` if it has none: bounds are no tokens."""
    if value.dim() == 4:  # a mask, whose last dimension has the keys
        return 2 if value.shape[2] == num_tokens else None
    dims = range(value.dim()) if value.dim() > 1 else ()
    return next((dim for dim in dims if value.shape[dim] == num_tokens), None)


@dataclass(eq=False)
class TokenShare:
    """The part of the tokens of each row that this rank has in one forward: consecutive ones."""

    group: dist.ProcessGroup
    num_tokens: int = 0  # of a row on all ranks
    _shards: dict[tuple[int, int], tuple[SequenceShard, Tensor | None]] = field(default_factory=dict)

    @property
    def num_own(self) -> int:
        """The tokens of a row on each rank; the last ones of the last ranks may repeat its last token."""
        return -(-self.num_tokens // self.group.size())

    def cut(self, value: Any, dim: int | None = None) -> Any:
        """Returns this rank's part of an argument of a layer, along a dimension or that of its tokens."""
        if not isinstance(value, Tensor):
            return value
        dim = _token_dim(value, self.num_tokens) if dim is None else dim
        if dim is None:
            return value
        first = self.group.rank() * self.num_own
        own = torch.arange(first, first + self.num_own, device=value.device).clamp_max(self.num_tokens - 1)
        return value.index_select(dim, own)

    def join(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states of all tokens, `[..., T, F]` of `[..., L, F]`."""
        rows = hidden if hidden.dim() > 2 else hidden[None]
        return gather_rows(rows, self.group, self.num_tokens).view(*hidden.shape[:-2], -1, hidden.shape[-1])

    def attend(
        self,
        module: nn.Module,
        query_BHLD: Tensor,
        key_BHLD: Tensor,
        value_BHLD: Tensor,
        mask: Tensor | None,
        bounds: Tensor | None,
        scaling: float | None,
        dropout: float,
    ) -> Tensor:
        """Returns attention of this rank's queries to the keys of all ranks, `[B, L, H, D]`; collective."""
        if dropout:
            raise ValueError(
                f"`dropout={dropout}` in `{type(module).__name__}`, whose tokens ranks share: each would draw its "
                "own. Set `attention_dropout` of the config to 0, or use `cp_size=1`."
            )
        query, key, value = cast_like_autocast(query_BHLD, key_BHLD, value_BHLD)
        if mask is not None:
            key, value = self._gather_states(key), self._gather_states(value)
            return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, is_causal=False)[0]
        batch, length = query.shape[0], query.shape[2]
        query, key, value = (tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in (query, key, value))
        output = context_parallel_attention(query, key, value, self._shard(bounds, batch, query.device), scale=scaling)
        assert isinstance(output, Tensor)
        return output[0].unflatten(1, (batch, length)).permute(1, 2, 0, 3).contiguous()

    def _gather_states(self, states_BHLD: Tensor) -> Tensor:
        """Returns the keys or values of all tokens, `[B, H, T, D]`."""
        rows = gather_rows(states_BHLD.transpose(1, 2).flatten(2), self.group, self.num_tokens)
        return rows.unflatten(2, (states_BHLD.shape[1], -1)).transpose(1, 2)

    def _shard(self, bounds: Tensor | None, batch: int, device: torch.device) -> SequenceShard:
        """Returns the shard of all rows as one, with sequences apart; the same for all layers with these bounds."""
        key = (id(bounds), batch)
        if key not in self._shards:
            lengths = [self.num_tokens] * batch if bounds is None else bounds.diff().tolist()
            num_ranks, num_own = self.group.size(), self.num_own
            places = torch.arange(num_ranks * num_own).view(num_ranks, 1, num_own)
            tokens = places + torch.arange(batch)[:, None] * self.num_tokens
            order = tokens.where(places < self.num_tokens, -1)
            words = bidirectional_words(lengths, batch * self.num_tokens)
            shard = shard_sequence(words, order.flatten(), self.group.rank(), self.group)
            self._shards[key] = shard.to(device), bounds  # which keeps its id
        return self._shards[key][0]


class SharedTokens:
    """Layers of an encoder on this rank, which get all tokens, or those of this rank; none that always get all."""

    def __init__(self, layers: Mapping[int, nn.Module] | None = None, joined_behind: Collection[int] = ()):
        # `joined_behind` has the layers whose outputs the model reads with all tokens, and -1 for the input
        self.joined_behind = joined_behind
        self.share: TokenShare | None = None
        self._run: StageRun | None = None
        for index, layer in (layers or {}).items():
            layer.forward = partial(self._forward, index, layer, layer.forward)  # type: ignore[method-assign]

    @contextmanager
    def running(self, group: dist.ProcessGroup | None, run: StageRun) -> Iterator[None]:
        """A forward whose tokens the ranks of a group share, if there is one."""
        self.share, self._run = None if group is None else TokenShare(group), run
        try:
            yield
        finally:
            self.share = self._run = None

    def part_of_rank(self, index: int, hidden: Tensor) -> tuple[int, float]:
        """Returns the tokens of a row that enters a layer, on all ranks, and the share of each rank in its work."""
        if self.share is None:
            return hidden.shape[-2], 1.0
        return self._num_tokens(index, hidden), 1 / self.share.group.size()

    def _num_tokens(self, index: int, hidden: Tensor) -> int:
        assert self.share is not None and self._run is not None
        is_whole = index - 1 in self.joined_behind
        return hidden.shape[-2] if is_whole else self.share.num_tokens or self._run.num_tokens

    def shape_behind(self, layer: int, shape: torch.Size, group: dist.ProcessGroup | None) -> torch.Size:
        """Returns the shape on this rank of the output of a layer, from that of all tokens."""
        if group is None or layer in self.joined_behind:
            return shape
        return torch.Size((*shape[:-2], TokenShare(group, shape[-2]).num_own, shape[-1]))

    def _forward(self, index: int, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        share = self.share
        if share is None:
            return forward(*args, **kwargs)
        hidden = hidden_of(args, kwargs)
        share.num_tokens = self._num_tokens(index, hidden)
        args, kwargs = tree_map(lambda value: value if value is hidden else share.cut(value), (args, kwargs))
        if index - 1 in self.joined_behind:
            args, kwargs = with_hidden(args, kwargs, share.cut(hidden, hidden.dim() - 2))
        if is_compiled(layer):
            forward = partial(type(layer).forward, layer)  # no graph holds the collectives of its attention
        with attending_by(share.attend):
            output = forward(*args, **kwargs)
        if index not in self.joined_behind:
            return output
        joined = share.join(output[0] if isinstance(output, tuple) else output)
        return (joined, *output[1:]) if isinstance(output, tuple) else joined


# Which encoders can share tokens: each token is computed by itself, but for attention through the interface of
# transformers.

_FEW_TOKENS = 8
_MOST = 1 << 22  # elements of a parameter that gets values of its own


class _ValuesOnly:
    """Stands for attention in which each token sees itself alone."""

    def __init__(self) -> None:
        self.num_tokens: list[int] = []
        self.is_plain = True

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bounds: Tensor | None,
        scaling: float | None,
        dropout: float,
    ) -> Tensor:
        self.num_tokens.append(query.shape[2])
        self.is_plain &= not dropout and query.shape == key.shape == value.shape
        return value.transpose(1, 2)


def can_share_tokens(encoder: nn.Module, layers: nn.ModuleList) -> bool:
    """
    Returns whether the layers of an encoder compute each token by itself, but for attention that they leave to
    transformers' interface: with attention of each token to itself they give the first tokens of a row what they give
    these tokens alone.
    """
    inputs = meta_inputs(encoder) if isinstance(encoder, PreTrainedModel) else None
    if inputs is None or "input_ids" in inputs:
        return False
    entered: dict[type[nn.Module], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}  # the first of each class
    configs = {module: module.config for module in encoder.modules() if hasattr(module, "config")}
    hooks = [
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs: entered.setdefault(type(layer), (layer, args, kwargs)) and None,
            with_kwargs=True,
        )
        for layer in layers
    ]
    try:
        use_varlen_attention(encoder, every=True)
        meta_forward(encoder, **inputs)
        return bool(entered) and all(_computes_tokens_alone(*call) for call in entered.values())
    finally:
        for hook in hooks:
            hook.remove()
        for module, config in configs.items():
            module.config = config


@torch.no_grad()
def _computes_tokens_alone(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    num_tokens, attention = hidden_of(args, kwargs).shape[-2], _ValuesOnly()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tried = with_values(layer)
        whole = tree_map(partial(_few, num_tokens=num_tokens, hidden=hidden_of(args, kwargs)), (args, kwargs))
        half = tree_map(lambda value: _first_half(value, hidden_of(*whole)), whole)
        try:
            with attending_by(attention):
                outputs = [tried(*call[0], **call[1]) for call in (whole, half)]
        except Exception:  # a layer may raise anything
            return False
    first, second = (output[0] if isinstance(output, tuple) else output for output in outputs)
    has_attended = attention.is_plain and attention.num_tokens == [_FEW_TOKENS, _FEW_TOKENS // 2]
    length = second.shape[-2] if second.dim() > 1 else 0
    return has_attended and torch.allclose(first[..., :length, :], second, rtol=1e-4, atol=1e-5)


def with_values(layer: nn.Module) -> nn.Module:
    """Copies a layer to the CPU, without hooks, for training, with values that differ in all but large matrices."""
    memo: dict[int, Any] = {}
    for module in layer.modules():  # hooks may hold process groups, which can't be copied
        memo |= {id(value): type(value)() for name, value in vars(module).items() if "hooks" in name}
    for parameter in layer.parameters():
        shape = whole_shape(parameter)
        values = torch.rand(shape) if shape.numel() <= _MOST else torch.full((1,), 1e-3).expand(shape)
        memo[id(parameter)] = nn.Parameter(values / max(shape[-1:], default=1), requires_grad=False)
    for buffer in layer.buffers():
        memo[id(buffer)] = torch.zeros_like(buffer, device="cpu")
    tried = copy.deepcopy(layer, memo)
    tried.__dict__.update(gradient_checkpointing=False)
    return tried.train()


def _few(value: Any, num_tokens: int, hidden: Tensor) -> Any:
    """An argument of a layer for a row of few tokens, with values."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 1 and not value.is_floating_point():
        return torch.tensor([0, _FEW_TOKENS], dtype=value.dtype)  # bounds of sequences
    dim, shape = (hidden.dim() - 2 if value is hidden else _token_dim(value, num_tokens)), list(value.shape)
    if dim is not None:
        shape[dim] = _FEW_TOKENS
    return torch.rand(shape).to(value.dtype if not value.is_floating_point() else torch.float32)


def _first_half(value: Any, hidden: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 1 and not value.is_floating_point():
        return value // 2
    dim = hidden.dim() - 2 if value is hidden else _token_dim(value, _FEW_TOKENS)
    return value if dim is None else value.narrow(dim, 0, _FEW_TOKENS // 2)
