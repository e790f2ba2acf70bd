"""Models under `"bitfield"` against the same models under eager attention, to rounding."""

from __future__ import annotations

import pytest
import torch

from hf_mmparallel.kernels.bitfield_attention import encode_words
from tests.deep_cases import deep
from tests.kernels.bitfield_attention.hf_models import (
    MULTIMODAL,
    TEXT,
    assert_same,
    build,
    multimodal_batch,
    padded_left,
    run,
    text_batch,
    words_of,
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.set_num_threads(1)
    torch.manual_seed(torch.seed() % 2**31)


def _batch(family: str, **settings: int) -> dict[str, torch.Tensor]:
    return text_batch(**settings) if family in TEXT else multimodal_batch(family)


@pytest.mark.parametrize("family", [*TEXT, *MULTIMODAL])
def test_trains_and_evaluates_as_under_eager_attention(family):
    model, batch = build(family), _batch(family)
    expected = run(model, batch, "eager")
    assert_same(run(model, batch, "bitfield", attention_words=words_of(family, batch)), expected)
    assert_same(run(model, batch, "bitfield"), expected)
    unmasked = {name: value for name, value in batch.items() if name not in ("attention_mask", "labels")}
    logits = {}
    for attention in ("eager", "bitfield"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            logits[attention] = model(**unmasked).logits
    torch.testing.assert_close(logits["bitfield"], logits["eager"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "cache"),
    [
        deep(family, cache, unless=index % 2 == (cache == "dynamic"))
        for index, family in enumerate((*TEXT, *MULTIMODAL))
        for cache in ("dynamic", "static")
    ],
)
def test_generation_with_a_cache(family, cache):
    model, batch = build(family), padded_left(_batch(family))
    batch.pop("labels")
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1}
    settings |= {"cache_implementation": "static"} if cache == "static" else {}
    model.set_attn_implementation("eager")
    expected = model.generate(**batch, **settings)
    model.set_attn_implementation("bitfield")
    assert model.generate(**batch, **settings).equal(expected)
    assert expected.shape[1] == batch["input_ids"].shape[1] + 8


@pytest.mark.parametrize("family", TEXT)
def test_a_packed_row_trains_as_its_samples_do(family):
    model, batch = build(family), text_batch()
    expected = run(model, batch, "eager")
    real = batch["attention_mask"].bool()
    row, column = real.nonzero(as_tuple=True)
    packed = {"input_ids": batch["input_ids"][real][None], "position_ids": column[None]}
    packed["labels"] = batch["labels"][real].masked_fill(column == 0, -100)[None]
    words = encode_words(row[None] + 1)
    assert_same(run(model, packed, "bitfield", attention_words=words), (expected[0], expected[1][None], expected[2]))
