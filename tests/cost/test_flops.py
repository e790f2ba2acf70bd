"""What MFU counts, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_mmparallel.cost import analytic_costs, model_flops
from hf_mmparallel.cost.stage_times import attended_squares
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, SampleSizes, resolve_plan
from hf_mmparallel.runtime.work import language_work
from hf_mmparallel.steps.step_planner import StepPlanner
from tests.cost.models import HIDDEN, LAYER_MATRICES, LAYERS, PLAIN, VOCABULARY, model

WINDOW = 8
LENGTHS = (20, 5)
# Two layers of four have the window: of 20 tokens each but the first eight sees eight, 20^2 - 12^2 squares.
WITHIN = {20: 256, 5: 25}
SQUARES = sum((WITHIN[length] + length**2) / 2 for length in LENGTHS)
PER_TOKEN = 3 * 2 * (LAYERS * LAYER_MATRICES + VOCABULARY * HIDDEN)
PER_SQUARE = 3 * LAYERS * 2 * HIDDEN


def spec_with(windows: tuple[int, ...], attention: str = "sdpa") -> ModelSpec:
    spec = model()
    part = replace(spec.language_model, windows=windows, attention=attention)
    return replace(spec, modules={LANGUAGE_MODEL: part})


def sizes_of(lengths) -> SampleSizes:
    tokens = np.array(lengths)
    return SampleSizes({LANGUAGE_MODEL: tokens}, {LANGUAGE_MODEL: tokens.astype(float) ** 2})


@pytest.mark.parametrize("attention", ["sdpa", "bitfield"])
def test_attention_under_a_window_counts_the_window_whatever_the_kernel_skips(attention):
    found = model_flops(spec_with((WINDOW, 0) * 2, attention), sizes_of(LENGTHS))
    assert found == PER_TOKEN * 25 + PER_SQUARE * (328 + 25)
    whole = model_flops(spec_with((), attention), sizes_of(LENGTHS))
    assert whole == PER_TOKEN * 25 + PER_SQUARE * (400 + 25)


def test_pairs_of_a_window_are_those_that_a_mask_lets_through():
    place = np.arange(20)
    behind = place[:, None] - place
    for window in (1, 8, 20, 64):
        seen = ((behind >= 0) & (behind < window)).sum()
        twice = float(attended_squares(spec_with((window,)).language_model, 20, 400))
        assert 2 * seen - min(window, 20) == twice  # a square stands for two pairs, and leaves out the diagonal


def test_planner_and_log_count_the_same():
    windows = (WINDOW, 0) * 2
    mask = torch.zeros(2, 20, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    tokens, squares = language_work({"input_ids": torch.zeros_like(mask), "attention_mask": mask}, windows)
    assert (int(tokens), float(squares)) == (25, SQUARES)
    assert language_work({"input_ids": torch.zeros(3, 20)}, windows) == (60, 3 * 328)
    spec = spec_with(windows)
    costs = analytic_costs(spec, PLAIN)
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin()}, num_microbatches=1)
    step_ms = 3.0
    found = StepPlanner(costs, plan, [], 2).utilisation(sizes_of(LENGTHS), step_ms)
    assert found == pytest.approx((PER_TOKEN * 25 + PER_SQUARE * SQUARES) / (1e9 * PLAIN.bf16_tflops * step_ms))


def test_windows_of_an_encoder_are_whole_squares():
    spec = model()
    part = replace(spec.modules["vision"], windows=(4, 4, 4, 0))
    assert float(attended_squares(part, 16, 256)) == (3 * 64 + 256) / 4  # each of 16 patches sees four, or all
