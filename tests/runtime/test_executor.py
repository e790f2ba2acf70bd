"""What travels between ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_mmparallel.modeling.stages import ModuleStage
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec
from hf_mmparallel.runtime.executor import wire_dtype
from tests import tiny
from tests.plan.specs import model_spec


def with_dtypes(spec: ModelSpec, matrices: str, vectors: str) -> ModelSpec:
    """The model with matrices and vectors of other dtypes in its language model."""
    module = spec.modules[LANGUAGE_MODEL]
    parameters = tuple(replace(p, dtype=matrices if len(p.shape) > 1 else vectors) for p in module.parameters)
    return replace(spec, modules={LANGUAGE_MODEL: replace(module, parameters=parameters)})


@pytest.mark.parametrize(
    ("matrices", "vectors", "expected"),
    [
        ("bfloat16", "float32", torch.float32),
        ("float16", "float16", torch.float16),
        ("float16", "bfloat16", torch.float32),
        ("bfloat16", "bfloat16", torch.bfloat16),
        ("float8_e4m3fn", "bfloat16", torch.bfloat16),
        ("float8_e5m2", "float32", torch.float32),
        ("float8_e4m3fn", "float8_e8m0fnu", torch.bfloat16),
        ("int8", "bfloat16", torch.bfloat16),
    ],
)
def test_messages_have_the_widest_dtype_that_layers_compute_in(matrices, vectors, expected):
    assert wire_dtype(with_dtypes(model_spec(), matrices, vectors)) == expected


@pytest.mark.parametrize("matrices", ["float8_e4m3fn", "bfloat16"])
def test_hidden_states_of_eight_bit_weights_have_the_dtype_of_the_rest(matrices):
    spec = with_dtypes(model_spec(), matrices, "bfloat16")
    stage = ModuleStage(tiny.FAMILIES["llama"](), spec, LANGUAGE_MODEL, (0, spec.language_model.num_layers))
    assert stage.input_dtype == torch.bfloat16
