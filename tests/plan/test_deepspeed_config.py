"""What DeepSpeed configurations ask for becomes settings of modules, or a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModulePlugin,
    MultimodalParallelPlugin,
    plan_for_model,
    resolve_plan,
)
from hf_mmparallel.plan.deepspeed_config import deepspeed_settings, idle_keys
from tests.plan.specs import model_spec

SPEC = model_spec()
STAGE_3 = {"zero_optimization": {"stage": 3}}
USUAL: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
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
    assert from_file == from_dict and from_dict.zero_stage == 2
    plain = json.loads(json.dumps(from_file.to_dict()))
    assert ModulePlugin.from_dict(plain) == from_file
    plan = resolve_plan(SPEC, {LANGUAGE_MODEL: ModulePlugin(dp_size=2, deepspeed=USUAL)})
    assert [module.sharding.zero_stage for module in plan.modules.values()] == [0, 2]
    assert "steps_per_print" in idle_keys(USUAL) and "gradient_clipping" not in idle_keys(USUAL)


def test_an_optimizer_on_the_cpu_is_a_setting():
    config = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    assert deepspeed_settings(config) == {"zero_stage": 1, "offload_optimizer": True}
    assert ModulePlugin(deepspeed=config).offload_optimizer and not ModulePlugin(deepspeed=USUAL).offload_optimizer
    assert deepspeed_settings({}) == {"zero_stage": 0}
    assert deepspeed_settings({"zero_optimization": {"offload_optimizer": None}}) == {"zero_stage": 0}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"zero_optimisation": {"stage": 2}}, "`deepspeed` has no `zero_optimisation`. Did you mean `zero_optim"),
        ({"zero_optimization": {"stge": 2}}, "`zero_optimization` of `deepspeed` has no `stge`. Did you mean `stage`"),
        ({"optimizer": {"params": {"learning_rate": 1}}}, "`optimizer.params` of `deepspeed` has no `learning_rate`"),
        ({"zero_optimization": 2}, "`zero_optimization` of `deepspeed` is `2`; it must be a mapping"),
        ({"zero_optimization": {"stage": 4}}, "`zero_optimization.stage=4` of `deepspeed` can't be honoured"),
        ({"zero_optimization": {"stage": True}}, "`zero_optimization.stage=True` of `deepspeed` can't"),
        ({"zero_optimization": {"stage": "auto"}}, "`zero_optimization.stage='auto'` of `deepspeed` can't"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "device='nvme'` .* Use `\"cpu\"`"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}, "ratio=0.5` .* on the CPU or on the device"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "Leave `offload_param` out"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "Use `shard_size` of the module"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type='OneBitAdam'` .* in the argument `optim`"),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, "adam_w_mode=False` .* that of AdamW"),
        ({"scheduler": {"type": "WarmupLR"}}, '"constant_with_warmup"` for `WarmupLR`'),
        ({"fp16": {"enabled": True}}, "fp16.enabled=True` .* Use `bf16=True`"),
        ({"activation_checkpointing": {}}, "Use `activation_checkpointing` of the module"),
        ({"tensor_parallel": {"autotp_size": 2}}, "Use `tp_size` of the module"),
        ({"communication_data_type": "bf16"}, "Gradients are summed in float32"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(config: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        ModulePlugin(deepspeed=config)


def test_files_that_can_not_be_read_are_refused(tmp_path: Path):
    file = tmp_path / "ds.json"
    with pytest.raises(ValueError, match="is no file. Give the path of a DeepSpeed configuration"):
        ModulePlugin(deepspeed=str(file))
    file.write_text('{"zero_optimization": ')
    with pytest.raises(ValueError, match="is no valid JSON: .* Mend it"):
        ModulePlugin(deepspeed=str(file))
    file.write_text('{"zero_optimization": {"stage": 1, "stage": 2}}')
    with pytest.raises(ValueError, match="`deepspeed` has `stage` twice. Keep one of them"):
        ModulePlugin(deepspeed=str(file))
    with pytest.raises(ValueError, match="`deepspeed=2` must be the path of a JSON file, or a dict"):
        ModulePlugin(deepspeed=2)  # type: ignore[arg-type]


def test_a_zero_stage_beside_the_configuration_must_be_its_own():
    assert ModulePlugin(deepspeed=USUAL, zero_stage=2).zero_stage == 2
    with pytest.raises(ValueError, match="`zero_stage=1` contradicts `deepspeed` beside it, which asks for 2"):
        ModulePlugin(deepspeed=USUAL, zero_stage=1)
    with pytest.raises(ValueError, match="`zero_stage=0` contradicts `deepspeed`"):
        ModulePlugin.from_dict({"deepspeed": USUAL, "zero_stage": 0})


@pytest.mark.parametrize("shares_ranks", [False, True])
def test_zero_3_with_stages_is_refused(shares_ranks: bool):
    sizes: dict[str, Any] = {"pp_size": 2, "dp_size": 2}
    own: dict[str, Any] = {"colocate_with": "vision"} if shares_ranks else sizes
    modules = {
        "vision": ModulePlugin(**sizes),
        LANGUAGE_MODEL: ModulePlugin(deepspeed=STAGE_3, **own),
    }
    with pytest.raises(ValueError, match=r"stage=3` in `deepspeed` of `language_model` .* `pp_size=2`: .* Use `zero"):
        resolve_plan(SPEC, modules)
    modules[LANGUAGE_MODEL] = ModulePlugin(dp_size=2, deepspeed=STAGE_3)
    assert resolve_plan(SPEC, modules).modules[LANGUAGE_MODEL].sharding.zero_stage == 3


def test_a_finished_plan_must_have_the_stage():
    plan = resolve_plan(SPEC, {LANGUAGE_MODEL: ModulePlugin(dp_size=2, deepspeed=USUAL)})
    beside = MultimodalParallelPlugin(plan=plan, modules={LANGUAGE_MODEL: ModulePlugin(deepspeed=USUAL)})
    assert plan_for_model(beside, SPEC, 3).modules == plan.modules
    with pytest.raises(ValueError, match="`zero_stage=3` of `language_model` contradicts the plan beside it"):
        MultimodalParallelPlugin(plan=plan, modules={LANGUAGE_MODEL: ModulePlugin(deepspeed=STAGE_3)})


def test_a_search_refuses_a_configuration():
    with pytest.raises(ValueError, match="`deepspeed=.* of `vision` is not known to the search yet"):
        MultimodalParallelPlugin(auto=True, modules={"vision": ModulePlugin(deepspeed=USUAL)})
