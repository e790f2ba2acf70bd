"""Each term of the counted costs: what is slower because of it, and by how much."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.cost import StepCost, analytic_costs, layer_table
from hf_mmparallel.cost.activations import grouped_copies
from hf_mmparallel.cost.collectives import all_gather, all_reduce
from hf_mmparallel.cost.gradient_sums import optimizer_ms
from hf_mmparallel.cost.layers import Engine
from hf_mmparallel.cost.memory import activation_sizes
from hf_mmparallel.cost.row_sizes import chunk_sizes
from hf_mmparallel.cost.stage_times import windowed_squares
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.loading import build_on_meta
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, SampleSizes, resolve_plan
from hf_mmparallel.schedule import Task, build_program, simulate
from tests import tiny
from tests.cost.models import HIDDEN, LAYER_MATRICES, LAYERS, PLAIN, model

LAUNCHING = replace(PLAIN, launch_us=10.0)


def text_model(**changes) -> ModelSpec:
    spec = model()
    return replace(spec, modules={LANGUAGE_MODEL: replace(spec.language_model, **changes)})


def step_of(costs, sizes, microbatch_size, **plugin):
    plan = resolve_plan(costs.spec, {LANGUAGE_MODEL: ModulePlugin(**plugin)})
    step = contiguous_step(plan, range(sizes.num_samples), microbatch_size)
    return plan, step, StepCost(costs, plan, step, sizes)


def step_ms(costs, microbatch_size, num_tokens=64, **plugin):
    plan, step, cost = step_of(costs, SampleSizes.uniform({LANGUAGE_MODEL: num_tokens}, 16), microbatch_size, **plugin)
    return simulate(plan, build_program(plan, step, [], cost), cost, cost.message_ms).iteration_ms


class TestLaunches:
    def test_small_microbatches_cost_their_launches(self):
        costs = analytic_costs(text_model(), LAUNCHING)
        one, four = (step_ms(costs, size) for size in (1, 4))
        assert one == pytest.approx(4 * four)  # nothing but launches, for each microbatch
        without = [step_ms(analytic_costs(text_model(), PLAIN), size) for size in (1, 4)]
        assert without[0] < 2 * without[1] < four

    def test_a_device_that_computes_longer_hides_them(self):
        times = [step_ms(analytic_costs(text_model(), device), 4, 10**6) for device in (PLAIN, LAUNCHING)]
        assert times[0] == times[1]

    def test_recomputation_launches_the_forward_again(self):
        costs = analytic_costs(text_model(), LAUNCHING)
        plain, again = (layer_table(costs, LANGUAGE_MODEL, 1, recomputed).launches for recomputed in (False, True))
        assert again[1:-1, 1] == pytest.approx(2 * plain[1:-1, 1]) and again[-1, 1] == plain[-1, 1]
        frozen = analytic_costs(
            replace(costs.spec, modules={LANGUAGE_MODEL: costs.spec.language_model.with_frozen(True)}), LAUNCHING
        )
        assert layer_table(frozen, LANGUAGE_MODEL).launches[:, 1].tolist() == [0.0] * (LAYERS + 2)


class TestPrecision:
    def test_float32_takes_its_own_peak(self):
        wide = replace(
            model().language_model,
            parameters=tuple(replace(p, dtype="float32") for p in model().language_model.parameters),
        )
        spec = ModelSpec({LANGUAGE_MODEL: wide})
        costs = analytic_costs(spec, PLAIN, 4)
        assert costs.device.dtype == "float32" and costs.device.peak_tflops == 66.9
        tf32 = analytic_costs(spec, PLAIN.computing_in("tf32"), 4)
        half = analytic_costs(text_model(), PLAIN)
        times = [float(own.layers.layer(LANGUAGE_MODEL, 0, 1).forward.token) for own in (costs, tf32, half)]
        assert times[0] > times[1] > times[2]
        products = 2 * LAYER_MATRICES / 1e9 / PLAIN.matmul_efficiency
        assert times[0] - times[1] == pytest.approx(products / 66.9 - products / 494.7)

    def test_autocast_casts_weights_and_inputs(self):
        parameters = tuple(replace(p, dtype="float32") for p in model().language_model.parameters)
        spec = text_model(parameters=parameters)
        cast, plain = (analytic_costs(own, PLAIN).layers.layer(LANGUAGE_MODEL, 0, 1) for own in (spec, text_model()))
        assert analytic_costs(spec, PLAIN).device.dtype == "bfloat16"
        read = cast.forward.constant / plain.forward.constant
        assert read == pytest.approx((4 + 2 + 2) / 2)  # read in four bytes, written and read in two
        assert cast.forward.token > plain.forward.token


class TestNarrowMatrices:
    def test_a_matrix_cut_by_tensor_parallelism_is_slower_for_each_operation(self):
        costs = analytic_costs(text_model(), replace(PLAIN, link_gb_per_s=1e30))
        one, four = (costs.layers.layer(LANGUAGE_MODEL, 0, size).weight_gradient.token for size in (1, 4))
        inputs = 2 * 6 * HIDDEN / PLAIN.memory_bytes_per_ms  # of six matrices each rank reads or writes it whole
        assert four == pytest.approx(one / 4 + inputs * 3 / 4)


class TestForms:
    def test_each_form_of_attention_has_its_own_speed(self):
        device = replace(PLAIN, masked_attention_share=0.5, block_attention_share=0.8)
        flash, block, flex = (
            analytic_costs(text_model(attention=attention), device).layers.layer(LANGUAGE_MODEL, 0, 1).forward.square
            for attention in ("flash_attention_2", "bitfield", "flex_attention")
        )
        assert flash == pytest.approx(2 * HIDDEN / (1e9 * 989.4 * 0.4))
        assert block == flex == pytest.approx(flash / 0.8)

    def test_a_dense_mask_takes_the_slow_kernel_and_all_pairs(self):
        """
        Samples of 30 and 20 tokens: two rows of 30, both halves of each, at half the speed. Without padding there is
        no mask.
        """
        spec = text_model(attention="sdpa")
        slow = analytic_costs(spec, replace(PLAIN, masked_attention_share=0.5))
        for lengths, squares in (((30, 20), 2 * 2 * 900 / 0.5), ((30, 30), 2 * 900)):
            tokens = np.array(lengths)
            sizes = SampleSizes({LANGUAGE_MODEL: tokens}, {LANGUAGE_MODEL: tokens.astype(float) ** 2})
            plan, step, _ = step_of(slow, sizes, 2)
            (size,) = chunk_sizes(slow, plan, step, sizes).values()
            assert size.squares == squares


class TestWindows:
    @pytest.mark.parametrize("length", [3, 8, 9, 100])
    @pytest.mark.parametrize("is_causal", [True, False])
    def test_squares_are_those_of_the_tokens_that_are_seen(self, length, is_causal):
        window = 8
        found = float(windowed_squares(5 * length, 5 * length**2, window, is_causal))
        if is_causal:  # a squared token stands for half a pair; tokens near the start see fewer
            exact = sum(min(place, window) for place in range(length + 1))
            assert found == pytest.approx(5 * 2 * exact, abs=5 * length)
        else:
            assert found == 5 * min(length**2, window * length)

    def test_layers_with_a_window_cost_less_where_the_kernel_skips(self):
        windows = (8, 0, 8, 0)
        tables = {
            attention: layer_table(
                analytic_costs(text_model(windows=windows, attention=attention), PLAIN), LANGUAGE_MODEL
            )
            for attention in ("bitfield", "sdpa")
        }
        tokens, squares = 1000.0, 1000.0**2
        sliding, whole, *_ = tables["bitfield"].step_ms(tokens, squares)
        same = tables["sdpa"].step_ms(tokens, squares)
        assert same[1] == whole and same[0] > sliding
        per_square = (tables["sdpa"].forward + tables["sdpa"].backward)[1, 0]
        seen = float(windowed_squares(tokens, squares, 8, True))
        assert same[0] - sliding == pytest.approx(per_square * (squares - seen))

    def test_a_stage_costs_the_sum_of_its_layers(self):
        costs = analytic_costs(text_model(windows=(8, 0, 16, 0), attention="flash_attention_2"), PLAIN)
        sizes = SampleSizes.uniform({LANGUAGE_MODEL: 300}, 16)
        _, _, cost = step_of(costs, sizes, 2)
        forward, backward = layer_table(costs, LANGUAGE_MODEL).times(600, 2 * 300**2)
        assert cost(Task("fwd", LANGUAGE_MODEL, 0, 0, 0)) == pytest.approx(forward.sum())
        assert cost(Task("bwd", LANGUAGE_MODEL, 0, 0, 0)) == pytest.approx(backward.sum())

    def test_they_are_read_off_the_configuration(self):
        spec = build_model_spec(tiny.FAMILIES["qwen2_5_vl"]())
        config = tiny.FAMILIES["qwen2_5_vl"]().config.vision_config
        window = (config.window_size // config.patch_size) ** 2
        expected = [0 if layer in config.fullatt_block_indexes else window for layer in range(config.depth)]
        assert [spec.modules["vision"].window(layer) for layer in range(config.depth)] == expected
        settings = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 32}
        config = AutoConfig.for_model("mistral", **settings, intermediate_size=64, sliding_window=16)
        mistral = build_model_spec(build_on_meta(config)).language_model
        assert mistral.windows == (16,) * 4 and mistral.window(0) == 0  # sdpa computes what the mask hides
        config = AutoConfig.for_model(
            "gemma3_text", **settings, intermediate_size=64, sliding_window=16, sliding_window_pattern=2, head_dim=16
        )
        assert set(build_model_spec(build_on_meta(config)).language_model.windows) == {0, 16}
        llama = build_model_spec(build_on_meta(AutoConfig.for_model("llama", **settings, intermediate_size=64)))
        assert llama.language_model.windows == ()


class TestCollectives:
    def test_messages_of_a_tree_and_bytes_of_a_ring(self):
        device = replace(PLAIN, link_latency_us=2.0, node_link_latency_us=20.0)
        for count, steps in ((2, 1), (3, 2), (8, 3)):
            found = all_reduce(device, range(count))
            assert found(0.0) == pytest.approx(2 * steps * 2e-3)
            travels = 2 * (count - 1) / count / 450e6
            assert found(1e9) == pytest.approx(found(0.0) + travels * 1e9)
            polynomial = found.of_tokens(1000.0)
            assert (polynomial.token, polynomial.constant) == pytest.approx((1000 * travels, found(0.0)))
        assert all_reduce(device, range(16))(0.0) == pytest.approx(2 * 4 * 20e-3)
        assert all_reduce(device, range(1))(1e9) == 0.0

    def test_gathers_take_a_ring_whose_steps_within_and_between_nodes_differ(self):
        device = replace(PLAIN, link_latency_us=2.0, node_link_latency_us=20.0)
        slow = 1e12  # bytes, where the latency of a slower protocol is gained back
        for ranks, within, between in (
            (range(2), 1, 0),
            (range(8), 7, 0),
            (range(4096), 4096 - 512, 511),
            (range(0, 64, 4), 8, 7),
        ):
            latency_ms = (within * 2 + between * 20) / 1e3
            travels = (len(ranks) - 1) / len(ranks) * slow / device.link_bytes_per_ms(ranks)
            found = all_gather(device, ranks)
            assert found(slow) == pytest.approx(travels + latency_ms)
            assert 0.25 * latency_ms <= found(0.0) <= 0.28 * latency_ms, "LL for small messages"
            assert found(1e7) <= 1e7 / slow * travels + latency_ms
            plain = all_gather(replace(device, name="cpu"), ranks)
            assert plain(0.0) == pytest.approx(latency_ms) and plain(slow) == pytest.approx(found(slow))

    def test_gathers_of_one_rank_a_node_may_take_a_tree(self):
        """PAT, at small sizes: with two ranks on each node there is only the ring."""
        device = replace(PLAIN, link_latency_us=2.0, node_link_latency_us=20.0)
        one, two = (all_gather(device, ranks)(0.0) for ranks in (range(0, 8 * 1024, 8), range(0, 8 * 1024, 4)))
        assert one == pytest.approx((10 * 20 / 3.5 + 1024 * 2.8) / 1e3) and two > 0.25 * 1023 * 20 / 1e3
        large = 1e12
        ring_ms = 1023 * 20 / 1e3 + 1023 / 1024 * large / device.link_bytes_per_ms(range(0, 8 * 1024, 8))
        assert all_gather(device, range(0, 8 * 1024, 8))(large) == pytest.approx(ring_ms)

    def test_messages_have_a_latency(self):
        times = [
            step_ms(analytic_costs(text_model(), replace(PLAIN, link_latency_us=latency)), 16, pp_size=2)
            for latency in (0.0, 1e6)
        ]
        assert times[1] - times[0] == pytest.approx(2000.0)  # hidden states there, their gradient back


class TestOptimizer:
    def test_a_step_moves_weights_gradients_and_state(self):
        costs = analytic_costs(text_model(), PLAIN)
        plan = resolve_plan(costs.spec, {})
        elements = sum(p.num_elements for p in costs.spec.language_model.parameters)
        # Master weights and two moments are read and written in four bytes, weights written in two; gradients move in
        # four, five times.
        num_bytes = elements * (3 * 2 * 4 + 2 + 5 * 4)
        assert optimizer_ms(costs, plan) == pytest.approx(num_bytes / PLAIN.memory_bytes_per_ms)
        in_place = resolve_plan(costs.spec, {LANGUAGE_MODEL: ModulePlugin(master_weights=False)})
        num_bytes = elements * (3 * 2 * 2 + 5 * 4)
        assert optimizer_ms(costs, in_place) == pytest.approx(num_bytes / PLAIN.memory_bytes_per_ms)
        half = resolve_plan(costs.spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2)})
        assert optimizer_ms(costs, half) < optimizer_ms(costs, plan)
        frozen = costs.with_spec(ModelSpec({LANGUAGE_MODEL: costs.spec.language_model.with_frozen(True)}))
        assert optimizer_ms(frozen, plan) == 0.0


class TestEngines:
    @pytest.mark.parametrize(
        ("flag", "tp_size"),
        [("fused", 1), ("fused_loss", 1), ("merged_sums", 2), ("hidden_sums", 2), ("split_norms", 2)],
    )
    def test_what_another_engine_does_is_faster(self, flag, tp_size):
        device = replace(PLAIN, link_gb_per_s=50.0)
        spec = text_model()
        ours, theirs = (
            layer_table(analytic_costs(spec, device, engine=engine), LANGUAGE_MODEL, tp_size).step_ms(4000, 4e6)
            for engine in (Engine(), replace(Engine(), **{flag: True}))
        )
        assert theirs[-1] < ours[-1] and (theirs <= ours).all()

    def test_stages_that_stand_still_while_they_send(self):
        device = replace(PLAIN, link_gb_per_s=1.0)
        blocked, ours = (
            step_ms(analytic_costs(text_model(), device, engine=Engine(blocking_messages=blocks)), 1, pp_size=4)
            for blocks in (True, False)
        )
        assert blocked > ours
        slow = Engine(blocking_messages=True, message_gb_per_s=(0.1, 0.1))
        assert step_ms(analytic_costs(text_model(), device, engine=slow), 1, pp_size=4) > 3 * blocked


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_keys_and_values_repeated_under_a_dense_mask_are_kept(kv_heads):
    """Bytes that one layer more keeps, with rows of unlike lengths, against those that autograd keeps."""
    width, rows, length = 512, 4, 256
    config = AutoConfig.for_model(
        "llama",
        hidden_size=width,
        intermediate_size=1408,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        vocab_size=64,
        attn_implementation="sdpa",
    )
    ids, mask = torch.zeros(rows, length, dtype=torch.long), torch.ones(rows, length, dtype=torch.long)
    mask[1:, 200:] = 0
    kept, predicted = [], []
    for num_layers in (1, 2):
        config.num_hidden_layers = num_layers
        net: Any = LlamaForCausalLM(config).to(dtype=torch.bfloat16)
        own = {p.untyped_storage().data_ptr() for p in net.parameters()}
        seen: dict[int, torch.UntypedStorage] = {}

        def pack(tensor, own=own, seen=seen):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = net(input_ids=ids, attention_mask=mask)
        kept.append(sum(storage.nbytes() for storage in seen.values()))
        del output
        spec = build_model_spec(net)
        costs = analytic_costs(spec, PLAIN)
        sizes = SampleSizes.of_sequences({LANGUAGE_MODEL: [[length], *([[200]] * (rows - 1))]})
        plan, step, _ = step_of(costs, sizes, rows)
        (held,) = activation_sizes(costs, plan, step, sizes).values()
        layer = costs.layers.layer(LANGUAGE_MODEL, 0, 1).activations
        per_layer = layer.square * held[0] + layer.token * held[1]
        predicted.append(num_layers * per_layer)
        assert grouped_copies(spec.language_model) == (2 * 6 * 64 if kv_heads == 2 else 0)
    one_more = (kept[1] - kept[0]) / (rows * length)
    assert (predicted[1] - predicted[0]) / (rows * length) == pytest.approx(one_more, rel=0.001)


def test_samples_are_arranged_by_windows_too():
    costs = analytic_costs(text_model(windows=(8,) * LAYERS, attention="bitfield"), PLAIN)
    table = layer_table(costs, LANGUAGE_MODEL)
    tokens = np.array([10.0, 1000.0])
    forward, backward = table.sample_ms(tokens, tokens**2)
    for index in range(2):
        both = table.times(tokens[index], tokens[index] ** 2)
        assert forward[index] == pytest.approx(both[0].sum() - table.forward[:, 2].sum())
        assert backward[index] == pytest.approx(both[1].sum() - table.backward[:, 2].sum())
    assert forward[1] < 110 * forward[0]  # in proportion to tokens, where squares would be 10,000 times as many
