"""What DeepSpeed configurations ask for becomes settings of modules, or a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, MultimodalParallelPlugin, plan_for_model, resolve_plan
from hf_mmparallel.plan.other_configs import deepspeed_settings, idle_keys
from tests.plan.specs import model_spec

SPEC = model_spec()
STAGE_3 = {"zero_optimization": {"stage": 3}}
USUAL: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""The configuration of the documentation of transformers, with bf16 and without a schedule."""


def test_a_file_and_its_contents_set_the_zero_stage(tmp_path: Path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(USUAL))
    from_file, from_dict = ModulePlugin(deepspeed=str(file)), ModulePlugin(deepspeed=USUAL)
    assert from_file == from_dict == ModulePlugin(deepspeed=USUAL, zero_stage=2) and from_dict.zero_stage == 2
    assert ModulePlugin.from_dict(json.loads(json.dumps(from_file.to_dict()))) == from_file
    plan = resolve_plan(SPEC, {LANGUAGE_MODEL: ModulePlugin(dp_size=2, deepspeed=USUAL)})
    assert [module.sharding.zero_stage for module in plan.modules.values()] == [0, 2]
    assert "steps_per_print" in idle_keys(USUAL) and "gradient_clipping" not in idle_keys(USUAL)


def test_an_optimizer_on_the_cpu_is_a_setting():
    config = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    assert deepspeed_settings(config) == {"zero_stage": 1, "offload_optimizer": True}
    assert ModulePlugin(deepspeed=config).offload_optimizer and not ModulePlugin(deepspeed=USUAL).offload_optimizer
    for empty in ({}, {"zero_optimization": {"offload_optimizer": None}}):
        assert deepspeed_settings(empty) == {"zero_stage": 0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimisation": {"stage": 2}}, "no `zero_optimisation`. Did you mean `zero_optim"),
        ({"optimizer": {"params": {"learning_rate": 1}}}, "`optimizer.params` of `deepspeed` has no `learning_rate`"),
        ({"zero_optimization": 2}, "`zero_optimization` of `deepspeed` is `2`"),
        ({"zero_optimization": {"stge": 2}}, "`zero_optimization` of `deepspeed` has no `stge`. Did you mean `stage`"),
        ({"zero_optimization": {"stage": 4}}, "stage=4`"),
        ({"zero_optimization": {"stage": True}}, "stage=True`"),
        ({"zero_optimization": {"stage": "auto"}}, "stage='auto'`"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "device='nvme'`"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}, "ratio=0.5`"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "Leave `offload_param` out"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "Use `shard_size`"),
        ({"optimizer": {"type": "OneBitAdam"}}, "type='OneBitAdam'` .* `optim`"),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, "adam_w_mode=False`"),
        ({"scheduler": {"type": "WarmupLR"}}, '"constant_with_warmup"` for `WarmupLR`'),
        ({"fp16": {"enabled": True}}, "fp16.enabled=True` .* Use `bf16=True`"),
        ({"activation_checkpointing": {}}, "Use `activation_checkpointing`"),
        ({"tensor_parallel": {"autotp_size": 2}}, "Use `tp_size`"),
        ({"communication_data_type": "bf16"}, "in float32"),
        ("none.json", "is no file"),
        ('{"zero_optimization": ', "is no valid JSON"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "has `stage` twice"),
        (2, "`deepspeed=2` must be the path"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(tmp_path: Path, config: Any, message: str):
    if isinstance(config, str) and config.startswith("{"):  # the text of a file
        (tmp_path / "ds.json").write_text(config)
        config = str(tmp_path / "ds.json")
    with pytest.raises(ValueError, match=message):
        ModulePlugin(deepspeed=config)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_zero_stage_beside_the_configuration_must_be_its_own(stage: int):
    with pytest.raises(ValueError, match=f"`zero_stage={stage}` contradicts `deepspeed` .* 2"):
        ModulePlugin.from_dict({"deepspeed": USUAL, "zero_stage": stage})


@pytest.mark.parametrize("own", [{"colocate_with": "vision"}, {"pp_size": 2, "dp_size": 2}])
def test_zero_3_with_stages_is_refused(own: dict[str, Any]):
    vision = ModulePlugin(pp_size=2, dp_size=2)
    with pytest.raises(ValueError, match="stage=3` in `deepspeed` of `language_model` .* `pp_size=2`"):
        resolve_plan(SPEC, {"vision": vision, LANGUAGE_MODEL: ModulePlugin(deepspeed=STAGE_3, **own)})
    plan = resolve_plan(SPEC, {"vision": vision, LANGUAGE_MODEL: ModulePlugin(dp_size=2, deepspeed=STAGE_3)})
    assert plan.modules[LANGUAGE_MODEL].sharding.zero_stage == 3


def test_a_finished_plan_must_have_the_stage_and_a_search_refuses_it():
    plan = resolve_plan(SPEC, {LANGUAGE_MODEL: ModulePlugin(dp_size=2, deepspeed=USUAL)})
    beside = MultimodalParallelPlugin(plan=plan, modules={LANGUAGE_MODEL: ModulePlugin(deepspeed=USUAL)})
    assert plan_for_model(beside, SPEC, 3).modules == plan.modules
    with pytest.raises(ValueError, match="`zero_stage=3` of `language_model` contradicts the plan"):
        MultimodalParallelPlugin(plan=plan, modules={LANGUAGE_MODEL: ModulePlugin(deepspeed=STAGE_3)})
    with pytest.raises(ValueError, match="`deepspeed=.* of `vision` is not known to the search"):
        MultimodalParallelPlugin(auto=True, modules={"vision": ModulePlugin(deepspeed=USUAL)})
