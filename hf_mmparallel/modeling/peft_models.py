"""`PeftModel`s: wrapping a model for one process, unwrapping it for a plan, and assembling it again."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.utils.import_utils import is_peft_available

from ..plan import ModelSpec
from .adapter import (
    DEFAULT_NAME,
    Adapter,
    adapter_file_key,
    adapter_names,
    merge_configs,
    modules_to_save,
    parameters_to_save,
    saved_config,
)

_ALONE = "or train without `parallel`"
# Setting -> (why it can't be laid out, remedy).
REFUSED = {
    "bias": ("it trains biases of layers that have no adapter", "Use `bias='none'`"),
    "trainable_token_indices": (
        "it trains single rows of an embedding",
        "Use `modules_to_save` for the whole embedding",
    ),
    "target_parameters": ("it adapts parameters, not layers", "Name layers in `target_modules`"),
    "target_modules_to_tie": (
        "the adapters of two layers are one",
        "Use `ensure_weight_tying=False`",
    ),
    "layer_replication": ("its layers share their weights", "Use `layer_replication=None`"),
}


def wrap_with_adapters(model: Any, spec: ModelSpec, configs: Mapping[str, Any]) -> Any:
    """Wraps the whole model as a `peft.PeftModel` with the same training as [`add_adapters`], for one process."""
    from peft import get_peft_model

    merged = merge_configs(model, spec, configs)
    frozen = {
        name: replace(module, parameters=tuple(replace(p, trainable=False) for p in module.parameters))
        for name, module in spec.modules.items()
        if name in configs
    }
    # trainable parts outside of adapters, such as projectors
    merged.modules_to_save = modules_to_save(replace(spec, modules={**spec.modules, **frozen}), set()) or None
    return get_peft_model(model, merged, adapter_name=DEFAULT_NAME)


def is_peft_model(model: Any) -> bool:
    """Returns whether a model is a `PeftModel` or has layers with adapters."""
    if not is_peft_available():
        return False
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(model, (PeftModel, PeftMixedModel)):
        return True
    return isinstance(model, nn.Module) and any(isinstance(layer, BaseTunerLayer) for layer in model.modules())


def base_model_of(model: Any) -> Any:
    """Returns the model that a `PeftModel` wraps, and other models unchanged."""
    if not is_peft_available():
        return model
    from peft import PeftModel

    return model.get_base_model() if isinstance(model, PeftModel) else model


def unwrap_peft_model(model: Any) -> tuple[Any, Adapter]:
    """
    Returns the base model with its LoRA layers, and the adapter; the given model can't be used afterwards. Raises
    `ValueError` for adapters that a plan can't lay out, and then leaves the model unchanged.
    """
    config, name = _only_adapter(model)
    base = base_model_of(model)
    _check_layers(base, name, config)
    for path, wrapper in _saved_modules(base):
        parent, _, attribute = path.rpartition(".")
        # the trainable copy in place of the original
        setattr(base.get_submodule(parent), attribute, wrapper.modules_to_save[name])
    if not any(parameter.requires_grad for parameter in base.parameters()):
        raise ValueError(
            f"Nothing is trained in the model: its adapter `{name}` was loaded for inference. Load it with "
            "`PeftModel.from_pretrained(base, folder, is_trainable=True)`."
        )
    adapter = Adapter(config, name)
    mark_adapted(base, adapter)
    return base, adapter


def mark_adapted(model: Any, adapter: Adapter) -> None:
    """Marks a model as having trainable adapters; transformers refuses to train quantized weights without them."""
    model._hf_peft_config_loaded = True
    model.peft_config = {adapter.name: adapter.config}


def _only_adapter(model: Any) -> tuple[Any, str]:
    """Returns config and name of a model's only adapter. Raises `ValueError` unless it is a single LoRA adapter."""
    from peft import LoraConfig, PeftMixedModel

    if isinstance(model, PeftMixedModel):
        raise ValueError(
            f"A `PeftMixedModel` has several kinds of adapters; only LoRA can be split over ranks. Use LoRA, {_ALONE}."
        )
    configs = dict(getattr(model, "peft_config", None) or {})
    if len(configs) > 1:
        others = [name for name in configs if name not in getattr(model, "active_adapters", [])] or list(configs)[1:]
        raise ValueError(
            f"The model has several adapters, {list(configs)}, but a plan trains and saves one. Remove the others "
            f"with `model.delete_adapter({others[0]!r})`, or merge them into the base with `merge_and_unload()`."
        )
    if not configs:
        raise ValueError(
            "The model has layers with adapters, but no `peft_config` that describes them. Create them with "
            "`get_peft_model`."
        )
    ((name, config),) = configs.items()
    if type(config) is not LoraConfig:
        raise ValueError(
            f"The adapter `{name}` is a `{type(config).__name__}`; only LoRA can be split over ranks. Use a "
            f"`LoraConfig`, {_ALONE}."
        )
    return config, name


def _check_layers(base: Any, name: str, config: Any) -> None:
    """Raises `ValueError` for settings and layers that are only correct within the whole `PeftModel`."""
    for setting, (reason, remedy) in REFUSED.items():
        value = getattr(config, setting, None)
        if value and value != "none":
            raise ValueError(
                f"`{setting}={value!r}` of the adapter `{name}` can't be laid out: {reason}. {remedy}, {_ALONE}."
            )
    for path, layer in base.named_modules():
        variant = getattr(layer, "lora_variant", {}).get(name)
        if variant is not None and not _name_of(variant).startswith("Dora"):
            raise ValueError(
                f"`{path}` has a `{_name_of(variant)}`, a LoRA variant whose layers need more than their input. "
                f"Use plain LoRA, {_ALONE}."
            )
        if getattr(layer, "merged", False) is True or getattr(layer, "disable_adapters", False) is True:
            raise ValueError(
                f"The adapter `{name}` of `{path}` is merged or disabled. Call `model.unmerge_adapter()`, or "
                "`model.base_model.enable_adapter_layers()`."
            )
    for path, parameter in base.named_parameters():
        if parameter.requires_grad and ".base_layer." in path:
            raise ValueError(
                f"`{path}` is trainable in addition to its adapter, and `peft` does not save it. Freeze it, or use "
                "`modules_to_save` in place of an adapter."
            )
    tied = getattr(base, "all_tied_weights_keys", None) or {}
    for path, _ in _saved_modules(base):
        used = [key for pair in tied.items() for key in pair if key.startswith(path + ".")]
        if used:
            raise ValueError(
                f"`modules_to_save` of the adapter `{name}` has `{path}`, whose `{used[0]}` is tied to another "
                f"parameter, but `peft` trains an untied copy. Target it by LoRA, {_ALONE}."
            )


def _name_of(variant: Any) -> str:
    """Returns the class name of a LoRA variant, which `peft` stores as a class or as an instance."""
    return (variant if isinstance(variant, type) else type(variant)).__name__


def _saved_modules(base: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields names and wrappers of `modules_to_save`, which `peft` trains as a copy beside the original."""
    from peft.utils.other import ModulesToSaveWrapper

    yield from [(name, m) for name, m in base.named_modules() if isinstance(m, ModulesToSaveWrapper)]


def as_peft_model(base: Any, spec: ModelSpec, adapter: Adapter) -> Any:
    """Wraps a whole base model, without adapters, as the `PeftModel` that an adapter is saved from."""
    from peft import get_peft_model

    config = saved_config(base, spec, adapter)
    initialisation = config.init_lora_weights
    config.inference_mode, config.init_lora_weights = False, False  # some initialisations change the base
    with torch.random.fork_rng(devices=[]):
        model: Any = get_peft_model(base, config, adapter_name=adapter.name)
    config.init_lora_weights = initialisation
    return model


def wrap_as_peft_model(base: Any, spec: ModelSpec, adapter: Adapter, state: Mapping[str, torch.Tensor]) -> Any:
    """
    Wraps a whole base model as a `PeftModel` with trained weights, at least for all of [`parameters_to_save`]. Its
    `disable_adapter()` turns off LoRA only, since the originals of `modules_to_save` no longer exist.
    """
    from peft import set_peft_model_state_dict

    model = as_peft_model(base, spec, adapter)
    names = parameters_to_save(spec, adapter_names(spec.parameters))
    result = set_peft_model_state_dict(
        model, {adapter_file_key(name, adapter): state[name] for name in names}, adapter_name=adapter.name
    )
    assert not result.unexpected_keys, result.unexpected_keys
    return model


def with_adapters_of(model: Any, blank: Any) -> Any:
    """Gives a base model on the meta device the adapters of another model, as a `PeftModel` if that is one."""
    configs = getattr(model, "peft_config", None) or {}
    if not configs:
        return blank
    from peft import PeftModel, get_peft_model

    for name, config in configs.items():
        config = copy.deepcopy(config)
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = False  # some initialisations read the base, which has no values
        with torch.device("meta"):
            if isinstance(blank, PeftModel):
                blank.add_adapter(name, config)
            elif isinstance(model, PeftModel):
                blank = get_peft_model(blank, config, adapter_name=name)
            else:
                blank.add_adapter(config, name)
    blank.peft_config = copy.deepcopy(configs)
    return blank
