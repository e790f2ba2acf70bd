"""Ranks that share the tokens of a row give the losses, gradient norms and weights of the stock Trainer, unpacked."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import transformers
from shrunk_models import shrunk
from transformers import PreTrainedConfig

from hf_mmparallel import ModulePlugin, MultimodalParallelPlugin
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import resolve_plan
from hf_mmparallel.planning.possible_sizes import check_context
from hf_mmparallel.trainer.build import prepare_context
from tests import tiny
from tests.distributed import run_distributed
from tests.modeling import test_composed as parts

from . import runs
from .runs import case
from .test_features import assert_same_evaluations, evaluations

VISION, LM = "vision", "language_model"
CP = {"cp_size": 2, "cp_block": 16}


def on_the_ranks_of_vision(family: str) -> MultimodalParallelPlugin:
    """A plan in which the ranks that share the matrices of vision share the tokens of the language model."""
    plan = resolve_plan(
        build_model_spec(tiny.FAMILIES[family]()), {VISION: ModulePlugin(tp_size=2), LM: ModulePlugin(cp_size=2)}
    )
    ((stage,),) = plan.modules[LM].replicas
    shared = replace(plan.modules[LM], replicas=((replace(stage, mesh=((0,), (1,))),),))
    return MultimodalParallelPlugin(plan=replace(plan, modules={**plan.modules, LM: shared}))


LAYOUTS = [
    case("llava", on_the_ranks_of_vision("llava"), always=True, include_num_input_tokens_seen="non_padding"),
    case("gemma3", {LM: {**CP, "pp_size": 2, "cp_method": "random"}}),
    case("llava", {LM: {**CP, "tp_size": 2, "activation_checkpointing": True}}),
    case("qwen2_vl", {LM: {**CP, "dp_size": 2, "cp_method": "zigzag", "cp_mode": "row"}}),
    case("qwen3_vl", {VISION: {"dp_size": 2}, LM: {**CP, "pp_size": 2, "cp_mode": "segments"}}),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("family", "parallel", "arguments"), LAYOUTS)
def test_a_layout_equals_the_stock_trainer(family: str, parallel: Any, arguments: dict[str, Any]):
    runs.assert_a_layout_equals_the_stock_trainer(family, parallel, **arguments)


# What else a run has: adapters, predictions, a model of several encoders, checkpoints


SHORT: dict[str, Any] = {"max_steps": 2, "warmup_steps": 0}


def adapted(**sizes: Any) -> dict[str, Any]:
    """A projector and adapters of the language model that are trained."""
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
    return {VISION: {"freeze": "tower"}, LM: {"peft_config": lora, **sizes}}


def composed() -> dict[str, Any]:
    """A model of a CLIP tower, a Whisper encoder and a Llama; samples with images and clips, one of them or none."""
    model, rows = parts.compose("clip_whisper_llama")
    images, clips = ([index % most for index in range(runs.SAMPLES)] for most in (3, 2))
    return {"model": model.train(), "data": parts.make_samples("clip_whisper_llama", rows, images, clips), **SHORT}


def evaluated() -> dict[str, Any]:
    """Evaluations and predictions on this rank."""
    return evaluations(functools.partial(runs.make_trainer, "llava", {LM: CP}))


@pytest.mark.distributed
@pytest.mark.deep
def test_predictions_are_those_of_one_process():
    ranks = run_distributed(evaluated, 3)
    assert_same_evaluations(ranks, evaluations(runs.stock_trainer))
    logits = ranks[0]["logits"]  # where the stock Trainer's padding has values too
    data = tiny.make_dataset("llava", 9, seed=4)[:5]
    assert (logits != -100).sum() == logits.shape[2] * sum(len(sample["input_ids"]) for sample in data)


@pytest.mark.distributed
@pytest.mark.deep
def test_adapters_and_composed_models_equal_the_stock_trainer():
    together = {VISION: {}, "audio": {"colocate_with": VISION}, LM: CP}
    adapters = runs.Layout("llava", adapted(**CP), functools.partial(dict, SHORT), alone=adapted())
    layouts = {"adapters": adapters, "composed": runs.Layout("llava", together, composed)}
    runs.assert_layouts_equal_the_stock_trainer(3, layouts)


# What is refused


def test_a_language_model_gets_the_attention_that_ranks_share_and_another_is_refused():
    model = tiny.FAMILIES["llava"]()
    prepare_context(model, build_model_spec(model), None)
    assert model.config.text_config._attn_implementation == "bitfield"
    assert model.config.vision_config._attn_implementation != "bitfield"
    with pytest.raises(ValueError, match="`attn_implementation='eager'`"):
        prepare_context(model, build_model_spec(model), ModulePlugin(attn_implementation="eager"))


REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "layers with an attention of their own": (shrunk(transformers.BloomConfig()), "`BloomModel`"),
    "a state-space model": (shrunk(transformers.MambaConfig()), "`MambaForCausalLM.create_masks"),
    "a mask that words can't say": (
        shrunk(transformers.Gemma3TextConfig(), {"use_bidirectional_attention": True}),
        "`cp_size=1`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_tokens_no_ranks_can_share_is_refused(name: str):
    config, message = REFUSED[name]
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=message):
        check_context(model, build_model_spec(model))
