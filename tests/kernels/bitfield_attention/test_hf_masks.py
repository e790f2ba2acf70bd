"""What a layer does with words, with a mask, with both and with neither."""

import pytest
import torch
import transformers
from torch import nn
from transformers import masking_utils, modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_mmparallel._versions import CACHE
from hf_mmparallel.kernels.bitfield_attention import (
    BitfieldMask,
    context_parallel,
    dense_mask,
    encode_words,
    hf,
    reference_attention,
)
from tests import tiny
from tests.deep_cases import third

from .hf_models import HEADS, LAYER_TYPES, TEXT, assert_same, batch_of, build, checkpoint, run, text_batch, words_of

WINDOWED = ("mistral", "gemma2", "gpt_oss")
ONE_SAMPLE = encode_words(torch.ones(1, 12, dtype=torch.int64))


@pytest.fixture
def built_masks(monkeypatch):
    """The shapes of the dense masks that are built during a test."""
    shapes, build_mask = [], masking_utils.sdpa_mask

    def recorded(*args, **kwargs):
        mask = build_mask(*args, **kwargs)
        shapes.append(None if mask is None else tuple(mask.shape))
        return mask

    monkeypatch.setattr(masking_utils, "sdpa_mask", recorded)
    return shapes


def _layer(**attributes) -> nn.Module:
    """Something that looks like the attention layer of a Llama."""
    layer = build("llama").model.layers[1].self_attn
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def _states(batch: int = 1) -> list[torch.Tensor]:
    """Queries, keys and values of twelve tokens."""
    return [torch.randn(batch, heads, 12, 16) for heads in (4, 2, 2)]


def _in_text(family: str) -> str | dict[str, str]:
    """Bitfield attention in the language model only."""
    return "bitfield" if family in TEXT else {"text_config": "bitfield"}


@pytest.mark.parametrize("family", ["llama", *WINDOWED, "gemma3", "paligemma", "qwen2_vl"])
def test_with_words_no_dense_mask_is_built(family, built_masks):
    model, batch = build(family), batch_of(family)
    run(model, batch, _in_text(family), attention_words=words_of(family, batch))
    assert built_masks == []


@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_without_words_a_mask_is_built_once_for_all_layers_of_a_type(built_masks, checkpointing):
    model, batch = build("gemma3"), batch_of("gemma3")
    if checkpointing is not None:
        checkpoint(model, use_reentrant=checkpointing)
    run(model, batch, _in_text("gemma3"))
    length = batch["input_ids"].shape[1]
    assert built_masks == [(3, 1, length, length)] * 2


def test_a_mask_of_a_million_tokens_costs_nothing_until_it_is_read():
    mask = hf.deferred_mask(1, 2**20, 2**20, mask_function=masking_utils.causal_mask_function)
    assert mask.shape == (1, 1, 2**20, 2**20)
    assert mask.build(may_skip=True) is None  # what is plainly causal needs none even then


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "ones"])
def test_generation_in_train_mode(masked):
    """As reinforcement learning does it: without gradients no row can be packed."""
    model = build("llama")
    model.set_attn_implementation("bitfield")
    ids = text_batch()["input_ids"]
    given = {"attention_mask": torch.ones_like(ids)} if masked else {}
    settings = {"max_new_tokens": 3, "do_sample": False, **given}
    expected = model.eval().generate(ids, **settings)
    assert model.train().generate(ids, **settings).equal(expected)


def test_a_model_that_drops_words_on_the_way_is_refused():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.NemotronConfig(vocab_size=64, num_hidden_layers=1, head_dim=16, **sizes)
    model = transformers.NemotronForCausalLM(config)
    model.set_attn_implementation("bitfield")
    words = encode_words(torch.tensor([[1, 1, 1, 2, 2]]))
    with pytest.raises(ValueError, match="Nemotron"):
        model.train()(input_ids=torch.randint(1, 64, (1, 5)), attention_words=words, use_cache=False)


def test_a_model_that_computes_with_its_mask_is_told_what_it_got():
    mask = hf.DeferredMask((1, 1, 4, 4), {"attention_mask": None, "q_offset": 0}, causal=True)
    with pytest.raises(AttributeError, match='has no `dtype`; .* `attn_implementation="sdpa"`'):
        mask.dtype  # noqa: B018
    assert not hasattr(mask, "device") and mask.num_seen == 4
    assert mask[:, :, 0:, :] is mask
    with pytest.raises(ValueError, match="has no `values`"):
        mask[:, :, 1:, :]
    with pytest.raises(ValueError, match="`scaled_dot_product_attention`"):  # BLT's encoder has a config of its own
        torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3, attn_mask=mask)


SAMPLES = torch.tensor([[0] * 9 + [1] * 14 + [2]])
POSITIONS = torch.tensor([[*range(9), *range(14), 0]])
APART = {
    "position ids": {"position_ids": POSITIONS},
    "the sample of each token": {"seq_idx": SAMPLES.int()},
    "bounds": {"cu_seq_lens_q": torch.tensor([0, 9, 23, 24], dtype=torch.int32)},
}


@pytest.mark.parametrize("given", APART)
@pytest.mark.parametrize("family", third(["llama", *WINDOWED, "qwen2_vl"]))
def test_what_tells_samples_apart_takes_the_place_of_words(family, given, built_masks):
    """What `DataCollatorWithFlattening` and TRL's packing pass."""
    model, batch = build(family), text_batch(rows=1, length=24)
    del batch["attention_mask"]
    apart = dict(APART[given])
    if family == "qwen2_vl" and "position_ids" in apart:  # of text, by which masks are made, and three of M-RoPE
        apart["position_ids"] = POSITIONS.expand(4, 1, 24)
    positions = {name: value for name, value in apart.items() if name == "position_ids"}
    expected = run(model, batch, "bitfield", attention_words=encode_words(SAMPLES + 1), **positions)
    assert_same(run(model, batch, "bitfield", **apart), expected, tolerance=1e-6)
    assert built_masks == []
    run(model, batch, "bitfield", position_ids=torch.arange(24)[None])  # a row of one sample, which says nothing
    model.set_attn_implementation("eager")
    if positions and family != "gpt_oss":  # whose own masks do not follow position ids
        starts = model.eval()(**batch, **positions, use_cache=False).logits
        parts = batch["input_ids"].split([9, 14, 1], dim=1)
        torch.testing.assert_close(starts, torch.cat([model(part).logits for part in parts], dim=1))


def test_samples_that_are_told_apart_keep_what_else_is_in_a_mask(built_masks):
    """The tokens of an image see each other in both directions, which no ids say: the model's own mask is built."""
    model, batch = build("gemma3"), batch_of("gemma3")
    first = {name: value[:1] for name, value in batch.items() if name not in ("attention_mask", "labels")}
    length = first["input_ids"].shape[1]
    positions = torch.cat([torch.arange(length - 3), torch.arange(3)])[None]
    outputs = []
    for attention in ("eager", _in_text("gemma3")):
        model.set_attn_implementation(attention)
        outputs.append(model.train()(**first, position_ids=positions, use_cache=False).logits)
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-4)
    assert (1, 1, length, length) in built_masks


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_language_layer_without_any_mask_is_refused_whatever_it_says_of_itself(training, is_causal):
    layer = _layer(is_causal=is_causal).train(training)
    with pytest.raises(ValueError, match="`LlamaAttention` .* neither"):
        hf.bitfield_attention_forward(layer, *_states(), None)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_layer_that_says_itself_whether_it_is_causal_is_believed(is_causal, softcap):
    states = _states()
    found, _ = hf.bitfield_attention_forward(_layer(), *states, None, is_causal=is_causal, softcap=softcap)
    words = encode_words(torch.ones(1, 12, dtype=torch.int64), causal=is_causal, sees_all=not is_causal)
    expected, _ = reference_attention(*states, BitfieldMask.from_words(words), softcap=softcap or 0.0)
    torch.testing.assert_close(found, expected.transpose(1, 2))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_says_whether_it_is_causal_and_not_the_layer(causal, is_causal):
    sees = masking_utils.causal_mask_function if causal else masking_utils.bidirectional_mask_function
    mask = hf.deferred_mask(1, 12, 12, mask_function=sees, **({} if causal else {"allow_is_bidirectional_skip": True}))
    layer, states = _layer(is_causal=is_causal).eval(), _states()
    found, _ = hf.bitfield_attention_forward(layer, *states, mask)
    expected, _ = sdpa_attention_forward(layer, *states, None, is_causal=causal)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "internvl"])
def test_words_do_not_reach_a_tower_whose_length_is_that_of_the_text(family, monkeypatch):
    model, batch = build(family), tiny.collate(family)(tiny.make_dataset(family, 1))
    lengths: dict[str, set[tuple[int, int]]] = {}

    def recorded(module, query, *args, **kwargs):
        lengths.setdefault(type(module).__name__, set()).add((query.shape[0], query.shape[2]))
        return hf.bitfield_attention_forward(module, query, *args, **kwargs)

    monkeypatch.setitem(modeling_utils.AttentionInterface._global_mapping, "bitfield", recorded)
    run(model, batch, "bitfield", attention_words=words_of(family, batch))
    ((_, length),) = next(pairs for name, pairs in lengths.items() if "Vision" in name)
    for name, fill in {"input_ids": 7, "attention_mask": 1, "mm_token_type_ids": 0, "labels": 7}.items():
        if name in batch:  # more text after the image
            batch[name] = nn.functional.pad(batch[name], (0, length - batch["labels"].shape[1]), value=fill)
    expected = run(model, batch, "eager")
    lengths.clear()
    assert_same(run(model, batch, "bitfield", attention_words=words_of(family, batch)), expected)
    assert list(lengths.values()) == [{(1, length)}] * 2


@pytest.mark.parametrize("family", ["llama", *WINDOWED])
@torch.no_grad()
def test_words_with_a_growing_cache(family):
    model, length = build(family), 15
    input_ids = torch.randint(3, 90, (2, length))
    words = encode_words(torch.tensor([[1] * 4 + [2] * 11, [0] * 3 + [1] * 12]))
    position_ids = torch.tensor([[*range(4), *range(11)], [0, 1, 2, *range(12)]])
    model.set_attn_implementation("bitfield")
    expected = model(input_ids, attention_words=words, position_ids=position_ids).logits
    cache, logits = transformers.DynamicCache(config=model.config), []
    for part in torch.arange(length).split([9, 3, 1, 1, 1]):
        given = {"attention_words": words[:, : int(part[-1]) + 1], CACHE: cache}
        logits.append(model(input_ids[:, part], position_ids=position_ids[:, part], **given).logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", *WINDOWED])
@torch.no_grad()
def test_a_cache_of_fixed_size_that_a_loop_fills(family):
    model, input_ids = build(family), torch.randint(3, 90, (2, 12))
    model.set_attn_implementation("eager")
    expected = model(input_ids).logits
    model.set_attn_implementation("bitfield")
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    logits = [model(part, **{CACHE: cache}).logits for part in input_ids.split([7, 2, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cache_type", [transformers.DynamicCache, transformers.StaticCache])
@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.no_grad()
def test_words_that_do_not_grow_with_the_cache_are_refused(family, cache_type):
    model, words = build(family), encode_words(torch.ones(1, 9, dtype=torch.int64))
    model.set_attn_implementation("bitfield")
    fixed = cache_type is transformers.StaticCache
    cache = cache_type(config=model.config, **({"max_cache_len": 16} if fixed else {}))
    model(torch.randint(3, 90, (1, 9)), **({} if fixed else {"attention_words": words}), **{CACHE: cache})
    with pytest.raises(ValueError, match="`attention_words` covers 9 tokens; .* cache"):
        model(torch.tensor([[5]]), attention_words=words, **{CACHE: cache})


@pytest.mark.parametrize(
    ("settings", "salient"),
    [
        ({"attention_words": torch.ones(2, 12, dtype=torch.int32)}, r"torch.int32 of shape \(2, 12\)"),
        ({"attention_words": torch.ones(1, 12, dtype=torch.int64)}, "2 rows"),
        ({"attention_words": torch.ones(2, 1, 1, 12, dtype=torch.int64)}, r"shape \(2, 1, 1, 12\)"),
        ({"attention_words": torch.ones(2, 11, dtype=torch.int64)}, "11 tokens; a layer has 12 queries and 12 keys"),
        ({"attention_words": torch.ones(2, 13, dtype=torch.int64)}, "13 tokens"),
        ({"dropout": 0.1}, "`dropout=0.1` in `LlamaAttention`"),
        ({"position_bias": torch.ones(1)}, "`position_bias`"),
        ({"cache": object()}, "`cache`"),
        ({"attention_mask": torch.ones(2, 1, 1, 12, dtype=torch.int64)}, "`attention_mask` is an int64"),
    ],
)
def test_words_that_do_not_fit_and_what_no_path_computes_are_refused(settings, salient):
    settings = {"attention_mask": None, "attention_words": ONE_SAMPLE.expand(2, -1), **settings}
    with pytest.raises(ValueError, match=salient):
        hf.bitfield_attention_forward(_layer(), *_states(batch=2), **settings)


@pytest.mark.parametrize("of_config", [True, False])
def test_words_are_not_used_for_another_sequence(of_config):
    layer = _layer()
    if of_config:
        layer.config.is_encoder_decoder = True
    else:
        layer.__class__ = type("MllamaTextCrossAttention", (type(layer),), {})
    with pytest.raises(ValueError, match="another sequence"):
        hf.bitfield_attention_forward(layer, *_states(), None, attention_words=ONE_SAMPLE)


def test_a_window_that_reaches_ahead_is_refused():
    settings = {**HEADS, **LAYER_TYPES, "layer_types": ["full_attention", "sliding_attention"]}
    settings |= {"query_pre_attn_scalar": 8, "use_bidirectional_attention": True}
    model = transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**settings))
    model.set_attn_implementation("bitfield")
    input_ids = torch.randint(3, 90, (1, 12))
    with pytest.raises(ValueError, match="in layer 1 reaches ahead"):
        model(input_ids, attention_words=encode_words(torch.ones(1, 12, dtype=torch.int64), sees_all=True))
    model.eval()
    found = model(input_ids).last_hidden_state
    model.set_attn_implementation("eager")
    torch.testing.assert_close(found, model(input_ids).last_hidden_state)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("additive", [False, True])
def test_a_dense_mask_of_the_user(sinks, additive):
    states = _states()
    mask = BitfieldMask.from_words(encode_words(torch.tensor([[1] * 5 + [2] * 7])))
    dense = torch.where(dense_mask(mask), 0.0, -1e30) if additive else dense_mask(mask)
    s_aux = torch.randn(4) if sinks else None
    found, _ = hf.bitfield_attention_forward(_layer(), *states, dense[:, None], scaling=0.3, s_aux=s_aux)
    expected, _ = reference_attention(*states, mask, 0.3, sinks=s_aux)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_values_may_have_smaller_heads_than_keys():
    query, key, _ = _states()
    value, layer = torch.randn(1, 2, 12, 8), _layer()
    found, _ = hf.bitfield_attention_forward(layer, query, key, value, None, attention_words=ONE_SAMPLE)
    expected, _ = sdpa_attention_forward(layer, query, key, value, None, is_causal=True)
    torch.testing.assert_close(found, expected)


def test_a_sequence_that_is_cut_over_ranks_goes_to_its_own_attention(monkeypatch):
    seen = {}

    def attention(query, key, value, shard, **settings):
        seen.update(settings, shard=shard)
        return query

    monkeypatch.setattr(context_parallel, "context_parallel_attention", attention)
    states, shard, sinks = _states(), object(), torch.randn(4)
    settings = {"scaling": 0.3, "sliding_window": 5, "softcap": 2.0, "s_aux": sinks}
    found, _ = hf.bitfield_attention_forward(_layer(), *states, None, attention_words=shard, **settings)
    assert seen == {"shard": shard, "scale": 0.3, "window": 5, "softcap": 2.0, "sinks": sinks}
    assert found.equal(states[0].transpose(1, 2))


def test_layers_with_chunks_divide_samples_or_take_words_of_their_own():
    config = {"intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 4, "no_rope_layers": [1, 0]}
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**HEADS, **config))
    batch = text_batch(rows=2, length=11)
    assert model.config.layer_types == ["chunked_attention", "full_attention"]
    expected = run(model, batch, "eager")
    real = batch["attention_mask"]
    full, chunked = encode_words(real), encode_words((torch.arange(11) // 4 + 1) * real)
    words = {"full_attention": full, "chunked_attention": chunked}
    assert_same(run(model, batch, "bitfield", attention_words=words), expected)
    assert_same(run(model, batch, "bitfield"), expected)
    assert_same(run(model, batch, "bitfield", attention_words=full), expected)
    with pytest.raises(ValueError, match="layer 0 is of type 'chunked_attention'"):
        run(model, batch, "bitfield", attention_words={"full_attention": full})
