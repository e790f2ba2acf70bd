"""Recurrent layers start anew at each sample of a packed row."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening

import hf_mmparallel
from hf_mmparallel import PackingCollator
from hf_mmparallel.kernels.recurrent_layers import start_anew_at_samples
from tests import hybrids, tiny
from tests.deep_cases import third

LENGTHS = (13, 5, 21, 30)
BOUNDS = [0, 13, 18, 39, 69]
# their experts multiply the tokens of all samples at once
ROUNDED = ("Lfm2MoeForCausalLM", "NemotronHForCausalLM")


def samples(other: bool = False) -> list[dict[str, Any]]:
    """Four samples, of which the second may be another one."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, tiny.VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    if other:
        rows[1] = torch.randint(3, tiny.VOCAB_SIZE, (LENGTHS[1],), generator=generator)
    return [{"input_ids": row} for row in rows]


def pad(rows: Sequence[Any]) -> dict[str, Any]:
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    mask = (ids != 0).to(torch.int64)  # no sample has the id of padding
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def run(model: Any, batch: dict[str, Any]) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Loss, all gradients, and logits."""
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return output.loss.item(), torch.cat(gradients), output.logits.detach()


@pytest.mark.parametrize("name", third(hybrids.CONFIGS))
def test_a_packed_row_is_its_samples(name: str):
    model = hybrids.build(name).train()
    model.set_attn_implementation("bitfield")
    loss, gradient, _ = run(model, pad(samples()))
    collator = PackingCollator(pad, model, pad_to_multiple_of=8)
    packed = run(model, collator(samples()))
    assert packed[0] == pytest.approx(loss, rel=1e-6)
    assert (packed[1] - gradient).norm() <= 1e-6 * gradient.norm()
    # another neighbour: not a bit of the other samples moves
    beside = run(model, collator(samples(other=True)))[2]
    for start, end, is_same in zip(BOUNDS, BOUNDS[1:], (True, False, True, True), strict=False):
        mine, theirs = packed[2][:, start:end], beside[:, start:end]
        assert is_same == (torch.allclose(mine, theirs, atol=1e-6) if name in ROUNDED else torch.equal(mine, theirs))


def test_rows_of_other_collators_and_recomputed_layers():
    model = hybrids.build("BambaForCausalLM").train()
    model.set_attn_implementation("bitfield")
    rows: Any = [{"input_ids": row["input_ids"].tolist()} for row in samples()]
    by_position = DataCollatorWithFlattening()(rows)
    by_index = DataCollatorWithFlattening(return_position_ids=True, return_seq_idx=True)(rows)
    with pytest.raises(ValueError, match="start_anew_at_samples"):
        model(**by_position)
    loss, gradient, _ = run(model, pad(samples()))
    start_anew_at_samples(model)
    start_anew_at_samples(model)  # once is enough
    model.gradient_checkpointing_enable()
    for row in (by_position, by_index):
        got = run(model, row)
        assert got[0] == pytest.approx(loss, rel=1e-6) and (got[1] - gradient).norm() <= 1e-6 * gradient.norm()
    assert run(model, pad(samples()))[0] == pytest.approx(loss, rel=1e-6)  # padded rows as ever


def test_a_config_can_prepare_no_layers_and_unknown_ones_are_refused():
    model = hybrids.build("Qwen3_5ForCausalLM")
    model.set_attn_implementation("bitfield")
    with pytest.raises(ValueError, match="Give the model itself"):
        PackingCollator(pad, model.config)
    layers: Any = model.get_submodule("model.layers")
    layers[0].linear_attn = torch.nn.Linear(64, 64)
    with pytest.raises(ValueError, match="takes a cache"):
        hf_mmparallel.start_anew_at_samples(model)
