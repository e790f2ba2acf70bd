"""Each term of the counted costs: what is slower because of it, and by how much."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from transformers import AutoConfig

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.cost import StepCost, analytic_costs, layer_table
from hf_mmparallel.cost.collectives import all_gather, all_reduce
from hf_mmparallel.cost.gradient_sums import optimizer_ms
from hf_mmparallel.cost.layer_table import windowed_squares
from hf_mmparallel.cost.layers import Engine
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.loading import build_on_meta
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, SampleSizes, resolve_plan
from hf_mmparallel.plan.checkpointing import SELECTIVE
from hf_mmparallel.schedule import Task
from hf_mmparallel.schedule.kinds import WHOLE_PASSES
from tests import tiny
from tests.cost.messages import message_ms
from tests.cost.models import HIDDEN, LAYER_MATRICES, LAYERS, PLAIN, WIDE, model, text_model
from tests.schedule.builders import timeline_of

LAUNCHING = replace(PLAIN, launch_us=10.0)
LATE = replace(PLAIN, link_latency_us=2.0, node_link_latency_us=20.0)


def costs_on(device=PLAIN, spec=None, **settings):
    return analytic_costs(spec or text_model(), device, **settings)


def layer_on(device=PLAIN, tp_size: int = 1, spec=None, **settings):
    """Costs of the first layer."""
    return costs_on(device, spec, **settings).layers.layer(LANGUAGE_MODEL, 0, tp_size)


def cost_of(costs, microbatch_size: int, num_tokens: int = 64, **plugin):
    plan = resolve_plan(costs.spec, {LANGUAGE_MODEL: ModulePlugin(**plugin)})
    step = contiguous_step(plan, range(16), microbatch_size)
    return StepCost(costs, plan, step, SampleSizes.uniform({LANGUAGE_MODEL: num_tokens}, 16))


def step_ms(costs, microbatch_size: int, num_tokens: int = 64, **plugin) -> float:
    cost = cost_of(costs, microbatch_size, num_tokens, **plugin)
    return timeline_of(cost.plan, cost.step, [], cost, partial(message_ms, cost)).iteration_ms


def in_float32() -> ModelSpec:
    return text_model(parameters=tuple(replace(p, dtype="float32") for p in model().language_model.parameters))


def all_frozen() -> ModelSpec:
    return ModelSpec({LANGUAGE_MODEL: model().language_model.with_frozen(True)})


def test_small_microbatches_cost_their_launches_unless_the_device_computes_longer():
    one, four = (step_ms(costs_on(LAUNCHING), size) for size in (1, 4))
    assert one == pytest.approx(4 * four)  # nothing but launches, for each microbatch
    without = [step_ms(costs_on(), size) for size in (1, 4)]
    assert without[0] < 2 * without[1] < four
    assert step_ms(costs_on(), 4, 10**6) == step_ms(costs_on(LAUNCHING), 4, 10**6)


def test_recomputation_launches_the_forward_again():
    backward = WHOLE_PASSES[1]
    tables = [layer_table(costs_on(LAUNCHING), LANGUAGE_MODEL, 1, recomputed) for recomputed in (False, True)]
    plain, again = (table.launched_ms(backward) for table in tables)
    assert again[1:-1] == pytest.approx(2 * plain[1:-1]) and again[-1] == plain[-1]
    selective = layer_table(costs_on(LAUNCHING), LANGUAGE_MODEL, 1, SELECTIVE)  # whose operations pass through Python
    for kind, before in zip(WHOLE_PASSES, (0.0, plain[1:-1]), strict=True):
        forward = tables[0].launched_ms(WHOLE_PASSES[0])[1:-1]
        assert (selective.launched_ms(kind)[1:-1] - before > 2 * forward).all()
    frozen = costs_on(LAUNCHING, all_frozen())
    assert layer_table(frozen, LANGUAGE_MODEL).launched_ms(backward).tolist() == [0.0] * (LAYERS + 2)


def test_float32_takes_its_own_peak():
    costs = costs_on(PLAIN, in_float32(), value_bytes=4)
    assert costs.device.dtype == "float32" and costs.device.peak_tflops == 66.9
    wide, tf32 = (layer_on(device, spec=in_float32(), value_bytes=4) for device in (PLAIN, PLAIN.computing_in("tf32")))
    assert wide.forward.token > tf32.forward.token > layer_on().forward.token
    products = 2 * LAYER_MATRICES / 1e9 / PLAIN.matmul_efficiency
    assert wide.forward.token - tf32.forward.token == pytest.approx(products / 66.9 - products / 494.7)


def test_linear_layers_in_float8_take_its_peak_and_keep_what_they_read():
    def of(device, index, in_float8, spec=None):
        costs = costs_on(device, spec)
        costs = costs.in_layout({LANGUAGE_MODEL: ((), True)}) if in_float8 else costs
        return costs.layers.layer(LANGUAGE_MODEL, index, 1)

    thrice = replace(PLAIN, float8_speedup=3.0)
    before, after = of(thrice, 0, False), of(thrice, 0, True)
    for name in ("forward", "data_gradient", "weight_gradient"):
        one, other = getattr(before, name), getattr(after, name)
        assert one.token - other.token == pytest.approx(2 * LAYER_MATRICES / PLAIN.flops_per_ms * 2 / 3)
        assert other.square == one.square  # attention's
    assert before.activations == after.activations
    # a product saves what it reads though its weight gets no gradient: what is normalized, and what is activated
    kept = after.frozen_activations.token - before.frozen_activations.token
    assert kept == 2 * (2 * HIDDEN + WIDE)
    assert of(thrice, LAYERS, False) == of(thrice, LAYERS, True)  # the head
    assert of(replace(PLAIN, float8_speedup=1.0), 0, True).forward == before.forward


def test_autocast_casts_weights_and_inputs():
    cast, plain = layer_on(spec=in_float32()), layer_on()
    assert costs_on(spec=in_float32()).device.dtype == "bfloat16"
    # Read in four bytes, written and read in two.
    assert cast.forward.constant / plain.forward.constant == pytest.approx((4 + 2 + 2) / 2)
    assert cast.forward.token > plain.forward.token


def test_a_matrix_cut_by_tensor_parallelism_is_slower_for_each_operation():
    one, four = (layer_on(replace(PLAIN, link_gb_per_s=1e30), size).weight_gradient.token for size in (1, 4))
    inputs = 2 * 6 * HIDDEN / PLAIN.memory_bytes_per_ms  # of six matrices each rank reads or writes it whole
    assert four == pytest.approx(one / 4 + inputs * 3 / 4)


@pytest.mark.parametrize(
    ("attention", "share"), [("flash_attention_2", 1.0), ("bitfield", 0.8), ("flex_attention", 0.8)]
)
def test_each_form_of_attention_has_its_own_speed(attention, share):
    device = replace(PLAIN, masked_attention_share=0.5, block_attention_share=0.8)
    found = layer_on(device, spec=text_model(attention=attention)).forward.square
    assert found == pytest.approx(2 * HIDDEN / (1e9 * 989.4 * 0.4) / share)


def test_layers_with_a_window_cost_less_where_the_kernel_skips():
    tables = {
        attention: layer_table(costs_on(spec=text_model(windows=(8, 0, 8, 0), attention=attention)), LANGUAGE_MODEL)
        for attention in ("bitfield", "sdpa")
    }
    tokens, squares = 1000.0, 1000.0**2
    sliding, whole, *_ = tables["bitfield"].step_ms(tokens, squares)
    same = tables["sdpa"].step_ms(tokens, squares)
    assert same[1] == whole and same[0] > sliding
    per_square = (tables["sdpa"].forward + tables["sdpa"].backward)[1, 0]
    assert same[0] - sliding == pytest.approx(
        per_square * (squares - float(windowed_squares(tokens, squares, 8, True)))
    )


def test_a_stage_costs_the_sum_of_its_layers():
    costs = costs_on(spec=text_model(windows=(8, 0, 16, 0), attention="flash_attention_2"))
    cost = cost_of(costs, 2, 300)
    forward, backward = layer_table(costs, LANGUAGE_MODEL).times(600, 2 * 300**2)
    assert cost(Task("fwd", LANGUAGE_MODEL, 0, 0, 0)) == pytest.approx(forward.sum())
    assert cost(Task("bwd", LANGUAGE_MODEL, 0, 0, 0)) == pytest.approx(backward.sum())


def test_samples_are_arranged_by_windows_too():
    costs = costs_on(spec=text_model(windows=(8,) * LAYERS, attention="bitfield"))
    table = layer_table(costs, LANGUAGE_MODEL)
    tokens = np.array([10.0, 1000.0])
    forward, backward = table.sample_ms(tokens, tokens**2)
    for index in range(2):
        both = table.times(tokens[index], tokens[index] ** 2)
        assert forward[index] == pytest.approx(both[0].sum() - table.forward[:, 2].sum())
        assert backward[index] == pytest.approx(both[1].sum() - table.backward[:, 2].sum())
    assert forward[1] < 110 * forward[0]  # in proportion to tokens, where squares would be 10,000 times as many


def test_windows_are_read_off_the_configuration():
    qwen = tiny.FAMILIES["qwen2_5_vl"]()
    spec, config = build_model_spec(qwen), qwen.config.vision_config
    window = (config.window_size // config.patch_size) ** 2
    expected = [0 if layer in config.fullatt_block_indexes else window for layer in range(config.depth)]
    assert [spec.modules["vision"].window(layer) for layer in range(config.depth)] == expected
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 32}

    def language_model(family: str, **settings):
        config = AutoConfig.for_model(family, **sizes, intermediate_size=64, **settings)
        return build_model_spec(build_on_meta(config)).language_model

    mistral = language_model("mistral", sliding_window=16)
    assert mistral.windows == (16,) * 4 and mistral.window(0) == 0  # sdpa computes what the mask hides
    gemma = language_model("gemma3_text", sliding_window=16, sliding_window_pattern=2, head_dim=16)
    assert set(gemma.windows) == {0, 16} and language_model("llama").windows == ()


@pytest.mark.parametrize(("count", "steps"), [(2, 1), (3, 2), (8, 3)])
def test_sums_have_the_messages_of_a_tree_and_the_bytes_of_a_ring(count, steps):
    found = all_reduce(LATE, range(count))
    travels = 2 * (count - 1) / count / 450e6
    assert found(0.0) == pytest.approx(2 * steps * 2e-3)
    assert found(1e9) == pytest.approx(found(0.0) + travels * 1e9)
    polynomial = found.of_tokens(1000.0)
    assert (polynomial.token, polynomial.constant) == pytest.approx((1000 * travels, found(0.0)))
    assert all_reduce(LATE, range(16))(0.0) == pytest.approx(2 * 4 * 20e-3)
    assert all_reduce(LATE, range(1))(1e9) == 0.0


@pytest.mark.parametrize(
    ("ranks", "within", "between"),
    [(range(2), 1, 0), (range(8), 7, 0), (range(4096), 4096 - 512, 511), (range(0, 64, 4), 8, 7)],
)
def test_gathers_take_a_ring_whose_steps_within_and_between_nodes_differ(ranks, within, between):
    slow = 1e12  # bytes, where the latency of a slower protocol is gained back
    latency_ms = (within * 2 + between * 20) / 1e3
    travels = (len(ranks) - 1) / len(ranks) * slow / LATE.link_bytes_per_ms(ranks)
    found = all_gather(LATE, ranks)
    assert found(slow) == pytest.approx(travels + latency_ms)
    assert 0.25 * latency_ms <= found(0.0) <= 0.28 * latency_ms, "LL for small messages"
    assert found(1e7) <= 1e7 / slow * travels + latency_ms
    plain = all_gather(replace(LATE, name="cpu"), ranks)
    assert plain(0.0) == pytest.approx(latency_ms) and plain(slow) == pytest.approx(found(slow))


def test_gathers_of_one_rank_a_node_may_take_a_tree():
    """PAT, at small sizes: with two ranks on each node there is only the ring."""
    one, two = (all_gather(LATE, range(0, 8 * 1024, step)) for step in (8, 4))
    assert one(0.0) == pytest.approx((10 * 20 / 3.5 + 1024 * 2.8) / 1e3) and two(0.0) > 0.25 * 1023 * 20 / 1e3
    travels = 1023 / 1024 * 1e12 / LATE.link_bytes_per_ms(range(0, 8 * 1024, 8))
    assert one(1e12) == pytest.approx(1023 * 20 / 1e3 + travels)


def test_messages_have_a_latency():
    times = [step_ms(costs_on(replace(PLAIN, link_latency_us=own)), 16, pp_size=2) for own in (0.0, 1e6)]
    assert times[1] - times[0] == pytest.approx(2000.0)  # hidden states there, their gradient back


def test_an_optimizer_step_moves_weights_gradients_and_state():
    costs = costs_on()
    plan, in_place, half = (
        resolve_plan(costs.spec, {LANGUAGE_MODEL: plugin})
        for plugin in (ModulePlugin(), ModulePlugin(master_weights=False), ModulePlugin(pp_size=2))
    )
    byte_ms = sum(p.num_elements for p in costs.spec.language_model.parameters) / PLAIN.memory_bytes_per_ms
    # Master weights and two moments are read and written in four bytes, weights written in two; gradients move in
    # four, five times.
    assert optimizer_ms(costs, plan) == pytest.approx((3 * 2 * 4 + 2 + 5 * 4) * byte_ms)
    assert optimizer_ms(costs, in_place) == pytest.approx((3 * 2 * 2 + 5 * 4) * byte_ms)
    assert optimizer_ms(costs, half) < optimizer_ms(costs, plan)
    assert optimizer_ms(costs.with_spec(all_frozen()), plan) == 0.0


@pytest.mark.parametrize(("flag", "tp_size"), [("fused", 1), ("fused_loss", 1), ("hidden_sums", 2)])
def test_what_another_engine_does_is_faster(flag, tp_size):
    ours, theirs = (
        layer_table(costs_on(replace(PLAIN, link_gb_per_s=50.0), engine=engine), LANGUAGE_MODEL, tp_size)
        for engine in (Engine(), replace(Engine(), **{flag: True}))
    )
    gained = ours.step_ms(4000, 4e6) - theirs.step_ms(4000, 4e6)
    assert gained[-1] > 0 and (gained >= 0).all()


def test_stages_that_stand_still_while_they_send():
    slow = Engine(blocking_messages=True, message_gb_per_s=(0.1, 0.1))
    ours, blocked, slowly = (
        step_ms(costs_on(replace(PLAIN, link_gb_per_s=1.0), engine=engine), 1, pp_size=4)
        for engine in (Engine(blocking_messages=False), Engine(blocking_messages=True), slow)
    )
    assert ours < blocked < slowly / 3
