"""Models as `PeftModel`s: made for one process, taken apart for a plan, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..plan import ModelSpec
from .adapter import DEFAULT_NAME, Adapter, merge_configs
from .adapter_files import adapter_file_key, adapter_names, modules_to_save, parameters_to_save, saved_config

_ALONE = "or train without `parallel`"
# Setting -> (why it can't be laid out, what to do).
_REFUSED = {
    "bias": ("it trains biases of layers that have no adapter", "Use `bias='none'`"),
    "trainable_token_indices": (
        "it keeps single rows of an embedding beside it",
        "Use `modules_to_save` for the whole embedding",
    ),
    "target_parameters": ("it adapts parameters, not layers", "Name layers in `target_modules`"),
    "layer_replication": ("its layers share their weights", "Use `layer_replication=None`"),
}


def wrap_with_adapters(model: Any, spec: ModelSpec, configs: Mapping[str, Any]) -> Any:
    """
    The whole model as a `peft.PeftModel` that trains the same as [`add_adapters`], for one process.

    What is trained without being an adapter, such as a projector, becomes one of `peft`'s `modules_to_save`.
    """
    from peft import get_peft_model

    merged = merge_configs(model, spec, configs)
    frozen = {
        name: replace(module, parameters=tuple(replace(p, trainable=False) for p in module.parameters))
        for name, module in spec.modules.items()
        if name in configs
    }
    merged.modules_to_save = modules_to_save(replace(spec, modules={**spec.modules, **frozen}), set()) or None
    return get_peft_model(model, merged, adapter_name=DEFAULT_NAME)


def is_peft_model(model: Any) -> bool:
    """Whether a model has adapters, around it or in its layers."""
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(model, (PeftModel, PeftMixedModel)):
        return True
    return isinstance(model, nn.Module) and any(isinstance(layer, BaseTunerLayer) for layer in model.modules())


def base_model_of(model: Any) -> Any:
    """The model that a `PeftModel` wraps, other models as they are."""
    from peft import PeftModel

    return model.get_base_model() if isinstance(model, PeftModel) else model


def unwrap_peft_model(model: Any) -> tuple[Any, Adapter]:
    """
    The base model with the LoRA layers that are in it, and their adapter. What `peft` keeps twice to train it
    (`modules_to_save`) takes the place of the original.

    Args:
        model (`PeftModel` or `PreTrainedModel`):
            What `get_peft_model` or `add_adapter` made. It can't be used any more.

    Raises:
        `ValueError`: For adapters that a plan can't lay out, which are named with the reason. The model is as before.
    """
    config, name = _only_adapter(model)
    base = base_model_of(model)
    _check_layers(base, name, config)
    for path, wrapper in _saved_modules(base):
        parent, _, attribute = path.rpartition(".")
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
    """Tells transformers that a model has trainable adapters, without which it refuses to train quantized weights."""
    model._hf_peft_config_loaded = True
    model.peft_config = {adapter.name: adapter.config}


def _only_adapter(model: Any) -> tuple[Any, str]:
    """The one adapter of a model, a LoRA; its config and name."""
    from peft import LoraConfig, PeftMixedModel

    if isinstance(model, PeftMixedModel):
        raise ValueError(
            f"A `PeftMixedModel` mixes kinds of adapters, of which only LoRA can be cut. Use LoRA, {_ALONE}."
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
            "The model has layers of adapters, but no `peft_config` that says what they are. Make them with "
            "`get_peft_model`."
        )
    ((name, config),) = configs.items()
    if type(config) is not LoraConfig:
        raise ValueError(
            f"The adapter `{name}` is a `{type(config).__name__}`. Only LoRA is known to train alike when the layers "
            f"of a model, or their weights, are on several ranks. Use a `LoraConfig`, {_ALONE}."
        )
    return config, name


def _check_layers(base: Any, name: str, config: Any) -> None:
    """Raises `ValueError` for what only the whole `PeftModel` would do right."""
    for setting, (reason, remedy) in _REFUSED.items():
        value = getattr(config, setting, None)
        if value and value != "none":
            raise ValueError(
                f"`{setting}={value!r}` of the adapter `{name}` can't be laid out: {reason}. {remedy}, {_ALONE}."
            )
    for path, layer in base.named_modules():
        variant = getattr(layer, "lora_variant", {}).get(name)
        if variant is not None and not _name_of(variant).startswith("Dora"):
            raise ValueError(
                f"`{path}` has a `{_name_of(variant)}`, a kind of LoRA whose layers need more than their own input. "
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
                f"`{path}` is trained beside its adapter, which `peft` does not save. Freeze it, or use "
                "`modules_to_save` in place of an adapter."
            )
    tied = getattr(base, "all_tied_weights_keys", None) or {}
    for path, _ in _saved_modules(base):
        used = [key for pair in tied.items() for key in pair if key.startswith(path + ".")]
        if used:
            raise ValueError(
                f"`modules_to_save` of the adapter `{name}` has `{path}`, whose `{used[0]}` is tied to another "
                f"parameter: `peft` trains a copy that is not. Target it by LoRA, {_ALONE}."
            )


def _name_of(variant: Any) -> str:
    """The class of a variant of LoRA, which `peft` keeps as a class or as an instance."""
    return (variant if isinstance(variant, type) else type(variant)).__name__


def _saved_modules(base: nn.Module) -> Iterator[tuple[str, Any]]:
    """The parts that `peft` trains whole, each with a copy of the original."""
    from peft.utils.other import ModulesToSaveWrapper

    yield from [(name, m) for name, m in base.named_modules() if isinstance(m, ModulesToSaveWrapper)]


def wrap_as_peft_model(base: Any, spec: ModelSpec, adapter: Adapter, state: Mapping[str, torch.Tensor]) -> Any:
    """
    A whole base model as a `PeftModel`.

    Parts that are trained whole have no original any more: `disable_adapter()` turns off LoRA only.

    Args:
        base (`PreTrainedModel`): The whole base model, without layers of adapters.
        spec (`ModelSpec`): The model with adapters.
        adapter ([`Adapter`]): The adapter.
        state (`Mapping[str, torch.Tensor]`): At least what an adapter folder holds, by the names of parameters.
    """
    from peft import get_peft_model, set_peft_model_state_dict

    config = saved_config(base, spec, adapter)
    initialised = config.init_lora_weights
    config.inference_mode, config.init_lora_weights = False, False  # some initialisations change the base
    with torch.random.fork_rng(devices=[]):
        model: Any = get_peft_model(base, config, adapter_name=adapter.name)
    names = parameters_to_save(spec, adapter_names(spec))
    result = set_peft_model_state_dict(
        model, {adapter_file_key(name, adapter): state[name] for name in names}, adapter_name=adapter.name
    )
    assert not result.unexpected_keys, result.unexpected_keys
    config.init_lora_weights = initialised
    return model
