"""Operations of what is behind the layers of encoders, against those that models take."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_mmparallel.cost import analytic_costs, layer_flops
from hf_mmparallel.cost.stage_times import trainable_share
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec
from tests import tiny
from tests.cost.models import PLAIN

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
