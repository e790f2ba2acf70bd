"""What ZeRO and offloading change: when ranks send gradients and weights, what passes wait for, what ranks hold."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.cost import StepCost, analytic_costs, find_device, memory_per_rank
from hf_mmparallel.cost.activations import parameter_shares
from hf_mmparallel.cost.devices import HostStep, host_step_ms
from hf_mmparallel.cost.gradient_sums import optimizer_ms
from hf_mmparallel.cost.layer_table import layer_table
from hf_mmparallel.cost.layers import Engine
from hf_mmparallel.cost.memory import state_per_rank
from hf_mmparallel.cost.sharded_passes import (
    PassTransfers,
    held_bytes,
    pass_transfers,
    streamed_transfers,
    transfers_in_passes,
)
from hf_mmparallel.cost.stage_memory import moved_bytes, stage_memories
from hf_mmparallel.cost.stage_times import stage_costs
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.plan.parallel_plan import ShardingSettings
from hf_mmparallel.schedule.kinds import WHOLE_PASSES
from tests.cost.models import LAYER_MATRICES, LAYERS, PLAIN, model, text_model
from tests.plan.specs import model_spec, with_experts

FORWARD, BACKWARD = WHOLE_PASSES

STAGE = (LANGUAGE_MODEL, 0, 0)
LINK = PLAIN.link_gb_per_s * 1e6


COSTS = analytic_costs(text_model(tied=False), PLAIN)
ELEMENTS = sum(p.num_elements for p in COSTS.spec.language_model.parameters)


def plan_of(spec, stage: int, shard_size: int | None = None, **sizes):
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(**{"dp_size": 4, **sizes})})
    module = replace(plan.modules[LANGUAGE_MODEL], sharding=ShardingSettings(stage, shard_size))
    return replace(plan, modules={LANGUAGE_MODEL: module})


def sync_ms(costs, plan) -> float:
    sizes = SampleSizes.uniform({LANGUAGE_MODEL: 10}, 8)
    return StepCost(costs, plan, contiguous_step(plan, range(8), 1), sizes, sync_groups(costs.spec, plan)).sync_ms(0)


def update_ms(plan) -> float:
    return optimizer_ms(COSTS, plan, sync_groups(COSTS.spec, plan))


def memory_of(stage: int, shard_size: int | None = None, **sizes):
    return stage_memories(COSTS, plan_of(COSTS.spec, stage, shard_size, **sizes))[STAGE]


def transfers_of(costs, plan, index: int) -> PassTransfers:
    transfers = pass_transfers(costs, plan, LANGUAGE_MODEL, plan.stage(LANGUAGE_MODEL, 0, index).layers)
    assert transfers is not None
    return transfers


def test_gradients_come_before_the_step_and_weights_after_it():
    """A reduce-scatter of four bytes, an all-gather of two; an all-reduce of four sends them twice."""
    whole, divided, reduced, gathered = (plan_of(COSTS.spec, stage) for stage in range(4))
    gathered_ms = 3 / 4 * ELEMENTS / LINK
    sums = [sync_ms(COSTS, plan) for plan in (whole, divided, reduced, gathered)]
    assert sums == pytest.approx([8 * gathered_ms, 4 * gathered_ms, 0, 0])  # passes that reduce leave nothing
    assert update_ms(divided) == pytest.approx(update_ms(whole) / 4 + 2 * gathered_ms)
    in_layers = sum(p.num_elements for p in COSTS.spec.language_model.parameters if p.layer >= 0)
    assert update_ms(reduced) - update_ms(gathered) == pytest.approx(3 / 4 * 2 * in_layers / LINK)


def test_groups_that_repeat_slices_sum_them():
    """Nodes of two: a reduce-scatter in each, and an all-reduce of half of the gradients over the network."""
    device = replace(PLAIN, node_size=2)
    inside = 4 * ELEMENTS / 2 / device.link_bytes_per_ms((0, 1))
    between = 2 * 4 * ELEMENTS / 2 / 2 / device.link_bytes_per_ms((0, 2))
    costs = analytic_costs(text_model(tied=False), device)
    for stage, expected in ((1, inside + between), (2, between), (3, between)):
        assert sync_ms(costs, plan_of(costs.spec, stage, 2)) == pytest.approx(expected)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("link", [1e9, 3.0, 1e-3])
def test_communication_is_beside_the_neighbours(stage, link):
    costs = analytic_costs(text_model(tied=False), replace(PLAIN, overlap_efficiency=0.5, link_gb_per_s=link))
    plan = replace(plan_of(costs.spec, stage), schedule="gpipe")
    (cost,) = {id(own): own for own in stage_costs(costs, plan).values()}.values()
    of_layers = [held_bytes(costs, LANGUAGE_MODEL, 1, (layer,)) for layer in range(LAYERS)]
    weights, gradients = (3 / 4 * np.array(of_layers) / (link * 1e6)).T
    transfers = transfers_of(costs, plan, 0)
    assert transfers.gather_ms == pytest.approx(weights * (stage == 3))
    assert transfers.reduce_ms == pytest.approx(gradients) and transfers.outer_rows == (1, 1)
    outer = held_bytes(costs, LANGUAGE_MODEL, 1, (-1,))[1]
    assert transfers.outer_reduce_ms == pytest.approx(3 / 4 * outer / (link * 1e6))
    table = layer_table(costs, LANGUAGE_MODEL)
    for tokens in (10.0, 1e4):
        # `test_a_pass_is_as_long_as_its_actions` of test_gradient_sums.py says what a pass waits for.
        forward, backward = (own[:, 0] for own in table.times([tokens], [tokens**2]))
        assert cost.task_ms(tokens, tokens**2, FORWARD) == pytest.approx(transfers.time_transfers(forward, FORWARD)[1])
        assert cost.task_ms(tokens, tokens**2, BACKWARD) == pytest.approx(
            transfers.time_transfers(backward, BACKWARD)[1]
        )


def test_layers_without_a_backward_are_gathered_for_the_forward_only():
    transfers = PassTransfers((1.0, 2.0, 4.0), (0.0, 0.0, 32.0), 64.0, 128.0, (0, 0), False, 0.5, 2)
    beside, exposed = transfers.of_pass(3, BACKWARD)
    # A backward of one layer follows another one, so that the layer stays gathered.
    assert beside.tolist() == [0.0, 0.0, 0.0] and exposed == 32.0 + 128.0
    assert transfers.of_pass(3, FORWARD)[0].tolist() == [2.0, 4.0, 0.0]
    trained = tuple(replace(p, trainable=p.layer >= 1) for p in COSTS.spec.language_model.parameters)
    costs = analytic_costs(text_model(tied=False, parameters=trained), PLAIN)
    assert transfers_of(costs, plan_of(costs.spec, 3), 0).first_backward == 1
    plan = plan_of(costs.spec, 3, pp_size=2)
    assert [transfers_of(costs, plan, index).first_backward for index in (0, 1)] == [1, 0]
    frozen = analytic_costs(text_model((LANGUAGE_MODEL,), tied=False), PLAIN)
    sharded, whole = (stage_costs(frozen, plan_of(frozen.spec, stage))[STAGE] for stage in (3, 0))
    assert sharded.task_ms(10.0, 100.0, BACKWARD) == whole.task_ms(10.0, 100.0, BACKWARD) == 0.0
    assert sharded.task_ms(10.0, 100.0, FORWARD) > whole.task_ms(10.0, 100.0, FORWARD)


def test_gradients_may_be_sent_in_the_dtype_of_the_weights():
    for wide, num_bytes in ((True, 4), (False, 2)):
        costs = analytic_costs(text_model(tied=False), PLAIN, engine=Engine(wide_sums=wide))
        weights, gradients = held_bytes(costs, LANGUAGE_MODEL, 1, tuple(range(-1, LAYERS + 1)))
        assert gradients == num_bytes / 2 * weights


def test_stages_know_their_own_layers_and_ranks():
    device = replace(PLAIN, node_size=4)
    costs = analytic_costs(text_model(tied=False), device)
    plan = plan_of(costs.spec, 3, pp_size=2, dp_size=4, tp_size=2)
    first, last = (transfers_of(costs, plan, index) for index in (0, 1))
    assert len(first.gather_ms) == len(last.gather_ms) == LAYERS // 2
    assert (first.outer_rows, last.outer_rows) == ((1, 0), (0, 1))
    expected = 3 / 4 * held_bytes(costs, LANGUAGE_MODEL, 2, (0,))[0] / device.link_bytes_per_ms((0, 4, 8, 12))
    assert first.gather_ms[1] == last.gather_ms[0] == pytest.approx(expected)
    assert pass_transfers(costs, plan_of(costs.spec, 1), LANGUAGE_MODEL, (0, LAYERS)) is None
    assert pass_transfers(costs, plan_of(costs.spec, 3, dp_size=1), LANGUAGE_MODEL, (0, LAYERS)) is None
    # One stage runs a forward and a backward in turns; several stages run forwards in a row.
    assert transfers_of(costs, plan_of(costs.spec, 3), 0).alternates and not first.alternates


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"), [(0, 2, 4, 12), (1, 2, 4, 3), (2, 2, 1, 3), (3, 0.5, 1, 3)]
)
def test_state_is_divided(stage, weights, gradients, optimizer):
    """The optimizer has two moments and a float32 copy of the 16-bit weights."""
    state = memory_of(stage).state
    found = [state.weights, state.gradients, state.optimizer]
    assert found == pytest.approx([ELEMENTS * n for n in (weights, gradients, optimizer)])
    if stage == 3:  # shards of a group of two are larger
        assert memory_of(3, 2).state.total == pytest.approx(2 * state.total)


def test_gathered_layers_and_their_gradients_exist_while_a_task_runs():
    plain, reduced, gathered = (memory_of(stage) for stage in (0, 2, 3))
    (weights, gradients), outer = (held_bytes(COSTS, LANGUAGE_MODEL, 1, layers) for layers in ((0,), (-1,)))
    assert gathered.transient[:, 2].max() - reduced.transient[:, 2].max() == pytest.approx(3 * weights)
    assert reduced.largest.max() - plain.largest.max() == pytest.approx(2 * gradients + outer[1])
    assert (plain.kept_bytes, reduced.kept_bytes, gathered.kept_bytes) == (0.0, 0.0, outer[0])


def test_of_weights_that_several_stages_tie_only_the_optimizer_s_state_is_divided():
    costs = analytic_costs(text_model(), PLAIN)
    whole, split = (stage_memories(costs, plan_of(costs.spec, 3, dp_size=2, pp_size=size))[STAGE] for size in (1, 2))
    tied = 2 * costs.spec.parameters["embed_tokens.weight"].num_elements
    layers = held_bytes(costs, LANGUAGE_MODEL, 1, (0, 1))
    assert split.state.weights == tied + layers[0] / 2 and split.state.gradients == 2 * tied + layers[1] / 2
    assert split.state.optimizer == (6 * tied + 6 * layers[0]) / 2 and split.kept_bytes == 0.0
    assert whole.state.weights == (tied + 2 * layers[0]) / 2 and whole.kept_bytes == tied


def test_summed_slices_exist_beside_whole_gradients_but_not_beside_activations():
    whole, divided = (plan_of(COSTS.spec, stage, dp_size=2) for stage in (0, 1))
    memory = memory_of(1, dp_size=2)
    assert memory.slice_bytes == 2 * ELEMENTS  # four bytes, over two ranks
    state = state_per_rank(divided, stage_memories(COSTS, divided))[0]
    assert state.gradients == memory.state.gradients + memory.bucket_bytes
    for length, is_larger in ((1, True), (100_000, False)):
        sizes = SampleSizes.uniform({LANGUAGE_MODEL: length}, 8)
        step = contiguous_step(whole, range(8), 1)
        before, found = (
            memory_per_rank(COSTS, plan, step, sizes, {STAGE: 1.0})[0].activations for plan in (whole, divided)
        )
        assert found == max(before, memory.slice_bytes) and (found > before) == is_larger


HOST = replace(PLAIN, host_link_gb_per_s=10.0, host_memory_gb_per_s=80.0, host_memory_gib=64, node_size=8)
LAYER_MS = 2 * (LAYER_MATRICES + 64) / 10e6  # two bytes a weight, with the norm


def frozen_costs(device=HOST):
    return analytic_costs(model(("vision",)), device)


def test_the_slowest_of_three_counts():
    assert host_step_ms(HOST, HostStep(memory_bytes=1e7)) == pytest.approx(1.0)  # an eighth of 80 GB/s
    assert host_step_ms(HOST, HostStep(1e7, received_bytes=3e7)) == pytest.approx(3.0)
    assert host_step_ms(HOST, HostStep(1e7, 3e7, sent_bytes=5e7)) == pytest.approx(5.0)
    assert host_step_ms(replace(HOST, host_link_gb_per_s=None), HostStep(1e7)) == 0.0


@pytest.mark.parametrize("master_weights", [None, False])
def test_an_optimizer_step_on_the_cpu(master_weights):
    costs = frozen_costs()
    on_device, on_cpu = (
        resolve_plan(costs.spec, {LANGUAGE_MODEL: ModulePlugin(offload_optimizer=own, master_weights=master_weights)})
        for own in (False, True)
    )
    memories = stage_memories(costs, on_cpu)
    step = memories[LANGUAGE_MODEL, 0, 0].host_step
    count = sum(p.num_elements for p in costs.spec.language_model.parameters)
    wide = 4 if master_weights is None else 2
    assert step == HostStep(count * (6 * wide + 2 * 4 + 2), 4.0 * count, 2.0 * count)
    assert memories["vision", 0, 0].host_step == HostStep()
    assert optimizer_ms(costs, on_cpu) >= host_step_ms(HOST, step) > optimizer_ms(costs, on_device)


def test_what_the_computation_does_not_hide_of_activations_that_travel_is_waited_for():
    kinds = ("attention", "state", "state", "attention")  # layers that take unlike times
    link, waits = 100 * HOST.host_link_gb_per_s, set()
    costs = analytic_costs(text_model(layer_kinds=kinds), replace(HOST, host_link_gb_per_s=link))
    plans = [
        resolve_plan(costs.spec, {LANGUAGE_MODEL: ModulePlugin(offload_activations=own)}) for own in (False, True)
    ]
    here, there = (stage_costs(costs, plan)[LANGUAGE_MODEL, 0, 0] for plan in plans)
    moved = moved_bytes(costs, LANGUAGE_MODEL, 1, False, plans[1].modules[LANGUAGE_MODEL].storage)
    for tokens, kind in product((64.0, 1e3, 1e5), (FORWARD, BACKWARD)):
        layer_ms = layer_table(costs, LANGUAGE_MODEL).task_ms([tokens], [tokens**2], 1, kind)[1:-1, 0]
        copy_ms = moved @ [tokens**2, tokens, 1.0] / costs.device.host_link_bytes_per_ms
        waited = simulated_ms(layer_ms, copy_ms, kind) - layer_ms.sum()
        found = there.task_ms(tokens, tokens**2, kind) - here.task_ms(tokens, tokens**2, kind)
        assert found == pytest.approx(waited, rel=1e-6)
        waits.add(waited > 1.01 * copy_ms[-1])
    assert waits == {False, True}  # all but the last layer's copy is hidden, or not
    unknown = analytic_costs(text_model(), replace(HOST, host_link_gb_per_s=None))
    here, there = (stage_costs(unknown, plan)[LANGUAGE_MODEL, 0, 0] for plan in plans)
    assert here.task_ms(1e3, 1e6, FORWARD) == there.task_ms(1e3, 1e6, FORWARD)


def simulated_ms(layer_ms, copy_ms, kind):
    """A pass layer by layer, with one stream that copies, as `OffloadedActivations` lets them wait for each other."""
    now = stream = 0.0
    done, order = {}, range(len(layer_ms))
    if kind is FORWARD:
        for layer in order:
            now += layer_ms[layer]
            stream = done[layer] = max(stream, now) + copy_ms[layer]
            now = max(now, done.get(layer - 1, 0.0))  # whose activations leave the device
        return max(now, stream)
    for layer in reversed(order):
        for needed in (layer, layer - 1):
            if needed >= 0 and needed not in done:
                stream = done[needed] = max(stream, now) + copy_ms[needed]
        now = max(now, done[layer]) + layer_ms[layer]
    return now


def test_what_the_computation_does_not_hide_of_streamed_layers_is_waited_for():
    costs = frozen_costs()
    transfers = streamed_transfers(costs, "vision", (0, LAYERS), 1)
    assert transfers is not None and transfers.gather_ms == pytest.approx((LAYER_MS,) * LAYERS)
    assert streamed_transfers(frozen_costs(replace(HOST, host_link_gb_per_s=None)), "vision", (0, LAYERS), 1) is None
    plans = [resolve_plan(costs.spec, {"vision": ModulePlugin(offload_params=own)}) for own in (False, True)]
    kept, streamed = (stage_costs(costs, plan)["vision", 0, 0] for plan in plans)
    few, many = (1.0, 1.0), (1e6, 1e9)  # tokens and squared tokens
    assert streamed.task_ms(*few, FORWARD) == pytest.approx(LAYERS * LAYER_MS, rel=0.05)
    hidden = streamed.task_ms(*many, FORWARD) - kept.task_ms(*many, FORWARD)
    assert hidden == pytest.approx(LAYER_MS, rel=1e-6)  # of the first layer alone
    names = ("vision", LANGUAGE_MODEL)
    found = [transfers_in_passes(costs, plans[1], name, plans[1].stage(name, 0, 0)) for name in names]
    assert found[0] is not None and found[1] is None


SPEC = with_experts(ModelSpec({LANGUAGE_MODEL: model_spec().language_model}), 8)
MOE_COSTS = analytic_costs(SPEC, find_device("h100"))
EXPERT_BYTES = 4 * sum(p.num_elements for p in SPEC.parameters.values() if p.num_experts)


def plan_of_experts(**sizes: int):
    return resolve_plan(SPEC, {LANGUAGE_MODEL: ModulePlugin(**sizes)})


def weights(**sizes: int) -> float:
    return stage_memories(MOE_COSTS, plan_of_experts(**sizes))[LANGUAGE_MODEL, 0, 0].state.weights


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
        costs = MOE_COSTS.of_plan(plan_of_experts(**sizes))
        return costs.layers.layer(LANGUAGE_MODEL, 0, sizes.get("tp_size", 1))

    alone, within = layer(tp_size=2), layer(tp_size=2, ep_size=2)
    assert within.sums == alone.sums and within.travels == alone.travels, "a tp group has the same tokens"
    one, shared, wider = layer(dp_size=4), layer(dp_size=4, ep_size=2), layer(dp_size=4, ep_size=4)
    assert one.travels[0].token == 0 < shared.travels[0].token < wider.travels[0].token
    assert shared.forward.token == one.forward.token, "each rank computes as much as before"
    assert shared.forward.constant < one.forward.constant, "and reads the weights of fewer experts"


def test_costs_of_a_plan_are_one_object_and_reach_its_stages():
    plan = plan_of_experts(dp_size=2, ep_size=2)
    assert (
        MOE_COSTS.of_plan(plan) is MOE_COSTS.of_plan(plan)
        and MOE_COSTS.of_plan(plan_of_experts(dp_size=2)) is MOE_COSTS
    )
    shares = parameter_shares(MOE_COSTS.of_plan(plan).spec, LANGUAGE_MODEL, 0, 1)
    assert {share for name, share in shares.items() if "experts" in name} == {0.5}
    times = [
        float(stage_costs(MOE_COSTS, one)[LANGUAGE_MODEL, 0, 0].task_ms(1e6, 1e6, WHOLE_PASSES[0]))
        for one in (plan_of_experts(dp_size=2), plan)
    ]
    assert times[1] > times[0]


def test_experts_that_all_compute_all_tokens_do_not_where_ranks_share_them():
    language = SPEC.language_model
    every = tuple(
        replace(p, active_share=1.0, shared_share=p.active_share) if p.num_experts else p for p in language.parameters
    )
    spec = replace(SPEC, modules={LANGUAGE_MODEL: replace(language, parameters=every)})
    costs = analytic_costs(spec, find_device("h100"))
    plan = plan_of_experts(dp_size=4, ep_size=2)
    wanted = MOE_COSTS.of_plan(plan).layers.layer(LANGUAGE_MODEL, 0, 1)
    assert costs.of_plan(plan).layers.layer(LANGUAGE_MODEL, 0, 1) == wanted
    assert costs.layers.layer(LANGUAGE_MODEL, 0, 1).forward.token > wanted.forward.token
