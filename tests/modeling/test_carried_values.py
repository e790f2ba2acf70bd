"""Values beside the hidden state: found by what layers read, and the same behind a border."""

from dataclasses import replace

import pytest
import torch

from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.carried_values import pack, place, unpack
from hf_mmparallel.plan.model_spec import CarriedValue
from tests import tiny

MODULE = build_model_spec(tiny.FAMILIES["llama"]()).language_model
BATCH, LENGTH = 2, 5
VALUES = {
    CarriedValue((0, 1), ("batch", "length", 3, 4), None, True): torch.randn(BATCH, LENGTH, 3, 4),
    CarriedValue((1, "shared", "full", 0), ("batch", 2, "length", 7), "float64", False): torch.randn(
        BATCH, 2, LENGTH, 7, dtype=torch.float64
    ),
    CarriedValue((1, "angles", 1), ("batch", "length", 6), None, False): torch.randn(1, LENGTH, 6),
    CarriedValue((1, "router"), ("tokens", 9), None, False): torch.randn(BATCH * LENGTH, 9),
    CarriedValue((1, "chosen"), ("batch", "length", -8), "int32", False): torch.randint(
        -1, 2**31 - 1, (BATCH, LENGTH, LENGTH), dtype=torch.int32
    ),
}


def arguments_of(values):
    layers, shared, angles, router, chosen = values
    hidden = torch.randn(BATCH, LENGTH, 64)
    return (hidden, layers[:, :, 1]), {
        "shared": {"full": (shared,)},
        "angles": (None, angles),
        "router": router,
        "chosen": chosen,
    }


def test_values_are_what_they_were_before_the_border():
    module = replace(MODULE, carried=((), tuple(VALUES)))
    assert module.states_before(1) == 1 + -(-sum(value.width for value in VALUES) // 64)
    sent = pack(module, 1, arguments_of(VALUES.values()), (BATCH, LENGTH), torch.float64)
    assert [tuple(row.shape) for row in sent] == [(BATCH, LENGTH, 64)] * (module.states_before(1) - 1)
    # as a stage without the weights has computed them
    layers, angles = torch.full((BATCH, LENGTH, 3, 4), torch.nan), torch.full((1, LENGTH, 6), torch.nan)
    own = (torch.zeros(BATCH, LENGTH, 64), layers[:, :, 1]), {"shared": {}, "angles": (None, angles), "router": None}
    args, kwargs = place(unpack(tuple(VALUES), sent), *own)
    for got, want in zip(
        (args[1], layers[:, :, 2], kwargs["shared"]["full"][0], angles, kwargs["router"], kwargs["chosen"]),
        (list(VALUES.values())[0][:, :, 1], list(VALUES.values())[0][:, :, 2], *list(VALUES.values())[1:]),
        strict=True,
    ):
        assert torch.equal(got, want.to(got.dtype)) and got.is_floating_point() == want.is_floating_point()


def test_their_gradients_return():
    values = [value.clone().requires_grad_(value.is_floating_point()) for value in VALUES.values()]
    module = replace(MODULE, carried=((), tuple(VALUES)))
    sent = pack(module, 1, arguments_of(values), (BATCH, LENGTH), torch.float64)
    received = unpack(tuple(VALUES), sent)
    weights = {value: torch.randn(value.shape(BATCH, LENGTH), dtype=torch.float64) for value in VALUES}
    sum((got * weights[value]).sum() for value, got in received.items() if not value.is_index).backward()
    for value, want in zip(VALUES, values, strict=True):
        if not value.is_index:
            expected = weights[value].sum(0, True) if len(want) == 1 else weights[value]
            torch.testing.assert_close(want.grad, expected.to(want.dtype))


def test_what_layers_of_a_model_read_is_found():
    found = build_model_spec(tiny.FAMILIES["gemma4_text"]()).language_model.carried
    shared = [[value.path[2] for value in own if "shared_kv_states" in value.path] for own in found]
    sliding, full = ["sliding_attention"] * 2, ["full_attention"] * 2
    assert shared == [[], sliding, sliding + full, full]  # which two layers compute, and two others read
    assert [[value.axes for value in own if value.is_part] for own in found[1:]] == [[("batch", "length", 4, 8)]] * 3
    assert not MODULE.carried


def test_a_value_of_which_ranks_have_shares_is_refused():
    value = CarriedValue((1, "keys"), ("batch", 4, "length", 8), None, False)
    module = replace(MODULE, carried=((), (value,)))
    share = {"keys": torch.zeros(BATCH, 2, LENGTH, 8)}
    with pytest.raises(ValueError, match=r"shape \(2, 4, 5, 8\).* \(2, 2, 5, 8\).*`tp_size=1`"):
        pack(module, 1, ((torch.zeros(BATCH, LENGTH, 64),), share), (BATCH, LENGTH), torch.float32)
