"""The files of a plan: YAML for the Trainer, figures as JSON, and an HTML page."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arrange.balance import Balance, compare_with_contiguous, step_balance
from ..cost.stage_memory import GIB
from ..plan import LANGUAGE_MODEL, layout_data
from .answer import Answer
from .explain import slower_text
from .problem import ComparedPlan
from .text import batch_text, compared_text, numbers, origins, plan_cells, plan_text, samples_text, summary

if TYPE_CHECKING:
    from .page_data import PlanPage

WhatIfs = Sequence[tuple[str, Answer]]


def save_plan(path: str, answer: Answer, command: Sequence[str]) -> None:
    """
    Writes the file for the Trainer's `parallel`, with the command line that made it: YAML with comments, or JSON by
    its extension.
    """
    data = layout_data(answer.plan, answer.settings.plugin.modules, answer.planned_for)
    if path.endswith(".json"):
        Path(path).write_text(json.dumps(data, indent=2) + "\n")
        return
    del data["plan"]
    text = comments(path, answer, command) + _yaml(data) + "plan:\n"
    Path(path).write_text(text + textwrap.indent(plan_yaml(answer), "  "))


def comments(path: str, answer: Answer, command: Sequence[str]) -> str:
    """The head of a YAML file: what the numbers mean and what may be edited."""
    figures = [f"{label}: {text}" for label, text in summary(answer)]
    training = [f"parallel={str(Path(path).name)!r}", f"global_batch_size={answer.global_batch_size}"]
    training += [f"per_device_train_batch_size={answer.microbatch_size}"]
    training += [f"microbatch_assignment={answer.arrangement!r}"]
    training += ["packing=True"] * bool(answer.settings.packing)
    lines = [
        f"A plan of {answer.inputs.source.name} for {answer.plan.world_size} ranks of {answer.settings.gpu_type}.",
        f"Made by: {shlex.join(command)}",
        *figures,
        f"Samples: {samples_text(answer)}",
        "",
        f"Train with MultimodalTrainingArguments({', '.join(training)}, ...)."
        if answer.inputs.source.is_runnable
        else "No Trainer runs it: the model has no generator.",
        "What may be edited; `hf-mmparallel simulate` with `--model` and `--dataset` then predicts the result:",
        "  planned_for: device, batch and samples of this prediction; the Trainer has its own.",
        "  schedule: 1f1b, eager (forwards ahead as far as memory goes), gpipe, encoders_first, interleaved, "
        "zero_bubble or zero_bubble_h2.",
        "  replicas: the replicas of a module, each a list of stages; or copies of one, each with ranks that are "
        "ranks_apart above those of the one before.",
        "  layers: the first layer of a stage and the one after its last; consecutive within a replica.",
        "  ranks: a list of tp groups, one for each cp rank: a tp group shares the matrices, and cp ranks share the "
        "tokens (language_model only).",
        "    All stages of a module have as many tp groups and ranks; ranks are numbered from 0 without gaps.",
        "  activation_checkpointing: true recomputes activations in the backward, selective all but products.",
        "num_microbatches follows from the batch sizes of planned_for, and trainable from what is frozen.",
    ]
    return "".join(f"# {line}".rstrip() + "\n" for text in lines for line in _wrapped(text))


def _wrapped(text: str) -> list[str]:
    """Wraps a paragraph to the width of a screen."""
    spaces = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, 116, subsequent_indent=spaces, break_long_words=False, break_on_hyphens=False) or [""]


def plan_yaml(answer: Answer) -> str:
    """The plan as YAML: a line per stage, and comments about modules."""
    data = answer.plan.to_dict()
    modules = data.pop("modules")
    text = _yaml(data) + "modules:\n"
    for name, item in modules.items():
        module, module_spec = answer.plan.modules[name], answer.costs.spec.modules[name]
        total = sum(p.num_elements for p in module_spec.parameters)
        trained = sum(p.num_elements for p in module_spec.parameters if p.trainable)
        counts = f"{module_spec.num_layers} layers, {total:,} parameters, {trained:,} of them trained"
        text += f"  # {module.layout}; {counts}\n"
        replicas = item.pop("replicas")
        text += f"  {_yaml_key(name)}:\n"
        text += "".join(f"    {key}: {_yaml_line([value])[1:-1]}\n" for key, value in item.items()) + "    replicas:\n"
        for replica in replicas:
            copies = dict(replica) if isinstance(replica, dict) else {}
            lines = "".join(f"      - {_yaml_line(stage)}\n" for stage in copies.pop("stages", replica))
            if copies:
                lines = "".join(f"      {key}: {value}\n" for key, value in copies.items()) + f"      stages:\n{lines}"
            text += f"    - {lines.lstrip()}"
    return text


def _yaml(data: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(data), sort_keys=False, default_flow_style=None, width=116)


def _yaml_line(data: Any) -> str:
    """YAML on one line."""
    import yaml

    return yaml.safe_dump(data, sort_keys=False, default_flow_style=True, width=float("inf")).strip()


def _yaml_key(name: str) -> str:
    """A name as a YAML key, quoted if necessary."""
    return _yaml_line({name: 0})[1:-1].rpartition(":")[0]


def figures(
    answer: Answer, command: Sequence[str], comparison: Iterable[ComparedPlan] = (), what_ifs: WhatIfs = ()
) -> dict[str, Any]:
    """Returns all figures of a plan, for JSON; `comparison` has plans of baselines."""
    memory = answer.memory
    data: dict[str, Any] = {
        "command": shlex.join(command),
        "model": answer.inputs.source.name,
        "samples": samples_text(answer),
        **_figures(answer),
        "memory_gib": [memory[rank].total_gib for rank in sorted(memory)],
        "memory_limit_gib": answer.settings.memory_gib,
        "bound": answer.bound,
        "ledger_ms": dict(answer.ledger.terms),
    }
    result = answer.result
    if result is not None:
        data["runners_up"] = [
            {"step_ms": plan.step_ms, "layouts": plan_text(plan.plan), "reason": reason}
            for plan, reason in zip(result.runners_up, result.reasons, strict=True)
        ]
        data["search"] = {
            "num_candidates": result.num_candidates,
            "num_simulated": result.num_simulated,
            "is_proven": result.is_proven,
            "seconds": result.search_s,
            "rejected": dict(result.rejected),
        }
    if comparison:
        data["comparison"] = [
            {
                "name": plan.name,
                "layout": compared_text(plan),
                "step_ms": _finite(plan.step_ms),
                "bubble_fraction": _finite(plan.bubble_fraction),
                "peak_memory_gib": _finite(plan.peak_memory_gib),
                "flops_utilisation": _finite(plan.flops_utilisation),
                "note": plan.note,
            }
            for plan in comparison
        ]
    if what_ifs:
        data["what_if"] = {text: _figures(other) for text, other in what_ifs}
    data["plan"] = layout_data(answer.plan, answer.settings.plugin.modules, answer.planned_for)
    return data


def _figures(answer: Answer) -> dict[str, Any]:
    prediction, plan = answer.prediction, answer.plan
    return {
        "num_ranks": plan.world_size,
        "gpu_type": answer.settings.gpu_type,
        "global_batch_size": answer.global_batch_size,
        "microbatch_size": answer.microbatch_size,
        "microbatch_assignment": answer.arrangement,
        "num_microbatches": max(map(len, prediction.planned.step.microbatches[LANGUAGE_MODEL])),
        "schedule": plan.schedule,
        "layouts": {name: module.layout for name, module in plan.modules.items()},
        "step_ms": answer.step_ms,
        "samples_per_second": answer.samples_per_second,
        "tokens_per_second": answer.tokens_per_second,
        "flops_utilisation": answer.flops_utilisation,
        "bubble_fraction": prediction.timeline.bubble_fraction,
        "peak_memory_gib": answer.peak_bytes / GIB,
    }


def _finite(value: float) -> float | None:
    """A number, or `None` for infinities and NaN, which JSON can't represent."""
    return value if abs(value) < float("inf") else None


def workloads_of(answer: Answer) -> dict[str, Balance]:
    """Arrangement -> its balance: that of the plan, and before it that of the sampler's order if it is another."""
    planned = answer.prediction.planned
    if answer.arrangement == "contiguous":
        return {"contiguous": step_balance(planned.step, planned.workloads)}
    both = compare_with_contiguous(answer.plan, planned.step, planned.workloads, answer.microbatch_size)
    return dict(zip(("before, contiguous", f"after, {answer.arrangement}"), both, strict=True))


def page_of(
    answer: Answer, command: Sequence[str], comparison: Iterable[ComparedPlan] = (), what_ifs: WhatIfs = ()
) -> PlanPage:
    """Returns the HTML page of a plan; `comparison` has plans of baselines."""
    from ..cost import memory_timeline
    from .environment import environment
    from .page_data import MemoryCurves, PlanChoice, PlanPage, TextTable

    prediction, result = answer.prediction, answer.result
    planned, sizes = prediction.planned, prediction.sizes

    def text_table(is_short: bool) -> TextTable:
        cells = plan_cells(answer.plan, answer.costs.spec, prediction.timeline, answer.memory, is_short)
        return TextTable(cells.columns, cells.rows, cells.right)

    curves = memory_timeline(answer.costs, answer.plan, planned.step, sizes, prediction.timeline.task_times)
    limit = answer.settings.memory_gib
    installed = environment()
    runners_up = []
    if result is not None:
        runners_up = [
            PlanChoice(f"plan {number}", plan_text(own.plan), own.step_ms, reason, slower_text(result.best, own))
            for number, (own, reason) in enumerate(zip(result.runners_up, result.reasons, strict=True), start=2)
        ]
    versions = {name: installed[name] for name in ("hf_mmparallel", "python", "torch", "transformers")}
    return PlanPage(
        title=f"{Path(answer.inputs.source.name).name} on {answer.plan.world_size:,} x {answer.settings.gpu_type}",
        subtitle=f"Samples: {samples_text(answer)}. {batch_text(answer)}.".replace("`", ""),
        plan=answer.plan,
        modules=answer.settings.plugin.modules,
        planned_for=answer.planned_for,
        timeline=answer.drawn,
        layouts=text_table(is_short=True),
        numbers=numbers(answer),
        summary=[(label, text) for label, text in [*summary(answer), *origins(answer)] if label != "Bound"],
        bound=answer.bound,
        table=text_table(is_short=False),
        memory=MemoryCurves(curves, {}, None if limit is None else limit * GIB),
        workloads=workloads_of(answer),
        runners_up=runners_up,
        comparison=[
            *(
                PlanChoice(other.title, compared_text(other), _finite(other.step_ms), other.note)
                for other in comparison
            ),
            *(PlanChoice(f"what if {text}", plan_text(other.plan), other.step_ms) for text, other in what_ifs),
        ],
        step_ms=answer.step_ms,
        command=shlex.join(command),
        versions=versions,
    )
