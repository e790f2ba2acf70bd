"""The kernels in Triton's interpreter against the definition in float64: every constant that they are compiled for."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest
import torch
from torch import Tensor

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, encode_words
from hf_mmparallel.kernels.bitfield_attention import triton as kernels
from hf_mmparallel.kernels.bitfield_attention.mask_plan import MaskPlan, compile_mask
from hf_mmparallel.kernels.bitfield_attention.tuning import Tile, Tuning, choose_tuning, plan_blocks
from tests.deep_cases import deep

from .cases import Case
from .mask_families import FAMILIES, HOLES, permuted

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
ERROR = 2e-6  # of float32, relative


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN until they are written."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Call(Case):
    """One call of the kernels; blocks are small so that few tokens make many."""

    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    blocks: tuple[int, int] = (32, 16)
    dtype: torch.dtype = torch.float32
    num_programs: int = 1
    tuning: Tuning | None = None
    of_sum: bool = False  # the gradient is that of a sum

    def plan(self, mask: BitfieldMask) -> MaskPlan:
        """The compiled mask; on a device in blocks of its tiles."""
        blocks = self.blocks
        if DEVICE != "cpu" and self.tuning is None:
            blocks = plan_blocks(torch.cuda.get_device_capability(), self.head_dim, self.dtype == torch.float32)
        return compile_mask(mask, self.window, *blocks, num_heads=self.heads, num_programs=self.num_programs)


def error_of(found: Tensor, expected: Tensor, size: Tensor) -> float:
    """Norm of the difference by that of `size`; nothing is NaN, and infinite is what should be."""
    assert found.shape == expected.shape and torch.equal(found.isfinite(), expected.isfinite())
    found, expected, size = (t.double().nan_to_num(posinf=0.0, neginf=0.0) for t in (found, expected, size))
    return float((found - expected).norm() / size.norm().clamp(min=1e-12))


def check(mask: BitfieldMask, call: Call) -> list[Tensor]:
    """Compares output, log-sum-exp and all gradients with the definition in float64, and returns them."""
    mask = mask.to(DEVICE)
    inputs, plan = call.inputs(mask, call.dtype), call.plan(mask)
    grad = torch.randn_like(inputs[0])
    grad = grad[..., :1].expand_as(grad) if call.of_sum else grad
    assert (plan.split is not None) == (call.num_programs > 1)
    logits = inputs[3] if call.sinks else None
    options = (plan, call.scale, call.softcap, logits, call.tuning)
    out, lse = kernels.forward(*inputs[:3], *options)
    grads = kernels.backward(grad, *inputs[:3], out, lse, *options)
    assert (grads[3] is None) == (not call.sinks)
    assert out.stride() == inputs[0].stride() and lse.dtype == torch.float32
    assert [tensor.dtype for tensor in (out, *grads[:3])] == [call.dtype] * 4

    results = [out, lse, *grads[: len(inputs)]]
    exact, sizes = call.exactly(inputs, grad, mask)
    plain = call.definition(inputs, grad, mask)
    for found, wanted, low, size in zip(results, exact, plain, sizes, strict=True):
        limit = ERROR if call.dtype == torch.float32 else 1.5 * error_of(low, wanted, size)
        assert error_of(found, wanted, size) < limit
    blind = exact[1] == float("-inf")
    assert not out[blind].any() and not grads[0][blind].any()
    return results


def rows_of(family: str, length: int = 41, batch: int = 1) -> BitfieldMask:
    """Rows of a family, another one for each row of the batch."""
    return BitfieldMask.from_words(torch.cat([FAMILIES[family](Random(row), length) for row in range(batch)]))


NARROW = Tuning(16, 16, *[Tile(16, 16, 4, 1)] * 3)
INSIDE = Tuning(32, 32, Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))
CASES = {
    "softcap": ("embedded_modality", 1, Call(softcap=3.0)),
    "sinks": ("embedded_modality", 1, Call(sinks=True)),
    "softcap, sinks and a window": ("image_spans", 1, Call(softcap=3.0, sinks=True, window=11)),
    "many heads": ("embedded_modality", 1, Call(heads=6, kv_heads=2)),
    "gradient of a sum": ("image_spans", 2, Call(heads=4, kv_heads=2, of_sum=True)),
    "scale": ("image_spans", 1, Call(scale=0.7)),
    # Errors of a few numbers can be small by luck, also those of plain torch: eight sinks are enough to judge by.
    "float16": ("image_spans", 1, Call(heads=8, kv_heads=2, dtype=torch.float16, sinks=True)),
    "two slices of a head": ("image_spans", 1, Call(head_dim=48, sinks=True)),
    "a slice with padding": ("embedded_modality", 1, Call(head_dim=40, sinks=True)),
    "narrow tiles": ("image_spans", 1, Call(blocks=(32, 32), tuning=Tuning(32, 32, *[Tile(16, 16, 4, 1)] * 3))),
    "narrow inside": ("image_spans", 1, Call(blocks=(32, 32), tuning=INSIDE)),
}


@pytest.mark.parametrize(
    ("family", "batch", "call"),
    [
        *(deep(*given, id=name, unless=not place % 2) for place, (name, given) in enumerate(CASES.items())),
        *(deep("image_spans", 1, Call(head_dim=size, sinks=True), id=f"D{size}") for size in (64, 72, 80, 96, 256)),
    ],
)
def test_features(family: str, batch: int, call: Call):
    mask = rows_of(family, batch=batch)
    check(mask, call)
    assert call.plan(mask.to(DEVICE)).interval == (family not in HOLES)


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str):
    check(rows_of(family, 87), Call(window=19 * (len(family) % 2)))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies bfloat16 wrongly")
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_bfloat16(head_dim: int):
    mask = rows_of("image_spans", 300, batch=2)
    check(mask, Call(heads=4, kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16, sinks=True))


@pytest.mark.parametrize(
    "head_dim, parts",
    [(16, (16, 0)), (40, (32, 16)), (64, (64, 0)), (72, (64, 16)), (80, (64, 16)), (96, (64, 32)), (128, (128, 0))],
)
def test_parts_of_head_dims(head_dim: int, parts: tuple[int, int]):
    assert kernels.head_parts(head_dim) == {"D": head_dim, "PART_0": parts[0], "PART_1": parts[1]}


@pytest.mark.parametrize(
    "features", [{"sinks": True, "softcap": 3.0, "head_dim": 24}, deep({"head_dim": 16}, id="plain")]
)
def test_queries_cut_over_programs(features):
    words = encode_words(torch.ones(1, 105, dtype=torch.int64))
    words[:, 98:] = 0
    few = slice(78, 101)  # the last of them are padding
    whole = BitfieldMask.from_words(words)
    mask = BitfieldMask(words[:, few], whole.query_positions[:, few], words, whole.key_positions)
    check(mask, Call(blocks=(16, 16), num_programs=400, tuning=NARROW, **features))


@pytest.mark.parametrize("family", ["image_spans", "embedded_modality"])
def test_some_queries_in_any_order(family: str):
    mask = permuted(rows_of(family, 60, batch=2), Random(0), 35)
    check(mask, Call(heads=1))


def test_one_head_after_another_with_the_same_bits_each_time(monkeypatch: pytest.MonkeyPatch):
    """Where keys and values are larger than a cache; else tiles run over all heads."""
    monkeypatch.setattr(kernels, "L2_BYTES", 0)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append(check(rows_of("image_spans"), Call(heads=2, kv_heads=2, sinks=True)))
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


def test_nothing_is_visible():
    check(BitfieldMask.from_words(torch.zeros(1, 40, dtype=torch.int64)), Call())


def test_a_scale_that_turns_the_order_is_refused():
    mask = rows_of("image_spans", 20).to(DEVICE)
    with pytest.raises(ValueError, match="scale=-1.0"):
        kernels.forward(*Call().inputs(mask), Call().plan(mask), scale=-1.0)


def test_many_rows_of_many_heads_have_a_grid(monkeypatch: pytest.MonkeyPatch):
    """Only the first dimension of a grid goes beyond 65535."""
    grids: list[tuple[int, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]):
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(kernels, "row_stats_kernel", Recorder())
    out = torch.empty(2**12, 32, 1, 16, device="meta")
    kernels.row_stats(out, out, out[..., 0])
    assert grids == [(2**17,)]


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
def test_tiles_divide_the_blocks_of_the_plan(capability: tuple[int, int] | None, head_dim: int):
    for wide in (False, True):
        blocks = plan_blocks(capability, head_dim, wide)
        for interval in (False, True):
            tuning = choose_tuning(capability, head_dim, interval, wide)
            assert (tuning.block_q, tuning.block_k) == blocks
            for tile in (tuning.forward, tuning.dkdv, tuning.dq):
                assert blocks[0] % tile.block_q == 0
                assert blocks[1] % tile.block_k == 0
