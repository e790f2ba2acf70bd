"""The Hopper form in Triton's interpreter against the definition in float64, and what decides when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, encode_words, reference_attention
from hf_mmparallel.kernels.bitfield_attention import tuning as tuning_table
from hf_mmparallel.kernels.bitfield_attention.mask_plan import MaskPlan, compile_mask
from hf_mmparallel.kernels.bitfield_attention.tuning import Tile, Tuning

triton_hopper = pytest.importorskip("hf_mmparallel.kernels.bitfield_attention.triton_hopper")

BLOCK = 32
WHOLE = Tuning("hopper", BLOCK, BLOCK, Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
PARTS = Tuning("hopper", BLOCK, BLOCK, Tile(16, 32, 4, 1, True), Tile(16, 16, 4, 1, True), Tile(32, 16, 4, 1, True))


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN until they are written."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def runs(*lengths: int) -> Tensor:
    """`[1, length]`: 1, 2, ... repeated so many times; a last run of padding when its length is given as negative."""
    values = [0 if length < 0 else index for index, length in enumerate(lengths, 1)]
    return torch.repeat_interleave(torch.tensor(values), torch.tensor([abs(length) for length in lengths]))[None]


def spans(length: int, *bounds: tuple[int, int]) -> Tensor:
    """`[1, length]`: 1, 2, ... between each of the bounds, 0 elsewhere."""
    span = torch.zeros(1, length, dtype=torch.int64)
    for index, (start, stop) in enumerate(bounds, 1):
        span[:, start:stop] = index
    return span


def packed_words() -> Tensor:
    return encode_words(runs(33, 5, 40, -18), span=spans(96, (3, 20), (45, 70)))


MASKS = {
    "causal": (encode_words(runs(96)), 0),
    "images": (encode_words(runs(96), span=spans(96, (10, 43), (43, 60))), 0),
    "prefix": (encode_words(runs(96), span=spans(96, (0, 50))), 0),
    "packed": (packed_words(), 0),
    "packed, window": (packed_words(), 13),
    "encoder": (encode_words(runs(7, 60, 29), causal=False, sees_all=True), 0),
    "nothing": (torch.zeros(1, 96, dtype=torch.int64), 0),
}


def draw(heads: int, kv_heads: int, num_queries: int, num_keys: int, head_dim: int = 64) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    shapes = [(heads, num_queries), (kv_heads, num_keys), (kv_heads, num_keys), (heads, num_queries)]
    return [torch.randn(1, *shape, head_dim) for shape in shapes]


def run(tensors: list[Tensor], plan: MaskPlan, tuning: Tuning, num_programs: int = 3) -> list[Tensor]:
    """Output, log-sum-exp and the three gradients."""
    query, key, value, grad = tensors
    out, lse = triton_hopper.forward(query, key, value, plan, tuning=tuning, num_programs=num_programs)
    grads = triton_hopper.backward(grad, query, key, value, out, lse, plan, tuning=tuning, num_programs=num_programs)
    return [out, lse, *grads[:3]]


def expected(tensors: list[Tensor], mask: BitfieldMask, window: int) -> list[Tensor]:
    """The same by the definition in float64."""
    *inputs, grad = (tensor.double() for tensor in tensors)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    out, lse = reference_attention(*inputs, mask, window=window)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, grad)]


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float = 2e-6) -> None:
    for name, actual, right in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        finite = torch.isfinite(right)
        assert torch.equal(actual[~finite].double(), right[~finite]), name
        error = (actual.double() - right)[finite].norm() / right[finite].norm().clamp(min=1e-30)
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize(("name", "tuning"), [*((name, WHOLE) for name in MASKS), ("packed, window", PARTS)])
def test_equals_the_definition(name: str, tuning: Tuning):
    words, window = MASKS[name]
    mask = BitfieldMask.from_words(words)
    plan = compile_mask(mask, window, BLOCK, BLOCK)
    assert plan.consecutive_keys
    tensors = draw(2, 1, 96, 96)
    assert_close(run(tensors, plan, tuning), expected(tensors, mask, window))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_float16(head_dim: int):
    mask = BitfieldMask.from_words(packed_words())
    plan = compile_mask(mask, 0, BLOCK, BLOCK)
    tensors = [tensor.half() for tensor in draw(4, 2, 96, 96, head_dim)]
    right = expected(tensors, mask, 0)
    *inputs, grad = (tensor.detach().clone().requires_grad_() for tensor in tensors)
    out, lse = reference_attention(*inputs, mask)
    plain = [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, grad)]
    seen = torch.isfinite(right[1])
    for name, got, torch_got, want in zip(
        ("out", "lse", "dq", "dk", "dv"), run(tensors, plan, PARTS), plain, right, strict=True
    ):
        assert got.dtype == (torch.float32 if name == "lse" else torch.float16)
        part = seen if name == "lse" else slice(None)
        error, allowed = ((x.double() - want)[part].norm() / want[part].norm() for x in (got, torch_got))
        assert error <= 1.5 * allowed, name


def test_blocks_in_any_order_and_some_queries():
    """Rows of a rank: every second block of queries, all keys, both permuted by blocks."""
    words = packed_words()
    whole = BitfieldMask.from_words(words)
    order = torch.tensor([2, 0, 1])[:, None] * BLOCK + torch.arange(BLOCK)
    keys, queries = order.flatten(), order[[0, 2]].flatten()
    mask = BitfieldMask(
        words[:, queries], whole.query_positions[:, queries], words[:, keys], whole.key_positions[:, keys]
    )
    plan = compile_mask(mask, 0, BLOCK, BLOCK)
    assert plan.consecutive_keys
    tensors = draw(2, 2, 64, 96)
    assert_close(run(tensors, plan, PARTS), expected(tensors, mask, 0))


def test_the_number_of_programs_changes_no_bit():
    mask = BitfieldMask.from_words(packed_words())
    plan = compile_mask(mask, 0, BLOCK, BLOCK)
    tensors = draw(2, 1, 96, 96)
    first = run(tensors, plan, WHOLE, num_programs=1)
    for num_programs in (4, 100):
        assert all(map(torch.equal, run(tensors, plan, WHOLE, num_programs), first))


def test_layouts_of_heads():
    """Heads side by side, as models give them, are read where they are; the results are those of dense heads."""
    mask = BitfieldMask.from_words(packed_words())
    plan = compile_mask(mask, 0, BLOCK, BLOCK)
    dense = draw(4, 2, 96, 96)
    right = run(dense, plan, WHOLE)
    side_by_side = torch.cat([tensor.transpose(1, 2).flatten(2) for tensor in dense], dim=2)
    parts = side_by_side.split([4 * 64, 2 * 64, 2 * 64, 4 * 64], dim=2)
    views = [part.unflatten(2, (-1, 64)).transpose(1, 2) for part in parts]
    assert all(triton_hopper._as_matrix(view).data is view for view in [*dense, *views])
    assert all(map(torch.equal, run(views, plan, WHOLE), right))

    # Rows that do not start at multiples of 16 bytes, and columns with gaps, are copied.
    unaligned = torch.nn.functional.pad(dense[0], (0, 3))[..., :64]
    spread = dense[3].repeat_interleave(2, dim=3)[..., ::2]
    assert all(triton_hopper._as_matrix(odd).data is not odd for odd in (unaligned, spread))
    assert all(map(torch.equal, run([unaligned, *dense[1:3], spread], plan, WHOLE), right))


def plan_of(words: Tensor, block: int = 128, **options: int) -> MaskPlan:
    return compile_mask(BitfieldMask.from_words(words), 0, block, block, **options)


def test_refusals():
    long = encode_words(runs(200, 56))
    plan = plan_of(long)
    query = torch.randn(1, 2, 256, 128, dtype=torch.bfloat16)

    def refusal(*given: Any, **options: Any) -> str:
        return tuning_table.hopper_refusal(*given, **options) or ""

    assert not refusal(query, plan)
    assert "head dimension 96" in refusal(query[..., :96], plan)
    assert "float32" in refusal(query.float(), plan)
    assert "batch" in refusal(query.expand(2, -1, -1, -1), plan)
    assert "capped" in refusal(query, plan, softcap=30.0)
    assert "sinks" in refusal(query, plan, sinks=torch.zeros(2))
    holes = encode_words(runs(256), kinds=runs(20, 50, 60, 126) % 2 + 1, sees=1)
    assert "not one interval" in refusal(query, plan_of(holes))
    assert "64 x 64" in refusal(query, plan_of(long, 64))
    assert "250 queries" in refusal(query[:, :, :250], plan_of(encode_words(runs(250))))
    assert "cut" in refusal(query, plan_of(encode_words(runs(8192)), num_programs=132))
    mask = BitfieldMask.from_words(long)
    order = torch.randperm(256)
    shuffled = BitfieldMask(mask.query_words, mask.query_positions, long[:, order], mask.key_positions[:, order])
    assert "consecutive" in refusal(query, compile_mask(shuffled, 0, 128, 128))


def test_the_hopper_form_runs_only_where_it_was_measured(monkeypatch: pytest.MonkeyPatch):
    plan = plan_of(encode_words(runs(200, 56)))
    query = torch.randn(1, 2, 256, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(tuning_table, "MEASURED", {})
    assert tuning_table.choose_tuning((9, 0), query, plan).form == "portable"
    for specialized in (True, False):
        monkeypatch.setattr(tuning_table, "MEASURED", {((9, 0), 128): ("a device", specialized)})
        chosen = tuning_table.choose_tuning((9, 0), query, plan)
        assert (chosen.form, chosen.forward.specialized) == ("hopper", specialized)
        assert tuning_table.choose_tuning((9, 0), query, plan, softcap=20.0).form == "portable"
        assert tuning_table.choose_tuning((8, 0), query, plan).form == "portable"
        assert tuning_table.choose_tuning(None, query, plan).form == "portable"


def test_scales_below_zero_are_refused():
    query, key, value, _ = draw(2, 1, 96, 96)
    with pytest.raises(ValueError, match="`scale=-1.0` is not above 0"):
        triton_hopper.forward(query, key, value, plan_of(encode_words(runs(96)), BLOCK), scale=-1.0, tuning=WHOLE)


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
def test_tiles_divide_the_blocks_of_the_plan(capability: tuple[int, int] | None, head_dim: int):
    for wide in (False, True):
        blocks = tuning_table.plan_blocks(capability, head_dim, wide)
        for interval in (False, True):
            tuning = tuning_table.portable_tuning(capability, head_dim, interval, wide)
            assert (tuning.block_q, tuning.block_k) == blocks
            for tile in (tuning.forward, tuning.dkdv, tuning.dq):
                assert blocks[0] % tile.block_q == 0
                assert blocks[1] % tile.block_k == 0
    if head_dim in tuning_table.HOPPER_HEAD_DIMS:
        assert tuning_table.plan_blocks((9, 0), head_dim) == (128, 128)  # those of the Hopper form
