"""Checks of what a plan keeps in host memory, before anything is built."""

from __future__ import annotations

import platform

import psutil

from ..adapters.adapter_files import adapter_names
from ..cost import CostModel
from ..cost.memory import state_per_rank
from ..cost.stage_memory import GIB, stage_memories
from ..plan import ModelSpec, ParallelPlan
from ..world import World
from .cgroup_memory import cgroup_available_bytes


def check_storage(spec: ModelSpec, plan: ParallelPlan) -> None:
    """Refuses a module that streams weights which its training changes."""
    adapters = adapter_names(spec.parameters)
    for name, module in plan.modules.items():
        layers = spec.modules[name].num_layers
        trained = [
            parameter.name
            for parameter in spec.modules[name].parameters
            if parameter.trainable and 0 <= parameter.layer < layers and parameter.name not in adapters
        ]
        if module.storage.offload_params and trained:
            raise ValueError(
                f"`offload_params=True` of `{name}`, whose layers are trained (`{trained[0]}`): weights that a step "
                'changes stay on the device. Freeze them (`freeze=True` or `freeze="tower"`), or use '
                "`offload_optimizer=True`."
            )


def available_bytes() -> int:
    """Bytes of host memory that this process can have without swapping, below the limits of its control groups."""
    in_groups = cgroup_available_bytes()
    of_machine = psutil.virtual_memory().available
    return of_machine if in_groups is None else min(of_machine, in_groups)


def available_bytes_per_rank(world: World) -> float:
    """Bytes of host memory for each rank of a node, an equal share of what is available there. Collective."""
    nodes = world.all_gather((platform.node(), available_bytes()), "comparing host memory")
    node = platform.node()
    of_ranks = [available for name, available in nodes if name == node]
    return min(of_ranks) / len(of_ranks)


def check_host_memory(costs: CostModel, plan: ParallelPlan, world: World) -> None:
    """Raises `ValueError` on all ranks if a node lacks host memory for what a plan keeps there; collective then."""
    if not any(m.storage.offload_optimizer or m.storage.offload_params for m in plan.modules.values()):
        return
    needs = {rank: state.host for rank, state in state_per_rank(plan, stage_memories(costs, plan)).items()}
    nodes = world.all_gather((platform.node(), available_bytes()), "comparing host memory")
    for node in dict.fromkeys(name for name, _ in nodes):
        ranks = [rank for rank, (name, _) in enumerate(nodes) if name == node]
        needed, available = sum(needs[rank] for rank in ranks), min(nodes[rank][1] for rank in ranks)
        if needed > available:
            raise ValueError(
                f"The plan needs {needed / GIB:.3g} GiB of host memory on `{node}` for its ranks {ranks}, and "
                f"{available / GIB:.3g} GiB are available: {(needed - available) / GIB:.3g} GiB are missing. "
                "Use `zero_stage=1`, or leave `offload_optimizer` or `offload_params` out of a module."
            )
