"""Every folder that a plan saves is opened by the library that it is meant for, and its plan repeats the run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import Trainer, set_seed

from hf_mmparallel import MultimodalParallelTrainer
from hf_mmparallel.trainer import auto
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed
VISION, LM = "vision", "language_model"
PLAN: dict[str, Any] = {VISION: {"pp_size": 2}, LM: {"pp_size": 2, "colocate_with": VISION}}
STEPS: dict[str, Any] = {
    "max_steps": 2,
    "warmup_steps": 0,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "save_strategy": "steps",
    "save_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
# Form -> (family, settings of the adapter, its name); without an adapter all is trained. "by module": of `BY_MODULE`.
FORMS: dict[str, tuple[str, dict[str, Any] | None, str]] = {
    "whole, tied": ("gemma3", None, "default"),
    "whole, in float64": ("llava", None, "default"),
    "adapter with a name": ("llava", {"task_type": "CAUSAL_LM"}, "mine"),
    "adapter with a projector": ("llava", {"modules_to_save": ["multi_modal_projector"]}, "default"),
    "adapter by module": ("llava", {}, "default"),
    "adapter of a model with more tokens": ("llava", {}, "default"),
    "adapter of tied embeddings": ("gemma3", {"target_modules": ["embed_tokens", "lm_head"]}, "default"),
}


BY_MODULE: dict[str, Any] = {VISION: {"freeze": "tower"}, LM: {"peft_config": LORA}}


def model_of(form: str, folder: str) -> Any:
    """A model of a folder with what is trained of it."""
    family, settings, name = FORMS[form]
    set_seed(7)
    model = base_of(form, folder)
    has_none = settings is None or "by module" in form
    return model if has_none else get_peft_model(model, LoraConfig(**{**LORA, **settings}), adapter_name=name)


def base_of(form: str, folder: str) -> Any:
    """The model of a folder, with new tokens or a dtype where a form has them."""
    family = FORMS[form][0]
    model = type(tiny.FAMILIES[family]()).from_pretrained(f"{folder}/{family}")
    if "more tokens" in form:
        model.resize_token_embeddings(124)
    return model.double() if "float64" in form else model


def data_of(form: str, size: int = runs.SAMPLES) -> list[dict[str, Any]]:
    data = tiny.make_dataset(FORMS[form][0], size)
    if "float64" in form:
        data = [{k: v.double() if v.is_floating_point() else v for k, v in sample.items()} for sample in data]
    return data


def logits_of(model: Any, form: str) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**tiny.collate(FORMS[form][0])(data_of(form, 4))).logits


def train_and_save(trainer: Any, folder: str) -> None:
    """A run whose best model is saved, with its card."""
    trainer.train()
    trainer.save_model(folder)
    trainer.create_model_card()


@contextmanager
def in_float64() -> Iterator[None]:
    """A block in which models compute nothing of float64 in float32: no norm, no rotary embedding, no loss."""
    to, narrow = torch.Tensor.to, torch.Tensor.float

    def keeping(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.dtype == torch.float64:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs |= {"dtype": torch.float64} if kwargs.get("dtype") is torch.float32 else {}
        return to(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", keeping)
        patch.setattr(torch.Tensor, "float", lambda self: self if self.dtype == torch.float64 else narrow(self))
        yield


WILD: dict[str, Any] = {**STEPS, "learning_rate": 0.5, "max_steps": 4}
"""Steps so large that a run depends on its rounding: a difference is a thousand times as large a step later."""
WILD_FORM = "adapter with a projector"


def wild_run(trainer: Any) -> tuple[str, dict[str, torch.Tensor] | None]:
    """The best checkpoint of a run in float64, and what is trained of the model that it leaves."""
    trainer.train()
    whole = trainer.gather_model() if isinstance(trainer, MultimodalParallelTrainer) else trainer.model
    best = trainer.state.best_model_checkpoint.rpartition("/")[2]
    return best, None if whole is None else get_peft_model_state_dict(whole)


def wild_arguments(folder: str) -> dict[str, Any]:
    """Model, data and arguments of that run."""
    return {"model": model_of(WILD_FORM, folder).double(), "data": data_of("whole, in float64"), **WILD}


def planned_wild(folder: str) -> tuple[str, dict[str, torch.Tensor] | None]:
    with in_float64():
        return wild_run(runs.make_trainer("llava", PLAN, f"{folder}/wild", **wild_arguments(folder)))


def planned(folder: str, form: str) -> tuple[list[dict[str, float]], Any]:
    """Logs of a run under a plan, and the logits of the model that is saved."""
    out, plan = f"{folder}/planned/{form}", PLAN
    if "by module" in form:
        plan = {name: {**PLAN[name], **settings} for name, settings in BY_MODULE.items()}
    given = {"model": model_of(form, folder), "data": data_of(form), **STEPS}
    trainer = runs.make_trainer(FORMS[form][0], plan, out, **given)
    train_and_save(trainer, out)
    whole = trainer.gather_model()
    return runs.step_logs(trainer), None if whole is None else logits_of(whole, form)


def one_process_trainer(form: str, folder: str, ours: bool = False) -> Trainer:
    """The stock Trainer, or ours, which makes the adapters of "by module" as the user of `get_peft_model` does."""
    arguments = {**STEPS, "per_device_train_batch_size": runs.GLOBAL_BATCH, "output_dir": f"{folder}/stock/{form}"}
    arguments |= {"model": model_of(form, folder), "data": data_of(form)}
    if "by module" in form:
        return runs.our_trainer(FORMS[form][0], parallel=BY_MODULE, **arguments)
    return runs.stock_trainer(FORMS[form][0], cls=MultimodalParallelTrainer if ours else Trainer, **arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the models that are trained."""
    folder = str(tmp_path_factory.mktemp("saved"))
    for family in {family for family, _, _ in FORMS.values()}:
        tiny.FAMILIES[family]().save_pretrained(f"{folder}/{family}")
    return folder


@pytest.mark.parametrize("form", [deep(form, unless=form == "adapter with a projector") for form in FORMS])
def test_a_folder_is_opened_by_its_library_as_that_of_the_stock_trainer(folder: str, form: str):
    family, settings, name = FORMS[form]
    logs, logits = run_distributed(planned, 2, folder, form, timeout=200)[0]
    stock = one_process_trainer(form, folder)
    train_and_save(stock, stock.args.output_dir)
    wanted = [pytest.approx(row, rel=1e-4, abs=1e-5) for row in runs.step_logs(stock)]
    assert logs == wanted
    torch.testing.assert_close(logits, logits_of(stock.model, form), rtol=1e-3, atol=1e-4)
    out, cls = f"{folder}/planned/{form}", type(tiny.FAMILIES[family]())
    for opened in (out, f"{out}/checkpoint-2"):
        if settings is None:
            loaded, info = cls.from_pretrained(opened, output_loading_info=True)
            assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        else:
            adapter = opened if name == "default" else f"{opened}/{name}"
            loaded = PeftModel.from_pretrained(base_of(form, folder), adapter)
        torch.testing.assert_close(logits_of(loaded, form), logits, rtol=0, atol=0)
    card, expected = (ModelCard.load(f"{path}/README.md").data.to_dict() for path in (out, stock.args.output_dir))
    assert card.pop("parallel_plan")[LM]["pp"] == 2
    card["tags"].remove("hf_mmparallel")
    assert card == expected and ("base_model" in card) == (settings is not None)
    if name == "default":  # the stock Trainer resumes from no adapter with another name
        # Of a model with other names on the Hub it restores nothing, not from its own checkpoints either.
        resumed = one_process_trainer(form, folder, ours=settings is None)
        resumed.train(resume_from_checkpoint=f"{out}/checkpoint-1")
        assert runs.step_logs(resumed) == wanted


@pytest.mark.deep
def test_the_best_model_of_a_run_in_float64_is_that_of_the_stock_trainer(folder: str):
    """A model in float64 ended in `linalg.vector_norm: the dtype of the input (Double) should be convertible`."""
    best, weights = run_distributed(planned_wild, 2, folder)[0]
    with in_float64():
        arguments = {**wild_arguments(folder), "output_dir": f"{folder}/stock/wild"}
        expected, want = wild_run(runs.stock_trainer(**arguments))
    assert best == expected and weights is not None and want is not None and weights.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


FROZEN = {"vision": {"freeze": True, "attn_implementation": "eager"}, LM: {"activation_checkpointing": True}}
ADAPTED = {"vision": {"freeze": "tower"}, LM: {"peft_config": {"r": 2, "target_modules": ["q_proj", "v_proj"]}}}


def _train(parallel: Any, save: str | None = None) -> tuple[list[str], list[dict[str, float]]]:
    """What this rank trains, and the logs."""
    trainer = runs.make_trainer("llava", parallel, max_steps=2)
    trainer.train()
    if save is not None:
        trainer.save_model(save)
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    return trained, runs.step_logs(trainer)


def _repeat(layout: dict[str, Any], folder: Path) -> tuple[list[Any], str]:
    """
    A run, and runs from its file and from the file with sorted keys; and what is said when a run goes on that trains
    what was frozen.
    """
    first, path = _train(layout, str(folder)), folder / "parallel_plan.json"
    dumped = yaml.safe_dump(json.loads(path.read_text()), default_flow_style=True, width=1e9)
    again = [_train(str(path)), _train(dumped)]
    said: list[str] = []
    if layout == FROZEN:
        auto.logger.warning = lambda text, **_: said.append(text)
        trainer = runs.make_trainer("llava", {**layout, "vision": {}})
        trainer.state.save_to_json(str(folder / "trainer_state.json"))  # as in a checkpoint
        trainer._load_from_checkpoint(str(folder))
    return [first, *again], " ".join(said)


@pytest.mark.parametrize("layout", [deep(FROZEN), deep(ADAPTED)], ids=["frozen", "adapters"])
def test_a_run_is_repeated_from_its_plan(layout: dict[str, Any], tmp_path: Path):
    freeze = layout["vision"]["freeze"]
    for number, ((first, *again), said) in enumerate(run_distributed(_repeat, 2, layout, tmp_path, timeout=100)):
        assert layout != FROZEN or ("`freeze=True` of `vision`" in said and "`freeze=False`" in said)
        trained, logs = first
        assert len(logs) == 2 and all(row["loss"] > 0 for row in logs)
        assert any("lora" in name or "lm_head" in name for name in trained) == (number == 1)
        assert again == [first, first]
    saved = json.loads((tmp_path / "parallel_plan.json").read_text())
    assert saved["modules"]["vision"]["freeze"] == freeze
