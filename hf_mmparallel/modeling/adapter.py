"""PEFT adapters: settings of modules merged into one, its files, and `PeftModel`s taken apart and assembled again."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.utils.import_utils import is_peft_available

from ..plan import ModelSpec
from .expert_parallel import experts_of

DEFAULT_NAME = "default"
_PER_LAYER = {
    "target_modules", "target_parameters", "exclude_modules", "r", "lora_alpha", "rank_pattern", "alpha_pattern",
    "layers_to_transform", "layers_pattern", "base_model_name_or_path", "revision", "inference_mode",
    "peft_version", "auto_mapping",
}  # fmt: skip
# Setting that can't be restricted to a module -> remedy.
REFUSED = {
    "modules_to_save": "Leave these parts out of `freeze` instead; they are then trained and saved with the adapter",
    "trainable_token_indices": "Use `peft` without it",
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
    layers, parameters = dict[str, tuple[int, float]](), dict[str, tuple[int, float]]()
    for name, config in parsed.items():
        parameters |= _target_parameters(model, spec, name, config)
        layers |= _targets(model, name, config, _layers(model, spec, name), spec.modules[name].tower)
    # all target layers, with patterns where ranks and scales differ: `PeftModel.from_pretrained(base, folder)` reads
    # that
    return _merge(next(iter(parsed.values())), layers, parameters, getattr(model, "name_or_path", None))


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
    for setting, remedy in REFUSED.items():
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
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {p.name for p in spec.modules[module].parameters}
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if first[id(p)] in own]
    return {name.rpartition(".")[0] for name in names}


def _targets(model: Any, module: str, config: Any, names: set[str], tower: str) -> dict[str, tuple[int, float]]:
    """Maps each layer of the module that the config targets to its rank and alpha."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    layers = {name: layer for name, layer in model.named_modules() if name in names}
    wanted = config.target_modules
    if wanted is None:
        family = getattr(getattr(model.get_submodule(tower), "config", None), "model_type", "")
        wanted = DEFAULTS.get(family, [] if config.target_parameters else None)
        if wanted is None:
            raise ValueError(
                f"`peft` has no default `target_modules` for module `{module}` (`{family}`). Name its layers, such as "
                f"`target_modules=['q_proj', 'v_proj']`."
            )
        config.target_modules = set(wanted)
    if wanted == "all-linear":
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        targets = [
            name for name, layer in layers.items() if isinstance(layer, (nn.Linear, Conv1D)) and layer is not head
        ]
    else:
        targets = [name for name in layers if check_target_module_exists(config, name)]
    if not targets and (wanted or not config.target_parameters):
        raise ValueError(
            f"`target_modules={wanted!r}` matches no layer of module `{module}`, such as `{min(layers)}`. "
            f"Name layers of this module."
        )
    return _with_ranks(config, targets)


def _target_parameters(model: Any, spec: ModelSpec, module: str, config: Any) -> dict[str, tuple[int, float]]:
    """Maps each weight of experts in the module that the config targets to its rank and alpha."""
    wanted, own = config.target_parameters or (), [p.name for p in spec.modules[module].parameters]
    targets = {target: [name for name in own if f".{name}".endswith(f".{target}")] for target in wanted}
    stacked = {f"{name}.{parameter}" for name, experts in experts_of(model).items() for parameter in experts.cuts}
    for target, names in targets.items():
        other = next((name for name in names if name not in stacked), None)
        if not names:
            raise ValueError(
                f"`target_parameters` of module `{module}` has `{target}`, which matches none of its parameters, such "
                f"as `{own[0]}`. Name the weights of experts of this module."
            )
        if other is not None:
            raise ValueError(f"{_not_of_experts(module, other)}.")
    return _with_ranks(config, [name for names in targets.values() for name in names])


def _not_of_experts(owner: str, parameter: str) -> str:
    return (
        f"`target_parameters` of `{owner}` has `{parameter}`, which is not of experts that ranks can share. Name its "
        "layer in `target_modules`"
    )


def _with_ranks(config: Any, targets: Iterable[str]) -> dict[str, tuple[int, float]]:
    from peft.utils.other import get_pattern_key

    return {
        name: (
            config.rank_pattern.get(get_pattern_key(config.rank_pattern, name), config.r),
            config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, name), config.lora_alpha),
        )
        for name in targets
    }


def _merge(
    config: Any,
    layers: Mapping[str, tuple[int, float]],
    parameters: Mapping[str, tuple[int, float]],
    base: str | None,
) -> Any:
    from peft import LoraConfig

    ranks = {**layers, **parameters}
    common = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    for name in (*_PER_LAYER, "peft_type"):
        common.pop(name, None)
    r, alpha = config.r, config.lora_alpha
    return LoraConfig(
        **common,
        r=r,
        lora_alpha=alpha,
        target_modules=list(layers),
        target_parameters=list(parameters) or None,
        rank_pattern={re.escape(name): rank for name, (rank, _) in ranks.items() if rank != r},
        alpha_pattern={re.escape(name): scale for name, (_, scale) in ranks.items() if scale != alpha},
        base_model_name_or_path=base or None,
    )


# The contents of a `peft` adapter folder: parameters, keys and config.

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def adapter_folder(folder: str | Path, adapter: Adapter) -> Path:
    """Returns the folder in which `PeftModel.save_pretrained(folder)` saves an adapter."""
    return Path(folder) if adapter.name == DEFAULT_NAME else Path(folder) / adapter.name


def adapter_names(names: Iterable[str]) -> set[str]:
    return {name for name in names if ".lora_" in name}


def adapter_file_key(name: str, adapter: Adapter) -> str:
    """Returns the key of a parameter in `peft`'s files."""
    if name.endswith(f".lora_magnitude_vector.{adapter.name}.weight"):
        name = name.removesuffix(".weight")  # its name before it became a module
    parent, _, last = name.rpartition(".")
    key = parent if last == adapter.name else f"{parent.removesuffix('.' + adapter.name)}.{last}"
    return "base_model.model." + key


def modules_to_save(spec: ModelSpec, adapters: set[str]) -> list[str]:
    """Names the largest submodules that contain all trainable parameters outside of adapters, and nothing else."""
    parameters = [p for module in spec.modules.values() for p in module.parameters]
    trained = [p.name for p in parameters if p.trainable and p.name not in adapters]
    blocked: set[str] = set()  # submodules with frozen or adapter parameters
    for p in parameters:
        if not p.trainable or p.name in adapters:
            parts = p.name.split(".")[:-1]
            blocked |= {".".join(parts[:length]) for length in range(len(parts) + 1)}
    modules: dict[str, None] = {}
    for name in trained:
        parts = name.split(".")[:-1]
        prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        modules[next((prefix for prefix in prefixes if prefix not in blocked), ".".join(parts))] = None
    return [name for name in modules if not any(name.startswith(other + ".") for other in modules)]


def names_to_save(spec: ModelSpec, buffers: Iterable[str] = ()) -> list[str]:
    """Names all tensors in an adapter folder: adapters, and those of [`modules_to_save`]."""
    adapters = adapter_names(spec.parameters)
    prefixes = tuple(name + "." for name in modules_to_save(spec, adapters))
    return [name for name in (*spec.parameters, *buffers) if name in adapters or name.startswith(prefixes)]


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in parameters}


def resized_embeddings(model: Any, spec: ModelSpec) -> list[str]:
    """Names the matrices with a row for each token, where the base of the model has another number of tokens."""
    num_tokens = model.config.get_text_config().vocab_size
    try:
        base = type(model.config).from_pretrained(model.name_or_path).get_text_config().vocab_size
    except (OSError, ValueError):  # no name, or the Hub can't be reached
        return []
    text = spec.language_model
    # they are saved: no one who loads the adapter has the same new rows
    outer = [p for p in text.parameters if len(p.shape) == 2 and p.layer in (-1, text.num_layers)]
    return [p.name for p in outer if p.shape[0] == num_tokens != base and p.name not in adapter_names([p.name])]


def saved_config(model: Any, spec: ModelSpec, adapter: Adapter) -> Any:
    saved = copy.deepcopy(adapter.config)
    saved.inference_mode = True
    saved.modules_to_save = modules_to_save(spec, adapter_names(spec.parameters)) or None
    saved.base_model_name_or_path = saved.base_model_name_or_path or getattr(model, "name_or_path", None) or None
    if saved.task_type is None:
        # `AutoPeftModel` reads the class of the base model from it
        saved.auto_mapping = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    return saved


def write_adapters(state: Mapping[str, torch.Tensor], model: Any, spec: ModelSpec, adapter: Adapter, folder: Path):
    """Writes whole tensors, by the names of [`names_to_save`], in `peft`'s format."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    # `model` may be this rank's part
    saved_config(model, spec, adapter).save_pretrained(str(folder))
    tensors = {adapter_file_key(name, adapter): tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


# `PeftModel`s: wrapping a model for one process, unwrapping it for a plan, and assembling it again.

_ALONE = "or train without `parallel`"
# Setting -> (why it can't be laid out, remedy).
REFUSED_WHEN_GIVEN = {
    "bias": ("it trains biases of layers that have no adapter", "Use `bias='none'`"),
    "trainable_token_indices": (
        "it trains single rows of an embedding",
        "Use `modules_to_save` for the whole embedding",
    ),
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
    for setting, (reason, remedy) in REFUSED_WHEN_GIVEN.items():
        value = getattr(config, setting, None)
        if value and value != "none":
            raise ValueError(
                f"`{setting}={value!r}` of the adapter `{name}` can't be laid out: {reason}. {remedy}, {_ALONE}."
            )
    stacked = {id(adapter) for experts in experts_of(base).values() for adapter in experts.adapters}
    for path, layer in base.named_modules():
        if hasattr(layer, "parameter_name") and id(layer) not in stacked:
            raise ValueError(f"{_not_of_experts(name, f'{path}.{layer.parameter_name}')}, {_ALONE}.")
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
        if parameter.requires_grad and ".base_layer." in path and not adapter_names([path]):
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
    Wraps a whole base model as a `PeftModel` with trained weights, at least for all of [`names_to_save`]. Its
    `disable_adapter()` turns off LoRA only, since the originals of `modules_to_save` no longer exist.
    """
    from peft import set_peft_model_state_dict

    names = names_to_save(spec, persistent_buffers(base))
    model = as_peft_model(base, spec, adapter)
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
