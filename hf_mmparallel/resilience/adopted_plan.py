"""The pipelines of a plan that a user gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from ..plan import ModulePlan, ModulePlugin, ParallelPlan, check_plan, check_world_size
from ..plan.resolve import check_tp_sizes
from .model_chain import mean_stage_ms, settings_of
from .pipelines import Pipeline, PipelineLayout, PipelinePlans, on_ranks


def module_settings(plan: ParallelPlan) -> dict[str, ModulePlugin]:
    """The settings of a plan's modules that do not depend on its number of ranks, for [`model_chain`]."""
    return {name: _settings(module) for name, module in plan.modules.items()}


def tp_sizes_of(plan: ParallelPlan) -> dict[str, tuple[int, ...]]:
    """The tensor-parallel sizes that the stages of each module of a plan have, for [`model_chain`]."""
    return {name: module.tp_sizes for name, module in plan.modules.items()}


def _settings(module: ModulePlan) -> ModulePlugin:
    context = module.context
    return ModulePlugin(
        tp_size=module.tp_size,
        cp_size=module.cp_size,
        activation_checkpointing=module.activation_checkpointing,
        cp_method=context.method,
        cp_mode=context.mode,
        cp_block=context.block,
        **asdict(module.sharding),
        **asdict(module.storage),
    )


def adopted_pipelines(plan: ParallelPlan, plans: PipelinePlans, num_nodes: int) -> list[Pipeline]:
    """
    The pipelines of a plan of the user; raises `ValueError` if it does not consist of copies of the whole model on
    whole nodes, or has other settings than plans after failures.
    """
    check_plan(plan, plans.chain.spec)
    check_world_size(plan, num_nodes * plans.node_size)
    _check_settings(plan, plans)
    sizes = {name: module.dp_size for name, module in plan.modules.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"`{name}` {size}" for name, size in sizes.items())
        raise ValueError(
            f"The modules have different numbers of copies ({listed}). To survive failures each copy of the model has "
            "one of each module on nodes of its own: use the same `dp_size` in all modules."
        )
    times_ms = mean_stage_ms(plans.chain.costs, plan, plans.chain.microbatches)
    result: list[Pipeline] = []
    for replica in range(next(iter(sizes.values()))):
        stages = {name: module.replicas[replica] for name, module in plan.modules.items()}
        ranks = sorted({rank for of_module in stages.values() for stage in of_module for rank in stage.all_ranks})
        nodes = _whole_nodes(replica, ranks, plans.node_size, result)
        ms = [
            (stage.all_ranks, times_ms[name, replica, index])
            for name, of_module in stages.items()
            for index, stage in enumerate(of_module)
        ]
        slowest_ms = max(sum(time_ms for on, time_ms in ms if rank in on) for rank in ranks)
        places = {rank: place for place, rank in enumerate(ranks)}
        placed = {name: tuple(on_ranks(one, places) for one in of_module) for name, of_module in stages.items()}
        layout = PipelineLayout(len(nodes), placed, sum(time_ms for _, time_ms in ms), slowest_ms)
        result.append(Pipeline(nodes, layout))
    return result


def _check_settings(plan: ParallelPlan, plans: PipelinePlans) -> None:
    """Raises `ValueError` if a plan has other settings than the plans after a failure will have."""
    if plan.schedule != plans.schedule:
        raise ValueError(
            f"The plan has `schedule={plan.schedule!r}`, and plans after failures {plans.schedule!r}. Use one of them."
        )
    for name, module in plan.modules.items():
        plugin = plans.chain.modules[name]
        if module.cp_size != plugin.cp_size:
            raise ValueError(
                f"`{name}` has `cp_size={module.cp_size}` in the plan, and `cp_size={plugin.cp_size}` in plans after "
                "failures. Use one of them."
            )
        check_tp_sizes(plans.chain.spec.modules[name], module, sorted({*module.tp_sizes, *plans.chain.tp_sizes[name]}))
        if replace(module, replicas=()) != settings_of(plugin):
            raise ValueError(
                f"`{name}` has other settings in the plan than in plans after failures: {_settings(module)} and "
                f"{plugin}. Use the same."
            )


def _whole_nodes(replica: int, ranks: Sequence[int], node_size: int, others: Sequence[Pipeline]) -> tuple[int, ...]:
    """The nodes of a copy of the model; raises `ValueError` unless it has all of their ranks for itself."""
    nodes = tuple(dict.fromkeys(rank // node_size for rank in ranks))
    remedy = "Give each copy of the model, which is one copy of each module, whole nodes of its own."
    if len(ranks) != len(nodes) * node_size:
        node = next(node for node in nodes if sum(rank // node_size == node for rank in ranks) != node_size)
        raise ValueError(
            f"Replica {replica} of the plan's modules has some of the {node_size} ranks of node {node} (ranks "
            f"{node * node_size} to {node * node_size + node_size - 1}) and not the others. {remedy}"
        )
    for number, other in enumerate(others):
        shared = sorted(set(nodes) & set(other.nodes))
        if shared:
            raise ValueError(f"Replicas {number} and {replica} of the plan share node {shared[0]}. {remedy}")
    return nodes
