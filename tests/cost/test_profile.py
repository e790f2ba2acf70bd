"""Curves through measured points, files of them, and costs of layers taken from them."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.cost import CostModel, LayerCost, Polynomial, analytic_costs, find_device, layer_table
from hf_mmparallel.cost.profile import (
    CURVES,
    FIT_TOLERANCE,
    TIMES,
    LayerProfile,
    MeasuredLayer,
    MeasuredLayers,
    MeasuredPoint,
    fit_curve,
    measured_costs,
    shape_digest,
)
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ParameterSpec
from tests.cost import models
from tests.plan.specs import with_experts

CHUNKS = ((64, 1), (256, 1), (1024, 1), (1024, 4), (4096, 1), (4096, 16))
H100 = find_device("h100")
UNLINKED = replace(H100, link_gb_per_s=float("inf"), collective_latency_us=0.0)


def points(cost: LayerCost) -> tuple[MeasuredPoint, ...]:
    """What a layer of this cost takes, without noise."""
    found = []
    for tokens, sequences in CHUNKS:
        values = {name: getattr(cost, name)(tokens, tokens**2 / sequences) for name in CURVES}
        found.append(MeasuredPoint(tokens, sequences, **values))
    return tuple(found)


def forwards(times: dict[tuple[int, int], float]) -> list[MeasuredPoint]:
    return [MeasuredPoint(*chunk, ms, 0.0, 0.0, 0.0, 0.0) for chunk, ms in times.items()]


def times(factor: float) -> LayerCost:
    """Costs of a layer with a term of each order."""
    forward = Polynomial(2e-7, 3e-4, 0.05) * factor
    return LayerCost(forward, forward * 1.5, forward * 0.5, Polynomial(0.0, 4000.0, 96.0), Polynomial(1.0, 900.0))


def measured_layer(spec, module: str, index: int, tp_size: int, found, *window: int) -> MeasuredLayer:
    return MeasuredLayer(module, "Layer", (index,), shape_digest(spec, module, index), tp_size, found, *window)


def profile_of(spec, factors: dict[tuple[str, int], float], tp_sizes=(1,)) -> LayerProfile:
    """A profile in which (module, layer) takes this factor of [`times`]; the ranks of a layout share it evenly."""
    layers = [
        measured_layer(spec, module, index, tp_size, points(times(factor / tp_size)))
        for tp_size in tp_sizes
        for (module, index), factor in factors.items()
    ]
    return LayerProfile("tiny", "a device", "bfloat16", None, "sdpa", {"torch": "2"}, tuple(layers))


def missing(costs: CostModel) -> list[str]:
    assert isinstance(costs.layers, MeasuredLayers)
    return costs.layers.missing


LAYERS = {(LANGUAGE_MODEL, index): 2.0 + index for index in range(-1, models.LAYERS + 1)}
coefficients = st.one_of(st.just(0.0), st.floats(1e-3, 1e3))


@settings(max_examples=50)
@given(st.tuples(coefficients, coefficients, coefficients))
def test_curves_of_points_without_noise_are_exact(found):
    square, token, constant = found
    wanted = Polynomial(square * 1e-6, token * 1e-3, constant)
    curve = fit_curve(forwards({chunk: wanted(chunk[0], chunk[0] ** 2 / chunk[1]) for chunk in CHUNKS}), "forward")
    for tokens, sequences in CHUNKS:
        squares = tokens**2 / sequences
        assert curve.polynomial(tokens, squares) == pytest.approx(wanted(tokens, squares), rel=1e-6)
    assert curve.fits and curve.worst_error < 1e-6
    if min(found) > 0:
        assert curve.polynomial.square == pytest.approx(wanted.square, rel=1e-4)
        assert curve.polynomial.token == pytest.approx(wanted.token, rel=1e-4)


@settings(max_examples=50)
@given(st.lists(st.floats(1e-3, 1e3), min_size=len(CHUNKS), max_size=len(CHUNKS)))
def test_no_coefficient_is_negative_whatever_was_measured(found):
    curve = fit_curve(forwards(dict(zip(CHUNKS, found, strict=True))), "forward")
    polynomial = curve.polynomial
    assert min(polynomial.square, polynomial.token, polynomial.constant) >= 0.0
    assert curve.fits == (curve.worst_error <= FIT_TOLERANCE)


def test_a_curve_that_does_not_fit_says_where():
    exact = {chunk: 1e-3 * chunk[0] + 0.1 for chunk in CHUNKS}
    curve = fit_curve(forwards({**exact, (1024, 4): 3 * exact[1024, 4]}), "forward")
    assert not curve.fits and curve.worst_point == (1024, 4)
    assert curve.worst_error > 0.3


def test_small_times_count_as_much_as_large_ones():
    # A least-squares fit of absolute errors would take the first points' times for noise of the last ones.
    exact = {(n, 1): 1e-3 * n for n in (64, 256, 1024, 4096, 16384)}
    noisy = {**exact, (4096, 1): 1.1 * exact[4096, 1], (16384, 1): 0.9 * exact[16384, 1]}
    curve = fit_curve(forwards(noisy), "forward")
    assert curve.polynomial(64, 64**2) == pytest.approx(0.064, rel=0.05)


def test_squares_are_left_alone_where_all_sequences_have_one_length():
    curve = fit_curve(forwards({(577 * n, n): 2e-3 * 577 * n + 0.5 for n in (1, 2, 7, 28)}), "forward")
    assert curve.polynomial.square == 0.0
    assert curve.polynomial.token == pytest.approx(2e-3) and curve.polynomial.constant == pytest.approx(0.5)


def test_what_trained_weights_add_counts_relative_to_the_whole_backward():
    found = [MeasuredPoint(n, 1, 1.0, 10.0, 0.5 + 0.1 * (n == 256), 0.0, 0.0) for n in (64, 128, 256)]
    assert fit_curve(found, "weight_gradient").worst_error < 0.02
    nothing = [replace(point, data_gradient=0.0, weight_gradient=0.0) for point in found]
    assert fit_curve(nothing, "weight_gradient").polynomial == Polynomial() and fit_curve(nothing, "forward").fits


def test_a_profile_is_read_as_it_was_written(tmp_path):
    changes = {"left_out": ("`vision`: no inputs",), "autocast": "float16", "constants": {"launch_us": 7.5}}
    profile, path = replace(profile_of(models.model(), LAYERS), **changes), tmp_path / "profile.json"
    profile.save(path)
    assert LayerProfile.load(path) == profile
    text = path.read_text()
    assert json.loads(text)["profile"]["device"] == "a device" and profile.value_bytes == 2
    assert len(text) < 5000 * len(profile.layers)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("modules: {}", "holds no costs"),
        ("[1]", "holds no costs"),
        ('{"layers": []}', "holds no costs"),
        ('{"profile": null, "calibration": {}}', "has no layer profile"),
        ('{"profile": {"layers": [{}]}}', "fields missing"),
        ('{"profile": {}}', "fields missing"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, text, complaint):
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        LayerProfile.load(tmp_path / "profile.json")


def test_a_constant_that_no_device_has_is_refused(tmp_path):
    replace(profile_of(models.model(), LAYERS), constants={"speed": 1.0}).save(tmp_path / "profile.json")
    with pytest.raises(ValueError, match="`speed`"):
        LayerProfile.load(tmp_path / "profile.json")


def test_a_profile_of_another_model_is_refused():
    profile, spec = profile_of(models.model(), LAYERS), models.model()
    parameters = spec.language_model.parameters
    wider = tuple(replace(p, shape=(99, 64)) if ".2.mlp.up" in p.name else p for p in parameters)
    with pytest.raises(ValueError, match="measured for `tiny`.*layer 2 of `language_model`"):
        measured_costs(models.model(parameters=wider), H100, profile)
    with pytest.raises(ValueError, match=r"\['language_model'\], the model \['vision'\]"):
        profile.check(replace(spec, modules={"vision": spec.modules["vision"]}))


def test_adapters_and_frozen_weights_do_not_make_another_model():
    module = models.model().language_model

    def spec_of(*parts: tuple[str, tuple[int, int], bool]) -> ModelSpec:
        parameters = [
            ParameterSpec(f"{module.stack}.{layer}.attention.{name}weight", shape, layer, trainable=trainable)
            for layer in range(models.LAYERS)
            for name, shape, trainable in parts
        ]
        return ModelSpec({LANGUAGE_MODEL: replace(module, parameters=tuple(parameters))})

    shape = (4 * models.HIDDEN, models.HIDDEN)
    base, other = spec_of(("", shape, True)), spec_of(("", (8, 8), True))
    lora = spec_of(("base_layer.", shape, False), ("lora_A.default.", (8, models.HIDDEN), True))
    digests = {shape_digest(base, LANGUAGE_MODEL, index) for index in range(models.LAYERS)}
    assert len(digests) == 1  # layers that are alike have one
    profile_of(base, {(LANGUAGE_MODEL, 1): 1.0}).check(lora)
    with pytest.raises(ValueError, match="layer 1 of `language_model`"):
        profile_of(base, {(LANGUAGE_MODEL, 1): 1.0}).check(other)


def test_measured_layers_are_the_curves():
    spec = models.model()
    costs = measured_costs(spec, H100, profile_of(spec, LAYERS))
    for (module, index), factor in LAYERS.items():
        layer = costs.layers.layer(module, index, 1)
        for name in CURVES:
            assert getattr(layer, name)(2000, 3e6) == pytest.approx(getattr(times(factor), name)(2000, 3e6), abs=1e-9)
    assert layer_table(costs, LANGUAGE_MODEL).forward[1, 2] == pytest.approx(2 * 0.05)
    assert missing(costs) == [] and costs.value_bytes == 2


def test_constants_of_the_device_are_what_is_missing_is_counted_by():
    spec = models.model()
    constants = {"launch_us": 40.0, "matmul_efficiency": 0.2, "bf16_tflops": 500.0, "memory_gb_per_s": 1000.0}
    profile = replace(profile_of(spec, {("vision", 0): 1.0}), constants=constants)
    costs = measured_costs(spec, H100, profile)
    assert costs.device.flops_per_ms == 500e9 * 0.2 and costs.device.link_gb_per_s == H100.link_gb_per_s
    assert isinstance(costs.layers, MeasuredLayers)
    plain = analytic_costs(spec, replace(H100, launch_us=8.0)).layers.layer(LANGUAGE_MODEL, 0, 1)
    found = costs.layers.fallback.layer(LANGUAGE_MODEL, 0, 1)
    assert found.launch_ms == pytest.approx(tuple(5 * own for own in plain.launch_ms))


def test_sums_over_tensor_parallel_ranks_are_added():
    spec = models.model()
    costs = measured_costs(spec, H100, profile_of(spec, LAYERS, tp_sizes=(1, 2)))
    layer, counted = costs.layers.layer(LANGUAGE_MODEL, 1, 2).with_sums, analytic_costs(spec, H100).layers
    unlinked = analytic_costs(spec, UNLINKED).layers
    with_links, without = (source.layer(LANGUAGE_MODEL, 1, 2).with_sums for source in (counted, unlinked))
    sums = with_links.forward.token - without.forward.token
    backward_sums = with_links.data_gradient.token - without.data_gradient.token
    assert 0 < sums == pytest.approx(backward_sums)
    own = times(3.0 / 2)
    assert layer.forward.token == pytest.approx(own.forward.token + sums)
    assert layer.data_gradient.token == pytest.approx(own.data_gradient.token + backward_sums)
    assert layer.weight_gradient.token == pytest.approx(own.weight_gradient.token)
    # One message there and one back for each of two sums: latencies are no part of what is measured.
    assert layer.forward.constant == pytest.approx(own.forward.constant + 2 * 2 * H100.link_latency_us / 1e3)
    assert missing(costs) == []


def windowed(window: int, attention: str = "bitfield") -> ModelSpec:
    """The model with a window in all layers of its language model but the first."""
    return models.model(windows=(0, *[window] * (models.LAYERS - 1)), attention=attention)


def seen(tokens: float, squares: float, window: int) -> float:
    """Twice the pairs within a causal window, as plans count them, of sequences of one length."""
    length = squares / tokens
    return squares if length <= window else tokens * (2 * window - window**2 / length)


def windowed_points(cost: LayerCost, window: int) -> tuple[MeasuredPoint, ...]:
    """What a layer with a window takes, whose bytes grow with all squares."""
    found = []
    for point in points(cost):
        squares = seen(point.tokens, point.squares, window)
        found.append(replace(point, **{name: getattr(cost, name)(point.tokens, squares) for name in TIMES}))
    return tuple(found)


def test_curves_of_layers_with_a_window_are_of_the_squares_that_plans_count():
    spec, window = windowed(128), 128
    found = windowed_points(times(3.0), window)
    layer = measured_layer(spec, LANGUAGE_MODEL, 2, 1, found, window)
    assert not layer.misfits
    profile = replace(profile_of(spec, {}), layers=(layer,))
    without = replace(layer, window=0)
    for known in (profile, replace(profile, layers=(without,))):  # the window of the model counts
        table = layer_table(measured_costs(spec, H100, known), LANGUAGE_MODEL)
        for point in found:
            forward, _ = table.times(point.tokens, point.squares)
            assert forward[3] == pytest.approx(point.forward, rel=1e-6)
    # An attention function that computes all pairs has no windows, whatever was measured.
    whole = windowed(128, "sdpa")
    assert measured_costs(whole, H100, profile).layers.layer(LANGUAGE_MODEL, 2, 1).forward == (
        without.curves["forward"].polynomial
    )


def test_layers_with_a_window_scale_others_by_what_they_attend_to():
    """A machine three times as slow as counted gives a factor of three, also where windows were measured."""
    spec = windowed(128)
    counted = analytic_costs(spec, UNLINKED).layers
    own = counted.layer(LANGUAGE_MODEL, 2, 1)
    slow = replace(own, **{name: getattr(own, name) * 3 for name in TIMES})
    found = [replace(point, activations=1.0, frozen_activations=1.0) for point in windowed_points(slow, 128)]
    layer = measured_layer(spec, LANGUAGE_MODEL, 2, 1, found, 128)
    costs = measured_costs(spec, UNLINKED, replace(profile_of(spec, {}), layers=(layer,)))
    for place in ((LANGUAGE_MODEL, 0, 1), (LANGUAGE_MODEL, 2, 2), ("vision", 1, 1)):
        for name in TIMES:
            scaled, plain = (getattr(layers.layer(*place), name)(4096, 4096**2) for layers in (costs.layers, counted))
            assert scaled == pytest.approx(3 * plain)


def test_what_is_missing_is_counted_and_scaled():
    spec = models.model()
    counted = analytic_costs(spec, UNLINKED).layers
    inner = {key: factor for key, factor in LAYERS.items() if 0 <= key[1] < models.LAYERS}
    profile = profile_of(spec, inner)
    costs = measured_costs(spec, UNLINKED, profile)

    def taken(layer, name: str) -> float:
        """Of all of the measured chunks."""
        return sum(getattr(layer, name)(tokens, tokens**2 / sequences) for tokens, sequences in CHUNKS)

    # Another layout of a measured layer, by that layer; another module, by all that is measured.
    for name in ("forward", "data_gradient", "activations"):
        ratio = taken(times(4.0), name) / taken(counted.layer(LANGUAGE_MODEL, 2, 1), name)
        found = taken(costs.layers.layer(LANGUAGE_MODEL, 2, 4), name)
        assert found == pytest.approx(ratio * taken(counted.layer(LANGUAGE_MODEL, 2, 4), name))
    assert len(missing(costs)) == 1 and "tp 4 is not in the profile" in missing(costs)[0]
    total = sum(taken(times(factor), "forward") for factor in inner.values())
    ratio = total / sum(taken(counted.layer(module, index, 1), "forward") for module, index in inner)
    found = taken(costs.layers.layer("vision", 0, 1), "forward")
    assert found == pytest.approx(ratio * taken(counted.layer("vision", 0, 1), "forward"))
    assert "`vision` with tp 1" in missing(costs)[1] and "of the other modules" in missing(costs)[1]


def test_what_nothing_is_counted_for_stays_as_measured_in_other_layouts():
    spec = models.model()
    costs = measured_costs(spec, H100, profile_of(spec, {**LAYERS, ("vision", -1): 1.0}))
    before = costs.layers.layer("vision", -1, 8)
    assert analytic_costs(spec, H100).layers.layer("vision", -1, 8).forward == Polynomial()
    assert before.forward == costs.layers.layer("vision", -1, 1).forward != Polynomial()


def test_what_is_measured_of_whole_experts_grows_with_the_tokens_of_the_busiest_rank():
    spec = with_experts(models.text_model(), 8)
    profile = profile_of(spec, LAYERS)
    costs = measured_costs(spec, models.PLAIN, profile).with_expert_peaks({LANGUAGE_MODEL: {4: 3.0}})
    busy, even = (costs.in_layout({LANGUAGE_MODEL: (tuple(range(count)), False)}) for count in (4, 2))
    whole, *shared = (own.layers.layer(LANGUAGE_MODEL, 0, 1).forward.token for own in (costs, even, busy))
    assert shared[0] == pytest.approx(whole) and shared[1] > 1.01 * whole
