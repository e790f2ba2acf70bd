"""What the samples of a global batch cost in each module."""

from __future__ import annotations

import numpy as np

from ..plan import LANGUAGE_MODEL, ModelSpec, ParallelPlan, SampleSizes, Stage, Workloads
from ..schedule import GradientFlow
from .analytic import backward_ratio, stage_flops
from .hardware import Hardware
from .limits import fitting_tokens


def batch_workloads(
    spec: ModelSpec,
    plan: ParallelPlan,
    sizes: SampleSizes,
    device: Hardware,
    max_tokens: int | None = None,
    memory_bytes: float | None = None,
) -> Workloads:
    """
    What a global batch is arranged by, from the operations of each sample; see [`stage_flops`].

    Args:
        spec (`ModelSpec`): The model, with what is frozen.
        plan (`ParallelPlan`): The layout.
        sizes (`SampleSizes`): Tokens of the samples.
        device (`Hardware`): What each rank is.
        max_tokens (`int`, *optional*): Most tokens of a microbatch of the language model.
        memory_bytes (`float`, *optional*): Memory of a rank; it limits the tokens of a microbatch of every module.

    Returns:
        `Workloads`: With the tighter of the two limits. Times are rounded to float32, so that ranks whose processors
        round differently still arrange alike.

    Raises:
        `ValueError`: If weights, gradients and optimizer state alone are more than the memory of a rank.
    """
    flow = GradientFlow(plan)
    forward_ms, ratios = {}, {}
    for name, module in plan.modules.items():
        whole = Stage((0, spec.modules[name].num_layers), ((0,),))
        per_token, per_square = stage_flops(spec, name, whole)
        flops = per_token * sizes.tokens[name] + per_square * sizes.squares[name]
        forward_ms[name] = (flops / device.flops_per_ms).astype(np.float32).astype(float)
        flops_of = [stage_flops(spec, name, stage)[0] for stage in module.replicas[0]]
        ratio_of = [backward_ratio(spec, plan, flow, (name, 0, index)) for index in range(len(flops_of))]
        ratios[name] = float(np.dot(flops_of, ratio_of) / max(1.0, sum(flops_of)))
    limits = {} if memory_bytes is None else fitting_tokens(spec, plan, sizes, memory_bytes)
    if max_tokens is not None:
        limits[LANGUAGE_MODEL] = min(max_tokens, limits.get(LANGUAGE_MODEL, max_tokens))
    return Workloads(forward_ms, ratios, dict(sizes.tokens), limits)
