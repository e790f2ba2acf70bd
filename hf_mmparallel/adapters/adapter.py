"""Merges the adapter settings of several modules into one `peft` adapter, and injects it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from ..plan import ModelSpec

DEFAULT_NAME = "default"
_PER_LAYER = {
    "target_modules", "exclude_modules", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "layers_to_transform",
    "layers_pattern", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping",
}  # fmt: skip
# Setting that can't be restricted to a module -> remedy.
_REFUSED = {
    "modules_to_save": "Leave these parts out of `freeze` instead; they are then trained and saved with the adapter",
    "trainable_token_indices": "Use `peft` without it",
    "target_parameters": "Name layers in `target_modules`",
    "layer_replication": "Use `peft` without it",
    "megatron_config": "Use `tp_size` of the module",
    "alora_invocation_tokens": "Use `peft` without it",
    "use_qalora": "Use `peft` without it",
    "use_bdlora": "Use `peft` without it",
    "arrow_config": "Use `peft` without it",
    "kasa_config": "Use `peft` without it",
    "velora_config": "Use `peft` without it",
    "monteclora_config": "Use `peft` without it",
    "ensure_weight_tying": "Use `peft` without it",
    "lora_ga_config": "Use `init_lora_weights=True`",
    "loftq_config": "Use `init_lora_weights=True`",
    "eva_config": "Use `init_lora_weights=True`",
    "corda_config": "Use `init_lora_weights=True`",
}


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model: its `peft` config, as it is saved, and its name, which is part of parameter names."""

    config: Any
    name: str = DEFAULT_NAME


def merge_configs(model: Any, spec: ModelSpec, configs: Mapping[str, Any]) -> Any:
    """Merges the configs of all modules into one `LoraConfig`; for errors see [`add_adapters`]."""
    from ..plan.plugin import reject_unknown_keys

    reject_unknown_keys("The model", list(configs), list(spec.modules))
    parsed = {name: _parse(name, config) for name, config in configs.items()}
    _check_common(parsed)
    ranks: dict[str, tuple[int, float]] = {}
    for name, config in parsed.items():
        ranks |= _targets(model, name, config, _layers(model, spec, name), spec.modules[name].tower)
    # all target layers, with patterns where ranks and scales differ: `PeftModel.from_pretrained(base, folder)` reads
    # that
    return _merge(next(iter(parsed.values())), ranks, getattr(model, "name_or_path", None))


def add_adapters(model: Any, spec: ModelSpec, configs: Mapping[str, Any]) -> Adapter:
    """
    Injects LoRA into the modules with a config (module -> `peft` config or its dict) and freezes their other
    parameters; other modules keep their `requires_grad`. Called on the whole model, before pruning and
    [`build_model_spec`].

    Raises `ValueError` for adapters other than LoRA, for settings that affect parameters outside of the module's
    layers, and for settings other than targets, ranks and scales that differ between modules.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import cast_adapter_dtype

    merged = merge_configs(model, spec, configs)
    frozen = {p.name for name in configs for p in spec.modules[name].parameters}
    trainable = {id(p): p.requires_grad and name not in frozen for name, p in model.named_parameters()}
    inject_adapter_in_model(merged, model, adapter_name=DEFAULT_NAME)
    # adapters on half-precision weights are float32, as with `get_peft_model`
    cast_adapter_dtype(model, DEFAULT_NAME)
    for parameter in model.parameters():
        if id(parameter) in trainable:
            parameter.requires_grad_(trainable[id(parameter)])
    return Adapter(merged)


def _parse(module: str, config: Any) -> Any:
    """Parses the config of a module. Raises `ValueError` for settings that can't be restricted to a module."""
    from peft import LoraConfig, get_peft_config

    if isinstance(config, Mapping):
        config = get_peft_config({"peft_type": "LORA", **config})
    if type(config) is not LoraConfig:
        raise ValueError(
            f"`peft_config` of module `{module}` is a `{type(config).__name__}`; only LoRA can be split over ranks. "
            f"Use a `LoraConfig`."
        )
    for setting, remedy in _REFUSED.items():
        if getattr(config, setting, None):
            raise ValueError(
                f"`{setting}` in the `peft_config` of module `{module}` can't be restricted to the module. {remedy}."
            )
    if config.bias != "none":
        raise ValueError(
            f"`bias={config.bias!r}` in the `peft_config` of module `{module}` trains biases of the whole model. "
            f"Use `bias='none'`."
        )
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError(
            f"`init_lora_weights={config.init_lora_weights!r}` of module `{module}` needs the weights of all ranks. "
            f"Use `True`, `False` or `'gaussian'`."
        )
    return config


def _check_common(configs: Mapping[str, Any]) -> None:
    """Raises `ValueError` for settings that differ between modules but are common to the whole adapter."""
    (first, config), *others = configs.items()
    for name, other in others:
        for field in fields(config):
            value, other_value = getattr(config, field.name), getattr(other, field.name)
            if field.name not in _PER_LAYER and value != other_value:
                raise ValueError(
                    f"`{field.name}` is {value!r} in the `peft_config` of module `{first}` and {other_value!r} in "
                    f"that of `{name}`, but it is common to the whole adapter. Make them equal."
                )


def _layers(model: Any, spec: ModelSpec, module: str) -> set[str]:
    """Returns names of a module's layers that have parameters, also ones that belong to another layer first."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {p.name for p in spec.modules[module].parameters}
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if first[id(p)] in own]
    return {name.rpartition(".")[0] for name in names}


def _targets(model: Any, module: str, config: Any, names: set[str], tower: str) -> dict[str, tuple[int, float]]:
    """Maps each layer of the module that the config targets to its rank and alpha."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS
    from peft.utils.other import get_pattern_key

    layers = {name: layer for name, layer in model.named_modules() if name in names}
    wanted = config.target_modules
    if wanted is None:
        family = getattr(getattr(model.get_submodule(tower), "config", None), "model_type", "")
        wanted = DEFAULTS.get(family)
        if wanted is None:
            raise ValueError(
                f"`peft` has no default `target_modules` for module `{module}` (`{family}`). Name its layers, such as "
                f"`target_modules=['q_proj', 'v_proj']`."
            )
        config.target_modules = set(wanted)
    if wanted == "all-linear":
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        targets = [name for name, layer in layers.items() if isinstance(layer, nn.Linear) and layer is not head]
    else:
        targets = [name for name in layers if check_target_module_exists(config, name)]
    if not targets:
        raise ValueError(
            f"`target_modules={wanted!r}` matches no layer of module `{module}`, such as `{min(layers)}`. "
            f"Name layers of this module."
        )
    return {
        name: (
            config.rank_pattern.get(get_pattern_key(config.rank_pattern, name), config.r),
            config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, name), config.lora_alpha),
        )
        for name in targets
    }


def _merge(config: Any, ranks: Mapping[str, tuple[int, float]], base: str | None) -> Any:
    from peft import LoraConfig

    common = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    for name in (*_PER_LAYER, "peft_type", "runtime_config"):
        common.pop(name, None)
    r, alpha = config.r, config.lora_alpha
    return LoraConfig(
        **common,
        r=r,
        lora_alpha=alpha,
        target_modules=list(ranks),
        rank_pattern={re.escape(name): rank for name, (rank, _) in ranks.items() if rank != r},
        alpha_pattern={re.escape(name): scale for name, (_, scale) in ranks.items() if scale != alpha},
        base_model_name_or_path=base or None,
    )
