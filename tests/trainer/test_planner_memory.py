"""Which memory the steps of a run are planned for."""

from types import SimpleNamespace
from typing import Any

import pytest

from hf_mmparallel import MultimodalTrainingArguments
from hf_mmparallel.cost import RankMemory, analytic_costs, find_device, usable_bytes
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan, sync_groups
from hf_mmparallel.planner.answer import check_memory
from hf_mmparallel.planner.settings import Settings
from hf_mmparallel.steps.step_planner import StepPlanner
from hf_mmparallel.trainer.loaders import training_planner
from tests.plan.specs import model_spec


@pytest.mark.parametrize(
    ("device", "limit_gib", "expected_gib"), [("a100", None, 71.19), ("a100", 10.0, 10.0), ("cpu", None, None)]
)
def test_memory_is_the_users_or_that_of_the_device_that_all_ranks_know(device, limit_gib, expected_gib):
    args = MultimodalTrainingArguments(output_dir="unused", use_cpu=True, report_to=[], memory_limit_gib=limit_gib)
    spec = model_spec()
    plan = resolve_plan(spec, {"vision": ModulePlugin(), LANGUAGE_MODEL: ModulePlugin()})
    base = StepPlanner(analytic_costs(spec, find_device(device)), plan, sync_groups(spec, plan), 4)
    planner = training_planner(base, args, None)
    assert planner.memory_bytes == (None if expected_gib is None else expected_gib * 2**30)


@pytest.mark.parametrize(("device", "limit_gib"), [("a100", None), ("a100", 10.0), ("cpu", None)])
def test_the_trainer_and_the_command_line_have_one_rule(device, limit_gib):
    settings = Settings(gpu_type=device, memory_limit_gib=limit_gib)
    assert settings.memory_bytes == usable_bytes(find_device(device), limit_gib)
    assert settings.memory_gib == (None if settings.memory_bytes is None else settings.memory_bytes / 2**30)


def test_a_plan_above_ninety_percent_of_a_device_does_not_pass_a_dry_run():
    rank = RankMemory(activations=75 * 2**30)
    plan = SimpleNamespace(stages_of_rank=lambda rank: [("language_model", 0, 0)])
    answer: Any = SimpleNamespace(
        settings=Settings(gpu_type="a100"), memory={0: rank}, peak_gib=rank.total_gib, plan=plan
    )
    with pytest.raises(ValueError, match="75.0 GiB, 3.8 more than the 71.19 GiB, 90% of the memory of a100"):
        check_memory(answer)
    answer.memory, answer.peak_gib = {0: RankMemory(activations=71 * 2**30)}, 71.0
    check_memory(answer)
