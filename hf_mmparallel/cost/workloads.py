"""Costs of the samples of a global batch in each module."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..arrange.microbatch_counts import with_fastest_counts
from ..plan import LANGUAGE_MODEL, ParallelPlan, SampleSizes, Workloads
from .layers import CostModel
from .limits import fitting_tokens
from .row_sizes import RowLayout
from .stage_times import layer_table


def batch_workloads(
    costs: CostModel,
    plan: ParallelPlan,
    sizes: SampleSizes,
    max_tokens: int | None = None,
    memory_bytes: float | None = None,
) -> Workloads:
    """
    Workloads that a global batch is arranged by, from the layer costs of each sample, without constant costs per
    chunk, and with limits of tokens: `max_tokens` of the language model, and what fits the memory of a rank of every
    module.

    Raises:
        `ValueError`: If weights, gradients and optimizer state alone exceed the memory of a rank.
    """
    forward_ms, ratios, row_ms = {}, {}, None
    for name, module in plan.modules.items():
        table = layer_table(costs, name, module.tp_size, module.activation_checkpointing)
        layout = RowLayout.of(costs, name, module)
        alone, padded = (layout.of_samples(sizes, name, even) for even in (True, False))
        forward, backward = table.sample_ms(alone[1], alone[0])
        # rounded, so that ranks with processors that round differently make the same arrangement
        forward_ms[name] = (module.tp_size * forward).astype(np.float32).astype(float)
        ratios[name] = float(np.float32(backward.sum() / forward.sum())) if forward.sum() else 0.0
        if layout.padded and len(np.unique(sizes.tokens[name])) > 1:
            row, _ = table.sample_ms(padded[1], padded[0])
            row_ms = (module.tp_size * row).astype(np.float32).astype(float)
    workloads = Workloads(forward_ms, ratios, dict(sizes.tokens), {}, row_ms)
    limits = {}
    if memory_bytes is not None:
        limits = fitting_tokens(costs, with_fastest_counts(plan, workloads), sizes, memory_bytes)
    if max_tokens is not None:
        limits[LANGUAGE_MODEL] = min(max_tokens, limits.get(LANGUAGE_MODEL, max_tokens))
    return replace(workloads, token_limits=limits)
