"""
Layers that carry a state from token to token, of a row whose tokens are on several ranks: each rank computes its own
tokens, and in what runs along the row some heads of the samples that are on several ranks.

The mixers of transformers compute each token by itself, but for a few functions, of which kernels have the same: a
short convolution, and a scan, whose heads do not see each other. Here these get what they need of other ranks. The
convolution gets the few tokens before each run of this rank's tokens; the scan gets all tokens of such samples for
some of its heads, as many as this rank has of the tokens, so that all ranks have equal work.

Letters of shapes: B samples, T tokens of a sample, L tokens of a rank, N tokens that it scans, H heads, G groups of
heads with the same keys, C channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .row_exchange import RowExchange, layout_of
from .shared_samples import SharedSamples, in_batches


@dataclass(frozen=True)
class Scan:
    """A function along the row in which no head sees another."""

    names: tuple[str, ...]  # of its first arguments, which models pass by position
    gives_state: bool = False  # whether it returns a tuple, with the last state behind the output
    tokens_last: bool = False  # `[B, H, T]` and `[B, D, T]` of one group, in place of `[B, T, H, ...]`, `[B, T, G, D]`

    def rows(self, name: str, value: Tensor) -> Tensor:
        """`[B, T, H or G, ...]` of an argument."""
        if not self.tokens_last:
            return value
        return value.transpose(1, 2) if name in _OF_HEADS else value.transpose(1, 2).unsqueeze(2)

    def argument(self, name: str, rows: Tensor) -> Tensor:
        """The inverse of `rows`."""
        if not self.tokens_last:
            return rows
        return rows.transpose(1, 2).contiguous() if name in _OF_HEADS else rows.squeeze(2).transpose(1, 2).contiguous()


_DELTA_RULE = Scan(("query", "key", "value", "g", "beta"), gives_state=True)
_STATE_SPACE = ("hidden_states", "dt", "A", "B", "C")
_SCANS: Mapping[str, Scan] = {  # by the name of the kernel
    "chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kda": _DELTA_RULE,
    "mamba_chunk_scan_combined": Scan(_STATE_SPACE),
    "selective_scan_fn": Scan(_STATE_SPACE, tokens_last=True),
}
_CONVOLUTION = "causal_conv1d_fn"
_FUSED = "mamba_split_conv1d_scan_combined"  # both; without kernels it is `None`, and models call one after the other
_OF_HEADS = {"value", "g", "beta", "hidden_states", "dt", "z"}
_OF_GROUPS = {"query", "key", "B", "C"}
_WEIGHTS = {"A", "D", "dt_bias", "delta_bias"}  # [H, ...]
_SHARES = "_shares_heads"


@dataclass(frozen=True)
class ScanCall:
    """A call of a scan."""

    scan: Scan
    function: Callable[..., Any]
    given: Mapping[str, Any]  # all arguments
    num_by_position: int

    @classmethod
    def of(cls, scan: Scan, function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> ScanCall:
        given = {**dict(zip(scan.names, args, strict=False)), **kwargs}
        known = _OF_HEADS | _OF_GROUPS | _WEIGHTS
        assert all(name in known for name, value in given.items() if isinstance(value, Tensor)), given.keys()
        assert len(args) <= len(scan.names)
        return cls(scan, function, given, len(args))

    @property
    def rows(self) -> dict[str, Tensor]:
        """The arguments with tokens, `[L, H or G, ...]`."""
        return {
            name: self.scan.rows(name, value)[0]
            for name, value in self.given.items()
            if isinstance(value, Tensor) and name not in _WEIGHTS
        }

    def compute(self, rows: Mapping[str, Tensor], heads: slice, lengths: Sequence[int]) -> Tensor:
        """The output `[N, h, ...]` of some heads of samples of some lengths, from their rows `[N, h or g, ...]`."""
        weights = {n: v[heads] for n, v in self.given.items() if n in _WEIGHTS and isinstance(v, Tensor)}

        def run(**batch: Tensor) -> Tensor:
            arguments = {name: self.scan.argument(name, value) for name, value in batch.items()}
            values = [*{**self.given, **weights, **arguments}.items()]
            by_position, by_name = values[: self.num_by_position], values[self.num_by_position :]
            result = self.function(*(value for _, value in by_position), **dict(by_name))
            output = result[0] if self.scan.gives_state else result
            return output.transpose(1, 2) if self.scan.tokens_last else output

        return in_batches(run, lengths, ((), {name: value[None] for name, value in rows.items()}))[0]


@dataclass(frozen=True, eq=False)
class SharedHeads:
    """What runs along a row in a mixer on this rank; collective."""

    samples: SharedSamples
    has_backward: bool  # whether some rank runs a backward, so that all have to

    def call(self, name: str, function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """What a function of the given kernel returns for this rank's tokens `[1, L, ...]`."""
        if name == _FUSED:
            return None
        if name == _CONVOLUTION:
            return self._convolve(function, args, kwargs)
        call = ScanCall.of(_SCANS[name], function, args, kwargs)
        output = self.scan(call)[None]
        if call.scan.gives_state:
            return output, None
        return output.transpose(1, 2) if call.scan.tokens_last else output

    def _convolve(self, function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
        """A convolution of `[1, C, L]`, whose weight is the second argument, or has a name."""
        own_LC, others = args[0][0].T, args[1:]
        device, weight = own_LC.device, others[0] if others else kwargs["weight"]
        runs = self.samples.on(device, self.samples.runs(weight.shape[-1] - 1))
        parts = [own_LC]
        if not runs.is_complete:
            sent = own_LC[runs.wanted]
            exchange = self._anchor(device), self.samples.group, runs.sent, runs.received, layout_of([own_LC]), sent
            parts += RowExchange.apply(*exchange)  # type: ignore[misc]
        rows = torch.cat([*parts, own_LC.new_zeros(1, own_LC.shape[1])])[runs.row]
        output = function(rows.T[None].contiguous(), *others, **kwargs)[0].T[runs.place]
        return output.new_zeros(own_LC.shape).index_copy(0, runs.token, output).T[None]

    def scan(self, call: ScanCall) -> Tensor:
        """The output `[L, H, ...]` of a scan."""
        rows = call.rows
        main = next(value for name, value in rows.items() if name in _OF_HEADS)
        spread = self.samples.on(main.device, self.samples.spread)
        num_tokens, num_heads = main.shape[:2]
        groups = next((value.shape[1] for name, value in rows.items() if name in _OF_GROUPS), num_heads)
        ranges = head_ranges(num_heads, groups, spread.counts)
        heads = ranges[self.samples.rank]
        outputs: list[tuple[Tensor, Tensor]] = []
        if spread.own_lengths or heads.start == heads.stop:
            own = spread.own
            whole = {name: value[own] if len(own) else torch.zeros_like(value[:1]) for name, value in rows.items()}
            output = call.compute(whole, slice(None), spread.own_lengths or [1])
            outputs.append((own, output[: len(own)]))
        if spread.lengths:
            output = self._scan_spread(call, rows, ranges, groups, outputs)
            outputs.append((spread.sent, output))
        result = outputs[0][1].new_zeros(num_tokens, num_heads, *outputs[0][1].shape[2:])
        for tokens, output in outputs:
            result = result.index_copy(0, tokens, output)
        return result

    def _scan_spread(
        self,
        call: ScanCall,
        rows: Mapping[str, Tensor],
        ranges: Sequence[slice],
        num_groups: int,
        outputs: Sequence[tuple[Tensor, Tensor]],  # of other samples, if this rank has no heads
    ) -> Tensor:
        """The output of the tokens that this rank has of samples on several ranks, `[n, H, ...]`."""
        rank, num_heads, device = self.samples.rank, ranges[-1].stop, next(iter(rows.values())).device
        heads, spread = ranges[rank], self.samples.on(device, self.samples.spread)
        of_ranks = [
            {n: of if n in _OF_HEADS else _groups_of(of, num_heads // num_groups) for n in rows} for of in ranges
        ]
        travelling = {name: value[spread.sent] for name, value in rows.items()}
        parts = [[travelling[name][:, of] for name, of in units.items()] for units in of_ranks]
        shapes = [[(count, *part.shape[1:]) for part in parts[rank]] for count in spread.counts]
        arrived = self._exchange(parts, shapes, self._anchor(device))
        whole = {name: torch.cat(of)[spread.place] for name, of in zip(rows, zip(*arrived, strict=True), strict=True)}
        if heads.start == heads.stop:
            like = outputs[0][1]  # of all that arrives, so that this rank takes part in the backward of each exchange
            empty = [value.reshape(len(value), 0).to(like.dtype) for value in whole.values()]
            output = torch.cat(empty, dim=1).reshape(len(empty[0]), 0, *like.shape[2:])
        else:
            output = call.compute(whole, heads, spread.lengths)
        back = torch.empty_like(output).index_copy(0, spread.place, output)
        shapes = [[(len(spread.sent), of.stop - of.start, *output.shape[2:])] for of in ranges]
        returned = self._exchange([[part] for part in back.split(spread.counts)], shapes, None)
        return torch.cat([part for (part,) in returned], dim=1)

    def _anchor(self, device: torch.device) -> Tensor | None:
        return torch.zeros(0, device=device, requires_grad=True) if self.has_backward else None

    def _exchange(
        self, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], anchor: Tensor | None
    ) -> list[list[Tensor]]:
        """Sends tensors to each rank, and returns those of given shapes that arrive from each."""
        dtypes = [tensor.dtype for tensor in parts[0]]
        arrived: list[list[Tensor]] = [list(of) for of in parts]
        for dtype in dict.fromkeys(dtypes):
            chosen = [index for index, own in enumerate(dtypes) if own == dtype]
            flat = torch.cat([of[index].flatten() for of in parts for index in chosen])
            sent = [sum(of[index].numel() for index in chosen) for of in parts]
            sizes = [torch.Size(of[index]).numel() for of in shapes for index in chosen]
            received = [sum(sizes[i : i + len(chosen)]) for i in range(0, len(sizes), len(chosen))]
            (values,) = RowExchange.apply(anchor, self.samples.group, sent, received, [(1, dtype)], flat[:, None])  # type: ignore[misc]
            anchor = values[:0]  # on all ranks the next one goes backwards before this one
            pieces = iter(values[:, 0].split(sizes))
            for of, own in zip(arrived, shapes, strict=True):
                for index in chosen:
                    of[index] = next(pieces).view(own[index])
        return arrived


def head_ranges(num_heads: int, num_groups: int, counts: Sequence[int]) -> list[slice]:
    """
    The heads of each rank, as near as can be in proportion to its tokens of the samples that are on several ranks;
    whole groups where there are enough.
    """
    unit = num_heads // num_groups if num_groups >= len(counts) else 1
    total, ends = max(1, sum(counts)), [0]
    for rank in range(len(counts)):
        ends.append((num_heads // unit * sum(counts[: rank + 1]) * 2 + total) // (2 * total) * unit)
    return [slice(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]


def _groups_of(heads: slice, ratio: int) -> slice | list[int]:
    """The groups of some heads, each once if these are all heads of some or heads of one, else once for each head."""
    groups = slice(heads.start // ratio, -(-heads.stop // ratio) if heads.stop > heads.start else heads.start // ratio)
    is_even = groups.stop - groups.start < 2 or not (heads.start % ratio or heads.stop % ratio)
    return groups if is_even else [head // ratio for head in range(heads.start, heads.stop)]


_SHARED: ContextVar[SharedHeads | None] = ContextVar("shared_heads", default=None)


@torch.compiler.disable(reason="ranks send as many tokens as their samples have, which no graph holds")
def run_by_heads(forward: Callable[..., Any], shared: SharedHeads, *args: Any, **kwargs: Any) -> Any:
    """The forward of a mixer for the tokens of this rank. Collective."""
    token = _SHARED.set(shared)
    try:
        return forward(*args, **kwargs)
    finally:
        _SHARED.reset(token)


def share_heads(mixer: nn.Module) -> None:
    """Lets ranks that share a row share the heads of a mixer, in place."""
    for namespace, name, function, kernel in _along_rows(mixer):
        if not isinstance(function, _Shareable):
            namespace[name] = _Shareable(function, kernel)
    mixer.__dict__[_SHARES] = True


def shares_heads(mixer: nn.Module) -> bool:
    """Whether `share_heads` has had a mixer."""
    return mixer.__dict__.get(_SHARES, False)


def _along_rows(mixer: nn.Module) -> Iterator[tuple[dict[str, Any], str, Callable[..., Any], str]]:
    """The functions along the row that the code of a mixer calls, where it finds them, and the kernel of each."""
    for kind in dict.fromkeys(kind for part in mixer.modules() for kind in type(part).__mro__):
        forward = inspect.unwrap(vars(kind).get("forward"))  # type: ignore[arg-type]
        for name in forward.__code__.co_names if isinstance(forward, FunctionType) else ():
            function = forward.__globals__.get(name)
            kernel = _kernel_of(function)
            if kernel in _SCANS or kernel in (_CONVOLUTION, _FUSED):
                yield forward.__globals__, name, function, kernel


def _kernel_of(function: Any) -> str:
    """The name of the kernel that may stand for a function of transformers."""
    if isinstance(function, FunctionType):
        return inspect.getclosurevars(function).nonlocals.get("func_name", "")
    return str(getattr(function, "kernel_layer_name", ""))


@dataclass(frozen=True)
class _Shareable:
    """A function along the row, in place of that in the code of mixers: over the ranks that share the row, if any."""

    function: Callable[..., Any]
    kernel_layer_name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shared = None if torch.compiler.is_compiling() else _SHARED.get()
        if shared is None:
            return self.function(*args, **kwargs)
        return shared.call(self.kernel_layer_name, self.function, args, kwargs)
