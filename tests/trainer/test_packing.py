"""Packed runs equal the stock Trainer's on padded batches: alone, under our Trainer, in every kind of layout."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import HfArgumentParser, LlamaConfig, SiglipVisionConfig, Trainer

from hf_mmparallel import MultimodalModel, MultimodalTrainingArguments
from hf_mmparallel.data import packing as rows
from hf_mmparallel.data.packing import PackingCollator, row_choice
from hf_mmparallel.modeling import build_model_spec
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs
from .runs import case, our_trainer

VISION, LM = "vision", "language_model"
FAMILIES = ["llama_tied", "llava", "gemma3", "paligemma", "qwen2_vl", "qwen3_vl"]
SHORT: dict[str, Any] = {"max_steps": 2, "warmup_steps": 0}
COUNTED = {**SHORT, "include_num_input_tokens_seen": "non_padding"}


def assert_runs_alike(trainer: Trainer, family: str, **arguments: Any) -> None:
    """Trains and evaluates; the stock Trainer on padded rows has the same logs, weights and loss."""
    run, reference = runs.run_of(trainer, evaluate=True), runs.stock(family, evaluate=True, **arguments)
    runs.assert_same_run(run, reference)
    assert run.metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)


@pytest.mark.parametrize("family", [deep(f, unless=f == "qwen2_vl") for f in FAMILIES])
def test_the_stock_trainer_alone_packs(family: str):
    """With nothing of this package but the attention function and the collator."""
    model = tiny.attending(tiny.FAMILIES[family]())
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 7}
    trainer = runs.stock_trainer(family, model=model, **sizes, **SHORT)
    trainer.data_collator = PackingCollator(trainer.data_collator, model)
    assert_runs_alike(trainer, family, **sizes, **SHORT)


@pytest.mark.parametrize("name", [deep("label smoothing"), "a layout of one"])
def test_packing_is_one_argument_on_one_process(name: str):
    own = {"label_smoothing_factor": 0.1} if name == "label smoothing" else {}
    layout = None if own else {LM: {"activation_checkpointing": True}}
    sizes = {"global_batch_size": 8, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 7, **SHORT}
    trainer = our_trainer("llava", packing=True, parallel=layout, **sizes, **own)
    assert trainer.model.config.text_config._attn_implementation == "bitfield"
    assert trainer.model.config.vision_config._attn_implementation == "sdpa"
    shapes = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    assert_runs_alike(trainer, "llava", per_device_eval_batch_size=7, **SHORT, **own)
    assert set(shapes) == {1} and trainer.engine is None


def composed() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoders, tokens = {VISION: SiglipVisionConfig(**tiny.SIGLIP)}, {VISION: tiny.MEDIA_TOKEN}
        return MultimodalModel.from_unimodal(encoders, LlamaConfig(**tiny.TEXT), tokens)


ADAPTERS = {LM: {"peft_config": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}, VISION: {"freeze": True}}


@pytest.mark.parametrize(
    ("family", "model", "parallel"),
    [("llava", composed, None), deep("gemma3", tiny.FAMILIES["gemma3"], ADAPTERS)],
    ids=["composed", "adapters"],
)
def test_composed_models_and_adapters_pack_too(family: str, model: Any, parallel: Any):
    arguments: dict[str, Any] = {"per_device_train_batch_size": 4, "parallel": parallel, **SHORT}
    plain, packed = (our_trainer(family, model=model(), packing=packs, **arguments) for packs in (None, True))
    assert isinstance(packed.data_collator, PackingCollator)
    runs.assert_same_run(runs.run_of(packed), runs.run_of(plain))


def test_an_attention_function_that_reads_no_words_is_refused():
    parallel = {LM: {"attn_implementation": "sdpa"}}
    with pytest.raises(ValueError, match="`attn_implementation='sdpa'` of `language_model` reads no words.* Leave it"):
        our_trainer("llava", packing=True, parallel=parallel)
    ours = our_trainer("llava", packing=True, parallel={LM: {"attn_implementation": "bitfield"}})
    assert isinstance(ours.data_collator, PackingCollator)


def test_a_collator_that_packs_is_left_as_it_is():
    model = tiny.attending(tiny.FAMILIES["llava"]())
    pack = PackingCollator(tiny.collate("llava"), model)
    assert our_trainer(model=model, packing=True, data_collator=pack).data_collator is pack


def test_packing_is_a_flag_on_the_command_line():
    for words, packing in ((["--packing"], True), (["--packing", "false"], False), ([], None)):
        parser = HfArgumentParser(MultimodalTrainingArguments)  # type: ignore[arg-type]
        (args,) = parser.parse_args_into_dataclasses(["--output_dir", "unused", "--use_cpu", *words])
        assert args.packing is packing


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "parallel", "arguments"),
    [
        case("gemma3", {LM: {"pp_size": 2}}),
        case("qwen3_vl", {VISION: {"dp_size": 2}, LM: {"pp_size": 2}}, always=True),
        case("llava", {LM: {"tp_size": 2, "pp_size": 2}}),
    ],
)
def test_a_packed_layout_equals_the_stock_trainer(family: str, parallel: dict[str, Any], arguments: dict[str, Any]):
    words = partial(dict, evaluate=True, per_device_eval_batch_size=2, **COUNTED)
    layout = runs.Layout(family, parallel, words, {"packing": True, "per_device_train_batch_size": 3, **arguments})
    runs.assert_layouts_equal_the_stock_trainer(runs.ranks_of(family, parallel), {family: layout})


def test_rows_are_padded_by_default_where_samples_could_not_be_told_apart(monkeypatch: pytest.MonkeyPatch):
    model = tiny.FAMILIES["llava"]()
    choice = row_choice(None, model, build_model_spec(model), None)
    assert not choice.packed and "`sdpa` attention" in choice.reason and "`packing=True`" in choice.reason
    assert not our_trainer("llava", per_device_train_batch_size=4).args.packing
    tiny.attending(model)
    assert row_choice(None, model, build_model_spec(model), None).packed

    def refuse(model: Any) -> None:
        raise ValueError("Its masks are drawn in its forward.")

    monkeypatch.setattr(rows, "MaskRule", refuse)
    choice = row_choice(None, model, build_model_spec(model), None)
    assert not choice.packed and choice.reason == "Its masks are drawn in its forward"


BITFIELD = {LM: {"pp_size": 2, "attn_implementation": "bitfield"}}


def predictions(packing: bool | None) -> Any:
    """Predictions, labels and inputs of a run whose language model can pack, whether it does, and why."""
    trainer = runs.make_trainer("llava", BITFIELD, packing=packing, per_device_eval_batch_size=3)
    packs = isinstance(trainer.data_collator, PackingCollator)
    assert trainer.engine.costs.packs_rows == trainer.rows.packed == packs
    given = []
    trainer.compute_metrics = lambda p: given.append(p) or {}
    trainer.args.include_for_metrics = ["inputs"]
    output = trainer.predict(trainer.eval_dataset)
    return packs, trainer.rows.reason, output.predictions, output.label_ids, [p.inputs for p in given]


def plain_and_packed_predictions() -> list[Any]:
    return [predictions(packing) for packing in (False, None)]


@pytest.mark.distributed
def test_a_language_model_that_can_pack_does_so_by_default_and_predicts_by_sample():
    ranks = run_distributed(plain_and_packed_predictions, 3)
    for (pads, *_), (packs, reason, *_) in ranks:
        assert packs and not pads and "`bitfield` attention" in reason
    (_, _, plain, labels, inputs), (_, _, packed, packed_labels, packed_inputs) = ranks[0]
    assert packed.shape == plain.shape and len(packed) == 7
    assert np.array_equal(packed_labels, labels)
    real = labels != -100
    assert real.any(axis=1).all()
    np.testing.assert_allclose(packed[real], plain[real], rtol=2e-5, atol=2e-6)
    real = packed_inputs[0] != -100
    assert real.sum() > (labels != -100).sum()
    assert np.array_equal(packed_inputs[0][real], inputs[0][real])
