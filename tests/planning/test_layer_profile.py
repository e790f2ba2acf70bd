"""Layers timed one at a time, by a clock that counts operations instead of time."""

from functools import cache

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_mmparallel.cost import find_device, layer_flops, module_flops
from hf_mmparallel.cost.profile import LayerProfile, MeasuredPoint, measured_costs
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL
from hf_mmparallel.planning.layer_profile import Chunk, ProfileSettings, profile_layers
from hf_mmparallel.planning.layer_runs import Forward, ModuleRuns, Skeleton, profile_clock
from tests import any_to_any, tiny
from tests.deep_cases import deep

torch.set_num_threads(1)
HIDDEN, HEADS = 64, 4


class OperationClock:
    """An operation takes a millisecond."""

    def __init__(self, counter: FlopCounterMode):
        self.counter = counter

    def mark(self) -> int:
        return self.counter.get_total_flops()

    def ms(self, start: int, end: int) -> float:
        return float(end - start)


@cache
def counted(family: str, lengths=(8, 16, 32), limit_s: float = float("inf"), **options) -> LayerProfile:
    """The operations of a tiny model's layers, in one measurement of each chunk."""
    settings = ProfileSettings(lengths=lengths, budget_s=0.0, num_rounds=1, limit_s=limit_s, **options)
    with FlopCounterMode(display=False) as counter:
        return profile_layers(tiny.FAMILIES[family]().config, settings, OperationClock(counter))


def test_measured_operations_are_those_of_the_shapes():
    profile, spec = counted("llama", attention="eager"), build_model_spec(tiny.FAMILIES["llama"]())
    before, layer, after = profile.layers
    kinds = [("before", (-1,)), ("LlamaDecoderLayer", (0, 1, 2, 3)), ("after", (4,))]
    assert [(found.kind, found.layers) for found in profile.layers] == kinds
    assert [(point.tokens, point.sequences) for point in layer.points] == [(8, 1), (16, 1), (32, 1), (32, 2)]
    per_token, per_square = layer_flops(spec, LANGUAGE_MODEL, 0)
    # A gradient of an input, like that of a weight, takes as many operations as the forward; the two products of
    # attention have two factors each. Not all of a causal square is computed in theory; eager attention does.
    for curve, token, square in (
        (layer.cost.forward, per_token, 2 * per_square),
        (layer.cost.data_gradient, per_token, 4 * per_square),
        (layer.cost.weight_gradient, per_token, 0.0),
    ):
        assert (curve.token, curve.square) == pytest.approx((token, square), rel=1e-6, abs=1e-9)
    head = layer_flops(spec, LANGUAGE_MODEL, 4)[0]
    assert [after.cost.forward.token, after.cost.data_gradient.token] == pytest.approx([head, head])
    assert before.cost.forward.token == 0.0 and before.cost.activations.token == pytest.approx(8)  # ids of a lookup
    assert all(curve.fits for found in profile.layers for curve in found.curves.values())


def test_bytes_are_what_autograd_keeps():
    eager, sdpa = (counted("llama", attention=name).layers[1].cost for name in ("eager", "sdpa"))
    assert eager.activations.square == pytest.approx(4 * HEADS)
    assert sdpa.activations.square == pytest.approx(0.0, abs=1e-6)
    # With frozen weights no input of a matrix is kept: two of the attention, two of the feed-forward part.
    inputs = 4 * (HIDDEN + HIDDEN + HIDDEN + 128)
    assert sdpa.activations.token - sdpa.frozen_activations.token >= inputs
    model = tiny.FAMILIES["llama"]()
    layer, kept = model.model.layers[0], {}
    hidden = torch.randn(1, 32, HIDDEN, requires_grad=True)
    positions = model.model.rotary_emb(hidden, torch.arange(32)[None])
    weights = {p.untyped_storage().data_ptr() for p in (*layer.parameters(), *positions)}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(hidden, position_embeddings=positions)
    total = sum(storage.nbytes() for place, storage in kept.items() if place not in weights)
    assert total == pytest.approx(sdpa.activations(32, 32**2))
    del output


def test_packed_rows_are_measured_under_bitfield_attention():
    profile = counted("llava", attention="bitfield", lengths=(8, 16), modules=(LANGUAGE_MODEL,))
    assert profile.attention == "bitfield" and not profile.left_out
    (layer,) = [found for found in profile.layers if found.kind == "LlamaDecoderLayer"]
    assert [(point.tokens, point.sequences) for point in layer.points] == [(8, 1), (16, 1), (16, 2)]


@pytest.mark.parametrize(("family", "module"), [("gemma3", LANGUAGE_MODEL), ("qwen2_5_vl", "vision")])
def test_layers_that_differ_are_measured_apart(family, module):
    kinds = [found.layers for found in counted(family, lengths=(16,), modules=(module,)).layers[1:-1]]
    assert kinds == [(0, 2), (1, 3)]


@pytest.mark.parametrize("family", [name for name in tiny.FAMILIES if name not in tiny.TEXT_ONLY])
def test_encoders_get_inputs_of_their_own_without_a_processor(family):
    skeleton = Skeleton.of(tiny.FAMILIES[family]().config, torch.device("cpu"), None, None)
    for name in skeleton.spec.encoders:
        runs = ModuleRuns(skeleton, name, profile_clock(torch.device("cpu")), None)
        small, large = runs.inputs(16, 1), runs.inputs(128, 2)
        assert 0 < small.tokens < large.tokens and large.tokens == pytest.approx(128, rel=0.3)
        assert large.sequences >= 2
        args, kwargs = runs.arguments(large.batch)
        hidden = args[0] if args else kwargs["hidden_states"]
        assert hidden.shape[:-1].numel() == large.tokens


def test_parts_of_an_encoder_take_the_operations_of_their_weights():
    profile = counted("qwen2_vl", modules=("vision",), attention="eager")
    spec, (before, block, after) = build_model_spec(tiny.FAMILIES["qwen2_vl"]()), profile.layers
    assert before.cost.forward.token == pytest.approx(layer_flops(spec, "vision", -1)[0])
    assert block.cost.forward.token == pytest.approx(layer_flops(spec, "vision", 0)[0])
    assert block.cost.forward.square == pytest.approx(layer_flops(spec, "vision", 0)[1])
    merged = [use.parameter for use in spec.uses["vision", 4] if use.multiplies]  # of four patches at a time
    assert after.cost.forward.token == pytest.approx(2 * sum(p.num_elements for p in merged) / 4)
    assert not profile.left_out and before.cost.data_gradient.token == 0.0


def test_one_rank_of_a_layout_keeps_its_share():
    whole, half = (counted("llama", lengths=(16,), tp_sizes=(size,)).layers[1] for size in (1, 2))
    assert half.tp_size == 2 and half.layers == whole.layers and half.shapes == whole.shapes
    split, same = half.points[0].activations, whole.points[0].activations
    assert split == same / 2  # each keeps its share of rows, or of features
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("kind", [deep(kind, unless=kind == "dit") for kind in any_to_any.KINDS])
def test_generators_are_measured_and_blocks_that_are_no_chain_together(kind: str):
    model = any_to_any.compose(kind)
    rounds = {"budget_s": 0.0, "num_rounds": 1, "limit_s": float("inf")}  # the clock does not tell seconds
    settings = ProfileSettings(lengths=(8, 16), modules=("image",), **rounds)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        profile = profile_layers(model.config, settings, OperationClock(counter))
    spec = build_model_spec(model)
    costs = measured_costs(spec, find_device("cpu"), profile)
    layers = [costs.layers.layer("image", index, 1) for index in range(-1, spec.modules["image"].num_layers + 1)]
    assert not profile.left_out and all(
        layer.activations(8, 32) >= layer.frozen_activations(8, 32) for layer in layers
    )
    per_token, per_square = module_flops(spec, "image")
    counted = 8 * per_token + 2 * any_to_any.NUM_ROWS**2 * per_square  # two items
    assert sum(layer.forward(8, 32) for layer in layers) == pytest.approx(counted, rel=0.02)
    assert sum(layer.weight_gradient(8, 32) for layer in layers) > 0.5 * counted
    assert sum(layer.activations(8, 32) for layer in layers) > 0


def test_only_one_layer_has_memory_and_the_skeleton_stays_hollow():
    skeleton = Skeleton.of(tiny.FAMILIES["llama"]().config, torch.device("cpu"), torch.float32, None)

    def real() -> int:
        return sum(p.untyped_storage().nbytes() > 4 for p in skeleton.model.parameters())

    assert real() == 0
    with skeleton.real(LANGUAGE_MODEL, [2], None) as layer:
        assert layer is not None and real() == len(list(layer.parameters()))
        assert all(p.isfinite().all() for p in layer.parameters())
    with skeleton.real(LANGUAGE_MODEL, [4], None) as layer:
        assert layer is None and real() == 2
    assert real() == 0


def test_the_quickest_round_counts():
    backwards = {True: [10.0, 9.0, 14.0], False: [8.0, 9.0, 6.0]}
    chunk = Chunk(64, 2, Forward, {True: 7.0, False: 5.0}, [5.0, 3.0, 4.0], backwards)
    assert chunk.point == MeasuredPoint(64, 2, 3.0, 6.0, 3.0, 7.0, 5.0) and chunk.seconds == pytest.approx(0.012)


def test_each_round_times_each_chunk_trained_and_frozen():
    class Counting:
        marks = 0

        def mark(self) -> int:
            self.marks += 1
            return 0

        def ms(self, start: int, end: int) -> float:
            return 1.0

    once, often = Counting(), Counting()
    for clock, num_rounds in ((once, 1), (often, 3)):
        settings = ProfileSettings(lengths=(16,), budget_s=0.0, num_rounds=num_rounds)
        profile_layers(tiny.FAMILIES["llama"]().config, settings, clock)
    num_parts, ends = 3, 4  # of a forward and of a backward
    assert often.marks - once.marks == 2 * num_parts * 2 * ends


def test_long_chunks_and_what_fails_are_left_out():
    profile = counted("llama", limit_s=2e3)  # two thousand seconds are two million operations
    (layer,) = [found for found in profile.layers if found.kind == "LlamaDecoderLayer"]
    assert [point.tokens for point in layer.points] == [8]
    assert any("LlamaDecoderLayer, tp 1: 16 tokens would take over 2000 s" in text for text in profile.left_out)
    config, settings = tiny.FAMILIES["llava"]().config, ProfileSettings(lengths=(16,), budget_s=0.0, num_rounds=1)
    config.vision_config.num_channels = 5  # of images that no processor makes; any number will do
    assert {layer.module for layer in profile_layers(config, settings).layers} == {"vision", LANGUAGE_MODEL}
    with pytest.raises(ValueError, match=r"no module `audio`.*\['vision', 'language_model'\]"):
        profile_layers(config, ProfileSettings(modules=("audio",)))
    config.vision_feature_layer = 99
    found = profile_layers(config, settings)
    assert {layer.module for layer in found.layers} == {LANGUAGE_MODEL}
    assert found.left_out[0].startswith("`vision` with tp 1: No inputs of `vision`")


def test_a_profile_gives_the_costs_of_its_model():
    profile, spec = counted("llava", lengths=(16,)), build_model_spec(tiny.FAMILIES["llava"]())
    costs = measured_costs(spec, find_device("h100"), profile)
    for name, module in spec.modules.items():
        total = sum(costs.layers.layer(name, index, 1).forward(640, 640**2 / 10) for index in range(module.num_layers))
        assert total == pytest.approx(4 * costs.layers.layer(name, 0, 1).forward(640, 640**2 / 10))
        assert total > 0
    assert costs.value_bytes == 4
