"""The kernels in Triton's interpreter against the definition in float64: every mask family and feature."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest
import torch
from torch import Tensor

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, encode_words, reference_attention
from hf_mmparallel.kernels.bitfield_attention import triton as kernels
from hf_mmparallel.kernels.bitfield_attention.mask_plan import compile_mask
from hf_mmparallel.kernels.bitfield_attention.tuning import Tile, Tuning, choose_tuning, plan_blocks
from tests.deep_cases import deep
from tests.kernels.bitfield_attention.mask_families import FAMILIES, HOLES, permuted

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
class Shape:
    """Sizes of one call; blocks are small so that few tokens make many."""

    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    block_q: int = 32
    block_k: int = 16


def _blocks(shape: Shape, dtype: torch.dtype, tuning: Tuning | None) -> tuple[int, int]:
    """Queries and keys of a block; on a device those of its tiles."""
    if DEVICE == "cpu" or tuning is not None:
        return shape.block_q, shape.block_k
    return plan_blocks(torch.cuda.get_device_capability(), shape.head_dim, dtype == torch.float32)


def inputs_of(mask: BitfieldMask, shape: Shape, dtype: torch.dtype, sinks: bool) -> tuple[list[Tensor], Tensor]:
    """Query, key, value and sinks if there are any; and a gradient of the output."""
    batch, num_queries = mask.query_words.shape
    num_keys = mask.key_words.shape[1]
    sizes = ((shape.heads, num_queries), (shape.kv_heads, num_keys), (shape.kv_heads, num_keys))
    tensors = [torch.randn(batch, *size, shape.head_dim, dtype=dtype, device=DEVICE) for size in sizes]
    grad = torch.randn_like(tensors[0])
    return tensors + ([torch.randn(shape.heads, device=DEVICE)] if sinks else []), grad


def error_of(found: Tensor, expected: Tensor, size: Tensor | None = None) -> float:
    """Norm of the difference by that of what is expected, or of `size`; nothing is NaN, infinite is what should be."""
    assert found.shape == expected.shape and torch.equal(found.isfinite(), expected.isfinite())
    found, expected = (tensor.double().nan_to_num(posinf=0.0, neginf=0.0) for tensor in (found, expected))
    return float((found - expected).norm() / (expected if size is None else size).norm().clamp(min=1e-12))


def definition(
    inputs: list[Tensor], grad: Tensor, mask: BitfieldMask, scale: float | None, softcap: float, window: int
) -> list[Tensor]:
    """Output, log-sum-exp and the gradients of the inputs by the definition, in the dtype of the inputs."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    sinks = inputs[3] if len(inputs) > 3 else None
    out, lse = reference_attention(*inputs[:3], mask, scale, softcap, window, sinks)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, grad)]


def check(
    mask: BitfieldMask,
    shape: Shape = Shape(),  # noqa: B008 (frozen)
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    num_programs: int = 1,
    tuning: Tuning | None = None,
    transposed: bool = False,
) -> None:
    """Compares output, log-sum-exp and all gradients with the definition in float64."""
    mask = mask.to(DEVICE)
    inputs, grad = inputs_of(mask, shape, dtype, sinks)
    if transposed:
        inputs[:3] = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs[:3]]
        grad = grad[..., :1].expand_as(grad)  # as the gradient of a sum
    blocks = _blocks(shape, dtype, tuning)
    plan = compile_mask(mask, window, *blocks, num_heads=shape.heads, num_programs=num_programs)
    assert (plan.split is not None) == (num_programs > 1)
    logits = inputs[3] if sinks else None
    out, lse = kernels.forward(*inputs[:3], plan, scale, softcap, logits, tuning)
    grads = kernels.backward(grad, *inputs[:3], out, lse, plan, scale, softcap, logits, tuning)
    assert (grads[3] is None) == (not sinks)

    expected = definition([tensor.double() for tensor in inputs], grad.double(), mask, scale, softcap, window)
    plain = definition(inputs, grad, mask, scale, softcap, window)
    assert out.stride() == inputs[0].stride() and lse.dtype == torch.float32
    assert [tensor.dtype for tensor in (out, *grads[:3])] == [dtype] * 4
    sizes = [None] * 5
    if logits is not None:  # the gradient of a sink sums over all rows, of either sign
        weights = torch.exp(logits.double()[None, :, None] - expected[1])
        sizes.append((weights * (expected[0] * grad).sum(-1).abs()).sum((0, 2)))
    for found, wanted, low, size in zip((out, lse, *grads[: len(inputs)]), expected, plain, sizes, strict=True):
        assert found is not None
        limit = ERROR if dtype == torch.float32 else 1.5 * error_of(low, wanted, size)
        assert error_of(found, wanted, size) < limit
    blind = expected[1] == float("-inf")
    assert not out[blind].any() and not grads[0][blind].any()


def test_many_rows_of_many_heads_have_a_grid(monkeypatch):
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


def packed(length: int, batch: int = 1, seed: int = 0) -> BitfieldMask:
    """Rows of samples with images and padding, another one for each row of the batch."""
    rows = [FAMILIES["image_spans"](Random(seed + row), length) for row in range(batch)]
    return BitfieldMask.from_words(torch.cat(rows))


@pytest.mark.parametrize(
    ("family", "window", "length"),
    [
        *((family, 19 * (index % 2), 45) for index, family in enumerate(FAMILIES)),
        *(deep(family, window, 87) for family in FAMILIES for window in (0, 19)),
    ],
)
def test_families(family, window, length):
    words = FAMILIES[family](Random(f"{family} {window}"), length)
    check(BitfieldMask.from_words(words), window=window)


FEATURES = {
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "softcap and sinks": {"softcap": 3.0, "sinks": True, "window": 11},
    "scale": {"scale": 0.7},
    "many heads": {"shape": Shape(heads=6, kv_heads=2)},
    "equal heads": {"shape": Shape(heads=2, kv_heads=2)},
    "strides": {"transposed": True, "shape": Shape(heads=4, kv_heads=2)},
    # Errors of a few numbers can be small by luck, also those of plain torch: eight sinks are enough to judge by.
    "float16": {"dtype": torch.float16, "sinks": True, "shape": Shape(heads=8, kv_heads=2)},
}


@pytest.mark.parametrize(
    ("feature", "general", "length"),
    [
        *((feature, index % 2 == 0, 41) for index, feature in enumerate(FEATURES)),
        *(deep(feature, general, 75) for feature in FEATURES for general in (0, 1)),
    ],
)
def test_features(feature, general, length):
    mask = packed(length, batch=2)
    if general:  # half of the tokens look away from some of the others
        words = FAMILIES[HOLES[0]](Random(5), length)
        mask = BitfieldMask.from_words(torch.cat([words, packed(length).query_words]))
    check(mask, **FEATURES[feature])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies bfloat16 wrongly")
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_bfloat16(head_dim):
    check(packed(300, batch=2), Shape(heads=4, kv_heads=2, head_dim=head_dim), torch.bfloat16, sinks=True)


@pytest.mark.parametrize(
    ("head_dim", "general"),
    [
        *[(64, False), (72, True), (96, False), (128, True)],
        *(deep(size, general) for size in (80, 256) for general in (False, True)),
        *(deep(size, size in (64, 96)) for size in (64, 72, 96, 128)),
    ],
)
def test_head_dims(head_dim, general):
    mask = BitfieldMask.from_words(FAMILIES["noised" if general else "image_spans"](Random(head_dim), 41))
    check(mask, Shape(head_dim=head_dim), sinks=True)


@pytest.mark.parametrize(
    "head_dim, parts",
    [(16, (16, 0)), (40, (32, 16)), (64, (64, 0)), (72, (64, 16)), (80, (64, 16)), (96, (64, 32)), (128, (128, 0))],
)
def test_parts_of_head_dims(head_dim, parts):
    assert kernels.head_parts(head_dim) == {"D": head_dim, "PART_0": parts[0], "PART_1": parts[1]}


@pytest.mark.parametrize("features", [{}, deep({"sinks": True, "softcap": 3.0}, id="sinks and softcap")])
def test_queries_cut_over_programs(features):
    words = encode_words(torch.ones(1, 169, dtype=torch.int64))
    words[:, 162:] = 0
    few = slice(142, 165)  # the last of them are padding
    whole = BitfieldMask.from_words(words)
    mask = BitfieldMask(words[:, few], whole.query_positions[:, few], words, whole.key_positions)
    tuning = Tuning(16, 16, *[Tile(16, 16, 4, 1)] * 3)
    check(mask, Shape(block_q=16, head_dim=24), num_programs=400, tuning=tuning, **features)


@pytest.mark.parametrize("family", ["image_spans", "noised"])
def test_rows_in_any_order(family):
    rng = Random(f"order {family}")
    check(permuted(BitfieldMask.from_words(FAMILIES[family](rng, 60)), rng, 35), window=0)


TUNINGS = {
    "narrow tiles": (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    "narrow inside": (Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)),
}


@pytest.mark.parametrize("tiles", TUNINGS.values(), ids=TUNINGS)
def test_tiles_narrower_than_blocks(tiles):
    shape = Shape(heads=2, kv_heads=1, block_q=32, block_k=32)
    check(packed(45), shape, tuning=Tuning(32, 32, *tiles))


def test_gradients_are_the_same_bits_each_time():
    mask = packed(45).to(DEVICE)
    (query, key, value, sinks), grad = inputs_of(mask, Shape(), torch.float32, sinks=True)
    plan = compile_mask(mask, 0, *_blocks(Shape(), torch.float32, None))
    runs = []
    for _ in range(2):
        out, lse = kernels.forward(query, key, value, plan, sinks=sinks)
        runs.append((out, lse, *kernels.backward(grad, query, key, value, out, lse, plan, sinks=sinks)))
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


def test_heads_run_inside_of_tiles_or_tiles_inside_of_heads(monkeypatch):
    monkeypatch.setattr(kernels, "L2_BYTES", 0)
    check(packed(45, batch=2), Shape(heads=4, kv_heads=2))


def test_nothing_is_visible():
    check(BitfieldMask.from_words(torch.zeros(1, 40, dtype=torch.int64)))


def test_a_scale_that_turns_the_order_is_refused():
    mask = packed(20, seed=1).to(DEVICE)
    (query, key, value), _ = inputs_of(mask, Shape(), torch.float32, sinks=False)
    with pytest.raises(ValueError, match="scale=-1.0"):
        kernels.forward(query, key, value, compile_mask(mask, 0, 16, 16), scale=-1.0)


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
