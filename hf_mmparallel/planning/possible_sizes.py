"""Sizes of a layout that a model does not support, regardless of its numbers of heads and layers."""

from __future__ import annotations

import operator
from functools import partial, reduce
from itertools import takewhile
from typing import Any

from transformers import PreTrainedModel

from ..data.mask_rules import MaskRule
from ..kernels.recurrent_layers import LONE_LAYERS, attends, check_mixers, recurrent_mixers
from ..modeling.tensor_parallel import with_tp_dims
from ..plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlan,
    ModulePlugin,
    ModuleSpec,
    MultimodalParallelPlugin,
    ParallelPlan,
)
from ..plan.resolve import check_tp_size, check_tp_sizes

_WITH_CONTEXT = (None, "bitfield")  # attention functions of language models that support context parallelism


def check_context(model: PreTrainedModel, spec: ModelSpec) -> None:
    """
    Raises `ValueError` for context parallelism of a language model with attention code of its own, or unknown masks.
    """
    tower = type(model.get_submodule(spec.modules[LANGUAGE_MODEL].tower))
    layers = recurrent_mixers(model)
    has_own = not layers and not getattr(tower, "_supports_attention_backend", False)
    if has_own or not all(mixers or attends(layer) or kind in LONE_LAYERS for layer, kind, mixers in layers):
        raise ValueError(
            f"`cp_size` above 1: the layers of `{tower.__name__}` have their own attention code, which sees the "
            "tokens of one rank only. Use `cp_size=1`."
        )
    try:
        MaskRule(model)
        check_mixers(model)
    except ValueError as error:
        raise ValueError(f"`cp_size` above 1 splits packed samples. {error} Use `cp_size=1`.") from error


def whole_matrices(module: ModuleSpec) -> str | None:
    """Why tensor parallelism can't split the matrices of a module, `None` if it can."""
    for parameter in module.parameters:
        if "lora_magnitude_vector" in parameter.name:
            name = parameter.name.partition(".lora_magnitude_vector")[0]
            return (
                f"`{name}` has a DoRA adapter, whose norm needs the whole matrix. Use `use_dora=False` or `tp_size=1`"
            )
        if "float" not in parameter.dtype and parameter.name.endswith("weight"):
            return f"`{parameter.name}` is quantized to {parameter.dtype} in blocks. Use `tp_size=1`"
    return None


def check_matrices(spec: ModelSpec, plan: ParallelPlan) -> None:
    """Raises `ValueError` for a module whose matrices can't be split by tensor parallelism or divided by ZeRO-3."""
    for name, module in plan.modules.items():
        weight = spec.modules[name].int8_weight
        if module.sharding.zero_stage == 3 and weight is not None:
            raise ValueError(
                f"`zero_stage=3` of `{name}`: `{weight}` is quantized to int8, and its layer keeps it beside the "
                "parameter. Use `zero_stage=2`, or load the model in 4 bits."
            )
        reason = whole_matrices(spec.modules[name]) if module.tp_size > 1 else None
        if reason is not None:
            raise ValueError(f"`tp_size={module.tp_size}` of `{name}`: {reason}.")


def possible_sizes(
    model: PreTrainedModel, spec: ModelSpec, plugin: MultimodalParallelPlugin
) -> dict[str, dict[str, Any]]:
    """
    Returns module -> setting -> its fixed value in a search: sizes, sharding and storage that the user has set, and
    sizes that the model restricts to 1. Modules of `spec` that the model lacks have no restrictions.
    """
    only: dict[str, dict[str, Any]] = {name: {} for name in spec.modules}
    for name, module in spec.modules.items():
        if whole_matrices(module) is not None:
            only[name]["tp_size"] = 1
        if module.num_unread > 1 or not module.has_one_width:
            only[name]["pp_size"] = 1
    if not _can_share_tokens(model, spec, plugin):
        only[LANGUAGE_MODEL]["cp_size"] = 1
    given = (plugin.fixed_sizes, plugin.fixed_sharding, plugin.fixed_storage)
    merged = {name: reduce(operator.or_, (own.get(name, {}) for own in given), only[name]) for name in only}
    return {name: sizes for name, sizes in merged.items() if sizes}


def stage_tp_sizes(
    model: PreTrainedModel, spec: ModelSpec, plugin: MultimodalParallelPlugin, node_size: int
) -> dict[str, tuple[int, ...]]:
    """
    Returns module -> the tensor-parallel sizes, in ascending order, that its stages may have in one plan: the one set
    by the user, or the powers of two within a node of `node_size` ranks that cut its matrices alike. Of modules of
    `spec` that the model lacks only sizes are looked at.
    """
    given, result = plugin.fixed_sizes, {}
    powers = [1 << power for power in range(1, node_size.bit_length())]
    for name, module in spec.modules.items():
        settings = plugin.modules.get(name, ModulePlugin())
        result[name] = (settings.tp_size,)
        has_one_size = settings.cp_size > 1 or settings.zero_stage or whole_matrices(module) is not None
        if "tp_size" not in given.get(name, {}) and not has_one_size:
            result[name] += tuple(takewhile(partial(_divides_alike, model, module), powers))
    return result


def _divides_alike(model: PreTrainedModel, module: ModuleSpec, tp_size: int) -> bool:
    """Whether tp groups of a power of two, and those of smaller ones, have equal slices of the same dimensions."""
    try:
        check_tp_size(module, tp_size)
        check_tp_sizes(module, ModulePlan(()), [1 << power for power in range(tp_size.bit_length())])
        if module.stack not in {name for name, _ in model.named_modules()}:
            return True
        cut = with_tp_dims(model, ModelSpec({module.name: module}), {module.name: (tp_size,)}).modules[module.name]
    except ValueError:
        return False
    dims = [[(p.tp_dim, p.tp_blocks) for p in one.parameters] for one in (module, cut)]
    return dims[0] == dims[1]


def _can_share_tokens(model: PreTrainedModel, spec: ModelSpec, plugin: MultimodalParallelPlugin) -> bool:
    """Whether the language model supports context parallelism with these settings."""
    settings = plugin.modules.get(LANGUAGE_MODEL)
    if settings is not None and settings.attn_implementation not in _WITH_CONTEXT:
        return False
    try:
        check_context(model, spec)
    except ValueError:
        return False
    return True
