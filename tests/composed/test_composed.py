"""Composed models: they equal their parts, save and load, generate, train and turn into Llava."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    CLIPVisionModel,
    CohereConfig,
    Dinov2Config,
    Dinov2Model,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    PhiConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
    WhisperModel,
)

from hf_mmparallel.composed.llava_export import to_llava
from hf_mmparallel.composed.multimodal_config import EncoderSettings, MultimodalCallbacks, MultimodalConfig
from hf_mmparallel.composed.multimodal_model import MultimodalModel
from hf_mmparallel.modeling import build_model_spec, module_parts, prepare_stages
from hf_mmparallel.modeling.loading import blank_model, fill
from tests.modeling.test_stages import make_plan, reference, run_stages

VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
TEXT = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
    "bos_token_id": 1,
    "eos_token_id": 49,
    "pad_token_id": 0,
}
IMAGE, AUDIO = 40, 41


def whisper() -> WhisperModel:
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return WhisperModel(
        WhisperConfig(**sizes, **heads, num_mel_bins=8, max_source_positions=6, vocab_size=50, pad_token_id=0)
    )


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=24, n_layer=2, n_head=2, vocab_size=50, n_positions=64))


def compose(kind: str, **options) -> tuple[MultimodalModel, int]:
    """A composed model in eval mode, and its number of rows an image."""
    torch.manual_seed(0)
    if kind == "clip_llama":
        encoders, language_model, rows = {"vision": CLIPVisionModel(CLIPVisionConfig(**VISION))}, None, 5
    elif kind == "siglip_qwen2":
        encoders, rows = {"vision": SiglipVisionModel(SiglipVisionConfig(**VISION))}, 4
        language_model = Qwen2ForCausalLM(Qwen2Config(**TEXT, tie_word_embeddings=True))
    elif kind == "dinov2_gpt2":
        encoders, language_model, rows = {"vision": Dinov2Model(Dinov2Config(**VISION))}, gpt2(), 5
    else:
        encoders, rows = {"vision": CLIPVisionModel(CLIPVisionConfig(**VISION)), "audio": whisper()}, 5
        language_model = None
    language_model = language_model or LlamaForCausalLM(LlamaConfig(**TEXT))
    tokens = {name: token for name, token in (("vision", IMAGE), ("audio", AUDIO)) if name in encoders}
    return MultimodalModel.from_unimodal(encoders, language_model, token_ids=tokens, **options).eval(), rows


KINDS = ["clip_llama", "siglip_qwen2", "dinov2_gpt2", "clip_whisper_llama"]


def make_batch(kind: str, rows: int, images: tuple[int, ...] = (1, 2, 0)) -> dict[str, torch.Tensor]:
    """Samples with so many images (and audio clips) each, padded to the right."""
    generator = torch.Generator().manual_seed(1)
    has_audio, samples = "whisper" in kind, []
    for count in images:
        ids = [1]
        for _ in range(count):
            ids += [IMAGE] * rows + [3] + ([AUDIO] * 6 if has_audio else [])
        samples.append(torch.tensor([*ids, *torch.randint(4, 39, (4,), generator=generator).tolist()]))
    input_ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in samples], batch_first=True)
    labels = input_ids.masked_fill((mask == 0) | (input_ids >= IMAGE), -100)
    batch = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
    if sum(images):
        batch["pixel_values"] = torch.randn(sum(images), 3, 8, 8, generator=generator)
        if has_audio:
            batch["input_features"] = torch.randn(sum(images), 8, 12, generator=generator)
    return batch


def settings(model: MultimodalModel, **changes) -> None:
    """Changes the settings of the vision encoder."""
    values = {**model.config.encoder_settings["vision"], **changes}
    model.config.encoder_settings["vision"] = values


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_parts(kind):
    model, rows = compose(kind)
    batch = make_batch(kind, rows)
    output = model(**batch)
    base = model.model
    embeds = base.language_model.get_input_embeddings()(batch["input_ids"]).clone()
    features = base.projectors["vision"](base.encoders["vision"](batch["pixel_values"]).last_hidden_state)
    embeds[batch["input_ids"] == IMAGE] = features.flatten(0, 1)
    if "audio" in base.encoders:
        heard = base.encoders["audio"](batch["input_features"]).last_hidden_state
        embeds[batch["input_ids"] == AUDIO] = base.projectors["audio"](heard).flatten(0, 1)
    hidden = base.language_model(inputs_embeds=embeds, attention_mask=batch["attention_mask"]).last_hidden_state
    torch.testing.assert_close(output.logits, model.lm_head(hidden))
    shifted = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    torch.testing.assert_close(output.loss, shifted)
    targets = (batch["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(model(**batch, num_items_in_batch=2 * targets).loss, shifted / 2)


@pytest.mark.parametrize("kind", ["clip_llama", "dinov2_gpt2"])
def test_composing_keeps_the_weights(kind):
    vision = CLIPVisionModel(CLIPVisionConfig(**VISION))
    language_model = gpt2() if kind == "dinov2_gpt2" else Qwen2ForCausalLM(Qwen2Config(**TEXT))
    before = [p.clone() for module in (vision, language_model) for p in module.parameters()]
    model = MultimodalModel.from_unimodal({"vision": vision}, language_model, token_ids={"vision": IMAGE})
    after = [p for module in (vision, language_model) for p in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert model.model.encoders["vision"] is vision
    ids = torch.randint(4, 39, (2, 7))
    torch.testing.assert_close(model.eval()(input_ids=ids).logits, language_model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(kind, tmp_path):
    model, rows = compose(kind)
    batch = make_batch(kind, rows)
    model.save_pretrained(tmp_path)
    loaded, info = MultimodalModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    state, other = model.state_dict(), loaded.state_dict()
    assert list(state) == list(other) and all(torch.equal(state[key], other[key]) for key in state)
    assert torch.equal(model(**batch).logits, loaded.eval()(**batch).logits)
    assert list(loaded.model.encoders) == list(model.model.encoders)
    assert [type(e) for e in loaded.model.encoders.values()] == [type(e) for e in model.model.encoders.values()]
    auto = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(auto) is MultimodalModel
    assert AutoConfig.from_pretrained(tmp_path).vision_token_id == IMAGE


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**TEXT, head_dim=12, final_logit_softcapping=0.05),
        CohereConfig(**TEXT, logit_scale=0.3),
        GraniteConfig(**TEXT, logits_scaling=3.0),
        PhiConfig(**{**TEXT, "num_key_value_heads": 2}),
    ],
    ids=lambda config: config.model_type,
)
def test_the_head_does_what_the_language_model_does(config, tmp_path):
    torch.manual_seed(0)
    language_model = AutoModelForCausalLM.from_config(config).eval()
    if language_model.get_output_embeddings().bias is not None:
        nn.init.normal_(language_model.get_output_embeddings().bias)
    ids = torch.randint(4, 39, (2, 7))
    expected = language_model(input_ids=ids).logits
    encoder = CLIPVisionModel(CLIPVisionConfig(**VISION))
    model = MultimodalModel.from_unimodal({"vision": encoder}, language_model, token_ids={"vision": IMAGE})
    model.save_pretrained(tmp_path)
    for composed in (model, MultimodalModel.from_pretrained(tmp_path)):
        torch.testing.assert_close(composed.eval()(input_ids=ids).logits, expected)
    with pytest.raises(ValueError, match="a bias, a factor or a cap"):
        to_llava(model)


def test_tied_embeddings_stay_tied(tmp_path):
    model, _ = compose("siglip_qwen2")
    model.save_pretrained(tmp_path)
    for tied in (model, MultimodalModel.from_pretrained(tmp_path)):
        assert tied.lm_head.weight is tied.get_input_embeddings().weight
    untied, _ = compose("clip_llama")
    assert untied.lm_head.weight is not untied.get_input_embeddings().weight


@pytest.mark.parametrize("kind", KINDS)
def test_generate_is_greedy_decoding_of_the_forward(kind):
    model, rows = compose(kind)
    batch = make_batch(kind, rows, images=(1, 1))
    batch.pop("labels")
    new = model.generate(**batch, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    embeds = model.get_input_embeddings()
    forced = batch["input_ids"]
    features = {name: model.get_features(name, **{key: batch[key]}) for name, key in _mains(model).items()}
    for _ in range(4):
        mask = torch.ones_like(forced)
        length = batch["input_ids"].shape[1]
        prompt = embeds(forced).clone()
        for name, token in (("vision", IMAGE), ("audio", AUDIO)):
            if name in features:
                prompt[:, :length][batch["input_ids"] == token] = features[name].pooler_output
        logits = model.lm_head(model.get_decoder()(inputs_embeds=prompt, attention_mask=mask).last_hidden_state)
        forced = torch.cat([forced, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(new, forced)


def _mains(model: MultimodalModel) -> dict[str, str]:
    return dict(model.model.encoder_inputs.mains)


def test_generate_encodes_once_and_repeats_features_of_each_sample():
    model, rows = compose("clip_llama")
    batch = make_batch("clip_llama", rows, images=(2, 0, 1))
    batch.pop("labels")
    batch = {**batch, **_left_padded(batch)}
    calls = []
    model.model.encoders["vision"].register_forward_hook(lambda *_: calls.append(1))
    options = {"max_new_tokens": 3, "eos_token_id": None, "pad_token_id": 0}
    greedy = model.generate(**batch, do_sample=False, **options)
    assert len(calls) == 1
    beams = model.generate(**batch, do_sample=False, num_beams=2, num_return_sequences=2, **options)
    assert beams.shape[0] == 6 and len(calls) == 2
    features = model.model.get_features("vision", pixel_values=batch["pixel_values"])
    repeated = model._expand_features("vision", features, batch["input_ids"], None, 2).pooler_output
    first, last = features.pooler_output[: 2 * rows], features.pooler_output[2 * rows :]
    assert torch.equal(repeated, torch.cat([first, first, last, last]))
    assert greedy.shape == (3, batch["input_ids"].shape[1] + 3)


def _left_padded(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = [row[mask.bool()] for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    pad = {"batch_first": True, "padding_side": "left"}
    masks = [torch.ones_like(row) for row in ids]
    return {
        "input_ids": nn.utils.rnn.pad_sequence(ids, **pad),
        "attention_mask": nn.utils.rnn.pad_sequence(masks, **pad),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_module_and_checkpointing_changes_none(kind):
    model, rows = compose(kind)
    batch = make_batch(kind, rows)
    model(**batch).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for prefix in ("model.encoders.vision", "model.projectors.vision", "model.language_model"):
        assert any(name.startswith(prefix) and grad.abs().max() > 0 for name, grad in expected.items())
    if "audio" in model.model.encoders:
        assert expected["model.encoders.audio.conv1.weight"].abs().max() > 0
    model.zero_grad()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.text_config.attention_dropout = 0.0
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    model(**batch, use_cache=False).loss.backward()
    for name, grad in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad, msg=name)


def test_text_only_batch_runs_no_encoder():
    model, rows = compose("clip_whisper_llama")
    calls = []
    for encoder in model.model.encoders.values():
        encoder.register_forward_hook(lambda *_: calls.append(1))
    batch = make_batch("clip_whisper_llama", rows, images=(0, 0))
    loss = model(**batch).loss
    assert not calls and loss.isfinite()
    assert torch.equal(model(**batch, pixel_values=torch.empty(0, 3, 8, 8)).loss, loss) and not calls


def test_precomputed_features_equal_inputs():
    model, rows = compose("clip_whisper_llama")
    batch = make_batch("clip_whisper_llama", rows)
    expected = model(**batch).logits
    features = {name: model.get_features(name, **{key: batch.pop(key)}) for name, key in _mains(model).items()}
    assert features["vision"].pooler_output.shape == (3 * rows, 24)
    assert torch.equal(model(**batch, mm_encoder_outputs=features).logits, expected)
    features["vision"].pooler_output = list(features["vision"].pooler_output.split(rows))
    assert torch.equal(model(**batch, mm_encoder_outputs=features).logits, expected)
    embeds = model.get_input_embeddings()(batch.pop("input_ids"))
    assert torch.equal(model(**batch, inputs_embeds=embeds, mm_encoder_outputs=features).logits, expected)


@pytest.mark.parametrize("extra", [1, -1])
def test_count_mismatch_is_an_error(extra):
    model, rows = compose("clip_llama")
    batch = make_batch("clip_llama", rows + extra, images=(1, 1))
    with pytest.raises(ValueError, match=f"`vision` returned 10 feature tokens for {2 * (rows + extra)} place"):
        model(**batch)


def test_placeholders_without_inputs_are_an_error():
    model, rows = compose("clip_llama")
    batch = make_batch("clip_llama", rows)
    batch.pop("pixel_values")
    with pytest.raises(ValueError, match="`vision` returned 0 feature tokens for 15"):
        model(**batch)


def test_callbacks_run_in_order_and_change_values():
    calls = []

    def before_encoder(inputs):
        calls.append("before_encoder")
        return {**inputs, "pixel_values": inputs["pixel_values"] * 0}

    def after_encoder(inputs, output):
        calls.append("after_encoder")
        output.last_hidden_state = output.last_hidden_state[:, 1:]
        return output

    def after_projector(inputs, features):
        calls.append("after_projector")
        assert inputs["pixel_values"].abs().sum() == 0
        return list(features + 1)

    def before_language_model(encoder_outputs, inputs):
        calls.append("before_language_model")
        seen.append(encoder_outputs["vision"].pooler_output)
        return {**inputs, "inputs_embeds": inputs["inputs_embeds"] * 2}

    seen = []
    callbacks = MultimodalCallbacks(
        {"vision": before_encoder}, {"vision": after_encoder}, {"vision": after_projector}, before_language_model
    )
    model, _ = compose("clip_llama", callbacks=callbacks)
    model.model.encoders["vision"].register_forward_hook(lambda *_: calls.append("encoder"))
    model.model.projectors["vision"].register_forward_hook(lambda *_: calls.append("projector"))
    model.get_decoder().register_forward_pre_hook(lambda *_: calls.append("language_model"))
    batch = make_batch("clip_llama", 4, images=(1, 1))
    logits = model(**batch).logits
    assert calls == [
        "before_encoder",
        "encoder",
        "after_encoder",
        "projector",
        "after_projector",
        "before_language_model",
        "language_model",
    ]
    base = model.model
    hidden = base.encoders["vision"](batch["pixel_values"] * 0).last_hidden_state[:, 1:]
    rows = (base.projectors["vision"](hidden) + 1).flatten(0, 1)
    torch.testing.assert_close(seen[0], rows)
    embeds = model.get_input_embeddings()(batch["input_ids"]) * 2
    embeds[batch["input_ids"] == IMAGE] = rows
    hidden = model.get_decoder()(inputs_embeds=embeds, attention_mask=batch["attention_mask"]).last_hidden_state
    torch.testing.assert_close(logits, model.lm_head(hidden))


def test_callback_may_merge_by_itself_but_not_change_the_length():
    def merge(encoder_outputs, inputs):
        rows = encoder_outputs.pop("vision").pooler_output
        embeds = inputs["inputs_embeds"].clone()
        embeds[:, :5] = rows.view(-1, 5, rows.shape[-1])
        return {**inputs, "inputs_embeds": embeds}

    def prepend(encoder_outputs, inputs):
        embeds = inputs["inputs_embeds"]
        return {**inputs, "inputs_embeds": torch.cat([embeds, embeds], dim=1)}

    plain, rows = compose("clip_llama")
    own, _ = compose("clip_llama", callbacks=MultimodalCallbacks(before_language_model=merge))
    batch = make_batch("clip_llama", rows, images=(1, 1))
    batch = {key: value[:, 1:] if key != "pixel_values" else value for key, value in batch.items()}
    unmarked = {**batch, "input_ids": batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, 7)}
    torch.testing.assert_close(own(**unmarked).logits, plain(**batch).logits)
    longer, _ = compose("clip_llama", callbacks=MultimodalCallbacks(before_language_model=prepend))
    with pytest.raises(ValueError, match="changed the shape of `inputs_embeds`"):
        longer(**batch)
    with pytest.raises(ValueError, match="not an encoder of this model"):
        compose("clip_llama", callbacks=MultimodalCallbacks(after_encoder={"visoin": merge}))


def test_a_gathered_model_has_the_callbacks():
    callbacks = MultimodalCallbacks(after_projector={"vision": lambda inputs, features: features * 0})
    model, _ = compose("clip_llama", callbacks=callbacks)
    assert blank_model(model).model.callbacks is callbacks


def test_a_gathered_model_has_the_projectors_of_the_user():
    model, rows = compose("clip_llama", projectors=nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24)))
    blank = blank_model(model)
    assert {name: value.shape for name, value in blank.state_dict().items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    assert all(parameter.is_meta for parameter in blank.parameters())
    batch = make_batch("clip_llama", rows)
    assert torch.equal(fill(blank, model, model.state_dict()).eval()(**batch).logits, model(**batch).logits)


def test_callbacks_are_given_again_on_loading(tmp_path):
    callbacks = MultimodalCallbacks(after_projector={"vision": lambda inputs, features: features * 0})
    model, rows = compose("clip_llama", callbacks=callbacks)
    model.save_pretrained(tmp_path)
    batch = make_batch("clip_llama", rows)
    again = MultimodalModel.from_pretrained(tmp_path, callbacks=callbacks)
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    assert not torch.equal(MultimodalModel.from_pretrained(tmp_path)(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("kind", ["clip_whisper_llama", "siglip_qwen2"])
def test_bfloat16(kind, tmp_path):
    model, rows = compose(kind, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.config.dtype == torch.bfloat16
    batch = make_batch(kind, rows)
    exact, _ = compose(kind)
    output = model(**batch)
    assert output.logits.dtype == torch.bfloat16
    assert (output.loss - exact(**batch).loss).abs() < 0.05
    output.loss.backward()
    model.save_pretrained(tmp_path)
    loaded = MultimodalModel.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16 and torch.equal(loaded(**batch).logits, output.logits)


def test_modules_may_differ_in_dtype():
    torch.manual_seed(0)
    vision = CLIPVisionModel(CLIPVisionConfig(**VISION)).to(torch.bfloat16)
    model = MultimodalModel.from_unimodal(
        {"vision": vision}, LlamaForCausalLM(LlamaConfig(**TEXT)), token_ids={"vision": IMAGE}
    )
    assert model(**make_batch("clip_llama", 5)).logits.dtype == torch.float32
    assert vision.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"feature_select": "default"}, 4),
        ({"feature_select": "pooled"}, 1),
        ({"pooling": "mean"}, 1),
        ({"feature_layer": -2}, 5),
        ({"feature_layer": 1, "feature_select": "default", "pooling": "mean"}, 1),
    ],
)
def test_feature_selection(changes, rows):
    model, _ = compose("clip_llama", encoder_settings={"vision": changes})
    encoder = model.model.encoders["vision"]
    batch = make_batch("clip_llama", rows)
    output = encoder(batch["pixel_values"], output_hidden_states=True)
    expected = output.last_hidden_state
    if "feature_layer" in changes:
        expected = output.hidden_states[changes["feature_layer"]]
    if changes.get("feature_select") == "default":
        expected = expected[:, 1:]
    if changes.get("feature_select") == "pooled":
        expected = output.pooler_output.unsqueeze(1)
    if changes.get("pooling"):
        expected = expected.mean(1, keepdim=True)
    features = model.get_features("vision", pixel_values=batch["pixel_values"]).pooler_output
    torch.testing.assert_close(features, model.model.projectors["vision"](expected).flatten(0, 1))
    assert model(**batch).loss.isfinite()


def test_two_encoders_of_one_kind_have_their_own_inputs():
    torch.manual_seed(0)
    encoders = {
        "clip": CLIPVisionConfig(**VISION),
        "dino": Dinov2Config(**VISION),
        "sig": SiglipVisionConfig(**VISION),
    }
    model = MultimodalModel.from_unimodal(
        encoders,
        LlamaConfig(**TEXT),
        token_ids={"clip": 40, "dino": 41, "sig": 42},
        projectors={"clip": "mlp", "dino": "linear", "sig": nn.Linear(16, 24)},
        encoder_settings={"sig": {"input_names": {"small_pixels": "pixel_values"}}},
    ).eval()
    assert {n: i.split("_")[0] for n, i in _mains(model).items()} == {"clip": "clip", "dino": "dino", "sig": "small"}
    ids = torch.tensor([[1] + [40] * 5 + [41] * 5 + [42] * 4 + [5, 6]])
    pixels = {key: torch.randn(1, 3, 8, 8) for key in ("clip_pixel_values", "dino_pixel_values", "small_pixels")}
    logits = model(input_ids=ids, **pixels).logits
    for key in pixels:
        changed = {**pixels, key: pixels[key] + 1}
        assert not torch.allclose(model(input_ids=ids, **changed).logits, logits)
    assert model.generate(input_ids=ids, **pixels, max_new_tokens=2, do_sample=False).shape[1] > ids.shape[1]
    with pytest.raises(ValueError, match="`pixel_values` is an input of several encoders"):
        model(input_ids=ids, pixel_values=pixels["small_pixels"])
    with pytest.raises(ValueError, match="`clip_pixels` is no input of encoder `clip`"):
        model(input_ids=ids, clip_pixels=pixels["small_pixels"])


def test_custom_projector_is_saved_and_given_again(tmp_path):
    def projector():
        return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24))

    model, rows = compose("clip_llama", projectors=projector())
    batch = make_batch("clip_llama", rows)
    model.save_pretrained(tmp_path)
    loaded = MultimodalModel.from_pretrained(tmp_path, projectors={"vision": projector()})
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    with pytest.raises(ValueError, match="a custom module"):
        MultimodalModel.from_pretrained(tmp_path)


def test_parts_from_folders(tmp_path):
    vision, language_model = CLIPVisionModel(CLIPVisionConfig(**VISION)), LlamaForCausalLM(LlamaConfig(**TEXT))
    vision.save_pretrained(tmp_path / "vision")
    whisper().save_pretrained(tmp_path / "audio")
    language_model.save_pretrained(tmp_path / "text")
    model = MultimodalModel.from_unimodal(
        {"vision": str(tmp_path / "vision"), "audio": str(tmp_path / "audio")},
        str(tmp_path / "text"),
        token_ids={"vision": IMAGE, "audio": AUDIO},
    )
    assert type(model.model.encoders["audio"]).__name__ == "WhisperEncoder"
    for loaded, original in ((model.model.encoders["vision"], vision), (model.lm_head, language_model.lm_head)):
        for key, value in original.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value), key


def test_attention_implementation_of_each_module():
    model, rows = compose("clip_llama")
    batch = make_batch("clip_llama", rows)
    expected = model(**batch).logits
    model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    assert model.model.encoders["vision"].config._attn_implementation == "eager"
    assert model.get_decoder().config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(**batch).logits, expected)


def test_placeholder_beyond_the_vocabulary():
    model, rows = compose("clip_llama")
    batch = make_batch("clip_llama", rows)
    expected = model(**batch).logits
    settings(model, token_id=1000)
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, 1000)
    torch.testing.assert_close(model(**batch).logits, expected)


def test_discovery_finds_encoders_with_their_projectors():
    model, _ = compose("clip_whisper_llama")
    assert list(module_parts(model)) == ["vision", "audio", "language_model"]
    spec = build_model_spec(model)
    assert spec.placeholders == {"vision": IMAGE, "audio": AUDIO}
    assert spec.modules["audio"].stack == "model.encoders.audio.layers"
    names = {p.name for p in spec.modules["vision"].parameters}
    assert {n for n, _ in model.named_parameters() if ".vision." in n} == names
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "patch_size", "changes", "rows"),
    [
        ("clip", 4, {}, 5),
        ("clip", 4, {"feature_layer": -2, "feature_select": "default"}, 4),
        ("clip", 8, {"feature_select": "default"}, 1),
        ("siglip", 4, {}, 4),
        ("siglip", 4, {"feature_layer": -1}, 4),
        ("siglip", 4, {"feature_select": "default"}, 3),
        ("siglip", 8, {}, 1),
    ],
)
def test_llava_gives_the_same_predictions(kind, patch_size, changes, rows, tmp_path):
    torch.manual_seed(0)
    config = {**VISION, "patch_size": patch_size}
    vision = CLIPVisionConfig(**config) if kind == "clip" else SiglipVisionConfig(**config)
    model = MultimodalModel.from_unimodal(
        {"vision": vision},
        LlamaConfig(**TEXT),
        token_ids={"vision": IMAGE},
        encoder_settings={"vision": changes},
    ).eval()
    batch = make_batch("clip_llama", rows)
    to_llava(model).save_pretrained(tmp_path)
    llava = LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert llava.config.image_seq_length == rows
    torch.testing.assert_close(llava(**batch).logits, model(**batch).logits)
    prompt = {key: batch[key][:1, : rows + 4] for key in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 3, "do_sample": False, "pixel_values": batch["pixel_values"][:1]}
    assert torch.equal(llava.generate(**prompt, **options), model.generate(**prompt, **options))


def test_llava_needs_a_matching_composition():
    for kind, options, reason in (
        ("dinov2_gpt2", {}, "Dinov2Model"),
        ("clip_whisper_llama", {}, "2 encoders"),
        ("clip_llama", {"projectors": "linear"}, "projector"),
        ("clip_llama", {"encoder_settings": {"vision": {"pooling": "mean"}}}, "pooling"),
    ):
        with pytest.raises(ValueError, match=reason):
            to_llava(compose(kind, **options)[0])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"token_ids": {}}, "`token_ids` has no entry for encoder `vision`"),
        ({"token_ids": {"vision": -1}}, "`token_id=-1` is not a token id"),
        ({"projectors": "qformer"}, "`projector='qformer'` is not known"),
        ({"encoder_settings": {"vision": {"feature_layr": 1}}}, "Did you mean `feature_layer`"),
        ({"encoder_settings": {"sound": {}}}, "`encoder_settings` has `sound`"),
        ({"encoders": {}}, "`encoders` is empty"),
        ({"encoders": {"vision.tower": CLIPVisionConfig(**VISION)}}, "cannot name an encoder"),
        ({"language_model": whisper()}, "not a plain causal language model"),
    ],
)
def test_bad_compositions_are_errors(arguments, reason):
    given = {
        "encoders": {"vision": CLIPVisionConfig(**VISION)},
        "language_model": LlamaConfig(**TEXT),
        "token_ids": {"vision": IMAGE},
    }
    with pytest.raises(ValueError, match=reason):
        MultimodalModel.from_unimodal(**{**given, **arguments})


def test_config_keeps_the_order_of_encoders(tmp_path):
    model, _ = compose("clip_whisper_llama")
    model.config.save_pretrained(tmp_path)
    config = MultimodalConfig.from_pretrained(tmp_path)
    assert config.encoder_names == ["vision", "audio"] == list(config.encoder_configs)
    assert config.settings("audio") == EncoderSettings(AUDIO, "WhisperEncoder")
    assert "audio" in json.loads((tmp_path / "config.json").read_text())["encoder_configs"]
    assert config.get_text_config().vocab_size == 50


@pytest.mark.parametrize("kind", ["clip_whisper_llama", "siglip_qwen2"])
@pytest.mark.parametrize("images", [(1, 2, 0), (0, 0)])
def test_stages_equal_the_whole_model(kind, images):
    model, rows = compose(kind)
    batch = make_batch(kind, rows, images=images)
    loss, grads = reference(model, batch)
    spec = build_model_spec(model)
    plan = make_plan(spec, {name: [1] for name in spec.modules})
    cut_loss, cut_grads, _ = run_stages(model, plan, batch)
    torch.testing.assert_close(cut_loss, loss)
    assert set(grads) <= set(cut_grads)
    for name, grad in grads.items():
        torch.testing.assert_close(cut_grads[name], grad, msg=name)


def test_a_hidden_state_from_an_earlier_stage_is_refused():
    model, _ = compose("clip_llama", encoder_settings={"vision": {"feature_layer": 0}})
    spec = build_model_spec(model)
    with pytest.raises(ValueError, match="selects hidden state 0"):
        prepare_stages(model, spec, make_plan(spec, {"vision": [1]}), 0)
