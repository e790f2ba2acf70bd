"""`DistributedConfig` of transformers and `ParallelismConfig` of accelerate are plans."""

from pathlib import Path
from typing import Any

import pytest
from accelerate import ParallelismConfig
from transformers.distributed.configuration_utils import DistributedConfig

from hf_mmparallel import MultimodalParallelPlugin
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import plan_for_model
from tests import tiny
from tests.distributed import run_distributed

from . import runs

VISION, LM = "vision", "language_model"
FAMILY = "llava"
THREE_STEPS: dict[str, Any] = {"max_steps": 3, "warmup_steps": 0}


def layouts(mesh: Any) -> dict[str, str]:
    plan = plan_for_model(MultimodalParallelPlugin.from_any(mesh), build_model_spec(tiny.FAMILIES[FAMILY]()), None)
    return {name: str(module.layout) for name, module in plan.modules.items()}


def test_sizes_are_those_of_the_language_model_whose_ranks_all_share():
    mesh = DistributedConfig(tp_size=2, fsdp_size=2, dp_replicate_size=3)
    plugin = MultimodalParallelPlugin.from_any(mesh)
    assert plugin.modules[LM].shard_size == 2 and plugin.modules[LM].dp_size == 6
    both = "dp 6 x tp 2, ZeRO-3 over 2"
    assert layouts(mesh) == layouts(mesh.to_dict()) == layouts(plugin.to_dict()) == {VISION: both, LM: both}
    assert layouts(DistributedConfig(pp_size=2, tp_size=2)) == {
        VISION: "dp 2 x tp 2",
        LM: "pp 2 x tp 2",
    }
    shared = MultimodalParallelPlugin.from_any(DistributedConfig(fsdp_size=4, ep_size=2))
    assert shared.modules[LM].ep_size == 2 and shared.settings_of(VISION).ep_size == 1
    accelerate = ParallelismConfig(dp_shard_size=2, cp_size=2)
    assert layouts(accelerate) == {VISION: "dp 4, ZeRO-3", LM: "dp 2 x cp 2, ZeRO-3"}


@pytest.mark.parametrize(
    "refused",
    [
        {"ep_plan": {"layers.*.mlp.experts": "grouped_gemm"}},
        {"tp_plan": {"layers.*.mlp": "colwise"}, "tp_size": 2},
        {"fsdp_plan": {"layers.*": "keep"}},
        {"fsdp_cpu_offload": True},
        {"fsdp_mixed_precision": True},
    ],
)
def test_what_no_plan_means_is_refused(refused: dict[str, Any]):
    name = next(iter(refused))
    with pytest.raises(ValueError, match=f"`{name}="):
        MultimodalParallelPlugin.from_any(DistributedConfig(fsdp_size=2, **refused))


def on_two_ranks(folder: Path) -> dict[str, Any]:
    model = tiny.FAMILIES[FAMILY]()
    model.config.distributed_config = DistributedConfig(tp_size=2)
    trainer = runs.make_trainer(FAMILY, None, model=model, **THREE_STEPS)
    results: dict[str, Any] = {"layout": str(trainer.plan.modules[LM].layout)}
    results["of the configuration"] = runs.run_of(trainer)
    model = tiny.FAMILIES[FAMILY]()
    model.config.distributed_config = DistributedConfig(tp_size=2)
    with pytest.raises(ValueError) as raised:
        runs.make_trainer(FAMILY, {LM: {}}, model=model)
    results["two layouts"] = str(raised.value)
    sharded = type(model).from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    with pytest.raises(ValueError) as raised:
        runs.make_trainer(FAMILY, DistributedConfig(tp_size=2), model=sharded)  # type: ignore[arg-type]
    results["sharded"] = str(raised.value)
    return results


@pytest.mark.distributed
def test_the_mesh_of_a_model_is_its_plan(tmp_path: Path):
    tiny.FAMILIES[FAMILY]().save_pretrained(tmp_path)
    first = run_distributed(on_two_ranks, 2, tmp_path)[0]
    runs.assert_same_run(first["of the configuration"], runs.stock(FAMILY, **THREE_STEPS))
    assert first["layout"] == "tp 2"
    assert "`tp_size=2`" in first["two layouts"] and "Leave one of them out" in first["two layouts"]
    assert "hold shares of its weights" in first["sharded"]
