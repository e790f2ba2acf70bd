"""Operations: those that MFU counts, worked out by hand, and those of what is behind the layers of encoders."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_mmparallel.cost import analytic_costs, layer_flops, model_flops, module_flops
from hf_mmparallel.cost.layer_table import trainable_share
from hf_mmparallel.cost.stage_times import attended_squares
from hf_mmparallel.cost.step_planner import StepPlanner
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, SampleSizes, resolve_plan
from hf_mmparallel.plan.model_spec import STATE_CHUNK
from hf_mmparallel.runtime.work import language_work
from tests import any_to_any, tiny
from tests.cost.models import HIDDEN, LAYER_MATRICES, LAYERS, PLAIN, VOCABULARY, model, text_model

WINDOW = 8
LENGTHS = (20, 5)
# Two layers of four have the window: of 20 tokens each but the first eight sees eight, 20^2 - 12^2 squares.
WITHIN = {20: 256, 5: 25}
SQUARES = sum((WITHIN[length] + length**2) / 2 for length in LENGTHS)
PER_TOKEN = 3 * 2 * (LAYERS * LAYER_MATRICES + VOCABULARY * HIDDEN)
PER_SQUARE = 3 * LAYERS * 2 * HIDDEN


def sizes_of(lengths) -> SampleSizes:
    tokens = np.array(lengths)
    return SampleSizes({LANGUAGE_MODEL: tokens}, {LANGUAGE_MODEL: tokens.astype(float) ** 2})


@pytest.mark.parametrize("attention", ["sdpa", "bitfield"])
def test_attention_under_a_window_counts_the_window_whatever_the_kernel_skips(attention):
    found = model_flops(text_model(windows=(WINDOW, 0) * 2, attention=attention), sizes_of(LENGTHS))
    assert found == PER_TOKEN * 25 + PER_SQUARE * (328 + 25)
    whole = model_flops(text_model(attention=attention), sizes_of(LENGTHS))
    assert whole == PER_TOKEN * 25 + PER_SQUARE * (400 + 25)


def test_pairs_of_a_window_are_those_that_a_mask_lets_through():
    place = np.arange(20)
    behind = place[:, None] - place
    for window in (1, 8, 20, 64):
        seen = ((behind >= 0) & (behind < window)).sum()
        twice = float(attended_squares(text_model(windows=(window,)).language_model, 20, 400))
        assert 2 * seen - min(window, 20) == twice  # a square stands for two pairs, and leaves out the diagonal
    encoder = replace(model().modules["vision"], windows=(4, 4, 4, 0))
    assert float(attended_squares(encoder, 16, 256)) == (3 * 64 + 256) / 4  # each of 16 patches sees four, or all


def test_planner_and_log_count_the_same():
    windows = (WINDOW, 0) * 2
    mask = torch.zeros(2, 20, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    tokens, squares = language_work({"input_ids": torch.zeros_like(mask), "attention_mask": mask}, windows)
    assert (int(tokens), float(squares)) == (25, SQUARES)
    assert language_work({"input_ids": torch.zeros(3, 20)}, windows) == (60, 3 * 328)
    spec = text_model(windows=windows)
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin()}, num_microbatches=1)
    found = StepPlanner(analytic_costs(spec, PLAIN), plan, [], 2).utilisation(sizes_of(LENGTHS), 3.0)
    assert found == pytest.approx((PER_TOKEN * 25 + PER_SQUARE * SQUARES) / (1e9 * PLAIN.bf16_tflops * 3.0))


NUM_PATCHES, PATCH_VALUES = 16, 3 * 2 * 8 * 8
MERGER = re.compile(r"\.(merger|deepstack_merger_list\.\d+)$")


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_merger_takes_one_row_for_several_patches(family):
    model = tiny.FAMILIES[family]()
    spec = build_model_spec(model)
    tower = model.get_submodule(spec.modules["vision"].tower)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(torch.randn(NUM_PATCHES, PATCH_VALUES), grid_thw=torch.tensor([[1, 4, 4]]))
    counted = sum(sum(own.values()) for name, own in counter.get_flop_counts().items() if MERGER.search(name))
    per_token, per_square = layer_flops(spec, "vision", spec.modules["vision"].num_layers)
    assert (NUM_PATCHES * per_token, per_square) == (counted, 0.0)


def test_the_trained_share_of_a_merger_is_that_of_its_operations():
    spec = build_model_spec(tiny.FAMILIES["qwen3_vl"]())
    vision = spec.modules["vision"].with_frozen([r"visual\.merger", r"deepstack_merger_list\.[12]"])
    assert trainable_share(ModelSpec({**spec.modules, "vision": vision}), "vision", 4) == pytest.approx(1 / 4)


@pytest.mark.parametrize("kind", any_to_any.KINDS)
def test_a_generator_counts_what_its_forward_computes_per_row(kind: str):
    model, batch = any_to_any.compose(kind), any_to_any.make_batch(kind)
    rows = torch.randn(int((batch["input_ids"] == any_to_any.DRAWN_TOKEN).sum()), 64)
    generator = model.generators["image"]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        generator.loss(rows, **{name: batch[name] for name in generator.entries if name in batch})
    per_token, per_square = module_flops(build_model_spec(model), "image")
    counted = len(rows) * per_token + len(rows) * any_to_any.NUM_ROWS * per_square
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.02)  # all but the embedding of time steps


def test_what_tensor_parallelism_leaves_whole_takes_as_long_on_two_ranks():
    spec = build_model_spec(tiny.FAMILIES["qwen2_vl"]())
    layers = analytic_costs(spec, PLAIN).layers
    one, two = ([layers.layer("vision", index, size).forward for index in (0, 4)] for size in (1, 2))
    assert two[1] == one[1]  # the merger
    assert two[0].square == one[0].square  # queries, keys and values are one matrix
    attention = 4 * 32 * 32 / (4 * 32 * 32 + 2 * 32 * 64)
    assert two[0].constant == pytest.approx(one[0].constant * (attention + (1 - attention) / 2))
    text = [layers.layer(LANGUAGE_MODEL, 0, size).forward for size in (1, 2)]
    assert text[1].square == pytest.approx(text[0].square / 2)


def test_layers_with_a_state_count_as_attention_to_the_tokens_of_a_chunk():
    kinds = ("state", "attention", "both", "state")
    found = text_model(layer_kinds=kinds).language_model
    assert found.needed_windows == (STATE_CHUNK, 0, 0, STATE_CHUNK)
    assert [found.window(layer) for layer in range(LAYERS)] == [STATE_CHUNK, 0, 0, STATE_CHUNK]
    assert found.needed_windows == text_model(windows=(STATE_CHUNK, 0, 0, STATE_CHUNK)).language_model.needed_windows
    assert found.attention_windows == {0: 2}
    sliding = text_model(layer_kinds=kinds, windows=(0, WINDOW, 0, 0)).language_model
    assert sliding.needed_windows == (STATE_CHUNK, WINDOW, 0, STATE_CHUNK)
    assert sliding.attention_windows == {WINDOW: 1, 0: 1}
