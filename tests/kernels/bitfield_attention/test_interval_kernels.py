"""The search for intervals in Triton's interpreter against the dense mask, and what compiling a mask launches."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, dense_mask, encode_words, intervals
from hf_mmparallel.kernels.bitfield_attention.mask_plan import compile_mask
from tests.deep_cases import deep
from tests.kernels.bitfield_attention.mask_families import FAMILIES, permuted

interval_kernels = pytest.importorskip("hf_mmparallel.kernels.bitfield_attention.interval_kernels")


@pytest.fixture
def through_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search runs as on a GPU."""
    monkeypatch.setattr(intervals, "_has_kernel", lambda tensor: True)


def _words_without_kinds(rng: Random, batch: int, length: int) -> Tensor:
    """Tokens of any segment and span side by side, with padding; spans that are not consecutive make holes."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    segment, span, causal, sees_all = (
        torch.randint(0, high, (batch, length), generator=generator) for high in (3, rng.choice([1, 3]), 2, 2)
    )
    ordered = rng.random() < 0.7
    return encode_words(
        segment.sort(1).values if ordered else segment, span, causal=causal.bool(), sees_all=sees_all.bool() & ordered
    )


def _assert_exact(mask: BitfieldMask, window: int) -> bool:
    dense = dense_mask(mask, window)
    places = mask.key_positions[:, None].expand_as(dense)
    last = torch.where(dense, places, -1).amax(-1)
    first = torch.where(last < 0, 0, torch.where(dense, places, 2**30).amin(-1))
    inside = (places >= first[..., None]) & (places <= last[..., None]) & (mask.key_words != 0)[:, None]
    bounds, has_holes = intervals.row_bounds(mask, window)
    assert torch.equal(bounds.first, first) and torch.equal(bounds.last, last)
    assert bool(has_holes) != torch.equal(inside, dense)
    return bool(has_holes)


@pytest.mark.usefixtures("through_kernel")
def test_any_segments_and_spans_in_any_order():
    rng = Random()
    holes = []
    for _ in range(40):
        length, window = rng.randrange(1, 60), rng.choice([0, 1, 9])
        mask = BitfieldMask.from_words(_words_without_kinds(rng, rng.randrange(1, 4), length))
        if rng.random() < 0.5:
            mask = permuted(mask, rng, rng.randrange(1, length + 1))
        holes.append(_assert_exact(mask, window))
    assert len(set(holes)) == 2


@pytest.mark.usefixtures("through_kernel")
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str):
    rng = Random()
    for window in (0, 21):
        mask = BitfieldMask.from_words(FAMILIES[family](rng, 137))
        _assert_exact(mask, window)
        _assert_exact(permuted(mask, rng, 70), window)


@pytest.mark.usefixtures("through_kernel")
def test_no_queries():
    whole = BitfieldMask.from_words(encode_words(torch.ones(1, 9, dtype=torch.int64)))
    none = whole.query_words[:, :0]
    bounds, has_holes = intervals.row_bounds(BitfieldMask(none, none.int(), whole.key_words, whole.key_positions))
    assert bounds.first.shape == bounds.last.shape == (1, 0) and not has_holes


class _Launches(TorchDispatchMode):
    """Counts the operations that would start a kernel: all but views and empty tensors."""

    num: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view and func.overloadpacket is not torch.ops.aten.empty
        return func(*args, **(kwargs or {}))


def _packed_spans(length: int) -> Tensor:
    """Samples of 1024 tokens with two images each, and padding at the end."""
    place = torch.arange(length)[None]
    at = place % 1024
    span = ((at >= 20) & (at < 420)).long() + 2 * ((at >= 500) & (at < 900)).long()
    segment = torch.where(place < length - 64, place // 1024 + 1, 0)
    return encode_words(segment, torch.where(segment > 0, span, 0))


@pytest.mark.parametrize("kernel, most", [(False, 128), deep(True, 94)])
def test_launches_and_waits_of_a_packed_row(monkeypatch: pytest.MonkeyPatch, kernel: bool, most: int):
    """On a GPU it is they that take the time. With as many more as the limit allows, change the limit knowingly."""
    mask = BitfieldMask.from_words(_packed_spans(8192))
    waits: list[str] = []
    for name in ("tolist", "item", "__bool__", "__int__", "cpu"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, read=read, name=name: (waits.append(name), read(self))[1])
    launches = _Launches()
    search, searches = interval_kernels.search_bounds, []

    def search_once(*arguments: Any) -> Tensor:
        launches.num += 1
        num_waits = len(waits)
        with _disable_current_modes():  # the interpreter itself calls torch
            searches.append(search(*arguments))
        del waits[num_waits:]
        return searches[-1]

    if kernel:
        monkeypatch.setattr(intervals, "_has_kernel", lambda tensor: True)
        monkeypatch.setattr(interval_kernels, "search_bounds", search_once)
    with launches:
        plan = compile_mask(mask, 4096, num_heads=32, num_programs=4)
    assert plan.interval and plan.split is None
    assert len(searches) == kernel
    assert waits == ["tolist", "tolist"]
    assert most - 5 <= launches.num <= most
