"""The contents of a `peft` adapter folder: parameters, keys and config."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..plan import ModelSpec
from .adapter import DEFAULT_NAME, Adapter

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def adapter_folder(folder: str | Path, adapter: Adapter) -> Path:
    """Returns the folder in which `PeftModel.save_pretrained(folder)` saves an adapter."""
    return Path(folder) if adapter.name == DEFAULT_NAME else Path(folder) / adapter.name


def adapter_names(names: Iterable[str]) -> set[str]:
    """Picks the adapters' parameters among some names, by the rule of `peft`'s files."""
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


def parameters_to_save(spec: ModelSpec, adapters: set[str]) -> list[str]:
    """Names all parameters in an adapter folder: the adapters', and those of [`modules_to_save`]."""
    prefixes = tuple(name + "." for name in modules_to_save(spec, adapters))
    names = [p.name for module in spec.modules.values() for p in module.parameters]
    return [name for name in names if name in adapters or name.startswith(prefixes)]


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
    """Returns the `LoraConfig` that is saved with adapters, with `modules_to_save`."""
    saved = copy.deepcopy(adapter.config)
    saved.inference_mode = True
    saved.modules_to_save = modules_to_save(spec, adapter_names(spec.parameters)) or None
    saved.base_model_name_or_path = saved.base_model_name_or_path or getattr(model, "name_or_path", None) or None
    if saved.task_type is None:
        # `AutoPeftModel` reads the class of the base model from it
        saved.auto_mapping = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    return saved


def write_adapters(state: Mapping[str, torch.Tensor], model: Any, spec: ModelSpec, adapter: Adapter, folder: Path):
    """Writes whole tensors, by the names of [`parameters_to_save`], in `peft`'s format."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    # `model` may be this rank's part
    saved_config(model, spec, adapter).save_pretrained(str(folder))
    tensors = {adapter_file_key(name, adapter): tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
