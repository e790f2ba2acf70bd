"""The plans of a run that survives failures, as tables: templates, what is guaranteed, throughput with fewer nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

from rich.table import Table

from ..plan import ModulePlugin, PlannedFor, typical_batches
from ..resilience.model_chain import ModelChain, TypicalMicrobatches, copies_of, model_chain
from ..resilience.pipelines import ClusterPlan, PipelinePlans, layouts_of, layouts_of_plan, tp_sizes_of
from ..resilience.plan_choice import DAY_S, runs_text
from ..resilience.resilient_planner import ResilientPlanner
from ..resilience.templates import PipelineTemplate
from .answer import SAMPLES_PER_GPU, Inputs
from .possible_sizes import check_matrices, stage_tp_sizes
from .settings import Settings
from .text import ms_text

_PIPELINES = ("nodes", "nodes of each pipeline", "microbatches of each", "step")
_TIMES = {
    False: "of forwards and backwards, one microbatch after the other, of samples that count the same",
    True: "templates: forwards and backwards; steps: simulated with sends, gradient sums and the optimizer's update",
}
CHOSEN_BY_TEMPLATES = ("dp_size", "pp_size", "vp_size", "split_backward", "layers_per_stage", "colocate_with")


@dataclass(frozen=True)
class SurvivingPlans:
    """The plans of a model on a cluster that survives failures."""

    settings: Settings  # of the request
    inputs: Inputs
    planner: ResilientPlanner
    first: ClusterPlan  # of all nodes
    global_batch_size: int  # samples of a step

    @property
    def planned_for(self) -> PlannedFor:
        """What the plan of all nodes was made for."""
        size, inputs = self.settings.microbatch_size or 1, self.inputs
        return self.settings.planned_for(self.global_batch_size, size, inputs.num_samples, inputs.seed)


def nodes_and_size(gpus: int | None, nodes: int | None, device_node_size: int) -> tuple[int, int]:
    """
    Returns the number of nodes and ranks of each, by default `device_node_size`; raises `ValueError` if both numbers
    are left out, or nodes would have different numbers of ranks.
    """
    if gpus is None and nodes is None:
        raise ValueError("`--failures` plans for nodes that may fail. Give `--nodes`, `--gpus`, or both.")
    if gpus is None:
        assert nodes is not None
        return nodes, device_node_size
    count = nodes or max(1, gpus // device_node_size)
    if gpus % count or nodes is None and gpus % min(device_node_size, gpus):
        size = "" if nodes is not None else f" of {device_node_size} ranks"
        raise ValueError(
            f"`--gpus {gpus}` does not make {count} nodes{size} with equal numbers of ranks. Use a multiple, or "
            "another number of `--nodes`."
        )
    return count, gpus // count


def surviving_plans(
    settings: Settings, inputs: Inputs, nodes: int | None, failures: int, between_s: float = DAY_S
) -> SurvivingPlans:
    """
    Plans for a cluster of which `failures` nodes may fail at once, and some fail every `between_s` seconds on average;
    raises `ValueError` if that can't be guaranteed, with what can, or for settings that templates choose.
    """
    plan = settings.plugin.plan
    gpus = settings.gpus if plan is None else plan.world_size
    num_nodes, node_size = nodes_and_size(gpus, nodes, settings.device.node_size)
    settings = replace(settings, gpus=num_nodes * node_size)
    layouts = layouts_of(_modules(settings)) if plan is None else layouts_of_plan(plan, node_size)
    largest, model = min(node_size, settings.device.node_size), inputs.source.model
    batch = settings.global_batch_size or SAMPLES_PER_GPU * num_nodes * node_size
    microbatches = draw_microbatches(settings, inputs, batch, (failures + 1) * copies_of(layouts))
    costs = inputs.costs(settings)
    total = microbatches.count
    tp_sizes = stage_tp_sizes(model, costs.spec, settings.plugin, largest) if plan is None else tp_sizes_of(plan)
    chain = model_chain(costs, layouts, microbatches, settings.memory_bytes, tp_sizes=tp_sizes)
    schedule = settings.schedule or (settings.plugin.schedule if plan is None else plan.schedule) or "1f1b"
    plans = PipelinePlans(chain, node_size, total, schedule, settings.microbatch_assignment)
    planner = ResilientPlanner(plans, num_nodes, failures, between_s)
    first = planner.first() if plan is None else planner.adopt(plan)
    check_matrices(costs.spec, first.plan)
    return SurvivingPlans(settings, inputs, planner, first, batch)


def _modules(settings: Settings) -> dict[str, ModulePlugin]:
    """Settings of modules; raises `ValueError` for those that templates choose."""
    for name, module in settings.plugin.modules.items():
        for key in CHOSEN_BY_TEMPLATES:
            value = getattr(module, key)
            if value != getattr(ModulePlugin(), key):
                raise ValueError(
                    f"`{key}={value}` of `{name}`: with `--failures` templates have the stages, and as many copies as "
                    "nodes allow. Leave it out, or give a whole plan with `--parallel`."
                )
    return settings.plugin.modules


def draw_microbatches(settings: Settings, inputs: Inputs, batch: int, fewest_copies: int) -> TypicalMicrobatches:
    """Returns the microbatches of one global batch, which at least `fewest_copies` divide."""
    size = settings.microbatch_size or 1
    sizes = typical_batches(inputs.samples.sizes(inputs.source, settings), batch, inputs.seed)[0]
    return TypicalMicrobatches(sizes, size, -(-batch // (size * fewest_copies)))


def template_table(planner: ResilientPlanner, most: int | None = None) -> Table:
    """Returns a row for each of at most `most` templates and the last; equal neighboring stages are one line of it."""
    table = Table(title=f"Templates for nodes of {_count(planner.node_size, 'rank')}", title_justify="left")
    for column in ("nodes", "stages", "stages x layers of each", "one microbatch", "slowest stage"):
        table.add_column(column, justify="left" if column.endswith("each") else "right")
    first, last = _shown(planner.templates, most)
    for template in first:
        lines = stage_lines(planner.plans.chain, template)
        times = (ms_text(template.fill_ms), ms_text(template.slowest_ms))
        table.add_row(str(template.num_nodes), str(len(template.stages)), "\n".join(lines), *times, end_section=True)
    if last is not None:
        hidden = len(planner.templates) - len(first)
        table.add_row(f"to {last.num_nodes}", "", f"{hidden} more", "", ms_text(last.slowest_ms))
    return table


def _shown(templates: Sequence[PipelineTemplate], most: int | None) -> tuple[Sequence[PipelineTemplate], Any]:
    """The templates that get rows, and the last one of the others, if there are any."""
    if most is None or len(templates) <= most:
        return templates, None
    return templates[: most - 1], templates[-1]


def stage_lines(chain: ModelChain, template: PipelineTemplate) -> list[str]:
    """`3 stages of 9 layers of vision`: a line for each run of stages with as many layers of the same modules."""
    lines = []
    stages = [
        (" and ".join(_piece_text(name, stop - first) for name, (first, stop) in chain.pieces(stage.layers)), stage)
        for stage in template.stages
    ]
    for (text, num_ranks), run in groupby(stages, key=lambda one: (one[0], one[1].num_ranks)):
        count = len(list(run))
        ranks = f" on {num_ranks} ranks" if num_ranks > 1 else ""
        lines.append(f"{count} x {text}{ranks}")
    return lines


def _piece_text(module: str, count: int) -> str:
    return f"{module} {count}"


def guarantee_lines(planner: ResilientPlanner, global_batch_size: int, memory: str) -> list[tuple[str, str]]:
    """Returns labels and texts on what is guaranteed; `memory` is that of a rank that one copy of the model fits."""
    fewest, failures, size = planner.fewest, planner.failures, planner.node_size
    chain = planner.plans.chain
    losses = "No node" if not failures else "Any node" if failures == 1 else f"Any {failures} nodes"
    microbatches = f"{planner.plans.num_microbatches:,} microbatches of {chain.microbatches.microbatch_size}"
    needs, each = "one copy of the model needs", "copies"
    if chain.copies > 1:
        needs, each = f"{chain.copies} copies of the model on the same nodes need", "pipelines"
    return [
        ("Fewest nodes", f"{needs} {_count(fewest, 'node')} of {_count(size, 'rank')}, {memory}"),
        (
            "Guaranteed",
            f"{losses} may fail at once: each layer is on {failures + 1} nodes or more, and all nodes that are left "
            f"are used. Training goes on with {planner.fewest_guaranteed} nodes or more, "
            f"{failures + 1} {each} of {fewest}",
        ),
        ("Not guaranteed", "the host of machine 0, whose launcher keeps the job together: the run ends with it"),
        ("Global batch", f"{global_batch_size:,} samples, {microbatches}, whatever fails"),
        ("Times", _TIMES[chain.microbatches.sizes.known]),
    ]


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"


def throughput_table(planner: ResilientPlanner, first: ClusterPlan, global_batch_size: int, most: int) -> Table:
    """
    Returns a row for each number of nodes: of the fastest pipelines, and of those left if nodes are lost one by one.
    """
    table = Table(title="Throughput with fewer nodes, at best and after losses one by one", title_justify="left")
    for column in (*_PIPELINES, "samples/s", "nodes of each after losses", "samples/s"):
        _add_column(table, column)
    # from all nodes to the fewest that are guaranteed, whose row is the last one, at best
    for left in _shown_losses(planner, first, most):
        best = planner.at_best(left)
        rates = [_rate(planner, one, global_batch_size) for one in (best, left)]
        table.add_row(*_cells(planner, best), rates[0], _sizes(left), rates[1])
    return table


def fewer_nodes_table(planner: ResilientPlanner, first: ClusterPlan, global_batch_size: int, most: int) -> Table:
    """Returns a row for each number of nodes of a run that are left if they are lost one by one."""
    table = Table(title="Predicted steps with fewer nodes, lost one by one", title_justify="left")
    for column in (*_PIPELINES, "samples/s"):
        _add_column(table, column)
    # each time the one that slows the others most; the last row is that of the fewest nodes that are guaranteed
    for one in _shown_losses(planner, first, most):
        table.add_row(*_cells(planner, one), _rate(planner, one, global_batch_size))
    return table


def _shown_losses(planner: ResilientPlanner, first: ClusterPlan, most: int) -> list[ClusterPlan]:
    """The plans after single losses; of many the first ones, and the fastest one of the fewest nodes."""
    shown = list(islice(planner.after_single_losses(first), most))
    if len(shown[-1].nodes) > planner.fewest_guaranteed:
        shown[-1] = planner.fastest(planner.fewest_guaranteed)
    return shown


def _add_column(table: Table, name: str) -> None:
    table.add_column(name, justify="left" if name.startswith(("nodes of", "micro")) else "right")


def _cells(planner: ResilientPlanner, plan: ClusterPlan) -> tuple[str, str, str, str]:
    """The cells of [`_PIPELINES`]."""
    return str(len(plan.nodes)), _sizes(plan), runs_text(plan.microbatches), ms_text(planner.step_ms(plan))


def _sizes(plan: ClusterPlan) -> str:
    return runs_text([len(pipeline.nodes) for pipeline in plan.pipelines])


def _rate(planner: ResilientPlanner, plan: ClusterPlan, global_batch_size: int) -> str:
    return f"{1e3 * global_batch_size / planner.step_ms(plan):,.4g}"
