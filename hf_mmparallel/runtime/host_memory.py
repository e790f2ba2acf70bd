"""Checks of what a plan keeps in host memory, before anything is built."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

from ..cost import CostModel
from ..cost.memory import state_per_rank
from ..cost.stage_memory import GIB, stage_memories
from ..modeling.adapter import adapter_names
from ..plan import ModelSpec, ParallelPlan
from ..world import World


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
    if not any(module.storage.keeps_on_host for module in plan.modules.values()):
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


_V1, _V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
_CACHE = ("inactive_file", "total_inactive_file")
"""Entries of `memory.stat`, in version 2 and 1, of pages of files that the kernel drops when memory is short."""


def cgroup_available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that a process can still allocate below the limits of its control groups; `None` without a limit."""
    # each group above a process limits it as well
    return min((rest for folder in _folders(root) for rest in _rest(folder)), default=None)


def _folders(root: Path) -> Iterator[Path]:
    """The folders of the groups that count a process's memory, from its own group to the topmost that is mounted."""
    own = _own_groups(root)
    for mount in _lines(root / "proc/self/mountinfo"):
        before, _, after = mount.partition(" - ")
        fields, kind, options = before.split(), after.split()[:1], after.split()[-1:]
        version = 2 if kind == ["cgroup2"] else 1
        if version not in own or (version == 1 and (kind != ["cgroup"] or "memory" not in options[0].split(","))):
            continue
        top, folder = PurePosixPath(fields[3]), root / fields[4].lstrip("/")
        # In a container whose groups are mounted as those of the host, its own path may be one of the host.
        inside = own[version].relative_to(top) if own[version].is_relative_to(top) else PurePosixPath()
        for part in (inside, *inside.parents):
            yield folder / part


def _own_groups(root: Path) -> dict[int, PurePosixPath]:
    """Maps the version of control groups to the group of this process that counts memory."""
    groups = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups[2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            groups[1] = PurePosixPath(path)
    return groups


def _rest(folder: Path) -> Iterator[int]:
    """Yields the bytes that are left below the limit of one group, if it has one."""
    for limit_name, usage_name in (_V2, _V1):
        limit, usage = _lines(folder / limit_name), _lines(folder / usage_name)
        if limit and usage and limit[0].isdigit():  # `max` is none; in version 1 a number larger than any memory
            yield max(0, int(limit[0]) - int(usage[0]) + _droppable(folder))


def _droppable(folder: Path) -> int:
    entries = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
    return max((int(entries[name]) for name in _CACHE if name in entries), default=0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not on Linux, or not mounted
        return []
