"""What `build_model_spec` reads off a model."""

import pytest
import torch
from torch import nn

from hf_mmparallel.modeling import build_model_spec, count_feature_tokens, module_parts
from hf_mmparallel.modeling.spec import find_stack
from hf_mmparallel.plan import LANGUAGE_MODEL, FeatureSpec
from tests import tiny

torch.set_num_threads(1)


def layer_of(spec, name: str) -> tuple[str, int]:
    return next((m.name, p.layer) for m in spec.modules.values() for p in m.parameters if p.name == name)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_parameter_belongs_to_one_module(family):
    model = tiny.FAMILIES[family]()
    spec = build_model_spec(model)
    names = [p.name for module in spec.modules.values() for p in module.parameters]
    expected = dict(model.named_parameters())
    assert sorted(names) == sorted(expected)
    for module in spec.modules.values():
        assert module.num_layers == 4
        layers = model.get_submodule(module.stack)
        for p in module.parameters:
            assert p.shape == tuple(expected[p.name].shape)
            inner = p.name.startswith(module.stack + ".")
            assert inner == (0 <= p.layer < module.num_layers)
            assert not inner or f"{module.stack}.{p.layer}." in p.name
        assert module.hidden_size == (64 if module.name == LANGUAGE_MODEL else 32)
        assert (module.num_heads, len(layers)) == (4, 4)
    assert list(spec.modules)[-1] == LANGUAGE_MODEL
    assert spec.language_model.num_kv_heads == 2
    assert spec.language_model.intermediate_size == 128


@pytest.mark.parametrize("family", ["llava", "llava_next", "gemma3", "mistral3", "qwen2_vl"])
def test_the_projector_belongs_to_the_encoder(family):
    spec = build_model_spec(tiny.FAMILIES[family]())
    assert spec.encoders == ("vision",)
    for module in spec.modules.values():
        for p in module.parameters:
            encoder = any(part in p.name for part in ("vision_tower", "visual", "projector", "image_newline"))
            assert (module.name == "vision") == encoder, p.name
            if "projector" in p.name or "merger" in p.name or "image_newline" in p.name:
                assert p.layer == 4


def test_layers_around_the_stack():
    spec = build_model_spec(tiny.FAMILIES["llava"]())
    assert layer_of(spec, "model.vision_tower.embeddings.class_embedding") == ("vision", -1)
    assert layer_of(spec, "model.vision_tower.encoder.layers.2.mlp.fc1.weight") == ("vision", 2)
    assert layer_of(spec, "model.vision_tower.post_layernorm.weight") == ("vision", 4)
    assert layer_of(spec, "model.language_model.embed_tokens.weight") == (LANGUAGE_MODEL, -1)
    assert layer_of(spec, "model.language_model.norm.weight") == (LANGUAGE_MODEL, 4)
    assert layer_of(spec, "lm_head.weight") == (LANGUAGE_MODEL, 4)


def test_tied_embeddings_are_used_twice():
    assert build_model_spec(tiny.FAMILIES["llava"]()).tied == {}
    tied = build_model_spec(tiny.FAMILIES["gemma3"]()).tied
    assert tied == {"model.language_model.embed_tokens.weight": (LANGUAGE_MODEL, 4)}
    assert build_model_spec(tiny.FAMILIES["llama_tied"]()).tied == {"model.embed_tokens.weight": (LANGUAGE_MODEL, 4)}


def test_features_of_deepstack_enter_at_their_layers():
    spec = build_model_spec(tiny.FAMILIES["qwen3_vl"]())
    vision = spec.modules["vision"]
    levels = [FeatureSpec("image", "deepstack_features", i, i) for i in range(3)]
    assert vision.features[:4] == (FeatureSpec("image"), *levels)
    assert [f.modality for f in vision.features] == ["image"] * 4 + ["video"] * 4
    assert vision.inner_features
    assert not build_model_spec(tiny.FAMILIES["qwen2_vl"]()).modules["vision"].inner_features
    assert spec.placeholders == {"image": tiny.MEDIA_TOKEN, "video": tiny.VIDEO_TOKEN}


def test_frozen_parameters_are_not_trainable():
    model = tiny.FAMILIES["llava"]()
    model.model.vision_tower.requires_grad_(False)
    for p in build_model_spec(model).modules["vision"].parameters:
        assert p.trainable == ("vision_tower" not in p.name)


def test_a_model_on_meta_has_the_same_spec():
    for family in ("paligemma", "qwen3_vl", "voxtral"):
        with torch.device("meta"):
            model = tiny.FAMILIES[family]()
        assert build_model_spec(model) == build_model_spec(tiny.FAMILIES[family]())


@pytest.mark.parametrize("family", [name for name in tiny.FAMILIES if name not in tiny.TEXT_ONLY])
def test_rows_are_counted_per_sample(family):
    model = tiny.FAMILIES[family]()
    spec = build_model_spec(model)
    batch = tiny.collate(family)(tiny.make_dataset(family, 6))
    rows = count_feature_tokens(batch, spec)
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


def test_an_encoder_that_is_not_found_is_named():
    model = tiny.FAMILIES["llava"]()
    model.model.tower_of_mine = model.model.vision_tower
    del model.model.vision_tower
    with pytest.raises(ValueError, match=r"`get_encoder\('image'\)` finds no encoder"):
        build_model_spec(model)


def test_a_tower_without_layers_is_named():
    model = tiny.FAMILIES["llava"]()
    model.model.vision_tower.encoder = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="`model.vision_tower` has no list of layers"):
        find_stack(model, "model.vision_tower")


def test_a_parameter_used_at_three_places_is_refused():
    model = tiny.FAMILIES["llama_tied"]()
    model.model.layers[1].mlp.extra = nn.Linear(64, 120, bias=False)
    model.model.layers[1].mlp.extra.weight = model.lm_head.weight
    with pytest.raises(ValueError, match="used at three places"):
        build_model_spec(model)
