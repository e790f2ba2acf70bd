"""The section of a model card on the plan and the measured efficiency."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from .. import __version__
from ..plan import ParallelPlan, save_layout
from ..plan.methods import arrangement_name
from ..planning.comparison import RunComparison
from ..planning.text import range_text
from ..runtime.engine import ParallelEngine
from .metrics_callback import RECOVERY

SCHEDULE, WORKLOADS = "schedule.png", "workloads.png"
_SECTION = "### Parallel plan"
_PREFIX = "parallel/"
_TAG = "hf_mmparallel"
_COMPARED_METRICS = re.compile(_PREFIX + r"(predicted_|step_ms|bubble_fraction|memory_gib|(forward|backward)_ms/)")


@dataclass(frozen=True)
class RunSummary:
    log_history: list[dict]  # the Trainer's log
    comparison: RunComparison | None = None  # predictions beside measurements
    recoveries: str | None = None  # what became of it when ranks were lost or joined


def layout_rows(plan: ParallelPlan) -> list[dict[str, Any]]:
    """One row for each module: sizes, layers of the stages, ranks."""
    rows = []
    for name, module in plan.modules.items():
        stages = module.replicas[0]
        ranks = sorted({rank for _, _, stage in module.stages() for rank in stage.all_ranks})
        rows.append(
            {
                "module": name,
                "dp": module.dp_size,
                "pp": module.pp_size,
                "cp": module.cp_size,
                "tp": module.tp_size,
                "layers": " + ".join(str(stage.num_layers) for stage in stages),
                "ranks": f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0]),
                "trained": _trained([stage.trainable for stage in stages]),
            }
        )
    return rows


def _trained(stages: list[bool]) -> str:
    if all(stages):
        return "all stages"
    return "some stages" if any(stages) else "frozen"


def plan_section(folder: Path, engine: ParallelEngine, global_batch_size: int, run: RunSummary) -> str:
    plan, comparison = engine.plan, run.comparison
    rows = layout_rows(plan)
    head = list(rows[0])
    lines = [
        _SECTION,
        "",
        f"Trained with `hf_mmparallel` {__version__} on {plan.world_size} ranks, schedule `{plan.schedule}`, "
        f"{range_text(plan.microbatch_counts)} microbatches, {global_batch_size} samples an optimizer step. The "
        "plan is in `parallel_plan.json`.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "|".join(" --- " for _ in head) + "|",
        *("| " + " | ".join(str(row[name]) for name in head) + " |" for row in rows),
    ]
    if engine.planner is not None:
        lines += [
            "",
            f"The samples of a global batch are arranged by `{arrangement_name(engine.planner.arrangement)}`.",
        ]
    pictures = (
        (SCHEDULE, "Predicted schedule of one step"),
        (WORKLOADS, "Predicted forward of each microbatch of one step"),
    )
    if run.recoveries is not None:
        lines += ["", run.recoveries]
        pictures += ((RECOVERY, "Throughput while ranks change"),)
    for picture, title in pictures:
        if (folder / picture).is_file():
            lines += ["", f"![{title}]({picture})"]
    if comparison is not None:
        lines += comparison_lines(comparison)
    measured = {name: value for row in run.log_history for name, value in row.items() if name.startswith(_PREFIX)}
    if comparison is not None:
        measured = {name: value for name, value in measured.items() if not _COMPARED_METRICS.match(name)}
    if measured:
        lines += ["", "In the last logged steps; workloads are estimates, the rest is measured:", ""]
        lines += ["| quantity | value |", "| --- | --- |"]
        lines += [f"| {_readable(name)} | {value:.4g} |" for name, value in measured.items()]
    return "\n".join(lines) + "\n\n"


def comparison_lines(comparison: RunComparison) -> list[str]:
    """The table of predictions beside measurements, and the causes of the difference."""
    windows = comparison.windows
    lines = ["", f"Predicted beside measured, the mean over {len(windows)} logs until step {windows[-1].step}:", ""]
    lines += ["| quantity | predicted | measured | measured / predicted |", "| --- | --- | --- | --- |"]
    for name, predicted, measured in comparison.rows:
        ratio = f"{measured / predicted:.2f}" if predicted else ""
        lines.append(f"| {name} | {predicted:.4g} | {measured:.4g} | {ratio} |")
    return [*lines, "", comparison.sentence]


def _readable(name: str) -> str:
    """`parallel/tokens_per_second/vision` as `tokens per second, vision`; deviations with their unit."""
    what, _, module = name.removeprefix(_PREFIX).partition("/")
    words = what.replace("_ms", "").replace("_", " ")
    unit = " (ms)" if "_std" in what else ""
    return words + (f", {module}" if module else "") + unit


def write_model_card(folder: Path, engine: ParallelEngine, global_batch_size: int, run: RunSummary) -> None:
    """Adds the plan to the card that the Trainer wrote; writing it again replaces it."""
    save_layout(folder / "parallel_plan.json", engine.plan, engine.options.module_settings)
    path = folder / "README.md"
    card = ModelCard.load(path)
    card.data["parallel_plan"] = {
        row["module"]: {k: row[k] for k in ("dp", "pp", "cp", "tp")} for row in layout_rows(engine.plan)
    }
    card.data["tags"] = [*(tag for tag in card.data.get("tags") or [] if tag != _TAG), _TAG]
    text = re.sub(rf"{re.escape(_SECTION)}.*?(?=### |\Z)", "", card.text, flags=re.DOTALL)
    text = re.sub(r"total_train_batch_size: \d+", f"total_train_batch_size: {global_batch_size}", text)
    text = re.sub(r"- total_eval_batch_size: \d+\n", "", text)
    if engine.device.type == "cpu":
        text = text.replace("distributed_type: multi-GPU", "distributed_type: multi-CPU")
    text = text.replace("a fine-tuned version of [](https://huggingface.co/)", "trained from scratch")
    section = plan_section(folder, engine, global_batch_size, run)
    before, mark, after = text.partition("### Framework versions")
    card.text = before + section + mark + after
    card.save(path)
