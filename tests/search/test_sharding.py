"""What copies divide as a dimension of the search: chosen where it helps, kept where the user names it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_mmparallel.cost import StepCost
from hf_mmparallel.cost.gradient_sums import optimizer_ms
from hf_mmparallel.cost.memory import state_per_rank
from hf_mmparallel.cost.stage_memory import stage_memories
from hf_mmparallel.plan import LANGUAGE_MODEL, SampleSizes, check_plan, sync_groups
from hf_mmparallel.plan.parallel_plan import ShardingSettings
from hf_mmparallel.search.candidates import CandidateSpace
from hf_mmparallel.search.options import ModuleOptions
from hf_mmparallel.search.problem import Candidate, Layout
from hf_mmparallel.search.search import search_plans
from hf_mmparallel.search.simulations import AS_FAST, step_planner
from tests.cost.models import LAYERS, PLAIN
from tests.deep_cases import deep
from tests.papers.test_compare import problem

from .test_search import problem_of

ALL = (0, 1, 2, 3)
SHORT = SampleSizes.uniform({"vision": 4, LANGUAGE_MODEL: 4}, 48)
SLOW = replace(PLAIN, node_size=4, link_gb_per_s=2.0, node_link_gb_per_s=0.5, memory_gib=None)


def question(num_ranks: int = 8, batch: int = 16, frozen: tuple[str, ...] = (), **settings):
    given = {"zero_stages": ALL, "device": SLOW, "effort": 32, **settings}
    return problem_of(num_ranks, batch, frozen, **given)


def sharded(sharding: ShardingSettings, dp_size: int = 8, **sizes) -> Candidate:
    layouts = {name: Layout((LAYERS,), dp_size, sharding=sharding, **sizes) for name in ("vision", LANGUAGE_MODEL)}
    return Candidate(layouts, {"vision": LANGUAGE_MODEL}, 1)


class TestSearch:
    @pytest.mark.deep
    @pytest.mark.parametrize("frozen", [(), ("vision",)])
    def test_more_to_choose_from_is_never_slower(self, frozen):
        asked = problem(frozen, effort=16)
        found = [search_plans(replace(asked, zero_stages=stages)).best for stages in ((0,), (0, 1), ALL)]
        assert AS_FAST * found[0].step_ms > found[1].step_ms and AS_FAST * found[1].step_ms >= found[2].step_ms
        assert {layout.zero_stage for layout in found[0].candidate.layouts.values()} == {0}
        for own in found:
            check_plan(own.plan, asked.spec)

    def test_a_state_that_fits_only_where_it_is_divided(self):
        """Too large for a rank as a whole, with one stage and matrices that are not split."""
        sizes = {"dp_size": 8, "pp_size": 1, "tp_size": 1, "cp_size": 1}
        asked = replace(question(fixed={"vision": sizes, LANGUAGE_MODEL: sizes}), sizes=SHORT)
        state_bytes = {}
        for stage in (1, 3):
            plan = sharded(ShardingSettings(stage)).plan(asked.spec)
            states = state_per_rank(plan, stage_memories(asked.costs, plan))
            state_bytes[stage] = max(state.total for state in states.values())
        assert state_bytes[3] < state_bytes[1] / 2
        tight = replace(asked, memory_bytes=0.75 * state_bytes[1])
        with pytest.raises(ValueError, match="fits"):
            search_plans(replace(tight, zero_stages=(0, 1)))
        best = search_plans(tight).best
        assert max(layout.zero_stage for layout in best.candidate.layouts.values()) >= 2
        assert best.peak_memory_bytes <= 0.75 * state_bytes[1]

    @pytest.mark.parametrize(
        "sharding", [{"zero_stage": 3, "shard_size": 2}, *(deep({"zero_stage": stage}) for stage in (0, 1, 2))]
    )
    def test_what_the_user_names_is_kept(self, sharding):
        result = search_plans(question(4, 8, effort=2, fixed={LANGUAGE_MODEL: {**sharding, "dp_size": 4}}))
        for own in (result.best, *result.runners_up):
            layout = own.candidate.layouts[LANGUAGE_MODEL]
            assert all(getattr(layout, name) == value for name, value in sharding.items())

    def test_a_single_copy_divides_nothing(self):
        fixed = {name: {"dp_size": 1, "cp_size": 1} for name in ("vision", LANGUAGE_MODEL)}
        best = search_plans(question(num_ranks=2, batch=4, fixed=fixed)).best
        assert {layout.sharding for layout in best.candidate.layouts.values()} == {ShardingSettings()}


class TestClosedForm:
    def test_layouts_that_may_need_it(self):
        """Passes communicate in modules with one stage, over a node only if there are several nodes of copies."""
        space = CandidateSpace(question())
        seen = set()
        for candidate in space:
            for estimate in candidate.estimates.values():
                kind, copies = estimate.kind, estimate.dp_size * estimate.kind.cp_size
                if kind.shares_passes:
                    assert estimate.pp_size == 1 and copies > 1
                    assert kind.sharding.shard_size is None or copies % kind.sharding.shard_size == 0
                seen.add((kind.sharding.zero_stage, kind.sharding.shard_size))
        assert {(1, None), (3, None), (3, 4)} <= seen

    def test_a_state_above_the_limit_is_divided_over_stages_too(self):
        asked = replace(question(), sizes=SHORT)
        options = ModuleOptions(asked, LANGUAGE_MODEL)
        whole = float(options.state_bytes(options.plain_kinds[0], 2, dp_size=2))
        stages = {
            limit: {
                estimate.pp_size
                for candidate in CandidateSpace(replace(asked, memory_bytes=limit))
                for estimate in candidate.estimates.values()
                if estimate.kind.shares_passes
            }
            for limit in (0.9 * whole, 2.0**40)
        }
        assert stages[2.0**40] == {1} and max(stages[0.9 * whole]) > 1

    @pytest.mark.parametrize("stage", ALL)
    @pytest.mark.parametrize("shard_size", [None, 4])
    def test_state_and_sums_are_those_of_the_plan(self, stage, shard_size):
        asked = question()
        sharding = ShardingSettings(stage, shard_size if stage else None)
        candidate = sharded(sharding)
        plan = candidate.plan(asked.spec)
        memories = stage_memories(asked.costs, plan)
        options = {name: ModuleOptions(asked, name) for name in asked.spec.modules}
        kinds = {name: replace(own.plain_kinds[0], sharding=sharding) for name, own in options.items()}
        held = sum(float(options[name].state_bytes(kind, 1, dp_size=8)) for name, kind in kinds.items())
        expected = sum(memories[name, 0, 0].state.total + memories[name, 0, 0].kept_bytes for name in kinds)
        assert held == pytest.approx(expected)
        groups = sync_groups(asked.spec, plan)
        batch = asked.sizes.take(range(16))
        step = step_planner(asked, candidate).arrange(range(16), batch).step
        cost = StepCost(asked.costs, plan, step, batch, groups)
        expected = sum(map(cost.sync_ms, range(len(groups)))) + optimizer_ms(asked.costs, plan, groups)
        found = sum(options[name].sync_ms(kind, 8, 1) for name, kind in kinds.items())
        assert found == pytest.approx(expected, rel=0.02)


def test_layouts_say_what_they_divide():
    assert str(Layout((4,), 8, sharding=ShardingSettings(3))) == "dp 8, ZeRO-3"
    recomputed = Layout((4,), 8, 1, 2, True, ShardingSettings(1, 4))
    assert str(recomputed) == "dp 8 x tp 2, ZeRO-1 over 4, recomputed"
