"""The fastest plan for the published run with the best MFU of a study."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from published_study import Run, Study, costs_of, planned, predicted_ms, published_flops, published_model, sizes_of

from hf_mmparallel.cost import CostModel, analytic_costs, find_device, usable_bytes
from hf_mmparallel.cost.layers import OURS_FUSED
from hf_mmparallel.planning.problem import SEARCHED_STAGES, PlanningProblem
from hf_mmparallel.planning.search import search_plans

MOST_GPUS = 64
"""Up to which plans are searched; with more GPUs the plan has the sizes of the run."""


def mfu_of(run: Run, step_ms: float) -> float:
    """MFU as publications count it, of a step of the run's model and batch on its GPUs, of the peak in bfloat16."""
    peak = 1e9 * run.gpus * find_device(run.device.name).bf16_tflops
    return published_flops(run) / peak / step_ms


def best_run(study: Study) -> Run:
    """The run with the best published MFU; not those in float8, which hf_mmparallel does not have."""
    return max((run for run in study.runs if run.dtype != "float8"), key=lambda run: mfu_of(run, run.step_ms))


def best_plans(run: Run) -> dict[str, dict[str, Any]]:
    """
    The fastest plans for a run's model, GPUs, batch and sequence length that fit the memory.

    Args:
        run (`Run`): What is trained; its layout and microbatch count on more than 64 GPUs only.

    Returns:
        `dict[str, dict]`: `"own_engine"`: by the costs of the study's engine, among plans with the sharding that it
        has. `"ours"`: by the costs of hf_mmparallel's engine with `torch_compile` and the model's own attention
        function: nothing is counted that the study's engine has and this one has not.
    """
    # what was assumed of the hosts of the study's engine is no figure of the device
    device = replace(run, study=run.study.without_assumptions).device
    ours = analytic_costs(published_model(run.study.key, run.model, run.lora), device, 2, OURS_FUSED)
    if run.gpus <= MOST_GPUS:
        stages = (0, 1) if run.study.has_sharded_optimizer else (0,)
        stages += (3,) if run.study.has_sharded_optimizer and run.study.is_fsdp else ()
        own_engine, plans = _searched(run, costs_of(run), stages), _searched(run, ours, SEARCHED_STAGES)
    else:
        own_engine, plans = (predicted_ms(run), "as it ran"), _of_its_sizes(run, ours)
    measured = mfu_of(run, run.step_ms)
    return {
        kind: {
            "run": run.name,
            "is_searched": run.gpus <= MOST_GPUS,
            "plan": plan,
            "step_ms": round(step_ms, 1),
            "measured_mfu": round(measured, 4),
            "mfu": round(mfu_of(run, step_ms), 4),
        }
        for kind, (step_ms, plan) in (("own_engine", own_engine), ("ours", plans))
    }


def _searched(run: Run, costs: CostModel, zero_stages: tuple[int, ...]) -> tuple[float, str]:
    """The step of the fastest in ms, and its sizes in words."""
    limit = usable_bytes(run.device)
    sizes = sizes_of(run, run.batch)
    problem = PlanningProblem(costs, sizes, run.gpus, run.batch, memory_bytes=limit, zero_stages=zero_stages)
    best = search_plans(problem).best
    return best.step_ms, str(best.candidate)


def _of_its_sizes(run: Run, costs: CostModel) -> tuple[float, str]:
    """The same of the plan with the run's own sizes, recomputed where only that fits or it is faster."""
    limit = usable_bytes(run.device)
    found = {again: planned(run, costs, again) for again in (False, True)}
    fitting = {again: own.step_ms for again, own in found.items() if limit is None or own.peak_memory_bytes <= limit}
    if not fitting:
        raise ValueError(f"{run.name}: no plan of its sizes fits {limit} bytes.")
    again = min(fitting, key=lambda key: fitting[key])
    return fitting[again], "the sizes of the run, " + ("recomputed" if again else "without recomputation")
