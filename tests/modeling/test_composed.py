"""Composed models: they equal their parts, save and load, generate and train."""

from collections.abc import Sequence

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPVisionConfig, LlamaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

from hf_mmparallel.modeling import build_model_spec, prepare_stages
from hf_mmparallel.modeling.llava_export import to_llava
from hf_mmparallel.modeling.loading import blank_model, fill
from hf_mmparallel.modeling.multimodal_backbone import LogitScale
from hf_mmparallel.modeling.multimodal_config import EncoderSettings, MultimodalCallbacks
from hf_mmparallel.modeling.multimodal_model import MultimodalModel
from tests import tiny
from tests.modeling.test_stages import assert_same, make_plan

VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 8, "patch_size": 4}
TEXT = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 1, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 49, "pad_token_id": 0}
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 64}
IMAGE, AUDIO = 40, 41


def clip() -> hf.CLIPVisionModel:
    return hf.CLIPVisionModel(hf.CLIPVisionConfig(**VISION))


def whisper() -> hf.WhisperModel:
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"num_mel_bins": 8, "max_source_positions": 6, "vocab_size": 50, "pad_token_id": 0}
    return hf.WhisperModel(hf.WhisperConfig(**sizes, **heads))


def compose(kind: str, **options) -> tuple[MultimodalModel, int]:
    """A composed model in eval mode, and its number of rows an image."""
    torch.manual_seed(0)
    encoders, language_model, rows = {"vision": clip()}, None, 5
    if kind == "siglip_qwen2":
        encoders, rows = {"vision": hf.SiglipVisionModel(hf.SiglipVisionConfig(**VISION))}, 4
        language_model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**TEXT, tie_word_embeddings=True))
    elif kind == "dinov2_gpt2":
        encoders, language_model = (
            {"vision": hf.Dinov2Model(hf.Dinov2Config(**VISION))},
            hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
        )
    elif kind == "clip_whisper_llama":
        encoders["audio"] = whisper()
    language_model = language_model or hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT))
    tokens = {name: token for name, token in (("vision", IMAGE), ("audio", AUDIO)) if name in encoders}
    return MultimodalModel.from_unimodal(encoders, language_model, token_ids=tokens, **options).eval(), rows


KINDS = ("clip_llama", "siglip_qwen2", "dinov2_gpt2", "clip_whisper_llama")
TIED = ("siglip_qwen2", "dinov2_gpt2")


def make_samples(
    kind: str, rows: int, images: Sequence[int] = (1, 2, 0), clips: Sequence[int] | None = None
) -> list[dict[str, Tensor]]:
    """Samples with so many images (and audio clips, as many by default) each."""
    generator, samples = torch.Generator().manual_seed(1), []
    for count, heard in zip(images, (clips or images) if "whisper" in kind else [0] * len(images), strict=True):
        media = [([IMAGE] * rows * (n < count), [AUDIO] * 6 * (n < heard)) for n in range(max(count, heard))]
        ids = [1, *(token for image, clip in media for token in (*image, 3, *clip))]
        ids = torch.tensor([*ids, *torch.randint(4, 39, (4,), generator=generator).tolist()])
        sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        sample["labels"] = ids.masked_fill(ids >= IMAGE, -100)
        if count:
            sample["pixel_values"] = torch.randn(count, 3, 8, 8, generator=generator)
        if heard:
            sample["input_features"] = torch.randn(heard, 8, 12, generator=generator)
        samples.append(sample)
    return samples


def make_batch(kind: str, rows: int, images: tuple[int, ...] = (1, 2, 0)) -> dict[str, Tensor]:
    return tiny.collate("llava")(make_samples(kind, rows, images))


def merged(model: MultimodalModel, batch: dict[str, Tensor]) -> Tensor:
    """Embeddings of a batch with the projected outputs of its encoders, by the modules alone."""
    base = model.model
    embeds = base.language_model.get_input_embeddings()(batch["input_ids"]).clone()
    for name, key, token in (("vision", "pixel_values", IMAGE), ("audio", "input_features", AUDIO)):
        if name in base.encoders:
            features = base.projectors[name](base.encoders[name](batch[key]).last_hidden_state)
            embeds[batch["input_ids"] == token] = features.flatten(0, 1)
    return embeds


def logits_of(model: MultimodalModel, embeds: Tensor, mask: Tensor) -> Tensor:
    hidden = model.get_decoder()(inputs_embeds=embeds, attention_mask=mask).last_hidden_state
    return LogitScale.of(model.config.text_config).apply(model.lm_head(hidden))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_parts(kind):
    model, rows = compose(kind)
    batch = make_batch(kind, rows)
    output = model(**batch)
    torch.testing.assert_close(output.logits, logits_of(model, merged(model, batch), batch["attention_mask"]))
    shifted = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    torch.testing.assert_close(output.loss, shifted)
    targets = (batch["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(model(**batch, num_items_in_batch=2 * targets).loss, shifted / 2)


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
    for composed in (model, loaded):
        assert (composed.lm_head.weight is composed.get_input_embeddings().weight) == (kind in TIED)
    assert list(loaded.config.encoder_configs) == loaded.config.encoder_names == list(model.model.encoders)
    assert [type(e) for e in loaded.model.encoders.values()] == [type(e) for e in model.model.encoders.values()]
    assert type(hf.AutoModelForImageTextToText.from_pretrained(tmp_path)) is MultimodalModel
    assert hf.AutoConfig.from_pretrained(tmp_path).vision_token_id == IMAGE


@pytest.mark.parametrize(
    "config",
    [
        hf.Gemma2Config(**TEXT, head_dim=12, final_logit_softcapping=0.05),
        hf.CohereConfig(**TEXT, logit_scale=0.3),
        hf.GraniteConfig(**TEXT, logits_scaling=3.0),
        hf.PhiConfig(**{**TEXT, "num_key_value_heads": 2}),
        hf.GPT2Config(**GPT2),
    ],
    ids=lambda config: config.model_type,
)
def test_the_head_does_what_the_language_model_does(config, tmp_path):
    torch.manual_seed(0)
    language_model, encoder = hf.AutoModelForCausalLM.from_config(config).eval(), clip()
    if language_model.get_output_embeddings().bias is not None:
        nn.init.normal_(language_model.get_output_embeddings().bias)
    ids = torch.randint(4, 39, (2, 7))
    expected = language_model(input_ids=ids).logits
    model = MultimodalModel.from_unimodal({"vision": encoder}, language_model, token_ids={"vision": IMAGE})
    assert model.model.encoders["vision"] is encoder
    model.save_pretrained(tmp_path)
    for composed in (model, MultimodalModel.from_pretrained(tmp_path)):
        torch.testing.assert_close(composed.eval()(input_ids=ids).logits, expected)
    if config.model_type != "gpt2":
        with pytest.raises(ValueError, match="a bias, a factor or a cap"):
            to_llava(model)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_is_greedy_decoding_of_the_forward(kind):
    model, rows = compose(kind)
    batch = make_batch(kind, rows, images=(1, 1))
    batch.pop("labels")
    new = model.generate(**batch, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    prompt = merged(model, batch)
    forced = batch["input_ids"]
    for _ in range(4):
        embeds = model.get_input_embeddings()(forced).clone()
        embeds[:, : prompt.shape[1]] = prompt
        logits = logits_of(model, embeds, torch.ones_like(forced))
        forced = torch.cat([forced, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(new, forced)


def test_generate_encodes_once_and_repeats_features_of_each_sample():
    model, rows = compose("clip_llama")
    ids = torch.randint(4, 39, (3, 14))
    ids[0, 1 : 1 + 2 * rows], ids[2, 1 : 1 + rows] = IMAGE, IMAGE
    given = {"input_ids": ids, "pixel_values": torch.randn(3, 3, 8, 8)}
    calls = []
    model.model.encoders["vision"].register_forward_hook(lambda *_: calls.append(1))
    options = {"max_new_tokens": 3, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    assert model.generate(**given, **options).shape == (3, 17) and len(calls) == 1
    beams = model.generate(**given, **options, num_beams=2, num_return_sequences=2)
    assert beams.shape == (6, 17) and len(calls) == 2
    alone = model.generate(ids[2:], pixel_values=given["pixel_values"][2:], **options, num_beams=2)
    assert torch.equal(beams[4], alone[0])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_module_and_checkpointing_changes_none(kind):
    model, rows = compose(kind)
    batch = make_batch(kind, rows)
    model(**batch).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for part in ("projectors.vision", "language_model", *(f"encoders.{name}" for name in model.model.encoders)):
        assert any(name.startswith(f"model.{part}") and grad.abs().max() > 0 for name, grad in expected.items())
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
    features = {
        name: model.get_features(name, **{key: batch.pop(key)})
        for name, key in (("vision", "pixel_values"), ("audio", "input_features"))
    }
    assert features["vision"].pooler_output.shape == (3 * rows, 24)
    assert torch.equal(model(**batch, mm_encoder_outputs=features).logits, expected)
    features["vision"].pooler_output = list(features["vision"].pooler_output.split(rows))
    assert torch.equal(model(**batch, mm_encoder_outputs=features).logits, expected)
    embeds = model.get_input_embeddings()(batch.pop("input_ids"))
    assert torch.equal(model(**batch, inputs_embeds=embeds, mm_encoder_outputs=features).logits, expected)


@pytest.mark.parametrize("extra, found", [(1, 10), (-1, 10), (0, 0)])
def test_count_mismatch_is_an_error(extra, found):
    model, rows = compose("clip_llama")
    batch = make_batch("clip_llama", rows + extra, images=(1, 1))
    if not found:
        batch.pop("pixel_values")
    with pytest.raises(ValueError, match=f"`vision` returned {found} feature tokens for {2 * (rows + extra)} place"):
        model(**batch)


def test_callbacks_run_in_order_and_change_values():
    calls = []

    def noting(name, function=None):
        return lambda *given: (calls.append(name), function and function(*given))[1]

    def of_vision(name, function):
        return {"vision": noting(name, function)}

    callbacks = MultimodalCallbacks(
        of_vision("before_encoder", lambda inputs: {**inputs, "pixel_values": inputs["pixel_values"] * 0}),
        of_vision("after_encoder", lambda inputs, output: type(output)(output.last_hidden_state[:, 1:])),
        of_vision("after_projector", lambda inputs, features: list(features + 1)),
        noting("before_text", lambda outputs, inputs: {**inputs, "inputs_embeds": inputs["inputs_embeds"] * 2}),
    )
    model, _ = compose("clip_llama", callbacks=callbacks)
    encoder, projector = model.model.encoders["vision"], model.model.projectors["vision"]
    encoder.register_forward_hook(noting("encoder"))
    projector.register_forward_hook(noting("projector"))
    model.get_decoder().register_forward_pre_hook(noting("text"))
    batch = make_batch("clip_llama", 4, images=(1, 1))
    logits = model(**batch).logits
    assert calls == [
        "before_encoder",
        "encoder",
        "after_encoder",
        "projector",
        "after_projector",
        "before_text",
        "text",
    ]
    embeds = model.get_input_embeddings()(batch["input_ids"]) * 2
    hidden = encoder(batch["pixel_values"] * 0).last_hidden_state[:, 1:]
    embeds[batch["input_ids"] == IMAGE] = (projector(hidden) + 1).flatten(0, 1)
    torch.testing.assert_close(logits, logits_of(model, embeds, batch["attention_mask"]))


def test_callback_may_merge_by_itself_but_not_change_the_length():
    def merge(encoder_outputs, inputs):
        rows = encoder_outputs.pop("vision").pooler_output
        embeds = inputs["inputs_embeds"].clone()
        embeds[:, :5] = rows.view(-1, 5, rows.shape[-1])
        return {**inputs, "inputs_embeds": embeds}

    def prepend(encoder_outputs, inputs):
        return {**inputs, "inputs_embeds": inputs["inputs_embeds"].repeat(1, 2, 1)}

    plain, rows = compose("clip_llama")
    own, _ = compose("clip_llama", callbacks=MultimodalCallbacks(before_language_model=merge))
    batch = make_batch("clip_llama", rows, images=(1, 1))
    batch = {key: value[:, 1:] if key != "pixel_values" else value for key, value in batch.items()}
    unmarked = {**batch, "input_ids": batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, 7)}
    torch.testing.assert_close(own(**unmarked).logits, plain(**batch).logits)
    longer, _ = compose("clip_llama", callbacks=MultimodalCallbacks(before_language_model=prepend))
    with pytest.raises(ValueError, match="the shape of `inputs_embeds`"):
        longer(**batch)
    with pytest.raises(ValueError, match="not an encoder of this model"):
        compose("clip_llama", callbacks=MultimodalCallbacks(after_encoder={"visoin": merge}))


def test_callbacks_and_projectors_of_the_user_are_given_again_on_loading(tmp_path):
    def projector():
        return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24))

    callbacks = MultimodalCallbacks(after_projector={"vision": lambda inputs, features: features * 2})
    model, rows = compose("clip_llama", projectors=projector(), callbacks=callbacks)
    batch = make_batch("clip_llama", rows)
    logits = model(**batch).logits
    model.save_pretrained(tmp_path)
    options = {"projectors": {"vision": projector()}}
    assert torch.equal(
        MultimodalModel.from_pretrained(tmp_path, **options, callbacks=callbacks)(**batch).logits, logits
    )
    assert not torch.equal(MultimodalModel.from_pretrained(tmp_path, **options)(**batch).logits, logits)
    with pytest.raises(ValueError, match="a custom module"):
        MultimodalModel.from_pretrained(tmp_path)
    blank = blank_model(model)  # as a model is gathered
    assert blank.model.callbacks is callbacks and all(parameter.is_meta for parameter in blank.parameters())
    shapes = [{name: value.shape for name, value in m.state_dict().items()} for m in (blank, model)]
    assert shapes[0] == shapes[1]
    assert torch.equal(fill(blank, model, model.state_dict()).eval()(**batch).logits, logits)


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


def test_modules_may_differ_in_dtype_and_attention():
    vision = clip().to(torch.bfloat16)
    language_model = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT))
    model = MultimodalModel.from_unimodal({"vision": vision}, language_model, token_ids={"vision": IMAGE}).eval()
    batch = make_batch("clip_llama", 5)
    assert model(**batch).logits.dtype == torch.float32 and vision.dtype == torch.bfloat16
    vision.float()
    expected = model(**batch).logits
    model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    assert vision.config._attn_implementation == "eager"
    assert model.get_decoder().config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(**batch).logits, expected)


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
    batch = make_batch("clip_llama", rows)
    output = model.model.encoders["vision"](batch["pixel_values"], output_hidden_states=True)
    expected = (
        output.hidden_states[changes["feature_layer"]] if "feature_layer" in changes else output.last_hidden_state
    )
    if changes.get("feature_select") == "default":
        expected = expected[:, 1:]
    if changes.get("feature_select") == "pooled":
        expected = output.pooler_output.unsqueeze(1)
    if changes.get("pooling"):
        expected = expected.mean(1, keepdim=True)
    features = model.get_features("vision", pixel_values=batch["pixel_values"]).pooler_output
    torch.testing.assert_close(features, model.model.projectors["vision"](expected).flatten(0, 1))
    assert model(**batch).loss.isfinite()


def test_several_encoders_of_one_kind_have_their_own_inputs():
    torch.manual_seed(0)
    model = MultimodalModel.from_unimodal(
        {
            "clip": hf.CLIPVisionConfig(**VISION),
            "dino": hf.Dinov2Config(**VISION),
            "sig": hf.SiglipVisionConfig(**VISION),
        },
        hf.LlamaConfig(**TEXT),
        token_ids={"clip": 40, "dino": 41, "sig": 42},
        projectors={"clip": "mlp", "dino": "linear", "sig": nn.Linear(16, 24)},
        encoder_settings={"sig": {"input_names": {"small_pixels": "pixel_values"}}},
    ).eval()
    ids = torch.tensor([[1] + [40] * 5 + [41] * 5 + [42] * 4 + [5, 6]])
    pixels = {key: torch.randn(1, 3, 8, 8) for key in ("clip_pixel_values", "dino_pixel_values", "small_pixels")}
    logits = model(input_ids=ids, **pixels).logits
    for key in pixels:
        changed = {**pixels, key: pixels[key] + 1}
        assert not torch.allclose(model(input_ids=ids, **changed).logits, logits)
    assert model.generate(input_ids=ids, **pixels, max_new_tokens=2, do_sample=False).shape[1] > ids.shape[1]
    with pytest.raises(ValueError, match="`pixel_values` is an input of several"):
        model(input_ids=ids, pixel_values=pixels["small_pixels"])
    with pytest.raises(ValueError, match="`clip_pixels` is no input of encoder `clip`"):
        model(input_ids=ids, clip_pixels=pixels["small_pixels"])


def test_parts_from_folders(tmp_path):
    parts = {"vision": clip(), "audio": whisper(), "text": hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT))}
    for name, part in parts.items():
        part.save_pretrained(tmp_path / name)
    encoders = {name: str(tmp_path / name) for name in ("vision", "audio")}
    tokens = {"vision": IMAGE, "audio": AUDIO}
    model = MultimodalModel.from_unimodal(encoders, str(tmp_path / "text"), token_ids=tokens)
    assert model.config.settings("audio") == EncoderSettings(AUDIO, "WhisperEncoder")
    assert model.config.get_text_config().vocab_size == 50
    for loaded, original in (
        (model.model.encoders["vision"], parts["vision"]),
        (model.lm_head, parts["text"].lm_head),
    ):
        for key, value in original.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value), key


def test_placeholder_beyond_the_vocabulary():
    model, rows = compose("clip_llama")
    batch = make_batch("clip_llama", rows)
    expected = model(**batch).logits
    model.config.encoder_settings["vision"] = {**model.config.encoder_settings["vision"], "token_id": 1000}
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, 1000)
    torch.testing.assert_close(model(**batch).logits, expected)


@pytest.mark.parametrize(
    ("arguments", "salient"),
    [
        ({"token_ids": {}}, "`token_ids` has no entry for encoder `vision`"),
        ({"token_ids": {"vision": -1}}, "`token_id=-1`"),
        ({"projectors": "qformer"}, "`projector='qformer'`"),
        ({"encoder_settings": {"vision": {"feature_layr": 1}}}, "Did you mean `feature_layer`"),
        ({"encoder_settings": {"sound": {}}}, "`encoder_settings` has `sound`"),
        ({"encoders": {}}, "`encoders` is empty"),
        ({"encoders": {"vision.tower": hf.CLIPVisionConfig(**VISION)}}, "cannot name an encoder"),
        ({"language_model": whisper()}, "not a plain causal language model"),
    ],
)
def test_bad_compositions_are_errors(arguments, salient):
    given = {
        "encoders": {"vision": hf.CLIPVisionConfig(**VISION)},
        "language_model": hf.LlamaConfig(**TEXT),
        "token_ids": {"vision": IMAGE},
    }
    with pytest.raises(ValueError, match=salient):
        MultimodalModel.from_unimodal(**{**given, **arguments})


@pytest.mark.parametrize(
    ("kind", "rows", "settings", "images"),
    [
        ("siglip_qwen2", 4, {}, (1, 2, 0)),
        ("clip_whisper_llama", 5, {}, (0, 0)),
        ("clip_whisper_llama", 4, {"vision": {"feature_layer": -2, "feature_select": "default"}}, (1, 2, 0)),
        ("clip_whisper_llama", 5, {"audio": {"feature_layer": -2}}, (1, 2, 0)),
    ],
)
def test_stages_equal_the_whole_model(kind, rows, settings, images):
    model, _ = compose(kind, encoder_settings=settings)
    spec = build_model_spec(model)
    assert_same(model, make_plan(spec, {name: [1] for name in spec.modules}), make_batch(kind, rows, images=images))


@pytest.mark.parametrize(("name", "layer"), [("vision", 0), ("audio", -3)])
def test_layers_behind_the_selected_one_are_no_stage(name: str, layer: int):
    model, _ = compose("clip_whisper_llama", encoder_settings={name: {"feature_layer": layer}})
    spec = build_model_spec(model)
    with pytest.raises(ValueError, match=f"`{name}_feature_layer` selects hidden state 0"):
        prepare_stages(model, spec, make_plan(spec, {name: [1]}), 0)


@pytest.mark.parametrize(
    ("vision", "patch_size", "changes", "rows"),
    [
        (CLIPVisionConfig, 4, {}, 5),
        (CLIPVisionConfig, 4, {"feature_layer": -2, "feature_select": "default"}, 4),
        (CLIPVisionConfig, 8, {"feature_select": "default"}, 1),
        (SiglipVisionConfig, 4, {}, 4),
        (SiglipVisionConfig, 4, {"feature_layer": -1}, 4),
        (SiglipVisionConfig, 4, {"feature_select": "default"}, 3),
        (SiglipVisionConfig, 8, {}, 1),
    ],
)
def test_llava_gives_the_same_predictions(vision, patch_size, changes, rows, tmp_path):
    torch.manual_seed(0)
    model = MultimodalModel.from_unimodal(
        {"vision": vision(**{**VISION, "patch_size": patch_size})},
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


@pytest.mark.parametrize(
    ("kind", "options", "salient"),
    [
        ("dinov2_gpt2", {}, "Dinov2Model"),
        ("clip_whisper_llama", {}, "2 encoders"),
        ("clip_llama", {"projectors": "linear"}, "projector"),
        ("clip_llama", {"encoder_settings": {"vision": {"pooling": "mean"}}}, "pooling"),
    ],
)
def test_llava_needs_a_matching_composition(kind, options, salient):
    with pytest.raises(ValueError, match=salient):
        to_llava(compose(kind, **options)[0])
