"""What ZeRO changes: when gradients and weights are sent, what passes wait for, and what ranks hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.cost import StepCost, analytic_costs, memory_per_rank
from hf_mmparallel.cost.engine_traits import Engine
from hf_mmparallel.cost.memory import state_per_rank
from hf_mmparallel.cost.optimizer import optimizer_ms
from hf_mmparallel.cost.sharded_passes import PassTransfers, layer_bytes, pass_transfers
from hf_mmparallel.cost.stage_memory import stage_memories
from hf_mmparallel.cost.stage_times import layer_table, stage_costs
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.plan.parallel_plan import ShardingSettings
from hf_mmparallel.schedule import build_graph, build_program, simulate
from tests.cost.models import LAYERS, PLAIN, model

SIZES = SampleSizes.uniform({LANGUAGE_MODEL: 10}, 8)
DEVICE = replace(PLAIN, overlap_efficiency=0.5)


def text_model(frozen: bool = False) -> ModelSpec:
    spec = model((LANGUAGE_MODEL,) if frozen else (), tied=False)
    return ModelSpec({LANGUAGE_MODEL: spec.language_model})


def plan_of(spec, stage: int, shard_size: int | None = None, **sizes):
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(**{"dp_size": 4, **sizes})})
    module = replace(plan.modules[LANGUAGE_MODEL], sharding=ShardingSettings(stage, shard_size))
    return replace(plan, modules={LANGUAGE_MODEL: module})


def cost_of(costs, plan, sizes=SIZES, microbatch_size=1):
    step = contiguous_step(plan, range(sizes.num_samples), microbatch_size)
    return StepCost(costs, plan, step, sizes, sync_groups(costs.spec, plan))


def waited(order, compute, gather, reduce, efficiency: float) -> float:
    """A pass of two streams, second by second: one computes, the other gathers ahead and then reduces."""
    now = gather[order[0]]
    for position, layer in enumerate(order):
        beside = sum(gather[n] for n in order[position + 1 : position + 2])
        beside += sum(reduce[n] for n in order[max(0, position - 1) : position])
        left = compute[layer] - efficiency * beside  # of the computation once communication is over
        now += beside + max(0.0, left)
    return now + reduce[order[-1]]


class TestSums:
    def test_gradients_come_before_the_step_and_weights_after_it(self):
        """A reduce-scatter of four bytes, an all-gather of two; an all-reduce of four sends them twice."""
        costs = analytic_costs(text_model(), PLAIN)
        elements = sum(p.num_elements for p in costs.spec.language_model.parameters)
        whole, divided = plan_of(costs.spec, 0), plan_of(costs.spec, 1)
        gathered_ms = 3 / 4 * elements / (PLAIN.link_gb_per_s * 1e6)
        sums = [sum(map(cost_of(costs, plan).sync_ms, range(1))) for plan in (whole, divided)]
        assert sums == pytest.approx([8 * gathered_ms, 4 * gathered_ms])
        groups = [sync_groups(costs.spec, plan) for plan in (whole, divided)]
        updates = [optimizer_ms(costs, plan, own) for plan, own in zip((whole, divided), groups, strict=True)]
        assert updates[1] == pytest.approx(updates[0] / 4 + 2 * gathered_ms)

    def test_groups_that_repeat_slices_sum_them(self):
        """Nodes of two: a reduce-scatter in each, and an all-reduce of half of the gradients over the network."""
        device = replace(PLAIN, node_size=2)
        costs = analytic_costs(text_model(), device)
        num_bytes = 4 * sum(p.num_elements for p in costs.spec.language_model.parameters)
        inside = num_bytes / 2 / device.link_bytes_per_ms((0, 1))
        between = 2 * num_bytes / 2 / 2 / device.link_bytes_per_ms((0, 2))
        for stage, expected in ((1, inside + between), (2, between), (3, between)):
            assert cost_of(costs, plan_of(costs.spec, stage, 2)).sync_ms(0) == pytest.approx(expected)

    def test_passes_that_reduce_leave_nothing_to_sum(self):
        costs = analytic_costs(text_model(), PLAIN)
        for stage in (2, 3):
            assert cost_of(costs, plan_of(costs.spec, stage)).sync_ms(0) == 0.0

    def test_weights_that_passes_gather_are_not_gathered_after_the_step(self):
        costs = analytic_costs(text_model(), PLAIN)
        plans = [plan_of(costs.spec, stage) for stage in (2, 3)]
        kept, gathered = (optimizer_ms(costs, plan, sync_groups(costs.spec, plan)) for plan in plans)
        elements = sum(p.num_elements for p in costs.spec.language_model.parameters)
        assert kept - gathered == pytest.approx(3 / 4 * 2 * elements / (PLAIN.link_gb_per_s * 1e6))


class TestPasses:
    @pytest.mark.parametrize("stage", [2, 3])
    @pytest.mark.parametrize("link", [1e9, 3.0, 1e-3])
    def test_communication_is_beside_the_neighbours(self, stage, link):
        costs = analytic_costs(text_model(), replace(DEVICE, link_gb_per_s=link))
        plan = plan_of(costs.spec, stage)
        (cost,) = {id(own): own for own in stage_costs(costs, plan).values()}.values()
        weights, gradients = (3 / 4 * layer_bytes(costs, LANGUAGE_MODEL, 1) / (link * 1e6)).T
        weights = weights * (stage == 3)
        table = layer_table(costs, LANGUAGE_MODEL)
        for tokens in (10.0, 1e4):
            forward, backward = (own[:, 0] for own in table.times([tokens], [tokens**2]))
            order, none = list(range(LAYERS + 2)), np.zeros(LAYERS + 2)
            expected = waited(order, forward, weights, none, 0.5)
            assert cost.forward_ms(tokens, tokens**2) == pytest.approx(expected)
            expected = waited(order[::-1], backward, weights, gradients, 0.5)
            assert cost.backward_ms(tokens, tokens**2) == pytest.approx(expected)

    def test_what_is_frozen_is_gathered_for_the_forward_only(self):
        costs = analytic_costs(text_model(frozen=True), DEVICE)
        sharded, whole = (next(iter(stage_costs(costs, plan_of(costs.spec, stage)).values())) for stage in (3, 0))
        assert sharded.backward_ms(10.0, 100.0) == whole.backward_ms(10.0, 100.0) == 0.0
        assert sharded.forward_ms(10.0, 100.0) > whole.forward_ms(10.0, 100.0)

    def test_only_layers_with_a_backward_communicate_in_it(self):
        transfers = PassTransfers((1.0, 2.0, 4.0), (8.0, 16.0, 32.0), 0.5)
        assert [part.tolist() if np.ndim(part) else part for part in transfers.of_pass()] == [[2.0, 4.0, 0.0], 1.0]
        beside, exposed = transfers.of_pass(np.array([False, True, True]))
        assert beside.tolist() == [16.0, 32.0, 2.0] and exposed == 4.0

    def test_gradients_may_be_sent_in_the_dtype_of_the_weights(self):
        for wide, num_bytes in ((True, 4), (False, 2)):
            costs = analytic_costs(text_model(), PLAIN, engine=Engine(wide_sums=wide))
            weights, gradients = layer_bytes(costs, LANGUAGE_MODEL, 1).sum(axis=0)
            assert gradients == num_bytes / 2 * weights

    def test_stages_know_their_own_layers_and_ranks(self):
        device = replace(PLAIN, node_size=4)
        costs = analytic_costs(text_model(), device)
        plan = plan_of(costs.spec, 3, pp_size=2, dp_size=4, tp_size=2)
        first, last = (pass_transfers(costs, plan, LANGUAGE_MODEL, index) for index in (0, 1))
        assert len(first.gather_ms) == len(last.gather_ms) == 1 + LAYERS // 2
        num_bytes = layer_bytes(costs, LANGUAGE_MODEL, 2)[1, 0]
        expected = 3 / 4 * num_bytes / device.link_bytes_per_ms((0, 4, 8, 12))
        assert first.gather_ms[1] == last.gather_ms[0] == pytest.approx(expected)
        assert pass_transfers(costs, plan_of(costs.spec, 1), LANGUAGE_MODEL, 0) is None
        assert pass_transfers(costs, plan_of(costs.spec, 3, dp_size=1), LANGUAGE_MODEL, 0) is None

    def test_equal_passes_of_replicas_take_as_long_as_the_longest(self):
        costs = analytic_costs(text_model(), PLAIN)
        lengths = [10_000, 20_000, 30_000, 40_000, 50_000, 60_000, 70_000, 80_000]
        sizes = SampleSizes.of_sequences({LANGUAGE_MODEL: [[n] for n in lengths]})
        for shard_size, per_group in ((None, 4), (2, 2)):
            plan = plan_of(costs.spec, 3, shard_size)
            cost = cost_of(costs, plan, sizes)
            graph = build_graph(plan, cost.step)
            alone = stage_costs(costs, plan)[LANGUAGE_MODEL, 0, 0]
            times = dict(zip(graph.tasks, cost.of_graph(graph), strict=True))
            replicas = cost.step.microbatches[LANGUAGE_MODEL]
            for task, time_ms in times.items():
                first = task.replica // per_group * per_group
                together = [replicas[n][task.microbatch] for n in range(first, first + per_group)]
                longest = max(lengths[index] for indices in together for index in indices)
                expected = (alone.forward_ms if task.kind == "fwd" else alone.backward_ms)(longest, longest**2)
                assert time_ms == cost(task) == pytest.approx(expected)

    def test_a_replica_without_a_microbatch_waits_for_none(self):
        costs = analytic_costs(text_model(), PLAIN)
        sizes = SampleSizes.uniform({LANGUAGE_MODEL: 10}, 7)
        plan = plan_of(costs.spec, 3)
        cost = cost_of(costs, plan, sizes)
        program = build_program(plan, cost.step, cost.sync_groups, cost)
        assert simulate(plan, program, cost, cost.message_ms, cost.sync_ms).iteration_ms > 0


class TestMemory:
    @pytest.mark.parametrize(
        ("stage", "weights", "gradients", "optimizer"),
        [(0, 2, 4, 4), (1, 2, 4, 1), (2, 2, 1, 1), (3, 0.5, 1, 1)],
    )
    def test_state_is_divided(self, stage, weights, gradients, optimizer):
        costs = analytic_costs(text_model(), PLAIN)
        elements = sum(p.num_elements for p in costs.spec.language_model.parameters)
        (memory,) = {id(own): own for own in stage_memories(costs, plan_of(costs.spec, stage)).values()}.values()
        state = memory.state
        found = [state.weights, state.gradients, state.optimizer]
        assert found == pytest.approx([elements * n for n in (weights, gradients, optimizer)])

    def test_shards_of_a_group_are_larger(self):
        costs = analytic_costs(text_model(), PLAIN)
        all_ranks, pairs = (
            stage_memories(costs, plan_of(costs.spec, 3, size))[LANGUAGE_MODEL, 0, 0].state for size in (None, 2)
        )
        assert pairs.total == pytest.approx(2 * all_ranks.total)

    def test_gathered_layers_and_their_gradients_exist_while_a_task_runs(self):
        """The embeddings are the largest layer, the first layer is beside them, and gradients are float32."""
        costs = analytic_costs(text_model(), PLAIN)
        plain, reduced, gathered = (
            stage_memories(costs, plan_of(costs.spec, stage))[LANGUAGE_MODEL, 0, 0] for stage in (0, 2, 3)
        )
        weights, gradients = layer_bytes(costs, LANGUAGE_MODEL, 1).T
        more = gathered.transient[:, 2].max() - reduced.transient[:, 2].max()
        assert more == pytest.approx(2 * weights.max() + np.sort(weights)[-2])
        assert reduced.largest.max() == pytest.approx(gradients.max() + weights.max())
        assert plain.largest.max() < reduced.largest.max() + 1

    def test_summed_slices_exist_beside_whole_gradients_but_not_beside_activations(self):
        costs = analytic_costs(text_model(), PLAIN)
        whole, divided = (plan_of(costs.spec, stage, dp_size=2) for stage in (0, 1))
        memory = next(iter(stage_memories(costs, divided).values()))
        elements = sum(p.num_elements for p in costs.spec.language_model.parameters)
        assert memory.slice_bytes == 2 * elements  # four bytes, over two ranks
        state = state_per_rank(divided, stage_memories(costs, divided))[0]
        assert state.gradients == memory.state.gradients + memory.bucket_bytes
        larger = []
        for length in (1, 100_000):
            sizes = SampleSizes.uniform({LANGUAGE_MODEL: length}, 8)
            step = contiguous_step(whole, range(8), 1)
            before, found = (
                memory_per_rank(costs, plan, step, sizes, {(LANGUAGE_MODEL, 0, 0): 1.0})[0].activations
                for plan in (whole, divided)
            )
            assert found == max(before, memory.slice_bytes)
            larger.append(found > before)
        assert larger == [True, False]
