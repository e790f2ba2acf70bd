"""What `build_model_spec` reads off a model."""

from collections import Counter

import pytest
import torch
import transformers
from torch import nn

from hf_mmparallel.modeling import build_model_spec, count_feature_tokens, module_parts
from hf_mmparallel.modeling.spec import attention_windows
from hf_mmparallel.plan import LANGUAGE_MODEL
from tests import hybrids, tiny

torch.set_num_threads(1)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_parameter_belongs_to_one_module(family):
    model = tiny.FAMILIES[family]()
    spec = build_model_spec(model)
    names = [p.name for module in spec.modules.values() for p in module.parameters]
    expected = dict(model.named_parameters())
    assert sorted(names) == sorted(expected)
    for module in spec.modules.values():
        assert module.num_layers == len(model.get_submodule(module.stack)) == 4
        for p in module.parameters:
            assert p.shape == tuple(expected[p.name].shape)
            inner = p.name.startswith(module.stack + ".")
            assert inner == (0 <= p.layer < module.num_layers)
            assert not inner or f"{module.stack}.{p.layer}." in p.name
        assert module.hidden_size == (64 if module.name == LANGUAGE_MODEL else 32)
        assert module.num_heads == 4
    assert list(spec.modules)[-1] == LANGUAGE_MODEL
    assert spec.language_model.num_kv_heads == 2
    assert spec.language_model.intermediate_size == 128


@pytest.mark.parametrize("family", ["paligemma", "qwen3_vl", "voxtral"])
def test_a_model_on_meta_has_the_same_spec(family):
    with torch.device("meta"):
        model = tiny.FAMILIES[family]()
    assert build_model_spec(model) == build_model_spec(tiny.FAMILIES[family]())


@pytest.mark.parametrize("family", [name for name in tiny.FAMILIES if name not in tiny.TEXT_ONLY])
def test_rows_are_counted_per_sample(family):
    model = tiny.FAMILIES[family]()
    batch = tiny.collate(family)(tiny.make_dataset(family, 6))
    rows = count_feature_tokens(batch, build_model_spec(model).placeholders)
    for part in module_parts(model).values():
        for modality, method in part.features.items():
            names = part.input_names(modality)
            if names[0] not in batch:
                assert rows[modality] == [0] * 6
                continue
            features = method(**{name: batch[name] for name in names if name in batch}).pooler_output
            total = sum(item.reshape(-1, 64).shape[0] for item in features)
            assert total == sum(rows[modality]) > 0
            assert len(set(rows[modality])) > 2


def _without_encoder(model):
    model.model.tower_of_mine = model.model.vision_tower
    del model.model.vision_tower


def _without_layers(model):
    model.model.vision_tower.encoder = nn.Linear(2, 2)


@pytest.mark.parametrize("change", [_without_encoder, _without_layers])
def test_media_that_no_layers_encode_are_embedded_before_the_language_model(change):
    model = tiny.FAMILIES["llava"]()
    change(model)
    spec = build_model_spec(model)
    assert [*spec.modules] == [LANGUAGE_MODEL]
    layers = {p.layer for p in spec.language_model.parameters if "language_model" not in p.name}
    assert layers == {-1, 4}  # but the head
    model.model.language_model.layers = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="`model.language_model` has no list of layers"):
        build_model_spec(model)


def test_a_head_may_be_named_as_a_decoder():
    sizes = {**tiny.TEXT, "local_attention": 8}
    del sizes["num_key_value_heads"], sizes["tie_word_embeddings"]
    config = transformers.ModernBertDecoderConfig(
        **sizes, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2
    )
    with torch.device("meta"):
        spec = build_model_spec(transformers.ModernBertDecoderForCausalLM(config))
    assert spec.language_model.stack == "model.layers"


def test_a_parameter_may_have_many_uses_and_experts_may_all_compute_all_tokens():
    zamba = build_model_spec(hybrids.build("Zamba2ForCausalLM"))
    shared = "model.layers.0.shared_transformer.self_attn.q_proj.weight"
    assert zamba.used_at[shared] == tuple((LANGUAGE_MODEL, layer) for layer in (0, 2, 3))
    for layer in (0, 2, 3):
        assert shared in {use.parameter.name for use in zamba.uses[LANGUAGE_MODEL, layer]}
    assert zamba.language_model.layer_kinds == ("both", "state", "both", "both")
    nemotron = build_model_spec(hybrids.build("NemotronHForCausalLM")).language_model
    assert nemotron.layer_kinds == ("state", "alone", "attention", "alone")
    shares = {p.name.rpartition(".")[2]: p.active_share for p in nemotron.parameters if ".experts." in p.name}
    assert set(shares.values()) == {0.5}
    llama = build_model_spec(hybrids.build("Llama4ForCausalLM")).language_model
    assert {p.active_share for p in llama.parameters} == {1.0} and llama.num_experts == 4
    alone = llama.in_layout((0, 1))  # experts on different ranks compute the tokens that are theirs
    assert {p.active_share for p in alone.parameters if p.num_experts} == {0.25}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (transformers.LlamaConfig(), {0: 6}),
        (transformers.MistralConfig(sliding_window=64), {64: 6}),
        (transformers.Qwen2Config(use_sliding_window=False, sliding_window=64, num_hidden_layers=6), {0: 6}),
        (transformers.Gemma3TextConfig(sliding_window=64, num_hidden_layers=6), {0: 1, 64: 5}),
        (
            transformers.Llama4TextConfig(attention_chunk_size=64, no_rope_layers=[1, 1, 0] * 2, num_hidden_layers=6),
            {0: 2, 32: 4},
        ),
    ],
)
def test_windows_of_layers_come_from_the_config(config, windows):
    assert Counter(attention_windows(config, 6) or (0,) * 6) == windows
