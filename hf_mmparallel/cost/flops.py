"""Model FLOPs, as used for MFU."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..plan import LANGUAGE_MODEL, ModelSpec, ModuleSpec, SampleSizes
from .analytic import layer_flops
from .backwards import data_gradients
from .stage_times import inner_gradient_share, trainable_share, windowed_squares


def training_flops(spec: ModelSpec, module: str) -> tuple[float, float]:
    """FLOPs of a module's forward and backward without recomputation, per token and per attended square."""
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
    """Hashes a model by identity, as a cache key for FLOP counts."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec

    def __hash__(self) -> int:
        return id(self.spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.spec is other.spec


@lru_cache(maxsize=64)
def _training_flops(model: _Same, module: str) -> tuple[float, float]:
    return training_flops(model.spec, module)


def attended_squares(module_spec: ModuleSpec, tokens: ArrayLike, squares: ArrayLike) -> NDArray:
    """Squared lengths of samples averaged over a module's layers, of those with a window only what is inside."""
    tokens, squares = np.asarray(tokens, float), np.asarray(squares, float)
    if not module_spec.windows:
        return squares
    is_causal = module_spec.name == LANGUAGE_MODEL
    # whether or not the kernel skips the rest
    layers = (windowed_squares(tokens, squares, size, is_causal) if size else squares for size in module_spec.windows)
    return np.mean(np.stack(list(layers)), axis=0)


def module_model_flops(spec: ModelSpec, module: str, tokens: ArrayLike, squares: ArrayLike) -> NDArray:
    """FLOPs of a module's forward and backward of each sample, without recomputation."""
    per_token, per_square = _training_flops(_Same(spec), module)
    tokens = np.asarray(tokens, float)
    return per_token * tokens + per_square * attended_squares(spec.modules[module], tokens, squares)


def model_flops(spec: ModelSpec, sizes: SampleSizes) -> float:
    """Model FLOPs of a step for MFU, without padding, masked pairs, gradients of frozen weights or recomputation."""
    return math.fsum(
        float(module_model_flops(spec, name, sizes.tokens[name], sizes.squares[name]).sum()) for name in spec.modules
    )
