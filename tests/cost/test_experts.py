"""Costs of experts that ranks share: what each holds and computes, and what travels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.cost.activations import parameter_shares
from hf_mmparallel.cost.stage_memory import stage_memories
from hf_mmparallel.cost.stage_times import stage_costs
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, resolve_plan
from hf_mmparallel.schedule.kinds import WHOLE_PASSES
from tests.plan.specs import model_spec, with_experts

SPEC = with_experts(ModelSpec({LANGUAGE_MODEL: model_spec().language_model}), 8)
COSTS = analytic_costs(SPEC, find_device("h100"))
EXPERT_BYTES = 4 * sum(p.num_elements for p in SPEC.parameters.values() if p.num_experts)


def plan_of(**sizes: int):
    return resolve_plan(SPEC, {LANGUAGE_MODEL: ModulePlugin(**sizes)})


def weights(**sizes: int) -> float:
    return stage_memories(COSTS, plan_of(**sizes))[LANGUAGE_MODEL, 0, 0].state.weights


@pytest.mark.parametrize(("others", "ep_size"), [({"dp_size": 4}, 2), ({"dp_size": 4}, 4), ({"cp_size": 2}, 2)])
def test_a_rank_holds_its_experts_only(others: dict[str, int], ep_size: int):
    held = weights(**others, ep_size=ep_size)
    assert held == pytest.approx(weights(**others) - EXPERT_BYTES * (1 - 1 / ep_size))


def test_copies_of_an_expert_divide_what_is_left():
    """Of four replicas two have each expert: ZeRO-3 divides it by two, and all else by four."""
    rest = weights() - EXPERT_BYTES
    assert weights(dp_size=4, ep_size=2, zero_stage=3) == pytest.approx(rest / 4 + EXPERT_BYTES / 2 / 2)
    assert weights(dp_size=4, ep_size=4, zero_stage=3) == pytest.approx(rest / 4 + EXPERT_BYTES / 4)


def test_tokens_travel_between_ranks_with_other_tokens_only():
    def layer(**sizes: int):
        costs = COSTS.of_plan(plan_of(**sizes))
        return costs.layers.layer(LANGUAGE_MODEL, 0, sizes.get("tp_size", 1))

    alone, within = layer(tp_size=2), layer(tp_size=2, ep_size=2)
    assert within.sums == alone.sums and within.travels == alone.travels, "a tp group has the same tokens"
    one, shared, wider = layer(dp_size=4), layer(dp_size=4, ep_size=2), layer(dp_size=4, ep_size=4)
    assert one.travels[0].token == 0 < shared.travels[0].token < wider.travels[0].token
    assert shared.forward.token == one.forward.token, "each rank computes as much as before"
    assert shared.forward.constant < one.forward.constant, "and reads the weights of fewer experts"


def test_experts_that_all_compute_all_tokens_do_not_where_ranks_share_them():
    language = SPEC.language_model
    every = tuple(
        replace(p, active_share=1.0, shared_share=p.active_share) if p.num_experts else p for p in language.parameters
    )
    spec = replace(SPEC, modules={LANGUAGE_MODEL: replace(language, parameters=every)})
    costs = analytic_costs(spec, find_device("h100"))
    plan = plan_of(dp_size=4, ep_size=2)
    wanted = COSTS.of_plan(plan).layers.layer(LANGUAGE_MODEL, 0, 1)
    assert costs.of_plan(plan).layers.layer(LANGUAGE_MODEL, 0, 1) == wanted
    assert costs.layers.layer(LANGUAGE_MODEL, 0, 1).forward.token > wanted.forward.token


def test_costs_of_a_plan_are_one_object_and_reach_its_stages():
    plan = plan_of(dp_size=2, ep_size=2)
    assert COSTS.of_plan(plan) is COSTS.of_plan(plan) and COSTS.of_plan(plan_of(dp_size=2)) is COSTS
    shares = parameter_shares(COSTS.of_plan(plan).spec, LANGUAGE_MODEL, 0, 1)
    assert {share for name, share in shares.items() if "experts" in name} == {0.5}
    times = [
        float(stage_costs(COSTS, one)[LANGUAGE_MODEL, 0, 0].task_ms(1e6, 1e6, WHOLE_PASSES[0]))
        for one in (plan_of(dp_size=2), plan)
    ]
    assert times[1] > times[0]
