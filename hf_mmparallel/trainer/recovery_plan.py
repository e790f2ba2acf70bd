"""The layouts of a run that goes on when nodes are lost: what is refused, the first one, and what it becomes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from .. import _environment
from ..cost import CostModel
from ..modeling.prepare import earliest_selected_layer
from ..plan import LANGUAGE_MODEL, ModelSpec, ParallelPlan, SampleSizes, parameter_shards
from ..resilience.adopted_plan import module_settings
from ..resilience.model_chain import model_chain
from ..resilience.pipelines import ClusterPlan, PipelinePlans
from ..resilience.resilient_planner import ResilientPlanner
from ..resilience.state_copies import state_copies
from ..resilience.typical_microbatches import TypicalMicrobatches
from ..runtime.held_state import Transfer
from .arguments import AUTO, MultimodalTrainingArguments
from .oversized_samples import allowed_bytes


class NodeLayouts:
    """
    Decides on layouts when members are lost, see [`LayoutPlanner`].

    Args:
        planner ([`ResilientPlanner`]): Plans pipelines of nodes.
    """

    def __init__(self, planner: ResilientPlanner):
        self.planner = planner

    @property
    def _spec(self) -> ModelSpec:
        return self.planner.plans.chain.spec

    def without(self, layout: ClusterPlan, lost: Collection[int]) -> ClusterPlan:
        """The layout that follows when members, and so their nodes, are lost."""
        return self.planner.without(layout, {member // self.planner.node_size for member in lost})

    def transfers(self, before: ClusterPlan, after: ClusterPlan) -> list[Transfer]:
        """What ranks have to send each other, by their ranks in the new layout."""
        copies = state_copies(self._spec, before, after).copies
        rank_of = {member: rank for rank, member in enumerate(after.members)}
        return [Transfer(copy.parameter, rank_of[copy.source], rank_of[copy.target]) for copy in copies]

    def needed(self, layout: ClusterPlan, rank: int) -> list[str]:
        """The parameters that a rank holds."""
        return [name for name, shards in parameter_shards(self._spec, layout.plan).items() if shards.on_rank(rank)]


def plan_recovery(
    model: Any,
    plan: ParallelPlan,
    costs: CostModel,
    args: MultimodalTrainingArguments,
    typical: SampleSizes | None,
) -> tuple[NodeLayouts, ClusterPlan]:
    """
    Plans for the loss of nodes, on every rank alike.

    Args:
        model (`PreTrainedModel`): The whole model.
        plan ([`ParallelPlan`]): The plan that the run starts with.
        costs ([`CostModel`]): Costs of layers.
        args ([`MultimodalTrainingArguments`]): The arguments.
        typical (`SampleSizes`, *optional*): Sizes of a typical global batch; without it all samples count the same.

    Raises:
        `ValueError`: For what can't go on when nodes are lost, and for a number of failures that can't be guaranteed.
    """
    survives = args.survives
    assert survives is not None
    refused = next(refusals(args, plan), None)
    if refused is not None:
        raise ValueError(f"`resilience` can't be used with {refused}")
    spec = costs.spec
    node_size = survives.ranks_per_node or _environment.ranks_per_host(plan.world_size)
    if plan.world_size % node_size:
        raise ValueError(
            f"`ranks_per_node={node_size}` of `resilience` does not divide the {plan.world_size} ranks of the run. "
            "Use the number of ranks of a host, or a divisor of it."
        )
    sizes = typical or SampleSizes.uniform(dict.fromkeys(spec.modules, 1), args.per_device_train_batch_size)
    num_microbatches = plan.num_microbatches * plan.modules[LANGUAGE_MODEL].dp_size
    microbatches = TypicalMicrobatches(sizes, args.per_device_train_batch_size, num_microbatches)
    selected = {name: earliest_selected_layer(model, spec.modules[name]) for name in spec.encoders}
    chain = model_chain(
        costs,
        module_settings(plan),
        microbatches,
        allowed_bytes(args, costs.device),
        {name: layer for name, layer in selected.items() if layer is not None},
    )
    plans = PipelinePlans(chain, node_size, num_microbatches, plan.schedule, plan.microbatch_assignment)
    planner = ResilientPlanner(plans, plan.world_size // node_size, survives.failures)
    return NodeLayouts(planner), planner.adopt(plan)


def refusals(args: MultimodalTrainingArguments, plan: ParallelPlan) -> Iterator[str]:
    """Each setting with which a run could not go on, with the reason and a remedy."""
    if _environment.launch_settings() is None:
        yield (
            "this launcher, which ends all processes when one ends. Start the script with `hf-mmparallel launch`, "
            "which takes the flags of `accelerate launch`."
        )
    for name, module in plan.modules.items():
        if module.sharding.zero_stage:
            yield (
                f"`zero_stage={module.sharding.zero_stage}` of `{name}`: each rank has the only copy of its slice of "
                "the optimizer's state. Leave it out, and use pipeline stages for models that do not fit."
            )
        if module.storage.offload_params:
            yield f"`offload_params` of `{name}`: its layers can't move to other ranks. Leave it out."
    if args.memory_limit_gib == AUTO:
        yield "`memory_limit_gib='auto'`: limits are learned in the first steps of one plan. Give a number."
    if not args.accelerator_config.use_seedable_sampler:  # type: ignore[union-attr]
        yield (
            "`use_seedable_sampler=False` of `accelerator_config`: the order of an epoch can't be drawn again. Leave "
            "it out."
        )
