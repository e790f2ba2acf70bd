"""Layers that recompute all but products and attention give the stock Trainer's run in any layout."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import CheckpointPolicy

from hf_mmparallel.modeling import prepare
from hf_mmparallel.plan.checkpointing import SELECTIVE
from tests import tiny
from tests.deep_cases import in_turn

from . import runs
from .moments import AtTheEnd
from .test_experts import of_family

VISION, LM = "vision", "language_model"
TWO_STEPS: dict[str, Any] = {"max_steps": 2, "warmup_steps": 0}
AGAIN = {"activation_checkpointing": SELECTIVE}


def both(**sizes: Any) -> dict[str, Any]:
    """Both modules with the same sizes on the same ranks."""
    return {VISION: {**sizes, **AGAIN}, LM: {**sizes, **AGAIN, "colocate_with": VISION}}


TP2 = both(tp_size=2)


def adapted() -> dict[str, Any]:
    """A model with adapters in both modules."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        targets = ["q_proj", "v_proj", "o_proj", "down_proj", "fc1"]
        model = get_peft_model(tiny.FAMILIES["llava"](), LoraConfig(r=4, target_modules=targets))
    return {"model": model, **TWO_STEPS}


def with_experts() -> dict[str, Any]:
    return {**of_family("qwen3_moe"), **TWO_STEPS}


def selective(family: str, parallel: dict[str, Any], **ours: Any) -> runs.Layout:
    return runs.Layout(family, parallel, partial(dict, TWO_STEPS), ours, check=keeps_outputs)


def keeps_outputs(trainer: Any) -> None:
    """Outputs of some operations are kept in the run, those of others are not."""
    plain, decisions = prepare.checkpoint, set()

    def noting(contexts: Any) -> Any:
        caching, cached = contexts()
        decide = caching.policy_fn
        caching.policy_fn = lambda *args, **kwargs: decisions.add(found := decide(*args, **kwargs)) or found
        return caching, cached

    def check(state: Any) -> None:
        prepare.checkpoint = plain
        assert decisions == {CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE}

    prepare.checkpoint = lambda *args, context_fn, **kwargs: plain(
        *args, context_fn=partial(noting, context_fn), **kwargs
    )
    trainer.add_callback(AtTheEnd(check))


# on two ranks
LAYOUTS: dict[str, runs.Layout] = {
    "stages, packed": selective("llava", both(pp_size=2), packing=True),
    "stages, split backwards": selective("llava", both(pp_size=2, split_backward=True)),
    "tp, shared rows": selective("llava", TP2),
    "tp, shared rows, bf16": replace(selective("llava", TP2), words=partial(dict, TWO_STEPS, bf16=True), rtol=5e-3),
    "tp, experts, split backwards": selective("qwen3_vl_moe", {**TP2, LM: {**TP2[LM], "split_backward": True}}),
    "ZeRO-3, norms behind blocks": selective("gemma3", both(dp_size=2, zero_stage=3)),
    "tp, adapters": replace(selective("llava", TP2), words=adapted),
    "experts over replicas": replace(
        selective("llama", {LM: {"dp_size": 2, "ep_size": 2, **AGAIN}}), words=with_experts
    ),
}


@pytest.mark.distributed
def test_runs_equal_the_stock_trainers():
    chosen = in_turn(LAYOUTS, "stages, packed", "tp, experts, split backwards")
    runs.assert_layouts_equal_the_stock_trainer(2, chosen)


def test_one_process_recomputes_them_too(monkeypatch: pytest.MonkeyPatch):
    contexts, modes = prepare.create_selective_checkpoint_contexts, []
    monkeypatch.setattr(
        prepare, "create_selective_checkpoint_contexts", lambda keeps: modes.append(contexts(keeps)) or modes[-1]
    )
    sizes = {"per_device_train_batch_size": runs.GLOBAL_BATCH, **TWO_STEPS}
    run = runs.run_of(runs.our_trainer(parallel={VISION: AGAIN, LM: AGAIN}, **sizes))
    assert modes
    runs.assert_same_run(run, runs.stock("llava", **TWO_STEPS))
