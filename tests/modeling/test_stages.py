"""Stages of every family give the loss and the gradients of the whole model."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
import torch
import transformers
from torch import Tensor
from transformers import FalconConfig, FalconForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.modeling import ModuleStage, build_model_spec, is_unowned, prepare_stages
from hf_mmparallel.modeling.unowned import identity_layer
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlan, ParallelPlan, Stage
from tests import tiny
from tests.deep_cases import deep
from tests.runtime.loopback import Outcome, reference, run_loopback

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
    return ParallelPlan(modules, spec.edges)


def run_stages(model: PreTrainedModel, plan: ParallelPlan, batch: dict) -> Outcome:
    """A step of one microbatch, each rank on a pruned copy of its own."""
    samples = range(len(batch["input_ids"]))
    return run_loopback(model, plan, contiguous_step(plan, samples, len(samples)), samples, lambda _: {**batch})


def assert_same(model: PreTrainedModel, plan: ParallelPlan, batch: dict) -> list[PreTrainedModel]:
    """
    Compares a cut model with the whole one, bit for bit but for tied weights, whose two gradients are added, and for
    cut towers whose inner layers have features, since the gradients of these are added in another order.
    """
    loss, _, gradients = reference(model, batch)
    found, spec = run_stages(model, plan, batch), build_model_spec(model)
    tapped = {p.name for name, module in spec.modules.items() if module.taps for p in module.parameters}
    rounded = {*spec.tied, *(tapped if "vision" in plan.modules and plan.modules["vision"].replicas[0][1:] else ())}
    assert found.loss == loss
    assert found.gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        if name in rounded:
            torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(found.gradients[name], gradient), name
    return found.models


def test_virtual_stages_compute_their_own_layers_only():
    model = tiny.FAMILIES["llava"]().train()
    spec, calls = build_model_spec(model), Counter()

    def count(name: str, output: tuple[Tensor, ...]) -> None:
        calls.update([name] * (not output[0].is_meta))  # the spec runs a model without values

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_hook(lambda module, args, output, name=name: count(name, output))
    modules = {
        name: ModulePlan((tuple(Stage((index, index + 1), ((first + index % 2,),)) for index in range(4)),))
        for name, first in (("vision", 0), (LANGUAGE_MODEL, 2))
    }
    batch = make_batch("llava")
    expected = reference(model, batch)[2].keys()
    calls.clear()
    found = run_stages(model, ParallelPlan(modules, spec.edges), batch)
    assert found.gradients.keys() == expected
    assert len(calls) == 8 and set(calls.values()) == {1}
    wrapped = model.get_submodule(spec.language_model.stack)[0]
    wrapped.forward = lambda *args, **kwargs: pytest.fail("the wrapped layer runs")
    identity_layer(wrapped)(torch.ones(1, 2, 8))


def make_batch(family: str, text_only: bool = False, size: int = 3) -> dict[str, Tensor]:
    return tiny.collate(family)(tiny.make_dataset(family, size, max_items=0 if text_only else 2))


def cuts_of(family: str) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Two ways to cut a family: all that can be, and most of all the language model."""
    if family in tiny.TEXT_ONLY:
        return {LANGUAGE_MODEL: [1, 3]}, {LANGUAGE_MODEL: [2]}
    if family in ("qwen3_vl", "qwen3_vl_moe"):  # features of inner layers leave several stages and enter several
        return {"vision": [1, 2, 3], LANGUAGE_MODEL: [1, 3]}, {"vision": [2], LANGUAGE_MODEL: [2]}
    if family == "qwen2_5_omni":
        return {"vision": [2], "audio": [2], LANGUAGE_MODEL: [2]}, {"audio": [1, 3], LANGUAGE_MODEL: [1, 3]}
    encoder = "audio" if family == "voxtral" else "vision"
    return {encoder: [2, 3], LANGUAGE_MODEL: [2]}, {encoder: [1], LANGUAGE_MODEL: [1, 3]}


ALWAYS = ("llama_tied", "llava", "gemma3", "qwen2_5_vl", "qwen3_vl_moe", "qwen2_5_omni", "voxtral")


@pytest.mark.parametrize(
    ("family", "cuts"),
    [
        deep(family, cuts, id=f"{family}-{cuts}", unless=not number and family in ALWAYS)
        for family in tiny.FAMILIES
        for number, cuts in enumerate(cuts_of(family))
    ],
)
def test_stages_equal_the_whole_model(family, cuts):
    model = tiny.FAMILIES[family]().train()
    assert_same(model, make_plan(build_model_spec(model), cuts), make_batch(family))


def test_a_first_norm_that_is_registered_behind_the_layers_is_in_the_first_stage():
    vision = {**tiny.DEEP_VISION, "image_size": 32, "intermediate_size": 64}
    config = transformers.Glm4vConfig(
        vision_config=vision, text_config={**tiny.HEADS, **tiny.ROPE}, **tiny.QWEN_TOKENS, image_start_token_id=105
    )
    torch.manual_seed(0)
    model = transformers.Glm4vForConditionalGeneration(config).train()
    assert_same(
        model, make_plan(build_model_spec(model), {"vision": [1, 3], LANGUAGE_MODEL: [2]}), make_batch("qwen2_vl")
    )


@pytest.mark.parametrize(
    "family",
    [
        deep(name, unless=name in ("llava", "qwen3_vl", "qwen2_5_omni"))
        for name in tiny.FAMILIES
        if name not in tiny.TEXT_ONLY
    ],
)
def test_batches_without_images_equal_the_whole_model(family):
    model = tiny.FAMILIES[family]().train()
    batch = make_batch(family, text_only=True, size=2)
    assert not any(name.startswith(("pixel", "input_features")) for name in batch)
    assert_same(model, make_plan(build_model_spec(model), {LANGUAGE_MODEL: [2]}), batch)


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


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_images_and_videos_share_a_tower(family):
    model = tiny.FAMILIES[family]().train()
    batch = with_videos(make_batch(family))
    spec = build_model_spec(model)
    plan = make_plan(spec, cuts_of(family)[1])
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
    ("family", "recompute", "shared"),
    [("llava", 1, False), deep("gemma3", 2, True), ("qwen2_5_vl", 2, True), deep("qwen2_5_omni", 2, False)],
)
def test_activation_checkpointing_changes_nothing(family, recompute, shared):
    model = tiny.FAMILIES[family]().train()
    spec = build_model_spec(model)
    names = (spec.encoders[0], LANGUAGE_MODEL)
    plan = make_plan(spec, dict.fromkeys(names, [2]), recompute=names[:recompute], shared=shared)
    models = assert_same(model, plan, make_batch(family))
    for name in names:
        stacks = [own.get_submodule(spec.modules[name].stack) for own in models]
        enabled = sum(layer.gradient_checkpointing for stack in stacks for layer in stack)
        assert enabled == (4 if name in names[:recompute] else 0)


def test_stages_under_autocast_equal_the_whole_model():
    model = tiny.FAMILIES["llava"]().train()
    plan = make_plan(build_model_spec(model), {"vision": [1], LANGUAGE_MODEL: [1, 3]})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(model, plan, make_batch("llava"))


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
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in own.parameters()}
        assert sum(storages.values()) == sum(4 * p.numel() for p in real.values()) + 4 * len(unowned)
        for name in real:
            seen[name] = seen.get(name, 0) + 1
        if not spec.tied.keys().isdisjoint(real):
            assert own.lm_head.weight is own.get_input_embeddings().weight
    assert seen == {name: 2 if name in spec.tied else 1 for name in names}


def test_a_model_on_meta_stays_there_where_it_is_owned():
    with torch.device("meta"):
        model = tiny.FAMILIES["llava"]()
    spec = build_model_spec(model)
    prepare_stages(model, spec, make_plan(spec, {LANGUAGE_MODEL: [2]}), 1)
    for parameter in model.parameters():
        assert parameter.is_meta != is_unowned(parameter)


def test_a_rank_without_stages_holds_nothing():
    model = tiny.FAMILIES["llava"]()
    spec = build_model_spec(model)
    assert prepare_stages(model, spec, make_plan(spec, {}), 7) == {}
    assert all(is_unowned(parameter) for parameter in model.parameters())


@pytest.mark.parametrize("selected", [[-2, -4], [0, 3]])
def test_selected_hidden_states_of_other_stages_travel(selected: list[int]):
    model = tiny.FAMILIES["llava"]()
    model.config.vision_feature_layer = selected
    model.model.multi_modal_projector = type(model.model.multi_modal_projector)(model.config)
    spec = build_model_spec(model)
    model(**make_batch("llava"))  # from then on transformers records hidden states
    for cuts in ([1], [2], [1, 2, 3]):
        assert_same(copy.deepcopy(model).train(), make_plan(spec, {"vision": cuts}), make_batch("llava"))


def test_layers_behind_all_that_are_selected_are_no_stage():
    model = tiny.FAMILIES["llava"]()
    model.config.vision_feature_layer = 1
    spec = build_model_spec(model)
    assert_same(copy.deepcopy(model).train(), make_plan(spec, {"vision": [1]}), make_batch("llava"))
    with pytest.raises(ValueError, match="selects hidden state 1 and none behind it"):
        prepare_stages(model, spec, make_plan(spec, {"vision": [2]}), 0)


OPT = {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "dropout": 0.0}


@pytest.mark.parametrize("narrow", [False, True])
def test_norms_and_projections_that_are_registered_before_the_layers_are_used_behind_them(narrow: bool):
    config = {**OPT, "word_embed_proj_dim": 32 if narrow else 64, "do_layer_norm_before": not narrow}
    model = OPTForCausalLM(OPTConfig(vocab_size=tiny.VOCAB_SIZE, **config)).train()
    spec = build_model_spec(model)
    layers = {p.name.removeprefix("model.decoder."): p.layer for p in spec.language_model.parameters}
    behind = ["project_out.weight"] if narrow else ["final_layer_norm.weight", "final_layer_norm.bias"]
    assert [name for name, layer in layers.items() if layer == 4 and not name.startswith("layers.")] == behind
    assert layers["embed_positions.weight"] == -1 and layers.get("project_in.weight", -1) == -1
    assert_same(model, make_plan(spec, {LANGUAGE_MODEL: [1, 3]}), make_batch("llama"))


class _OddNorm(torch.nn.LayerNorm):
    """A norm that can't be computed without values."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if float(input.sum()) == 0 else super().forward(input)


def test_a_norm_that_is_registered_before_the_layers_and_cannot_be_found_is_refused():
    model = OPTForCausalLM(OPTConfig(vocab_size=tiny.VOCAB_SIZE, word_embed_proj_dim=64, **OPT)).train()
    model.model.decoder.layers[0].self_attn_layer_norm = _OddNorm(64)
    plan = make_plan(build_model_spec(model), {LANGUAGE_MODEL: [2]})
    with pytest.raises(ValueError, match=r"layers \(2, 4\) of `language_model` depends on parameters of other"):
        run_stages(model, plan, make_batch("llama"))


def llama_stage(model: PreTrainedModel, cut: int, index: int) -> ModuleStage:
    """One of the two stages of a Llama."""
    spec = build_model_spec(model)
    plan = make_plan(spec, {LANGUAGE_MODEL: [cut]})
    return prepare_stages(model, spec, plan, index)[LANGUAGE_MODEL, 0, index]


def test_hidden_states_wider_than_the_weights_are_refused():
    model = tiny.FAMILIES["llama"]().to(torch.bfloat16)
    model.model.layers[0].register_forward_hook(lambda module, args, output: output.float())
    with pytest.raises(ValueError, match="`language_model` are torch.float32, .* torch.bfloat16"):
        llama_stage(model, 1, 0)(make_batch("llama"))


def test_hidden_states_whose_dtype_changes_between_layers_are_refused():
    """The next stage knows the dtype of the embeddings only."""
    model = tiny.FAMILIES["llama"]()
    model.model.embed_tokens.bfloat16()
    stage = llama_stage(model, 1, 0)
    model.model.layers[0].register_forward_hook(lambda module, args, output: output.float())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="torch.bfloat16 before its layers and torch.float32 between"),
    ):
        stage({"input_ids": torch.tensor([[1, 2, 3]])})


def test_what_layers_read_beside_the_hidden_state_is_carried_or_refused():
    model, batch = tiny.FAMILIES["llama"]().train(), make_batch("llama")
    stage = llama_stage(copy.deepcopy(model), 2, 1)
    for owner in (model, stage.model):  # the second one when its values are known
        rotary = owner.model.rotary_emb
        rotary.register_forward_hook(lambda m, args, out: tuple(t + args[0].mean(-1, True) for t in out))
    assert_same(model, make_plan(build_model_spec(model), {LANGUAGE_MODEL: [1, 2]}), batch)
    with pytest.raises(ValueError, match="depends on weights of an earlier stage"):
        stage(batch, [torch.zeros(*batch["input_ids"].shape, 64)])


def test_identity_layers_return_what_the_layer_returns():
    config = FalconConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=8)
    hidden = torch.randn(1, 2, 32)
    assert identity_layer(FalconForCausalLM(config).transformer.h[0])(hidden)[0] is hidden
    assert identity_layer(tiny.FAMILIES["llama"]().model.layers[0])(hidden) is hidden
