"""Packed runs equal the stock Trainer's on padded batches: alone, under our Trainer, in every kind of layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, SiglipVisionConfig, Trainer, TrainingArguments

from hf_mmparallel import MultimodalModel, MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.data.packing import PackingCollator
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.trainer import build as rows
from hf_mmparallel.trainer.build import row_choice
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed
from tests.folders import run_folder

from . import runs

VISION, LM = "vision", "language_model"
FAMILIES = ["llama_tied", "llava", "gemma3", "paligemma", "qwen2_vl", "qwen3_vl"]
SHORT: dict[str, Any] = {"max_steps": 2, "warmup_steps": 0}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers make their output folder even when they save nothing."""
    monkeypatch.chdir(tmp_path)


def language_key(model: Any) -> str:
    """The name of the language model's config in that of the model."""
    text = model.config.get_text_config()
    return next((key for key in model.config.sub_configs if getattr(model.config, key, None) is text), "")


def run_of(trainer: Trainer, evaluate: bool = True) -> runs.Run:
    trainer.train()
    metrics = trainer.evaluate() if evaluate else {}
    model: Any = trainer.model
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return runs.Run(runs.step_logs(trainer), weights, metrics)


def stock_packed(family: str, **arguments: Any) -> runs.Run:
    """`transformers.Trainer` with nothing of this package but the attention function and the collator."""
    model = tiny.FAMILIES[family]()
    model.set_attn_implementation({language_key(model): "bitfield"})
    data: Any = tiny.make_dataset(family, runs.SAMPLES)
    collate: Any = tiny.collate(family)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=run_folder(), **{**runs.COMMON, **arguments}),
        train_dataset=data,
        eval_dataset=data[:7],
        data_collator=PackingCollator(collate, model),
    )
    return run_of(trainer)


def our_trainer(family: str, model: Any = None, **arguments: Any) -> MultimodalParallelTrainer:
    args = MultimodalTrainingArguments(output_dir=run_folder(), **{**runs.COMMON, **arguments})
    data: Any = tiny.make_dataset(family, runs.SAMPLES)
    return MultimodalParallelTrainer(
        model=model or tiny.FAMILIES[family](),
        args=args,
        train_dataset=data,
        eval_dataset=data[:7],
        data_collator=tiny.collate(family),
    )


@pytest.mark.parametrize("family", [deep(f, unless=f in ("gemma3", "qwen2_vl")) for f in FAMILIES])
def test_the_stock_trainer_alone_packs(family: str):
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 7,
        **SHORT,
    }
    reference = runs.stock(family, evaluate=True, **arguments)
    run = stock_packed(family, **arguments)
    runs.assert_same_run(run, reference)
    assert run.metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        deep({}, id="alone"),
        pytest.param({"label_smoothing_factor": 0.1}, id="label smoothing"),
        deep({"gradient_checkpointing": True}, id="checkpointing"),
        pytest.param({"parallel": {LM: {"activation_checkpointing": True}}}, id="a layout of one"),
    ],
)
def test_packing_is_one_argument_on_one_process(arguments: dict[str, Any]):
    sizes = {"global_batch_size": 8, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 7, **SHORT}
    trainer = our_trainer("llava", packing=True, **sizes, **arguments)
    assert trainer.model.config.text_config._attn_implementation == "bitfield"
    assert trainer.model.config.vision_config._attn_implementation == "sdpa"
    shapes = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    run = run_of(trainer)
    assert set(shapes) == {1} and trainer.engine is None
    given: dict[str, Any] = {name: value for name, value in arguments.items() if name != "parallel"}
    reference = runs.stock("llava", evaluate=True, per_device_eval_batch_size=7, **SHORT, **given)
    runs.assert_same_run(run, reference)
    assert run.metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)


def composed() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultimodalModel.from_unimodal(
            encoders={"vision": SiglipVisionConfig(**tiny.SIGLIP)},
            language_model=LlamaConfig(**tiny.TEXT),
            token_ids={"vision": tiny.MEDIA_TOKEN},
        )


ADAPTERS = {LM: {"peft_config": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}, VISION: {"freeze": True}}


@pytest.mark.parametrize(
    ("family", "model", "parallel"),
    [("llava", composed, None), ("gemma3", tiny.FAMILIES["gemma3"], ADAPTERS)],
    ids=["composed", "adapters"],
)
def test_composed_models_and_adapters_pack_too(family: str, model: Any, parallel: Any):
    arguments: dict[str, Any] = {"per_device_train_batch_size": 4, "parallel": parallel, **SHORT}
    plain = our_trainer(family, model=model(), **arguments)
    packed = our_trainer(family, model=model(), packing=True, **arguments)
    runs.assert_same_run(run_of(packed), run_of(plain))
    assert isinstance(packed.data_collator, PackingCollator)


def test_an_attention_function_that_reads_no_words_is_refused():
    parallel = {LM: {"attn_implementation": "sdpa"}}
    with pytest.raises(ValueError, match="`attn_implementation='sdpa'` of `language_model` reads no words.* Leave it"):
        our_trainer("llava", packing=True, parallel=parallel)
    ours = our_trainer("llava", packing=True, parallel={LM: {"attn_implementation": "bitfield"}})
    assert isinstance(ours.data_collator, PackingCollator)


def test_a_collator_that_packs_is_left_as_it_is():
    model = tiny.FAMILIES["llava"]()
    model.set_attn_implementation({"text_config": "bitfield"})
    collate: Any = tiny.collate("llava")
    pack = PackingCollator(collate, model)
    args = MultimodalTrainingArguments(output_dir="unused", packing=True, **runs.COMMON)
    assert MultimodalParallelTrainer(model=model, args=args, data_collator=pack).data_collator is pack


def test_packing_is_a_flag_on_the_command_line():
    from transformers import HfArgumentParser

    parser = HfArgumentParser(MultimodalTrainingArguments)  # type: ignore[arg-type]
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "unused", "--packing", "--use_cpu"])
    assert args.packing is True
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "unused", "--packing", "false", "--use_cpu"])
    assert args.packing is False
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "unused", "--use_cpu"])
    assert args.packing is None


LAYOUTS = {
    "llava, copies of both": ("llava", 4, {VISION: {"dp_size": 2}, LM: {"dp_size": 2}}),
    "llava, tp 2, stages": ("llava", 5, {LM: {"tp_size": 2, "pp_size": 2}}),
    "gemma3, tied, stages": ("gemma3", 3, {LM: {"pp_size": 2}}),
    "qwen3_vl, DeepStack, copies and stages": ("qwen3_vl", 4, {VISION: {"dp_size": 2}, LM: {"pp_size": 2}}),
    "paligemma, copies and stages": ("paligemma", 5, {LM: {"dp_size": 2, "pp_size": 2}}),
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", runs.deep_but(LAYOUTS, "gemma3, tied, stages", "qwen3_vl, DeepStack, copies and stages")
)
def test_a_packed_layout_equals_the_stock_trainer(name: str):
    family, world_size, parallel = LAYOUTS[name]
    arguments: dict[str, Any] = {"per_device_eval_batch_size": 2, "evaluate": True, **SHORT}
    arguments["include_num_input_tokens_seen"] = "non_padding"
    reference = runs.stock(family, **arguments)
    ranks = run_distributed(
        runs.parallel_run, world_size, family, parallel, packing=True, per_device_train_batch_size=3, **arguments
    )
    runs.assert_same_run(ranks[0], reference)
    assert all(rank.logs == ranks[0].logs for rank in ranks)
    assert ranks[0].metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)


def rows_by_default(family: str) -> list[tuple[bool, str, runs.Run]]:
    """Whether a run packs that does not say so, and one that is not to, why, and what they leave."""
    bitfield = {LM: {"pp_size": 2, "attn_implementation": "bitfield"}}
    found = []
    for packing in (None, False):
        trainer = runs.make_trainer(family, bitfield, per_device_train_batch_size=3, packing=packing, **SHORT)
        packs = isinstance(trainer.data_collator, PackingCollator)
        assert trainer.engine.costs.packs_rows == trainer.rows.packed == packs
        found.append((packs, trainer.rows.reason, runs.run_of(trainer)))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("family", ["llava", pytest.param("qwen2_vl", marks=pytest.mark.deep)])
def test_a_language_model_that_can_pack_does_so_by_default(family: str):
    ranks = run_distributed(rows_by_default, 3, family)
    for (packs, reason, _), (other_packs, _, _) in ranks:
        assert packs and "`bitfield` attention" in reason and not other_packs
    for _, _, run in ranks[0]:
        runs.assert_same_run(run, runs.stock(family, **SHORT))


def test_rows_are_padded_by_default_where_samples_could_not_be_told_apart():
    model = tiny.FAMILIES["llava"]()
    choice = row_choice(None, model, build_model_spec(model), None)
    assert str(choice).startswith("Samples are padded to the longest of their microbatch: `sdpa` attention of")
    assert "`packing=True` packs them" in choice.reason
    assert not our_trainer("llava", per_device_train_batch_size=4).args.packing


def test_a_model_whose_masks_are_no_words_is_padded_by_default(monkeypatch: pytest.MonkeyPatch):
    def refuse(model: Any) -> None:
        raise ValueError("Its masks are drawn in its forward.")

    model = tiny.FAMILIES["llava"]()
    model.set_attn_implementation({language_key(model): "bitfield"})
    assert row_choice(None, model, build_model_spec(model), None).packed
    monkeypatch.setattr(rows, "MaskRule", refuse)
    choice = row_choice(None, model, build_model_spec(model), None)
    assert not choice.packed and choice.reason == "Its masks are drawn in its forward"


def predictions(packing: bool) -> Any:
    trainer = runs.make_trainer("llava", {LM: {"pp_size": 2}}, packing=packing, per_device_eval_batch_size=3)
    given = []
    trainer.compute_metrics = lambda p: given.append(p) or {}
    trainer.args.include_for_metrics = ["inputs"]
    output = trainer.predict(trainer.eval_dataset)
    return output.predictions, output.label_ids, [p.inputs for p in given]


def plain_and_packed_predictions() -> list[Any]:
    return [predictions(packing) for packing in (False, True)]


@pytest.mark.distributed
def test_predictions_are_given_by_sample():
    ranks = run_distributed(plain_and_packed_predictions, 3)
    (plain, labels, inputs), (packed, packed_labels, packed_inputs) = ranks[0]
    assert packed.shape == plain.shape and len(packed) == 7
    assert np.array_equal(packed_labels, labels)
    real = labels != -100
    assert real.any(axis=1).all()
    np.testing.assert_allclose(packed[real], plain[real], rtol=2e-5, atol=2e-6)
    real = packed_inputs[0] != -100
    assert real.sum() > (labels != -100).sum()
    assert np.array_equal(packed_inputs[0][real], inputs[0][real])
