"""
Pages of plans for the tests. One to look at: `python -m tests.page.pages page.html`, larger with `--ranks 1024`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from benchmarks.paper_samples import PUBLISHED, PUBLISHED_MODELS, VISION
from hf_mmparallel.arrange.arrangements import arrange_step
from hf_mmparallel.arrange.balance import compare_with_contiguous
from hf_mmparallel.page import MemoryCurves, PlanChoice, PlanPage, TextTable, write_page
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, StepPlan, Workloads, resolve_plan
from hf_mmparallel.schedule import Simulation, Task, build_program, simulate

GIB = 2**30
MICROBATCH_SIZE = 4


def example_page(
    vision: ModulePlugin | None = None,
    language_model: ModulePlugin | None = None,
    num_microbatches: int = 8,
    dataset: str = "synthchartnet",
) -> PlanPage:
    """A page with every section, of a model and a dataset as published."""
    model = PUBLISHED_MODELS["llama3-1b"]
    plugins = {
        VISION: vision or ModulePlugin(dp_size=2, pp_size=2, tp_size=2),
        LANGUAGE_MODEL: language_model or ModulePlugin(dp_size=2, pp_size=2, tp_size=2),
    }
    plan = replace(resolve_plan(model.spec, plugins), num_microbatches=num_microbatches)
    num_samples = MICROBATCH_SIZE * num_microbatches * plan.modules[LANGUAGE_MODEL].dp_size
    workloads = model.workloads(PUBLISHED[dataset].draw(num_samples, seed=0))
    step = arrange_step(plan, range(num_samples), workloads, MICROBATCH_SIZE)
    cost = _task_cost(plan, step, workloads)
    simulation = simulate(plan, build_program(plan, step, [], cost), cost)
    before, after = compare_with_contiguous(plan, step, workloads, MICROBATCH_SIZE)
    step_ms = simulation.iteration_ms
    layouts = "vision: dp 4 x pp 1 x tp 2; language_model: dp 2 x pp 2 x tp 2"
    return PlanPage(
        title=f"Qwen2.5-VL's encoder with llama3-1b on {plan.world_size} GPUs",
        subtitle=f"{dataset}, {num_samples} samples a step, a40",
        plan=plan,
        simulation=simulation,
        summary=[
            ("predicted step", f"{step_ms:,.0f} ms"),
            ("samples/s", f"{1e3 * num_samples / step_ms:,.1f}"),
            ("bubble", f"{simulation.bubble_fraction:.1%}"),
            ("ranks", str(plan.world_size)),
            ("memory of the fullest rank", "31.4 GiB"),
        ],
        bound="Stage 0 of vision: it is busy for most of the step, and the stages behind it wait for it.",
        table=_stage_table(plan, simulation),
        memory=_memory(plan, step, simulation, workloads),
        workloads={"before, contiguous": before, "after, hierarchical": after},
        runners_up=[
            PlanChoice("second", layouts, 1.021 * step_ms, "the encoder's first stage has one layer more"),
            PlanChoice("third", layouts, 1.043 * step_ms, "more bubbles: one stage more in the language model"),
            PlanChoice("fourth", layouts, None, "rank 3 needs 52.1 GiB, the device has 48"),
        ],
        comparison=[
            PlanChoice("frozen-unaware", layouts, 1.18 * step_ms, "cuts stages as if the encoder had a backward"),
            PlanChoice("single layout", layouts, 1.31 * step_ms, "the encoder is on every rank of the language model"),
            PlanChoice("FSDP-like", layouts, 1.52 * step_ms, "gathers all weights in every microbatch"),
            PlanChoice("DistTrain", layouts, 1.07 * step_ms, "whole stages for each module, in closed form"),
        ],
        command="hf-mmparallel plan --model llava --dataset synthchartnet --gpus 16 --gpu-type a40 --page plan.html",
        versions={"hf_mmparallel": "0.5.0", "transformers": "5.23.0"},
    )


def _task_cost(plan: ParallelPlan, step: StepPlan, workloads: Workloads):
    """A task takes its stage's share of the layers, over the ranks of its grid."""

    def cost(task: Task) -> float:
        stage = plan.stage(*task.stage_key)
        batch_indices = step.chunks[task.module, task.replica, task.microbatch][task.chunk]
        share = stage.num_layers / plan.modules[task.module].num_layers / len(stage.all_ranks)
        forward_ms = share * float(workloads.forward_ms[task.module][list(batch_indices)].sum())
        return forward_ms * (1.0 if task.kind == "fwd" else 2.0)

    return cost


def _stage_table(plan: ParallelPlan, simulation: Simulation) -> TextTable:
    rows = [
        [name, module.layout, str(index), f"{stage.layers[0]}-{stage.layers[1] - 1}", str(len(stage.all_ranks)), peak]
        for name, module in plan.modules.items()
        for replica, index, stage in module.stages()
        for peak in [f"{simulation.peak_in_flight.get((name, replica, index), 0.0):g}"]
        if replica == 0
    ]
    return TextTable(["module", "layout", "stage", "layers", "ranks", "in flight"], rows, ["ranks", "in flight"])


def _memory(plan: ParallelPlan, step: StepPlan, simulation: Simulation, workloads: Workloads) -> MemoryCurves:
    """Each token keeps some memory from its forward to the end of its backward."""
    ends = {(span.rank, span.task): span.end_ms for span in simulation.spans}
    events: dict[int, list[tuple[float, float]]] = {rank: [] for rank in range(plan.world_size)}
    for span in simulation.spans:
        task = span.task
        if task.kind == "fwd":
            stage = plan.stage(*task.stage_key)
            batch_indices = list(step.chunks[task.module, task.replica, task.microbatch][task.chunk])
            tokens = float(workloads.tokens[task.module][batch_indices].sum())
            kept = 4e4 * stage.num_layers * tokens / len(stage.all_ranks)
            end_ms = ends.get((span.rank, Task("bwd", *task.key)), span.end_ms)
            events[span.rank] += [(span.start_ms, kept), (end_ms, -kept)]
    static = {
        rank: sum(plan.stage(*key).num_layers for key in plan.stages_of_rank(rank)) * 0.4 * GIB for rank in events
    }
    return MemoryCurves({rank: _curve(changes) for rank, changes in events.items()}, static, 48.0 * GIB)


def _curve(changes: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    ordered = np.array(sorted(changes)).reshape(-1, 2)
    return ordered[:, 0], np.maximum(0.0, ordered[:, 1].cumsum())


SHAPES: Mapping[str, tuple[ModulePlugin, ModulePlugin]] = {
    "16": (ModulePlugin(dp_size=2, pp_size=2, tp_size=2), ModulePlugin(dp_size=2, pp_size=2, tp_size=2)),
    "64": (ModulePlugin(dp_size=8, pp_size=4), ModulePlugin(dp_size=8, pp_size=4)),
    "128": (ModulePlugin(dp_size=16, pp_size=4), ModulePlugin(dp_size=16, pp_size=4)),
    "1024": (ModulePlugin(dp_size=32, pp_size=4, tp_size=4), ModulePlugin(dp_size=16, pp_size=4, tp_size=8)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--ranks", choices=SHAPES, default="16")
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    write_page(args.path, example_page(*SHAPES[args.ranks], num_microbatches=args.microbatches))


if __name__ == "__main__":
    main()
