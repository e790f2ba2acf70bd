"""A page with every section, of a model and a dataset as published."""

from dataclasses import replace

import numpy as np

from benchmarks.paper_samples import PUBLISHED, PUBLISHED_MODELS, VISION
from hf_mmparallel.arrange.arrangements import arrange_step
from hf_mmparallel.arrange.balance import compare_with_contiguous
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, resolve_plan
from hf_mmparallel.planning.page_data import MemoryCurves, PlanChoice, PlanPage, TextTable
from hf_mmparallel.schedule import Task
from tests.schedule.builders import timeline_of

GIB = 2**30
MICROBATCH_SIZE = 4
DATASET = "synthchartnet"


def example_page(plugin: ModulePlugin | None = None, num_microbatches: int = 8) -> PlanPage:
    model = PUBLISHED_MODELS["llama3-1b"]
    plugins = dict.fromkeys((VISION, LANGUAGE_MODEL), plugin or ModulePlugin(dp_size=2, pp_size=2, tp_size=2))
    plan = replace(resolve_plan(model.spec, plugins), num_microbatches=num_microbatches)
    num_samples = MICROBATCH_SIZE * num_microbatches * plan.modules[LANGUAGE_MODEL].dp_size
    workloads = model.workloads(PUBLISHED[DATASET].draw(num_samples, seed=0))
    step = arrange_step(plan, range(num_samples), workloads, MICROBATCH_SIZE)

    def cost(task: Task) -> float:
        batch_indices = step.chunks[task.module, task.replica, task.microbatch][task.chunk]
        return float(workloads.forward_ms[task.module][list(batch_indices)].sum()) * (1 + (task.kind == "bwd"))

    simulation = timeline_of(plan, step, [], cost)
    before, after = compare_with_contiguous(plan, step, workloads, MICROBATCH_SIZE)
    step_ms = simulation.iteration_ms
    layouts = "vision: dp 4 x pp 1 x tp 2; language_model: dp 2 x pp 2 x tp 2"
    return PlanPage(
        title=f"Qwen2.5-VL's encoder with llama3-1b on {plan.world_size} GPUs",
        subtitle=f"{DATASET}, {num_samples} samples a step, a40",
        plan=plan,
        timeline=simulation,
        layouts=TextTable(["module", "layout"], [["vision", "dp 2 x pp 2 x tp 2"], ["language_model", "dp 2"]]),
        numbers=[("tokens/s", "107,063"), ("MFU", "33.8%")],
        summary=[
            ("predicted step", f"{step_ms:,.0f} ms"),
            ("ranks", str(plan.world_size)),
            ("memory of the fullest rank", "31.4 GiB"),
        ],
        bound="Stage 0 of vision: it is busy for most of the step, and the stages behind it wait for it.",
        table=TextTable(["module", "stage", "ranks"], [["vision", "0", "4"], ["language_model", "0", "4"]], ["ranks"]),
        memory=_memory(plan, step_ms),
        workloads={"before, contiguous": before, "after, hierarchical": after},
        runners_up=[
            PlanChoice("second", layouts, 1.021 * step_ms, "the encoder's first stage has one layer more"),
            PlanChoice("fourth", layouts, None, "rank 3 needs 52.1 GiB, the device has 48"),
        ],
        comparison=[
            PlanChoice("FSDP-like", layouts, 1.52 * step_ms, "gathers all weights in every microbatch"),
        ],
        command="hf-mmparallel plan --model llava --dataset synthchartnet --gpus 16 --gpu-type a40 --page plan.html",
        versions={"hf_mmparallel": "0.5.0", "transformers": "5.23.0"},
    )


def _memory(plan: ParallelPlan, step_ms: float) -> MemoryCurves:
    """What each rank holds at some times of a step, beside what it always holds."""
    rng, curves = np.random.default_rng(0), {}
    for ranks in {stage.all_ranks for module in plan.modules.values() for *_, stage in module.stages()}:
        curve = np.sort(rng.uniform(0, step_ms, 40)), rng.uniform(0, 12 * GIB, 40)
        curves |= dict.fromkeys(ranks, curve)
    return MemoryCurves(curves, dict.fromkeys(curves, 4.0 * GIB), 48.0 * GIB)
