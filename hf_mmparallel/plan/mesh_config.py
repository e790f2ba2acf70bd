"""One mesh for a whole model: `DistributedConfig` of transformers, `ParallelismConfig` of accelerate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .reading import read_count

# key -> the setting of a module that it is; two of a row are multiplied
_SIZES = {
    "tp_size": "tp_size",
    "pp_size": "pp_size",
    "cp_size": "cp_size",
    "dp_replicate_size": "dp_size",
    "fsdp_size": "dp_size",
    "dp_shard_size": "dp_size",
    "ep_size": "ep_size",
}
_SHARDED = ("fsdp_size", "dp_shard_size")
_OWN = "tensor parallelism and sharding follow the model's own plan"
_REFUSED = {
    "ep_plan": (_OWN, "Leave it out"),
    "tp_plan": (_OWN, 'Use `"auto"`'),
    "fsdp_plan": (_OWN, "Leave it out"),
    "fsdp_cpu_offload": ("it moves weights, too", "Use `offload_optimizer` of modules in `parallel`"),
    "fsdp_mixed_precision": ("it is a setting of the whole run", "Use `bf16=True` of the arguments"),
    "sp_size": ("it is DeepSpeed's", "Use `cp_size`"),
}
_WITHOUT_EFFECT = {"enable_expert_parallel", "enable_sequence_parallel", "ep_implementation"}  # follow from the others
_WITHOUT_EFFECT |= {"cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler"}
_KNOWN = {*_SIZES, *_REFUSED, *_WITHOUT_EFFECT}


def mesh_settings(value: Any) -> dict[str, Any] | None:
    """
    The settings of each module on a mesh: copies, stages, shares of matrices and of tokens, ZeRO-3 where weights are
    sharded. `None` for a value that describes none; raises `ValueError` for what no setting of a module means.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.name in _KNOWN}
    if not isinstance(value, Mapping) or not value.keys() & {*_SIZES} or not value.keys() <= _KNOWN:
        return None
    for key, (reason, remedy) in _REFUSED.items():
        given = value.get(key)
        if given is True or given not in (None, False, 1, "auto"):
            raise ValueError(f"`{key}={given!r}` of one mesh for the whole model can't be a plan: {reason}. {remedy}.")
    settings: dict[str, Any] = {}
    for key, name in _SIZES.items():
        if value.get(key) is not None:
            settings[name] = settings.get(name, 1) * read_count(value[key], f"`{key}`", 1)
    sharded = max((value.get(key) or 1 for key in _SHARDED), default=1)
    if sharded > 1:
        settings["zero_stage"] = 3
        if sharded < settings["dp_size"]:
            settings["shard_size"] = sharded * settings.get("cp_size", 1)
    return settings


def num_ranks(value: Any) -> int:
    """Ranks of a mesh; 1 for a value that describes none."""
    count = 1
    for key in _SIZES.keys() - {"ep_size"}:  # experts are shared by the ranks of the others
        size = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
        count *= size or 1
    return count
