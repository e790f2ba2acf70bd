"""Estimates of time against numbers worked out by hand; of a graph as of its tasks one by one."""

from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.arrange import arrange_step, contiguous_step
from hf_mmparallel.cost import (
    StepCost,
    analytic_costs,
    batch_workloads,
    layer_flops,
    layer_table,
    stage_costs,
    training_flops,
)
from hf_mmparallel.cost.analytic import ATTENTION_BACKWARD
from hf_mmparallel.cost.layer_table import PLACES
from hf_mmparallel.cost.layers import LayersWithout
from hf_mmparallel.cost.stage_memory import stage_memory
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlan,
    ModulePlugin,
    ParallelPlan,
    SampleSizes,
    Stage,
    resolve_plan,
    sync_groups,
)
from hf_mmparallel.schedule import Task, build_graph, build_program, find_representatives
from hf_mmparallel.schedule.kinds import WHOLE_PASSES
from tests.cost.messages import message_ms
from tests.cost.models import (
    ENCODER_BYTES,
    HIDDEN,
    LAYER_BYTES,
    LAYER_MATRICES,
    LAYERS,
    LOOKUP_BYTES,
    LOSS_BYTES,
    NORM_BYTES,
    PLAIN,
    PRODUCT_BYTES,
    VOCABULARY,
    h100,
    model,
)
from tests.schedule.builders import make_step

SIZES = SampleSizes.uniform({"vision": 7, LANGUAGE_MODEL: 10}, 4)
H100 = PLAIN
BYTE_MS = 1 / H100.memory_bytes_per_ms
READ_MS = 2 * BYTE_MS  # of an element of a matrix
WRITTEN_MS = 12 * BYTE_MS  # of an element of a gradient: written and read in two bytes, added up in four
TOKEN_MS = 2 / H100.flops_per_ms
FORWARD, BACKWARD = Task("fwd", LANGUAGE_MODEL, 0, 0, 0), Task("bwd", LANGUAGE_MODEL, 0, 0, 0)
HEAD = VOCABULARY * HIDDEN
STACK = LAYERS * LAYER_MATRICES
PRODUCTS = LAYERS * PRODUCT_BYTES + 2 * (HIDDEN + VOCABULARY)  # bytes of a token
ELEMENTWISE = LAYERS * LAYER_BYTES + LOSS_BYTES
ATTENTION = LAYERS * 2 * HIDDEN / H100.flops_per_ms  # of a squared token


def cost_by(spec, plan):
    return StepCost(h100(spec), plan, contiguous_step(plan, range(4), 2), SIZES, sync_groups(spec, plan))


def cost_of(spec, **plugins):
    return cost_by(spec, resolve_plan(spec, plugins))


def test_a_stage_costs_what_its_own_tp_group_makes_of_it():
    spec = model()
    alike = {size: cost_of(spec, language_model=ModulePlugin(dp_size=2, tp_size=size)) for size in (1, 2)}
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=2)})
    wide, narrow = (Stage((0, LAYERS), (ranks,)) for ranks in ((1, 2), (3,)))
    module = replace(plan.modules[LANGUAGE_MODEL], replicas=((wide,), (narrow,)))
    plan = replace(plan, modules={**plan.modules, LANGUAGE_MODEL: module})
    stages = cost_by(spec, plan).stages
    for replica, size in ((0, 2), (1, 1)):
        key = LANGUAGE_MODEL, replica, 0
        assert (stages[key].work == alike[size].stages[key].work).all()


def test_operations_of_a_token():
    spec = model()
    assert layer_flops(spec, LANGUAGE_MODEL, 0) == (2 * LAYER_MATRICES, 2 * HIDDEN)
    assert layer_flops(spec, "vision", 0) == (2 * LAYER_MATRICES, 4 * HIDDEN)
    # Reading an embedding multiplies nothing; the tied head does.
    assert layer_flops(spec, LANGUAGE_MODEL, -1) == (0, 0)
    assert layer_flops(spec, LANGUAGE_MODEL, LAYERS) == (2 * HEAD, 0)
    assert layer_flops(spec, "vision", LAYERS) == (2 * HIDDEN * HIDDEN, 0)


def test_a_forward_is_operations_attention_and_what_is_moved():
    tokens, squares = 20, 200  # two samples of ten
    expected = (STACK + HEAD) * (tokens * TOKEN_MS + READ_MS) + ATTENTION * squares
    expected += tokens * (PRODUCTS + ELEMENTWISE + LOOKUP_BYTES) * BYTE_MS
    assert cost_of(model())(FORWARD) == pytest.approx(expected)


def test_backward_costs_what_is_trainable_and_what_lies_behind_it():
    tokens, squares = 20, 200
    product_ms = tokens * PRODUCTS * BYTE_MS
    data = (STACK + HEAD) * (tokens * TOKEN_MS + READ_MS) + ATTENTION_BACKWARD * ATTENTION * squares
    data += product_ms + 2 * tokens * ELEMENTWISE * BYTE_MS
    weights = (STACK + HEAD) * (tokens * TOKEN_MS + WRITTEN_MS) + product_ms
    embeddings = HEAD * WRITTEN_MS  # their gradient is as large as they are
    assert cost_of(model())(BACKWARD) == pytest.approx(data + weights + embeddings)
    cost = cost_of(model((LANGUAGE_MODEL,)))
    assert cost(BACKWARD) == pytest.approx(data)
    again = cost_of(model((LANGUAGE_MODEL,)), language_model=ModulePlugin(activation_checkpointing=True))
    head = HEAD * (tokens * TOKEN_MS + READ_MS)  # is not computed again, nor is what comes before the layers
    head += tokens * (2 * (HIDDEN + VOCABULARY) + LOSS_BYTES + LOOKUP_BYTES) * BYTE_MS
    assert again(BACKWARD) == pytest.approx(data + cost(FORWARD) - head)
    kept = cost_of(model((LANGUAGE_MODEL,)), language_model=ModulePlugin(activation_checkpointing="selective"))
    assert kept(BACKWARD) == pytest.approx(data + tokens * LAYERS * LAYER_BYTES * BYTE_MS)
    # Of a frozen tower only the projector behind it runs backwards, for its weights alone.
    cost = cost_of(model(("vision",)))
    projector = HIDDEN * HIDDEN * (14 * TOKEN_MS + WRITTEN_MS) + 14 * 2 * 2 * HIDDEN * BYTE_MS
    assert cost(Task("bwd", "vision", 0, 0, 0)) == pytest.approx(projector)
    cost = cost_of(model(("vision", LANGUAGE_MODEL)))  # but the projector
    assert cost(Task("bwd", "vision", 0, 0, 0)) > 0 and cost(BACKWARD) == pytest.approx(data)


def test_the_first_trained_layer_runs_back_through_its_own_inside():
    whole = model()
    spec = ModelSpec({LANGUAGE_MODEL: whole.language_model.with_frozen(["embed_tokens"])}, tied=whole.tied)
    table = layer_table(h100(spec), LANGUAGE_MODEL)
    # Its queries, keys and values need no gradient of its input, all that is behind them does.
    layer = h100(spec).layers.layer(LANGUAGE_MODEL, 0, 1)
    behind = 1 - 3 * HIDDEN * HIDDEN / LAYER_MATRICES
    first, second = table.backward[1], table.backward[2]
    assert first[0] == pytest.approx(second[0])  # attention
    assert second[1] - first[1] == pytest.approx((1 - behind) * layer.data_gradient.token)
    assert table.backward[0].tolist() == [0.0, 0.0, 0.0]
    per_token, per_square = training_flops(spec, LANGUAGE_MODEL)
    assert per_token == pytest.approx(2 * (3 * STACK + 2 * HEAD - 3 * HIDDEN * HIDDEN))
    assert per_square == pytest.approx(3 * LAYERS * 2 * HIDDEN)


def test_time_follows_ranks_and_their_sums():
    spec = model(tied=False)
    whole, half = cost_of(spec), cost_of(spec, language_model=ModulePlugin(tp_size=2))
    link_ms = 20 / H100.link_bytes_per_ms(range(2))  # of a byte of each token
    num_sums = 2 * LAYERS + 1  # two a layer, and that of the embeddings
    sums = num_sums * 2 * HIDDEN * link_ms  # rings, two bytes a value
    # What tensor parallelism does not cut: norms, residuals, lookups, and one side of each matrix.
    kept_whole = LAYERS * (NORM_BYTES + 2 * 3 * 2 * HIDDEN + 2 * 6 * HIDDEN) + LOOKUP_BYTES
    assert half(FORWARD) == pytest.approx(whole(FORWARD) / 2 + sums + 20 * kept_whole / 2 * BYTE_MS)
    late = StepCost(analytic_costs(spec, replace(PLAIN, link_latency_us=3.0)), half.plan, half.step, SIZES)
    assert late(FORWARD) - half(FORWARD) == pytest.approx(num_sums * 2 * 3e-3)  # two messages a sum
    # Each rank has half of the words of a head that is tied to the embeddings; the loss gathers four numbers.
    for size, without_head, gathered in ((1, whole, 0.0), (2, half, 16 * link_ms)):
        head = HEAD / size * (20 * TOKEN_MS + READ_MS) + gathered
        head += 20 * (2 * (HIDDEN + VOCABULARY / size) + LOSS_BYTES / size) * BYTE_MS
        tied = cost_of(model(), language_model=ModulePlugin(tp_size=size))(FORWARD)
        assert tied - head == pytest.approx(without_head(FORWARD))


def test_attention_and_the_feed_forward_sum_the_gradient_of_what_they_read_once():
    layers = h100(model()).layers
    one, two = (layers.layer(LANGUAGE_MODEL, 1, size).with_sums for size in (1, 2))
    ring = 2 * HIDDEN / H100.link_bytes_per_ms(range(2))  # two bytes a value, half of them twice
    inputs = 2 * 6 * HIDDEN * BYTE_MS / 2  # what of the matrices' inputs and outputs is on both ranks
    whole = (NORM_BYTES + 2 * 3 * 2 * HIDDEN) * BYTE_MS / 2
    found = two.data_gradient.token - one.data_gradient.token / 2
    assert found == pytest.approx(2 * ring + inputs + 2 * whole)


def sharing_rows(spec: ModelSpec) -> ModelSpec:
    """The model in whose layers ranks share rows."""
    language_model = replace(spec.language_model, sequence_parallel=True)
    return replace(spec, modules={**spec.modules, LANGUAGE_MODEL: language_model})


def test_ranks_that_share_rows_divide_norms_and_gather_at_the_ends_of_a_stage():
    whole = model(tied=False)
    shared = sharing_rows(whole)
    plugin = ModulePlugin(tp_size=2)
    times = [cost_of(spec, language_model=plugin)(FORWARD) for spec in (whole, shared)]
    # A gather and a reduce-scatter move what an all-reduce does; one more gather joins what leaves the stage.
    divided = 20 * LAYERS * (NORM_BYTES + 2 * 3 * 2 * HIDDEN) / 2 * BYTE_MS
    assert times[0] - times[1] == pytest.approx(divided - 20 * HIDDEN / H100.link_bytes_per_ms(range(2)))
    saved = [h100(spec).layers.layer(LANGUAGE_MODEL, 1, 2).activations.token for spec in (whole, shared)]
    # of the norm, in float32 and normalized, and of what attention and the feed-forward read
    assert saved[0] - saved[1] == pytest.approx((4 + 2 + 2 * 2) * HIDDEN / 2)
    again = ModulePlugin(tp_size=2, activation_checkpointing=True)
    held = [
        stage_memory(h100(spec), plan, LANGUAGE_MODEL, plan.stage(LANGUAGE_MODEL, 0, 0)).saved_bytes(CHUNK)
        for spec in (whole, shared)
        for plan in [resolve_plan(spec, {LANGUAGE_MODEL: again})]
    ]
    # The inputs of the layers; beside that of the first one all rows that it starts from stay, too.
    assert held[0] - held[1] == pytest.approx(10 * (LAYERS / 2 - 1) * 2 * HIDDEN)


def test_rows_are_gathered_once_more_for_the_gradients_of_weights_beside_products():
    """A block whose last matrix computes longer than the gather takes is slower meanwhile; nothing if frozen."""
    shared = sharing_rows(model(tied=False))
    gather = HIDDEN * 2 / 2 / H100.link_bytes_per_ms(range(2))
    fast, slow = (replace(H100, link_gb_per_s=H100.link_gb_per_s * factor) for factor in (1e6, 1.0))
    costs = [analytic_costs(shared, device) for device in (fast, slow)]
    hidden, exposed = (own.layers.layer(LANGUAGE_MODEL, 1, 2).gathers for own in costs)
    assert hidden.token == pytest.approx(2 * (1 - H100.overlap_efficiency) * gather / 1e6)
    assert 2 * (1 - H100.overlap_efficiency) * gather <= exposed.token < 2 * gather
    frozen = replace(shared, modules={name: own.with_frozen(True) for name, own in shared.modules.items()})
    for spec, again, expected in ((shared, False, exposed.token), (shared, True, 0.0), (frozen, False, 0.0)):
        costs = h100(spec)
        tables = [
            layer_table(replace(costs, layers=layers), LANGUAGE_MODEL, 2, again).work[:, 2, 1]
            for layers in (costs.layers, LayersWithout(costs.layers, ("sums",)))
        ]
        assert (tables[0] - tables[1])[[PLACES["weights"], PLACES["others"]]].sum() == pytest.approx(expected)


def test_tokens_of_layers_with_a_state_go_to_their_samples_or_heads_and_back_and_no_keys_are_gathered():
    """
    The same layers, of which two carry a state and so do not attend, with and without recomputation; then one whose
    heads take and give half as many values.
    """
    settings = [{"cp_size": 2, "activation_checkpointing": again} for again in (False, True)]
    kinds = [(), ("state",) * 2 + ("attention",) * (LAYERS - 2), ("both",) * LAYERS]
    plain, mixed, both = (
        [
            cost_of(model(layer_kinds=own), language_model=ModulePlugin(**given)).stages[LANGUAGE_MODEL, 0, 0]
            for given in settings
        ]
        for own in kinds
    )
    layer_ms = 2 * 2 * HIDDEN / 2 / 2 / 450e6  # two bytes, there and back, half of the tokens of a rank to the other
    for index, in_backward in enumerate((1, 2)):  # and the second forward
        assert mixed[index].gather_token_ms == plain[index].gather_token_ms * (LAYERS - 2) / LAYERS
        assert both[index].gather_token_ms == plain[index].gather_token_ms
        for kind, times in zip(WHOLE_PASSES, (1, in_backward), strict=True):
            added = both[index].work[:, 1] - plain[index].work[:, 1]
            assert sum(added[PLACES[part]] for part in kind.work) == pytest.approx(times * LAYERS * layer_ms)
    by_heads = model(layer_kinds=kinds[1], state_widths=(HIDDEN, *(None,) * (LAYERS - 1)))
    work = cost_of(by_heads, language_model=ModulePlugin(**settings[0])).stages[LANGUAGE_MODEL, 0, 0].work
    saved = (mixed[0].work - work)[PLACES["forward"], 1]
    assert saved == pytest.approx(layer_ms / 2)


def test_keys_that_take_longer_than_attention_cost_time():
    spec = model()
    alone, shared = cost_of(spec), cost_of(spec, language_model=ModulePlugin(cp_size=2, cp_block=10))
    received = 2 * 2 * HIDDEN * 20 / 2  # two bytes, keys and values, the other half of twenty tokens
    gather = LAYERS * received / 450e6 - ATTENTION * 200 / 2
    assert gather > 0
    read = (STACK + HEAD) * READ_MS  # each rank reads all weights
    assert shared(FORWARD) == pytest.approx((alone(FORWARD) + read) / 2 + gather)
    again = [
        cost_of(spec, language_model=ModulePlugin(cp_size=2, cp_block=10, activation_checkpointing=recomputed))
        for recomputed in (False, True)
    ]
    long = np.array([1e4]), np.zeros(1)  # nothing hides the transfers
    plain, again = (cost.stages[LANGUAGE_MODEL, 0, 0] for cost in again)
    hidden = [replace(cost, gather_token_ms=0.0) for cost in (plain, again)]
    for kind, factors in ((WHOLE_PASSES[0], (1, 1)), (WHOLE_PASSES[1], (2, 3))):  # 3 for the second forward
        exposed = [
            a.times_ms(*long, kind) - b.times_ms(*long, kind) for a, b in zip((plain, again), hidden, strict=True)
        ]
        assert np.ravel(exposed) == pytest.approx(np.array(factors) * 1e4 * plain.gather_token_ms)
    long = SampleSizes.uniform({"vision": 7, LANGUAGE_MODEL: 10**6}, 4)
    times = [StepCost(cost.costs, cost.plan, cost.step, long)(FORWARD) for cost in (alone, shared)]
    assert times[1] == pytest.approx((times[0] + read) / 2)  # attention hides it


CHUNK = np.array([100.0, 10.0, 1.0])  # squared tokens, tokens, one
MIXED = SampleSizes.of_sequences({"vision": [[4, 4], [], [9], [2]], LANGUAGE_MODEL: [[20], [5], [12], [7]]})
DEFERRED = make_step({"vision": [[[0, 1], [2, 3]]], LANGUAGE_MODEL: [[[1], [0, 2, 3]]]})


def test_a_packed_chunk_costs_the_sum_of_its_samples():
    spec = model()
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2)})
    cost = StepCost(replace(h100(spec), packing=True), plan, DEFERRED, MIXED)
    vision, half = STACK + HIDDEN * HIDDEN, STACK / 2 + HEAD
    vision_bytes = LAYERS * (PRODUCT_BYTES + ENCODER_BYTES) + 2 * 2 * HIDDEN
    half_bytes = LAYERS / 2 * (PRODUCT_BYTES + LAYER_BYTES) + 2 * (HIDDEN + VOCABULARY) + LOSS_BYTES
    for task, lengths, matrices, moved, attention in (
        (Task("fwd", "vision", 0, 0, 0, 0), [], vision, vision_bytes, 2 * ATTENTION),
        (Task("fwd", "vision", 0, 0, 0, 1), [4, 4], vision, vision_bytes, 2 * ATTENTION),
        (Task("fwd", "vision", 0, 0, 1, 0), [9, 2], vision, vision_bytes, 2 * ATTENTION),
        (Task("fwd", LANGUAGE_MODEL, 0, 1, 1), [20, 12, 7], half, half_bytes, ATTENTION / 2),
    ):
        expected = matrices * (sum(lengths) * TOKEN_MS + READ_MS) + attention * sum(n * n for n in lengths)
        expected += sum(lengths) * moved * BYTE_MS
        assert cost(task) == pytest.approx(expected)
    program = build_program(plan, DEFERRED, [], cost)
    sent = [a.message for a in program.actions[0] if a.op == "send" and a.message is not None]
    # Sample 1 has no image, sample 0 is taken one microbatch later.
    assert [message_ms(cost, m) * 450e6 for m in sent] == pytest.approx([2 * HIDDEN * tokens for tokens in (0, 8, 11)])


def test_ranks_that_share_matrices_over_two_nodes_pay_for_the_network():
    device = replace(PLAIN, node_size=4)
    costs = analytic_costs(model(), device)

    def forward_ms(first: int) -> float:
        stage = Stage((0, LAYERS), (tuple(range(first, first + 2)),))
        plan = ParallelPlan({LANGUAGE_MODEL: ModulePlan(((stage,),))})
        return stage_costs(costs, plan)[LANGUAGE_MODEL, 0, 0].task_ms(1000.0, 0.0, WHOLE_PASSES[0])

    assert forward_ms(0) == forward_ms(1) == forward_ms(4)
    network = replace(device, link_gb_per_s=device.network_gb_per_s)
    slow = layer_table(analytic_costs(model(), network), LANGUAGE_MODEL, 2)
    assert forward_ms(3) == pytest.approx(slow.forward[:, 1].sum() * 1000 + slow.forward[:, 2].sum())
    assert forward_ms(3) > forward_ms(0)


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
    spec = model(attention=attention, windows=windows)
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
        assert cost.messages_ms(graph) == pytest.approx([message_ms(cost, message) for message in graph.messages])
        assert len(set(cost.messages_ms(graph))) > 2
