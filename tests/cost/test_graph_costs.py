"""What all tasks and messages of a graph take is, to the last bit, what each of them takes."""

from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.cost import StepCost, analytic_costs, batch_workloads
from hf_mmparallel.cost.stage_times import stage_costs
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan
from hf_mmparallel.schedule import build_graph, find_representatives
from tests.cost.models import PLAIN, model

LAYOUTS = {
    "unlike": {"vision": ModulePlugin(dp_size=5), LANGUAGE_MODEL: ModulePlugin(dp_size=3, pp_size=2)},
    "colocated": {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(dp_size=2, colocate_with="vision")},
    "context": {"vision": ModulePlugin(pp_size=2), LANGUAGE_MODEL: ModulePlugin(dp_size=2, cp_size=2, cp_block=16)},
}


@pytest.mark.parametrize("windows", [(), (8, 0, 64, 0)])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "bitfield"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("blocking", [False, True])
def test_of_a_graph_as_one_by_one(windows, attention, layout, blocking):
    spec = model()
    language = replace(spec.language_model, attention=attention, windows=windows)
    spec = replace(spec, modules={**spec.modules, LANGUAGE_MODEL: language})
    costs = analytic_costs(spec, replace(PLAIN, link_latency_us=3.0))
    costs = replace(costs, engine=replace(costs.engine, blocking_messages=blocking))
    plan = resolve_plan(spec, LAYOUTS[layout])
    random = np.random.default_rng(0)
    media = [[int(n)] if n > 9 else [] for n in random.integers(0, 90, 48)]
    sizes = SampleSizes.of_sequences(
        {"vision": media, LANGUAGE_MODEL: [[int(n)] for n in random.integers(1, 300, 48)]}
    )
    step = arrange_step(plan, range(48), batch_workloads(costs, plan, sizes), 4)
    cost = StepCost(costs, plan, step, sizes)
    for on_representatives in (False, True):
        graph = build_graph(find_representatives(plan, ()).plan if on_representatives else plan, step)
        assert cost.of_graph(graph).tolist() == [cost(task) for task in graph.tasks]
        assert cost.messages_ms(graph) == [cost.message_ms(message) for message in graph.messages]
        assert len(set(cost.messages_ms(graph))) > 2
    known = stage_costs(costs, plan)
    for part in find_representatives(plan, ()).parts(step):
        few = StepCost(costs, part.whole_plan, part.step, sizes, (), known)
        graph = build_graph(part.plan, part.step)
        assert few.of_graph(graph).tolist() == [cost(task) for task in graph.tasks]
