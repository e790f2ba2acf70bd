"""Stages of every family give the loss and the gradients of the whole model."""

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, OPTConfig, OPTForCausalLM, PreTrainedModel, WhisperConfig

from hf_mmparallel.composed.multimodal_model import MultimodalModel
from hf_mmparallel.modeling import ModuleStage, build_model_spec, is_unowned, prepare_stages, token_loss
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlan, ParallelPlan, Stage
from tests import tiny
from tests.deep_cases import deep

torch.set_num_threads(1)


def make_plan(
    spec: ModelSpec, cuts: Mapping[str, Sequence[int]], recompute: Sequence[str] = (), shared: bool = False
) -> ParallelPlan:
    """One replica of each module, cut before the given layers; a rank for each stage, or `shared` by the modules."""
    modules, next_rank = {}, 0
    for name, module in spec.modules.items():
        bounds = [0, *cuts.get(name, ()), module.num_layers]
        stages = []
        for index, (first, stop) in enumerate(pairwise(bounds)):
            stages.append(Stage((first, stop), ((index if shared else next_rank,),)))
            next_rank += 1
        modules[name] = ModulePlan((tuple(stages),), activation_checkpointing=name in recompute)
    return ParallelPlan(modules)


def reference(model: PreTrainedModel, batch: dict) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss (a sum over target tokens) and gradients of the whole model."""
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
    loss, _ = token_loss(model, logits, batch["labels"])
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def wire(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What arrives on another rank: the values, without the graph."""
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def run_module(stages: Sequence[ModuleStage], batch: dict, features: dict | None = None) -> list[tuple]:
    """(received, features of the stage, returned) of each stage, run in order."""
    done, hidden = [], None
    for stage in stages:
        given = {
            name: [
                t if stage.layers[0] <= s.layer < stage.layers[1] else None
                for t, s in zip(tensors, specs, strict=True)
            ]
            for name, tensors in (features or {}).items()
            for specs in [stage.spec.modules[name].features]
        }
        if not stage.is_first:
            assert [t.shape for t in hidden] == stage.input_shapes(batch)
            assert all(t.dtype == stage.input_dtype for t in hidden)
        output = stage(batch, hidden, given)
        done.append((hidden or [], output))
        hidden = wire(output)
    return done


def push_back(done: list[tuple], gradients: list[Tensor | None]) -> None:
    """Backward through the stages of a module, last first."""
    for received, output in reversed(done):
        pairs = [(o, g) for o, g in zip(output, gradients, strict=True) if g is not None and o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        gradients = [tensor.grad for tensor in received]


def run_stages(model: PreTrainedModel, plan: ParallelPlan, batch: dict) -> tuple[Tensor, dict[str, Tensor], list]:
    """Loss and summed gradients of a cut model, each rank with a pruned copy of its own; and these copies."""
    spec = build_model_spec(model)
    models = [copy.deepcopy(model) for _ in range(plan.world_size)]
    stages: dict = {}
    for rank, own in enumerate(models):
        stages.update(prepare_stages(own, spec, plan, rank))
    chains = {
        name: [stages[name, 0, index] for index in range(len(module.replicas[0]))]
        for name, module in plan.modules.items()
    }
    encoded = {name: run_module(chains[name], batch) for name in spec.encoders}
    features = {name: wire(done[-1][1]) for name, done in encoded.items()}
    text = {k: v for k, v in batch.items() if not k.startswith(("pixel_values", "input_features"))}
    decoded = run_module(chains[LANGUAGE_MODEL], text, features)
    logits = wire(decoded[-1][1])
    loss, _ = token_loss(model, logits[0], batch["labels"])
    loss.backward()
    push_back(decoded, [logits[0].grad])
    for name, done in encoded.items():
        push_back(done, [tensor.grad for tensor in features[name]])
    grads: dict[str, Tensor] = {}
    for own in models:
        for name, parameter in own.named_parameters():
            if parameter.grad is not None:
                grads[name] = grads[name] + parameter.grad if name in grads else parameter.grad
    return loss.detach(), grads, models


def assert_same(model: PreTrainedModel, plan: ParallelPlan, batch: dict) -> list[PreTrainedModel]:
    """Compares a cut model with the whole one, bit for bit but for tied weights, whose two gradients are added."""
    loss, grads = reference(copy.deepcopy(model), batch)
    cut_loss, cut_grads, models = run_stages(model, plan, batch)
    tied = build_model_spec(model).tied
    assert torch.equal(loss, cut_loss)
    assert grads.keys() == cut_grads.keys()
    for name, grad in grads.items():
        if name in tied:
            torch.testing.assert_close(cut_grads[name], grad, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(cut_grads[name], grad), name
    return models


def make_batch(family: str, text_only: bool = False, size: int = 4) -> dict[str, Tensor]:
    return tiny.collate(family)(tiny.make_dataset(family, size, max_items=0 if text_only else 2))


def cuts_of(family: str) -> list[dict[str, list[int]]]:
    """The cuts that a family is tested with."""
    cuts: list[dict[str, list[int]]] = [{}, *({LANGUAGE_MODEL: [i]} for i in range(1, tiny.NUM_LAYERS))]
    cuts.append({LANGUAGE_MODEL: [1, 3]})
    if family not in ("llama", "llama_tied", "qwen3_vl", "qwen3_vl_moe"):
        encoder = "audio" if family == "voxtral" else "vision"
        cuts += [{encoder: [1]}, {encoder: [2, 3], LANGUAGE_MODEL: [2]}]
    if family == "qwen2_5_omni":
        cuts += [{"audio": [1, 3]}, {"vision": [2], "audio": [2], LANGUAGE_MODEL: [2]}]
    return cuts


@pytest.mark.parametrize(
    ("family", "cuts"),
    [
        deep(family, cuts, id=f"{family}-{cuts}", unless=cuts == cuts_of(family)[-1])
        for family in tiny.FAMILIES
        for cuts in cuts_of(family)
    ],
)
def test_stages_equal_the_whole_model(family, cuts):
    model = tiny.FAMILIES[family]().train()
    assert_same(model, make_plan(build_model_spec(model), cuts), make_batch(family))


@pytest.mark.parametrize(
    "family",
    [
        deep(name, unless=name in ("llava", "gemma3", "qwen2_vl", "qwen3_vl", "qwen2_5_omni", "voxtral"))
        for name in tiny.FAMILIES
        if name not in tiny.TEXT_ONLY
    ],
)
def test_batches_without_images_equal_the_whole_model(family):
    model = tiny.FAMILIES[family]().train()
    plan = make_plan(build_model_spec(model), {LANGUAGE_MODEL: [2]})
    batch = make_batch(family, text_only=True)
    assert not any(name.startswith(("pixel", "input_features")) for name in batch)
    assert_same(model, plan, batch)


def with_videos(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same batch of a Qwen family, its last image taken for a video."""
    batch = {name: value.clone() for name, value in batch.items()}
    grid = batch["image_grid_thw"]
    patches, tokens = int(grid[-1].prod()), int(grid[-1].prod()) // 4
    batch["video_grid_thw"], batch["image_grid_thw"] = grid[-1:], grid[:-1]
    batch["pixel_values_videos"] = batch["pixel_values"][-patches:]
    batch["pixel_values"] = batch["pixel_values"][:-patches]
    place = (batch["input_ids"] == tiny.MEDIA_TOKEN).nonzero()[-tokens:].unbind(-1)
    batch["input_ids"][place] = tiny.VIDEO_TOKEN
    batch["mm_token_type_ids"][place] = 2
    return batch


@pytest.mark.parametrize(
    ("family", "cuts"),
    [
        ("qwen2_vl", {"vision": [2], LANGUAGE_MODEL: [2]}),
        ("qwen2_5_vl", {"vision": [1], LANGUAGE_MODEL: [1]}),
        ("qwen3_vl", {LANGUAGE_MODEL: [1, 2]}),
    ],
)
def test_images_and_videos_share_a_tower(family, cuts):
    model = tiny.FAMILIES[family]().train()
    batch = with_videos(make_batch(family))
    spec = build_model_spec(model)
    plan = make_plan(spec, cuts)
    assert_same(model, plan, batch)
    if family != "qwen3_vl":
        stage = prepare_stages(model, spec, plan, 1)["vision", 0, 1]
        assert len(stage.input_shapes(batch)) == 2


def test_deepstack_features_enter_only_at_their_layers():
    model = tiny.FAMILIES["qwen3_vl"]().train()
    spec = build_model_spec(model)
    plan = make_plan(spec, {LANGUAGE_MODEL: [2]})
    stage = prepare_stages(model, spec, plan, 2)[LANGUAGE_MODEL, 0, 1]
    batch = make_batch("qwen3_vl")
    rows = int((batch["input_ids"] == tiny.MEDIA_TOKEN).sum())
    hidden = torch.randn(*batch["input_ids"].shape, 64)
    text = {name: value for name, value in batch.items() if name != "pixel_values"}
    given = [None, None, None, torch.randn(rows, 64), None, None, None, None]
    assert stage(text, [hidden], {"vision": given})[0].isfinite().all()
    with pytest.raises(ValueError, match="layer 2, which is in this stage"):
        stage(text, [hidden], {"vision": [None] * 8})


@pytest.mark.parametrize(
    ("family", "shared"),
    [("llava", False), ("qwen2_5_vl", True), ("voxtral", False), ("gemma3", True), ("qwen2_5_omni", False)],
)
def test_activation_checkpointing_changes_nothing(family, shared):
    model = tiny.FAMILIES[family]().train()
    spec = build_model_spec(model)
    encoder = spec.encoders[0]
    cuts = {encoder: [2], LANGUAGE_MODEL: [2]}
    plan = make_plan(spec, cuts, recompute=[encoder], shared=shared)
    models = assert_same(model, plan, make_batch(family))
    stacks = {name: [own.get_submodule(module.stack) for own in models] for name, module in spec.modules.items()}
    assert [layer.gradient_checkpointing for layer in stacks[encoder][0]] == [True, True, False, False]
    assert not any(layer.gradient_checkpointing for stack in stacks[LANGUAGE_MODEL] for layer in stack)
    assert_same(model, make_plan(spec, cuts, recompute=list(spec.modules), shared=shared), make_batch(family))


def test_microbatches_in_flight_do_not_mix():
    model = tiny.FAMILIES["llama"]().train()
    plan = make_plan(build_model_spec(model), {LANGUAGE_MODEL: [1]})
    first, last = (
        prepare_stages(own := copy.deepcopy(model), build_model_spec(own), plan, rank)[LANGUAGE_MODEL, 0, rank]
        for rank in (0, 1)
    )
    batches = [make_batch("llama", size=size) for size in (2, 3)]
    sent = [first(batch)[0] for batch in batches]
    received = [wire([tensor])[0] for tensor in sent]
    losses = [
        token_loss(model, last(batch, [hidden])[0], batch["labels"])[0]
        for batch, hidden in zip(batches, received, strict=True)
    ]
    for index in (1, 0):
        losses[index].backward()
        sent[index].backward(received[index].grad)
    expected = [reference(model, batch) for batch in batches]
    for stage in (first, last):
        for name, parameter in stage.parameters():
            torch.testing.assert_close(parameter.grad, sum(grads[name] for _, grads in expected))
    assert torch.equal(torch.stack(losses), torch.stack([loss for loss, _ in expected]))


@pytest.mark.parametrize("family", ["llava", deep("qwen2_vl"), deep("mistral3")])
def test_stages_under_autocast_equal_the_whole_model(family):
    model = tiny.FAMILIES[family]().train()
    plan = make_plan(build_model_spec(model), {"vision": [1], LANGUAGE_MODEL: [1, 3]})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(model, plan, make_batch(family))


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_adapters_belong_to_their_layer(family):
    from peft import LoraConfig

    model = tiny.FAMILIES[family]()
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.train()
    models = assert_same(
        model, make_plan(build_model_spec(model), {"vision": [2], LANGUAGE_MODEL: [2]}), make_batch(family)
    )
    trained = {n for own in models for n, p in own.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in model.named_parameters() if "lora_" in n}


def held_bytes(model: PreTrainedModel) -> int:
    """Memory behind the parameters of a model."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen3_vl", "voxtral", "llama_tied"])
def test_what_is_not_owned_takes_no_memory_and_names_stay(family):
    model = tiny.FAMILIES[family]()
    spec = build_model_spec(model)
    names = dict(model.named_parameters())
    plan = make_plan(spec, {LANGUAGE_MODEL: [1, 2]})
    seen: dict[str, int] = {}
    for rank in range(plan.world_size):
        own = copy.deepcopy(model)
        (stage,) = prepare_stages(own, spec, plan, rank).values()
        real = {name: p for name, p in own.named_parameters() if not is_unowned(p)}
        assert dict(stage.parameters()).keys() == real.keys()
        assert all(torch.equal(p, names[name]) for name, p in real.items())
        unowned = [p for p in own.parameters() if is_unowned(p)]
        assert not any(p.requires_grad for p in unowned)
        assert held_bytes(own) == sum(4 * p.numel() for p in real.values()) + 4 * len(unowned)
        for name in real:
            seen[name] = seen.get(name, 0) + 1
    assert seen == {name: 2 if name in spec.tied else 1 for name in names}


def test_tied_weights_stay_tied_where_both_uses_are():
    model = tiny.FAMILIES["gemma3"]()
    spec = build_model_spec(model)
    whole, cut = make_plan(spec, {}), make_plan(spec, {LANGUAGE_MODEL: [2]})
    for plan, rank in ((whole, 1), (cut, 1), (cut, 2)):
        own = copy.deepcopy(model)
        prepare_stages(own, spec, plan, rank)
        assert own.lm_head.weight is own.get_input_embeddings().weight
        assert not is_unowned(own.lm_head.weight)


def test_a_model_on_meta_stays_there_where_it_is_owned():
    with torch.device("meta"):
        model = tiny.FAMILIES["llava"]()
    spec = build_model_spec(model)
    assert spec == build_model_spec(tiny.FAMILIES["llava"]())
    prepare_stages(model, spec, make_plan(spec, {LANGUAGE_MODEL: [2]}), 1)
    for parameter in model.parameters():
        assert parameter.is_meta != is_unowned(parameter)


def test_a_rank_without_stages_holds_nothing():
    model = tiny.FAMILIES["llava"]()
    spec = build_model_spec(model)
    assert prepare_stages(model, spec, make_plan(spec, {}), 7) == {}
    assert all(is_unowned(parameter) for parameter in model.parameters())


def test_a_selected_hidden_state_of_another_stage_is_refused():
    model = tiny.FAMILIES["llava"]()
    model.config.vision_feature_layer = [-2, -4]
    model.model.multi_modal_projector = type(model.model.multi_modal_projector)(model.config)
    spec = build_model_spec(model)
    assert_same(model.train(), make_plan(spec, {"vision": [1]}), make_batch("llava"))
    with pytest.raises(ValueError, match=r"`vision_feature_layer=\[-2, -4\]` selects hidden state 1"):
        prepare_stages(model, spec, make_plan(spec, {"vision": [2]}), 0)


def make_composed(audio_layer: int | None = None) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A model of our own with a vision and an audio encoder, and a batch for it."""
    torch.manual_seed(0)
    sizes = {"encoder_layers": 4, "encoder_attention_heads": 4, "decoder_layers": 1, "decoder_attention_heads": 4}
    whisper = WhisperConfig(d_model=32, encoder_ffn_dim=64, num_mel_bins=16, max_source_positions=8, **sizes)
    model = MultimodalModel.from_unimodal(
        {"vision": CLIPVisionConfig(**tiny.VISION), "audio": whisper},
        LlamaConfig(**tiny.TEXT),
        {"vision": tiny.MEDIA_TOKEN, "audio": tiny.AUDIO_TOKEN},
        encoder_settings={
            "vision": {"feature_layer": -2, "feature_select": "default"},
            "audio": {"feature_layer": audio_layer},
        },
    )
    text, image, audio = list(range(1, 5)), [tiny.MEDIA_TOKEN] * 4, [tiny.AUDIO_TOKEN] * 8
    ids = torch.tensor([text + image + audio + text, text + audio + text + text])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return model.train(), {
        **batch,
        "pixel_values": torch.randn(1, 3, 16, 16),
        "input_features": torch.randn(2, 16, 16),
    }


@pytest.mark.parametrize(
    ("cuts", "shared"),
    [({LANGUAGE_MODEL: [2]}, True), ({"vision": [2], "audio": [1, 2], LANGUAGE_MODEL: [1, 3]}, False)],
)
def test_stages_of_a_composed_model_equal_the_whole_model(cuts, shared):
    model, batch = make_composed()
    assert_same(model, make_plan(build_model_spec(model), cuts, shared=shared), batch)


def test_features_that_read_layers_of_an_earlier_stage_are_refused():
    model, batch = make_composed(audio_layer=-4)
    spec = build_model_spec(model)
    assert_same(model, make_plan(spec, {"audio": [1]}), batch)
    with pytest.raises(
        ValueError, match=r"output of layers \(2, 4\) of `audio` depends on parameters of other stages"
    ):
        assert_same(model, make_plan(spec, {"audio": [2]}), batch)


@pytest.mark.parametrize("narrow", [False, True])
def test_norms_and_projections_that_are_registered_before_the_layers_are_used_behind_them(narrow: bool):
    config = {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "dropout": 0.0}
    config = {**config, "word_embed_proj_dim": 32 if narrow else 64, "do_layer_norm_before": not narrow}
    model = OPTForCausalLM(OPTConfig(vocab_size=tiny.VOCAB_SIZE, **config)).train()
    spec = build_model_spec(model)
    layers = {p.name.removeprefix("model.decoder."): p.layer for p in spec.language_model.parameters}
    behind = ["project_out.weight"] if narrow else ["final_layer_norm.weight", "final_layer_norm.bias"]
    assert [name for name, layer in layers.items() if layer == 4 and not name.startswith("layers.")] == behind
    assert layers["embed_positions.weight"] == -1 and layers.get("project_in.weight", -1) == -1
    assert_same(model, make_plan(spec, {}), make_batch("llama"))
    for cut in ([2], [1, 3]):
        assert_same(model, make_plan(spec, {LANGUAGE_MODEL: cut}), make_batch("llama"))


class _OddNorm(torch.nn.LayerNorm):
    """A norm that can't be computed without values."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if float(input.sum()) == 0 else super().forward(input)


def test_a_norm_that_is_registered_before_the_layers_and_cannot_be_found_is_refused():
    config = {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "dropout": 0.0}
    model = OPTForCausalLM(OPTConfig(vocab_size=tiny.VOCAB_SIZE, word_embed_proj_dim=64, **config)).train()
    model.model.decoder.layers[0].self_attn_layer_norm = _OddNorm(64)
    spec = build_model_spec(model)
    assert_same(model, make_plan(spec, {}), make_batch("llama"))
    with pytest.raises(
        ValueError, match=r"output of layers \(2, 4\) of `language_model` depends on parameters of other"
    ):
        assert_same(model, make_plan(spec, {LANGUAGE_MODEL: [2]}), make_batch("llama"))


def test_hidden_states_wider_than_the_weights_are_refused():
    model = tiny.FAMILIES["llama"]().to(torch.bfloat16)
    model.model.layers[0].register_forward_hook(lambda module, args, output: output.float())
    spec = build_model_spec(model)
    stage = prepare_stages(model, spec, make_plan(spec, {LANGUAGE_MODEL: [1]}), 0)[LANGUAGE_MODEL, 0, 0]
    with pytest.raises(
        ValueError, match=r"`language_model` are torch.float32, which does not fit in the torch.bfloat16"
    ):
        stage(make_batch("llama"))


def test_layers_that_read_weights_of_an_earlier_stage_are_refused():
    model = tiny.FAMILIES["llama"]()
    model.model.rotary_emb.register_forward_hook(lambda m, args, out: tuple(t + args[0].mean() for t in out))
    spec = build_model_spec(model)
    stage = prepare_stages(model, spec, make_plan(spec, {LANGUAGE_MODEL: [2]}), 1)[LANGUAGE_MODEL, 0, 1]
    batch = make_batch("llama")
    with pytest.raises(ValueError, match="depends on weights of an earlier stage"):
        stage(batch, [torch.zeros(*batch["input_ids"].shape, 64)])


def test_placeholders_return_what_the_layer_returns():
    from transformers.models.falcon.modeling_falcon import FalconDecoderLayer
    from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoderLayer

    from hf_mmparallel.modeling.unowned import _returns_tuple

    assert _returns_tuple(FalconDecoderLayer)
    assert _returns_tuple(Qwen2_5OmniAudioEncoderLayer)
    assert not _returns_tuple(Gemma3DecoderLayer)


def test_hidden_states_whose_dtype_changes_between_layers_are_refused():
    """The next stage knows the dtype of the embeddings only."""
    model = tiny.FAMILIES["llama"]()
    model.model.embed_tokens.bfloat16()
    spec = build_model_spec(model)
    stage = prepare_stages(model, spec, make_plan(spec, {LANGUAGE_MODEL: [1]}), 0)[LANGUAGE_MODEL, 0, 0]
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="are torch.bfloat16 before its layers and torch.float32 between"),
    ):
        model.model.layers[0].register_forward_hook(lambda module, args, output: output.float())
        stage({"input_ids": torch.tensor([[1, 2, 3]])})
