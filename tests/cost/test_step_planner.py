"""What a rank plans for itself is what all ranks together would be told, with the costs and limits of real steps."""

from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.cost.step_planner import StepPlanner
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.plan.methods import SCHEDULES
from tests.cost.models import h100, module
from tests.deep_cases import deep
from tests.schedule.checker import check_program

LM = LANGUAGE_MODEL
SPEC = ModelSpec({name: module(name) for name in ("vision", "audio", LM)})


def sizes_of(num_samples: int, share: float) -> SampleSizes:
    """Texts of unlike lengths, of which `share` have an image and some a sound."""
    random = np.random.default_rng(3)
    lengths = {name: np.ceil(random.lognormal(5, 1, num_samples)).astype(int) for name in SPEC.modules}
    for name in ("vision", "audio"):
        lengths[name][random.random(num_samples) >= share] = 0
    return SampleSizes.of_sequences({name: [[length] for length in own.tolist()] for name, own in lengths.items()})


LAYOUTS = {
    "apart": {
        "vision": ModulePlugin(dp_size=4),
        "audio": ModulePlugin(dp_size=2),
        LM: ModulePlugin(dp_size=4, pp_size=2, tp_size=2),
    },
    "encoders together": {
        "vision": ModulePlugin(dp_size=4, pp_size=2),
        "audio": ModulePlugin(dp_size=4, pp_size=2, colocate_with="vision"),
        LM: ModulePlugin(dp_size=2, cp_size=2, tp_size=2),
    },
}
# Four schedules by three shares with an image; each layout, and training or not, beside each of them and each other.
CASES = [
    (schedule, list(LAYOUTS)[(i + j) % 2], share, (i // 2 + j) % 2 == 0, j == i % 3)
    for i, schedule in enumerate(SCHEDULES)
    for j, share in enumerate((0.0, 0.05, 0.8))
]


@pytest.mark.parametrize(
    ("schedule", "layouts", "share", "training"), [deep(*own, unless=always) for *own, always in CASES]
)
def test_a_rank_plans_what_the_plan_of_all_ranks_says(layouts, schedule, share, training):
    plan, sizes = replace(resolve_plan(SPEC, LAYOUTS[layouts]), schedule=schedule), sizes_of(32, share)
    limits = {"memory_bytes": 60 * 2**30, "training": training}
    planner = StepPlanner(h100(SPEC), plan, sync_groups(SPEC, plan), 4, "hierarchical", sizes.take, **limits)
    draw = GlobalBatch(tuple(range(32)), 0)
    whole = planner(draw)
    check_program(plan, whole.step, planner.sync_groups, whole.program, training)
    for rank in range(plan.world_size):
        planned = planner(draw, rank)
        assert planned.step == whole.step
        assert planned.program.of_rank(rank) == whole.program.of_rank(rank)
        assert share < 0.5 or len(planned.program.actions) < plan.world_size
