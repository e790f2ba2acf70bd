"""The step of pipelines as the engine would run it, simulated with sends, gradient sums and the optimizer's step."""

from __future__ import annotations

import numpy as np

from ..cost.optimizer import optimizer_ms
from ..plan import ParallelPlan, sync_groups
from ..steps.representatives import iteration_ms
from ..steps.step_planner import StepPlanner
from .model_chain import ModelChain


def simulated_step_ms(chain: ModelChain, plan: ParallelPlan, num_microbatches: int) -> float:
    microbatches = chain.microbatches
    sizes = microbatches.sizes.like_the_mean(num_microbatches * microbatches.microbatch_size)
    planner = StepPlanner(chain.costs, plan, sync_groups(chain.spec, plan), microbatches.microbatch_size)
    planned = planner.arrange(range(sizes.num_samples), sizes)
    step_ms = iteration_ms(planner, planned) + optimizer_ms(chain.costs, plan, planner.sync_groups)
    return float(np.float32(step_ms))
