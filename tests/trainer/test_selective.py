"""Layers that recompute all but products and attention give the stock Trainer's run in any layout."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.modeling import prepare
from hf_mmparallel.plan.checkpointing import SELECTIVE
from tests import tiny
from tests.deep_cases import in_turn
from tests.distributed import run_distributed
from tests.folders import run_folder

from . import runs
from .test_experts import of_family

VISION, LM = "vision", "language_model"
TWO_STEPS: dict[str, Any] = {"max_steps": 2, "warmup_steps": 0}
AGAIN = {"activation_checkpointing": SELECTIVE}


def both(**sizes: Any) -> dict[str, Any]:
    """Both modules with the same sizes on the same ranks."""
    return {VISION: {**sizes, **AGAIN}, LM: {**sizes, **AGAIN, "colocate_with": VISION}}


TP2 = both(tp_size=2)


def adapted() -> Any:
    """A model with adapters in both modules."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        targets = ["q_proj", "v_proj", "o_proj", "down_proj", "fc1"]
        return get_peft_model(tiny.FAMILIES["llava"](), LoraConfig(r=4, target_modules=targets))


Case = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
# of family, layout of two ranks, arguments of both Trainers, and of ours
EVERY: dict[str, Case] = {
    "stages, packed": ("llava", both(pp_size=2), {}, {"packing": True}),
    "stages, split backwards": ("llava", both(pp_size=2, split_backward=True), {}, {}),
    "tp, shared rows": ("llava", TP2, {}, {}),
    "tp, shared rows, bf16": ("llava", TP2, {"bf16": True}, {}),
    "tp, experts, split backwards": ("qwen3_vl_moe", {**TP2, LM: {**TP2[LM], "split_backward": True}}, {}, {}),
    "ZeRO-3, norms behind blocks": ("gemma3", both(dp_size=2, zero_stage=3), {}, {}),
    "tp, adapters": ("llava", TP2, {"model": adapted}, {}),
    "experts over replicas": ("llama", {LM: {"dp_size": 2, "ep_size": 2, **AGAIN}}, {}, {}),
}
CASES = in_turn(EVERY, "stages, packed", "tp, experts, split backwards")


def arguments_of(name: str) -> dict[str, Any]:
    """The arguments of both Trainers."""
    given = {**TWO_STEPS, **CASES[name][2]}
    if "model" in given:
        given["model"] = given["model"]()
    return {**given, **of_family("Qwen3MoeForCausalLM"), **TWO_STEPS} if "over replicas" in name else given


def train() -> dict[str, tuple[runs.Run, int]]:
    """The runs, and how many outputs of operations were kept in each."""
    result, contexts = {}, prepare.create_selective_checkpoint_contexts
    for name, (family, layout, _, own) in CASES.items():
        modes: list[Any] = []
        prepare.create_selective_checkpoint_contexts = lambda keeps, own=modes: own.append(contexts(keeps)) or own[-1]
        run = runs.parallel_run(family, layout, **arguments_of(name), **own)
        kept = sum(len(entries) for mode, _ in modes for entries in mode.storage.values())
        result[name] = run, kept
    return result


@pytest.mark.distributed
def test_runs_equal_the_stock_trainers():
    first = run_distributed(train, 2, timeout=280)[0]
    for name, (run, num_kept) in first.items():
        assert num_kept > 0
        tolerance = {"rtol": 5e-3, "atol": 5e-4} if "bf16" in name else {}
        runs.assert_same_run(run, runs.stock(CASES[name][0], **arguments_of(name)), **tolerance)


def test_one_process_recomputes_them_too(monkeypatch: pytest.MonkeyPatch):
    contexts, modes = prepare.create_selective_checkpoint_contexts, []
    monkeypatch.setattr(
        prepare, "create_selective_checkpoint_contexts", lambda keeps: modes.append(contexts(keeps)) or modes[-1]
    )
    sizes = {**runs.COMMON, **TWO_STEPS, "per_device_train_batch_size": runs.GLOBAL_BATCH}
    args = MultimodalTrainingArguments(output_dir=run_folder(), parallel={VISION: AGAIN, LM: AGAIN}, **sizes)
    trainer: Any = MultimodalParallelTrainer(args=args, **runs.words_of("llava", {}))
    trainer.train()
    assert modes
    runs.assert_same_run(
        runs.Run(runs.step_logs(trainer), trainer.model.state_dict()), runs.stock("llava", **TWO_STEPS)
    )
