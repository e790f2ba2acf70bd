"""On one process without sizes our Trainer is the stock one, to the bit; settings of modules hold there too."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments, set_seed

from hf_mmparallel import ModulePlugin, MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.modeling import build_model_spec
from tests import tiny
from tests.folders import run_folder

from . import runs
from .contexts import arguments

VISION, LM = "vision", "language_model"
ADAMW: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 3}
stock_trainer, our_trainer = partial(runs.stock_trainer, **ADAMW), partial(runs.our_trainer, **ADAMW)


def train(trainer: Trainer) -> Trainer:
    trainer.train()
    return trainer


def assert_identical(ours: Trainer, stock: Trainer) -> None:
    """Equal losses, gradient norms and weights, to the bit."""
    assert runs.step_logs(ours) == runs.step_logs(stock) != []
    weights, wanted = ours.model.state_dict(), stock.model.state_dict()
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("parallel", [None, {VISION: {}, LM: {"dp_size": 1, "tp_size": 1, "pp_size": 1}}])
def test_without_sizes_the_run_is_the_stock_trainers_with_accumulation_for_a_global_batch(parallel: Any):
    ours = train(our_trainer(parallel=parallel, global_batch_size=6, per_device_train_batch_size=2))
    stock = train(stock_trainer(per_device_train_batch_size=2, gradient_accumulation_steps=3))
    assert_identical(ours, stock)
    assert ours.engine is None and ours.plan is None
    assert ours.args.gradient_accumulation_steps == 3 and ours.state.max_steps == stock.state.max_steps
    assert ours.evaluate()["eval_loss"] == stock.evaluate()["eval_loss"]
    assert ours.gather_model() is ours.model


def test_plain_training_arguments_work_too():
    ours = stock_trainer(cls=MultimodalParallelTrainer)
    assert_identical(train(ours), train(stock_trainer()))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"global_batch_size": 7}, "`per_device_train_batch_size=2`"),
        ({"global_batch_size": 8, "gradient_accumulation_steps": 3}, "`gradient_accumulation_steps=3`.* = 6"),
    ],
)
def test_a_global_batch_that_does_not_add_up_is_refused(arguments: dict[str, int], sentence: str):
    with pytest.raises(ValueError, match=f"`global_batch_size={arguments['global_batch_size']}` .*{sentence}"):
        our_trainer(per_device_train_batch_size=2, **arguments)


def test_saving_and_resuming_equal_a_straight_run(tmp_path: Path):
    saving = {"save_strategy": "steps", "save_steps": 2, "parallel": {VISION: {}}, "max_steps": 4}
    straight, resumed = (our_trainer(output_dir=str(tmp_path), **saving) for _ in range(2))
    train(straight)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_identical(resumed, straight)


@pytest.mark.parametrize("parallel", [None, {VISION: {}}])
def test_a_missing_checkpoint_is_not_looked_for_on_the_hub(parallel: Any, monkeypatch: pytest.MonkeyPatch):
    ours = our_trainer(parallel=parallel)
    asked: list[str] = []

    def ask(*args: Any, **kwargs: Any) -> None:
        asked.append(str(args))
        raise ConnectionError("the Hub was asked")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", ask)
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", ask)
    monkeypatch.setattr("transformers.utils.hub.snapshot_download", ask)
    for folder in ("checkpoint-7", "run/checkpoint-7", "/nowhere/checkpoint-7"):
        with pytest.raises(ValueError, match=folder):
            ours.train(resume_from_checkpoint=folder)
    assert asked == []


FROZEN: dict[str, tuple[Any, str]] = {
    "all": (True, "."),
    "the tower": ("tower", "^(?!.*multi_modal_projector)"),
    "layers": (r"layers\.[01]\.", r"\.layers\.[01]\."),
    "several": (["projector", "embeddings"], "projector|embeddings"),
}
"""What is frozen of vision, and a pattern of the names of its parameters that are."""


@pytest.mark.parametrize("what", runs.deep_but(FROZEN, "several"))
def test_frozen_parts_stay_what_they_are(what: str):
    freeze, pattern = FROZEN[what]
    before = tiny.FAMILIES["llava"]().state_dict()
    ours = our_trainer(parallel={VISION: {"freeze": freeze}})
    names = [parameter.name for parameter in build_model_spec(ours.model).modules[VISION].parameters]
    frozen = {name for name in names if re.search(pattern, name)}
    assert frozen and {name for name, p in ours.model.named_parameters() if not p.requires_grad} == frozen
    train(ours)
    after = ours.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in frozen)
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


def with_model_init(cls: Any, args_cls: Any, model_init: Any, **arguments: Any) -> Any:
    """A Trainer that makes its model by itself, trained twice."""
    args = args_cls(output_dir=run_folder(), **{**runs.COMMON, **ADAMW, **arguments})
    data = tiny.make_dataset("llava", runs.SAMPLES)
    trainer = cls(None, args, tiny.collate("llava"), data, data[:5], model_init=model_init)
    return train(train(trainer))


@pytest.mark.deep
def test_every_training_begins_with_a_model_that_model_init_makes_and_settings_of_modules_hold():
    def frozen(trial: Any) -> Any:
        model = tiny.FAMILIES["llava"]()
        model.model.vision_tower.requires_grad_(False)
        return model

    parallel = {VISION: {"freeze": "tower"}, LM: {}}
    stock = with_model_init(Trainer, TrainingArguments, frozen)
    for model_init in (tiny.FAMILIES["llava"], lambda trial: tiny.FAMILIES["llava"]()):
        ours = with_model_init(MultimodalParallelTrainer, MultimodalTrainingArguments, model_init, parallel=parallel)
        assert_identical(ours, stock)
    assert len(runs.step_logs(stock)) == ADAMW["max_steps"]


def test_activation_checkpointing_recomputes_one_module_and_changes_no_number():
    recomputed = {LM: {"activation_checkpointing": True}}
    ours = our_trainer(parallel=recomputed)
    recomputing = {name for name, module in ours.model.named_modules() if getattr(module, "gradient_checkpointing", 0)}
    assert recomputing and all("language_model" in name for name in recomputing)
    assert_identical(train(ours), train(stock_trainer()))
    some = our_trainer(parallel=recomputed, activation_checkpointing_kwargs={"every_n_layers": 2})
    layers = some.model.model.language_model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False, True, False]


def test_the_attention_function_of_a_module_is_set():
    ours = our_trainer(parallel={LM: {"attn_implementation": "eager"}})
    assert ours.model.config.text_config._attn_implementation == "eager"
    assert ours.model.config.vision_config._attn_implementation == "sdpa"


def test_adapters_equal_those_that_peft_makes(tmp_path: Path):
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    ours = our_trainer(parallel={VISION: {"freeze": True}, LM: ModulePlugin(peft_config=config)})
    assert isinstance(ours.model, PeftModel)
    set_seed(runs.COMMON["seed"])
    by_hand = LoraConfig(r=4, lora_alpha=8, target_modules=r".*language_model.*\.(q_proj|v_proj)")
    stock = stock_trainer(model=get_peft_model(tiny.FAMILIES["llava"](), by_hand))
    trained = {name for name, p in ours.model.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in stock.model.named_parameters() if p.requires_grad}
    assert_identical(train(ours), train(stock))
    ours.save_model(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny.FAMILIES["llava"](), str(tmp_path))
    assert stock_trainer(model=loaded).evaluate()["eval_loss"] == ours.evaluate()["eval_loss"]
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4


def test_plans_that_are_not_for_this_process_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="`visoin`.*`vision`"):
        our_trainer(parallel={"visoin": {}})
    with pytest.raises(ValueError, match="3 ranks .*1 was launched"):
        our_trainer(parallel={LM: {"pp_size": 2}})
    # Four processes that found no group: `WORLD_SIZE` says 4, the arguments see a world of one.
    args = arguments()
    assert args.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="`WORLD_SIZE` .* 4 "):
        MultimodalParallelTrainer(model=tiny.FAMILIES["llava"](), args=args)
