"""What a model computes by its definition, which MFU is counted by."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..plan import LANGUAGE_MODEL, ModelSpec, ModuleSpec, SampleSizes
from .analytic import layer_flops
from .stage_times import data_gradients, inner_gradient_share, trainable_share, windowed_squares


def training_flops(spec: ModelSpec, module: str) -> tuple[float, float]:
    """
    Operations of a module's forward and backward as the model defines them, nothing computed twice: for each token,
    and for each squared token that its layers attend to on average, see [`attended_squares`].
    """
    per_token = per_square = 0.0
    for index, needed in zip(
        range(-1, spec.modules[module].num_layers + 1), data_gradients(spec)[module], strict=True
    ):
        tokens, squares = layer_flops(spec, module, index)
        inner, attends = (1.0, True) if needed else inner_gradient_share(spec, module, index)
        per_token += tokens * (1 + inner + trainable_share(spec, module, index))
        per_square += squares * (1 + 2 * attends)
    return per_token, per_square


class _Same:
    """A model that equals itself only: it is what operations are kept by, which are counted for every plan."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec

    def __hash__(self) -> int:
        return id(self.spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.spec is other.spec


@lru_cache(maxsize=64)
def _training_flops(model: _Same, module: str) -> tuple[float, float]:
    return training_flops(model.spec, module)


def attended_squares(part: ModuleSpec, tokens: ArrayLike, squares: ArrayLike) -> NDArray:
    """
    Squared tokens that attention needs in the mean layer: less than all in layers with a window, whether or not the
    kernel skips what lies outside it.

    Args:
        part (`ModuleSpec`): The module.
        tokens (`ArrayLike`): Tokens.
        squares (`ArrayLike`): Squared lengths of their sequences.
    """
    tokens, squares = np.asarray(tokens, float), np.asarray(squares, float)
    if not part.windows:
        return squares
    is_causal = part.name == LANGUAGE_MODEL
    layers = (windowed_squares(tokens, squares, own, is_causal) if own else squares for own in part.windows)
    return np.mean(np.stack(list(layers)), axis=0)


def module_model_flops(spec: ModelSpec, module: str, tokens: ArrayLike, squares: ArrayLike) -> NDArray:
    """
    Operations of a module's forward and backward for samples, as the model defines them.

    Args:
        spec (`ModelSpec`): The model, with what is frozen.
        module (`str`): The module.
        tokens (`ArrayLike`): Tokens of each sample.
        squares (`ArrayLike`): Squared lengths of the sequences of each.
    """
    per_token, per_square = _training_flops(_Same(spec), module)
    tokens = np.asarray(tokens, float)
    return per_token * tokens + per_square * attended_squares(spec.modules[module], tokens, squares)


def model_flops(spec: ModelSpec, sizes: SampleSizes) -> float:
    """
    Operations of a step by which MFU is counted: those of the tokens of samples without padding, causal attention once
    and within windows where layers have them, frozen parts without gradients of weights, nothing computed again.

    Args:
        spec (`ModelSpec`): The model, with what is frozen.
        sizes (`SampleSizes`): The samples of the step.
    """
    return math.fsum(
        float(module_model_flops(spec, name, sizes.tokens[name], sizes.squares[name]).sum()) for name in spec.modules
    )
