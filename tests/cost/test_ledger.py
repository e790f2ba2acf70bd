"""The ledger of a step: its terms add up to the step, and each is what its cause takes."""

from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.cost import Hardware, analytic_costs, find_device
from hf_mmparallel.cost.ledger import TERMS, Ledger, ledger_of
from hf_mmparallel.cost.step_planner import Prediction, StepPlanner
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from tests.cost.models import PLAIN, model, text_model
from tests.plan.specs import model_spec, with_experts

LM = LANGUAGE_MODEL
H100 = replace(find_device("h100"), launch_us=0.02)
DENSE, VLM = text_model(tied=False), model(tied=False)
MOE = with_experts(ModelSpec({LM: model_spec().language_model}), 8)
PACKED = text_model(tied=False, attention="bitfield")


def drawn(spec: ModelSpec, count: int = 16) -> SampleSizes:
    """Samples of unlike lengths."""
    rng = np.random.default_rng(0)
    lengths = {name: rng.integers(100, 4000, count) for name in spec.modules}
    return SampleSizes.of_sequences({name: [[int(n)] for n in own] for name, own in lengths.items()})


def predicted(
    spec: ModelSpec, device: Hardware, sizes: SampleSizes, microbatch_size: int = 1, **plugins: ModulePlugin
):
    """A prediction, and its ledger."""
    plan, costs = resolve_plan(spec, plugins), analytic_costs(spec, device)
    groups = sync_groups(spec, plan)
    found = StepPlanner(costs, plan, groups, microbatch_size).predict_batch(sizes)
    return found, ledger_of([found], costs, groups)


def assert_adds_up(found: Prediction, ledger: Ledger) -> None:
    assert ledger.step_ms == pytest.approx(found.step_ms, rel=1e-12)
    assert all(ms >= -1e-9 * found.step_ms for ms in ledger.terms.values()), ledger.terms
    assert sum(ledger.shares.values()) == pytest.approx(1.0) and set(ledger.terms) <= set(TERMS)
    assert ledger.terms["needed"] == pytest.approx(found.flops_utilisation * found.step_ms)


@pytest.mark.parametrize(
    ("spec", "plugins", "wanted"),
    [
        (DENSE, {LM: ModulePlugin(pp_size=4, tp_size=2, dp_size=2)}, ("tp", "sums", "bubble", "messages", "padding")),
        (DENSE, {LM: ModulePlugin(dp_size=4, zero_stage=3, activation_checkpointing=True)}, ("zero", "recomputation")),
        (DENSE, {LM: ModulePlugin(dp_size=4, zero_stage=1)}, ("updated", "imbalance", "optimizer")),
        (MOE, {LM: ModulePlugin(dp_size=4, tp_size=2, ep_size=8)}, ("ep", "tp")),
        (PACKED, {LM: ModulePlugin(cp_size=4, pp_size=2)}, ("cp", "bubble")),
        (PACKED, {LM: ModulePlugin(pp_size=2, vp_size=2)}, ("bubble", "memory")),
        (
            VLM,
            {"vision": ModulePlugin(dp_size=2, cp_size=2), LM: ModulePlugin(dp_size=2, pp_size=2, tp_size=2)},
            ("messages", "imbalance", "bubble"),
        ),
        (VLM, {"vision": ModulePlugin(dp_size=8), LM: ModulePlugin(pp_size=4, colocate_with="vision")}, ("bubble",)),
    ],
)
def test_terms_add_up_to_the_step_and_none_is_negative(spec, plugins, wanted):
    found, ledger = predicted(spec, H100, drawn(spec), 2, **plugins)
    assert_adds_up(found, ledger)
    assert not [name for name in wanted if ledger.terms[name] <= 0], ledger.terms


def test_a_term_is_what_its_cause_takes():
    """Of equal stages the published bubble; of a device without launches, links and limits of memory nothing else."""
    num_stages, count = 4, 16
    free = replace(PLAIN, memory_gb_per_s=1e12, link_gb_per_s=1e12)
    sizes = SampleSizes.uniform({LM: 2000}, count)
    found, ledger = predicted(DENSE, free, sizes, **{LM: ModulePlugin(pp_size=num_stages)})
    assert_adds_up(found, ledger)
    bubble = (num_stages - 1) / count
    assert ledger.terms["bubble"] == pytest.approx(bubble / (1 + bubble) * found.step_ms, rel=1e-6)
    scores = ledger.terms["beyond"]  # a flash kernel's backward has five products, of which a model counts four
    assert 0 < scores < ledger.terms["needed"]
    share = PLAIN.matmul_efficiency
    operations = ledger.terms["needed"] + scores
    below = ledger.terms["products"] + ledger.terms["attention"]
    assert below == pytest.approx(operations * (1 / share - 1), rel=1e-6)
    other = {name for name, ms in ledger.terms.items() if ms > 1e-6 * found.step_ms}
    assert other == {"needed", "beyond", "products", "attention", "bubble"}


def test_recomputation_and_memory_take_what_a_step_without_them_saves():
    sizes = SampleSizes.uniform({LM: 2000}, 4)
    (plain, _), (again, ledger) = (
        predicted(DENSE, PLAIN, sizes, **{LM: ModulePlugin(activation_checkpointing=own)}) for own in (False, True)
    )
    assert ledger.terms["recomputation"] == pytest.approx(again.step_ms - plain.step_ms)
    fast, _ = predicted(DENSE, replace(PLAIN, memory_gb_per_s=1e12), sizes, **{LM: ModulePlugin()})
    _, of_plain = predicted(DENSE, PLAIN, sizes, **{LM: ModulePlugin()})
    saved = of_plain.terms["memory"] + of_plain.terms["optimizer"]
    assert saved == pytest.approx(plain.step_ms - fast.step_ms, rel=1e-6)


def test_a_loss_over_the_load_of_experts_runs_the_forwards_before_the_step():
    balanced = replace(DENSE, modules={LM: replace(DENSE.language_model, balances_experts=True)})
    sizes, layout = drawn(DENSE), {LM: ModulePlugin(pp_size=2)}
    plain, found = predicted(DENSE, H100, sizes, **layout)[0], predicted(balanced, H100, sizes, **layout)
    assert found[0].step_ms == pytest.approx(plain.step_ms + found[0].routes_ms)
    assert found[1].terms["routes"] == found[0].routes_ms
    tasks = plain.timeline.task_times.items()
    forward_ms = [
        sum(end - start for task, (start, end) in tasks if task.kind == "fwd" and task.stage == s) for s in (0, 1)
    ]
    assert max(forward_ms) < found[0].routes_ms < sum(forward_ms)
    assert_adds_up(*found)
    once = predicted(balanced, H100, sizes, microbatch_size=16, **layout)[0]  # all forwards are before all backwards
    assert once.routes_ms == 0
