"""The orders of torch's own pipeline schedules over time, without their runtime."""

from types import SimpleNamespace
from typing import Any

import numpy as np


def torch_length_ms(schedule: Any, num_ranks: int, num_microbatches: int, times_ms: np.ndarray) -> float:
    """
    A step by the order of a schedule of `torch.distributed.pipelining`, whose stages take `times_ms[part, stage]` for
    a forward and a backward, or for a forward and the gradients of inputs and of weights.
    """
    num_stages = times_ms.shape[1]
    rounds = max(1, num_microbatches // num_ranks)
    fields = SimpleNamespace(
        n_local_stages=num_stages // num_ranks,
        microbatches_per_round=num_microbatches // rounds,
        pp_group_size=num_ranks,
        _n_microbatches=num_microbatches,
    )
    orders = [
        [action for action in schedule._calculate_single_rank_operations(fields, rank) if action]
        for rank in range(num_ranks)
    ]
    ends: dict[tuple[str, int, int], float] = {}  # what is sent, stage, microbatch
    free = [0.0] * num_ranks
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                stage, microbatch = order[0].stage_index, order[0].microbatch_index
                kind = order[0].computation_type.name
                parts = {"FORWARD": [0], "BACKWARD_INPUT": [1], "BACKWARD_WEIGHT": [2]}
                back = kind in ("FULL_BACKWARD", "BACKWARD_INPUT")
                needed = [("act", stage - 1, microbatch)] * (kind == "FORWARD" and stage > 0)
                needed += [("act", stage, microbatch)] * back
                needed += [("grad", stage + 1, microbatch)] * (back and stage + 1 < num_stages)
                needed += [("grad", stage, microbatch)] * (kind == "BACKWARD_WEIGHT")
                if not all(key in ends for key in needed):
                    break
                start = max([free[rank], *(ends[key] for key in needed)])
                took = times_ms[parts.get(kind, list(range(1, len(times_ms)))), stage].sum()
                free[rank] = start + float(took)
                if kind != "BACKWARD_WEIGHT":
                    ends["grad" if back else "act", stage, microbatch] = free[rank]
                order.pop(0)
    return max(free)
