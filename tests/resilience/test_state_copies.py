"""What is copied: slices, bytes, and who sends."""

import numpy as np
import pytest

from hf_mmparallel.plan import LANGUAGE_MODEL, Cut, ModulePlugin, ParameterSpec, StorageSettings, resolve_plan
from hf_mmparallel.resilience.state_copies import PlacedPlan, Slice, state_copies, value_bytes
from tests.plan.specs import model_spec


@pytest.mark.parametrize(("dim", "num_blocks"), [(0, 1), (1, 1), (0, 2), (1, 3)])
def test_slices_are_what_a_cut_takes(dim: int, num_blocks: int) -> None:
    """Together they are the parameter, each element once; blocks, as of gate and up matrices, are each cut."""
    parameter = ParameterSpec("weight", (24, 36), 0)
    covered = np.zeros(parameter.shape, int)
    for index in range(4):
        part = Slice.of(parameter, [Cut("tp", dim, index, 4, num_blocks)])
        view, size = np.moveaxis(covered, dim, 0), 0
        for block, (start, stop) in enumerate(part.ranges):
            assert block * len(view) // num_blocks <= start < stop <= (block + 1) * len(view) // num_blocks
            view[start:stop] += 1
            size += view[start:stop].size
        assert part.num_elements(parameter) == size == parameter.num_elements // 4
    assert (covered == 1).all()
    assert Slice.of(parameter, []).num_elements(parameter) == parameter.num_elements


def test_bytes_of_an_element() -> None:
    """Weights, both moments, and a float32 copy of trained 16-bit weights."""
    for dtype, trainable, master_weights, expected in (
        ("float32", True, None, 12),
        ("bfloat16", True, None, 14),
        ("bfloat16", True, False, 6),
        ("bfloat16", False, None, 2),
    ):
        parameter = ParameterSpec("weight", (8,), 0, dtype, trainable)
        assert value_bytes(parameter, StorageSettings(master_weights)) == expected


def test_holders_share_the_sending() -> None:
    """One of four copies is new: the others send a third each, to the size of a parameter."""
    spec = model_spec()
    plan = resolve_plan(spec, {"vision": ModulePlugin(4), LANGUAGE_MODEL: ModulePlugin(colocate_with="vision")})
    copies = state_copies(spec, PlacedPlan(plan, (0, 1, 2, 3)), PlacedPlan(plan, (0, 2, 3, 7)))
    largest = max(copy.num_bytes for copy in copies.copies)
    sent = list(copies.sent_bytes.values())
    assert set(copies.sent_bytes) == {0, 2, 3} and max(sent) - min(sent) <= largest
    assert copies.received_bytes == {7: 12 * spec.num_parameters}
    assert [copy.parameter for copy in copies.copies] == list(spec.parameters)
