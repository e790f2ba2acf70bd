"""Models without their weights, and weights read from a checkpoint only where they are held."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..world import World
from .hollow import is_hollow
from .tensor_parallel import base_name

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"


def build_on_meta(source: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """
    Builds the model that `source` describes, without memory for its weights.

    Args:
        source (`str`, `Path`, `PretrainedConfig` or `PreTrainedModel`):
            A model id, a folder or a configuration. A live model is returned as it is.
        dtype (`torch.dtype`, *optional*): Of the weights; by default what the configuration says.
        kwargs: For `AutoConfig.from_pretrained`, such as `revision` or `trust_remote_code`.

    Returns:
        `PreTrainedModel`: The model on the meta device; [`load_owned`] gives it weights.

    Raises:
        `ValueError`: If no model class belongs to the configuration.
    """
    import transformers

    if isinstance(source, nn.Module):
        return source
    named = isinstance(source, (str, Path))
    config = transformers.AutoConfig.from_pretrained(source, **kwargs) if named else source
    dtype = dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
    with torch.device("meta"):
        model = _model_class(config)._from_config(config, dtype=dtype)
    if named and model.can_generate():
        with suppress(OSError):  # a checkpoint without one keeps the default
            model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    return model


def _model_class(config: Any) -> Any:
    """The class that a configuration was saved from, or the first that an auto class has for it."""
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    autos = (
        transformers.AutoModelForMultimodalLM,
        transformers.AutoModelForImageTextToText,
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModel,
    )
    for auto in autos:
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            return found[0] if isinstance(found, (list, tuple)) else found
    raise ValueError(
        f"No model class belongs to `{type(config).__name__}`. Register one with `AutoModel.register` or pass a model."
    )


def checkpoint_files(folder_or_id: str | Path) -> list[Path]:
    """
    The safetensors files of a folder or of a model on the Hub.

    Raises:
        `ValueError`: If there are none.
    """
    from transformers.utils.hub import cached_file

    folder = Path(folder_or_id)

    def find(name: str) -> Path | None:
        if folder.is_dir():
            return folder / name if (folder / name).is_file() else None
        found = cached_file(str(folder_or_id), name, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    index = find(WEIGHTS_INDEX)
    if index is not None:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [find(name) for name in names]
        missing = [name for name, file in zip(names, files, strict=True) if file is None]
        if missing:
            raise ValueError(f"`{folder_or_id}` lacks `{missing[0]}`, which its index names. Copy it there again.")
        return [file for file in files if file is not None]
    single = find(WEIGHTS)
    if single is None:
        raise ValueError(
            f"`{folder_or_id}` holds neither `{WEIGHTS}` nor `{WEIGHTS_INDEX}`. Give a folder that `save_pretrained` "
            f"wrote; files of other formats are converted by loading and saving them once."
        )
    return [single]


def load_owned(model: Any, folder_or_id: str | Path, device: torch.device | str = "cpu") -> None:
    """
    Fills the parameters and buffers of `model` that are still on the meta device, in place, reading nothing else.

    Names and layouts of older checkpoints are converted as `from_pretrained` does. Parameters that are already sharded
    read only their shard. LoRA matrices, which no base checkpoint has, are initialised the same way on every rank.

    Args:
        model (`PreTrainedModel`): The model, pruned to what this rank holds, before or after tensor parallelism.
        folder_or_id (`str` or `Path`): Where the weights are.
        device (`torch.device`, *optional*, defaults to `"cpu"`): Where they go.

    Raises:
        `ValueError`: If the checkpoint lacks a parameter, or has another shape for it: it belongs to another model.
    """
    adapters = adapter_parameters(model)
    names = {name for name, tensor in _state(model).items() if tensor.is_meta and name not in adapters}
    trainable = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    missing = fill_parameters(model, checkpoint_files(folder_or_id), names, device, str(folder_or_id))
    missing -= _tie(model, missing)
    initialize_rest(model, missing, device, str(folder_or_id))
    _initialize_adapters(model, device)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(trainable[name])


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, tied names included, and persistent buffers."""
    return model.state_dict(keep_vars=True)


def adapter_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that adapters add to a model."""
    return {
        f"{name}.{parameter}"
        for name, layer in _adapted_layers(model)
        for parameter, _ in layer.named_parameters()
        if not parameter.startswith("base_layer.")
    }


def _adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers that an adapter wraps."""
    return [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "base_layer")]


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Gives the layers their names in a base checkpoint: adapters step aside."""
    layers = _adapted_layers(model)

    def put(name: str, layer: nn.Module) -> None:
        parent, _, attribute = name.rpartition(".")
        model.get_submodule(parent)._modules[attribute] = layer

    for name, layer in layers:
        put(name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in layers:
            put(name, layer)


@contextmanager
def _showing_only(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Makes `model.state_dict()` hold these names alone, so that a loader takes the others for another model's."""

    def keep(module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        for name in [name for name in state if name not in names]:
            del state[name]

    handle = model.register_state_dict_post_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def fill_parameters(
    model: Any, files: Collection[Path], names: Collection[str], device: torch.device | str, source: str
) -> set[str]:
    """
    Replaces the meta tensors `names` of a model by those that the files have for them.

    Returns:
        `set[str]`: Names for which the files have nothing.

    Raises:
        `ValueError`: If a tensor has another shape.
    """
    from safetensors import safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    if not names:
        return set()
    plain = {base_name(name): name for name in names}
    with ExitStack() as stack:
        slices, homes = {}, {}
        for file in files:
            reader = stack.enter_context(safe_open(str(file), framework="pt"))
            for key in reader.keys():  # noqa: SIM118
                slices[key], homes[key] = reader.get_slice(key), file.name
        stack.enter_context(_without_adapters(model))
        stack.enter_context(_showing_only(model, plain))
        stack.enter_context(_quiet())
        _check_shapes(model, slices, homes, source)
        config = LoadStateDictConfig(
            device_map={"": torch.device(device)}, weight_mapping=cast(Any, get_model_conversion_mapping(model))
        )
        info, _ = convert_and_load_state_dict_in_model(model, slices, config)
    for name, found, expected in sorted(info.mismatched_keys, key=str):
        raise ValueError(_wrong_shape(source, "its converted tensor", tuple(found), name, tuple(expected)))
    for name, error in info.conversion_errors.items():
        raise ValueError(f"`{source}`: the tensors of `{name}` can't be converted: {error.strip().splitlines()[-1]}")
    return {plain[name] for name in info.missing_keys}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the progress bar that transformers shows for each load."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_shapes(model: Any, slices: dict[str, Any], homes: dict[str, str], source: str) -> None:
    """Raises for tensors whose shape differs from the whole parameter's, which a shard alone would not show."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    expected = model.state_dict()
    for key in sorted(slices, key=dot_natural_key):
        name, converted = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
        if converted is None and name in expected:
            found, shape = tuple(slices[key].get_shape()), tuple(expected[name].shape)
            if found != shape:
                raise ValueError(_wrong_shape(source, f"`{key}` in `{homes[key]}`", found, name, shape))


def _wrong_shape(source: str, what: str, found: tuple, name: str, expected: tuple) -> str:
    return (
        f"`{source}` is a checkpoint of another model: {what} has shape {found}, the model's `{name}` has {expected}. "
        f"Give the checkpoint that belongs to this configuration."
    )


def another_model(model: nn.Module, source: str | Path, lost: list[str]) -> str:
    """The sentence for parameters that a checkpoint lacks."""
    others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return (
        f"`{source}` is a checkpoint of another model: none of its files has `{lost[0]}`{others} of "
        f"`{type(model).__name__}`. Give the checkpoint that belongs to this configuration."
    )


def _tie(model: Any, missing: set[str]) -> set[str]:
    """Ties parameters that were not in the checkpoint to those that were; returns the ones that got a value."""
    tied = set()
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        for empty, full in ((target, source), (source, target)):
            if empty not in missing or full in missing:
                continue
            parent, _, attribute = empty.rpartition(".")
            value = model.get_parameter(full)
            if not value.is_meta and not is_hollow(value):
                model.get_submodule(parent)._parameters[attribute] = value
                tied.add(empty)
    return tied


def initialize_rest(model: Any, missing: set[str], device: torch.device | str, source: str) -> None:
    """Computes buffers that no checkpoint has; raises for parameters that it should have."""
    ignored = "|".join(f"({pattern})" for pattern in model._keys_to_ignore_on_load_missing or ())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    lost = sorted(name for name in missing & set(parameters) if not (ignored and re.search(ignored, name)))
    if lost:
        raise ValueError(another_model(model, source, lost))
    adapters = adapter_parameters(model)
    empty = {name for name, b in model.named_buffers() if b.is_meta}
    empty |= {name for name, p in parameters.items() if p.is_meta and name not in adapters}
    if not empty:
        return
    for name in empty:
        parent, _, attribute = name.rpartition(".")
        owner = model.get_submodule(parent)
        if name in parameters:
            owner._parameters[attribute] = nn.Parameter(torch.empty_like(parameters[name], device=device))
        else:
            owner._buffers[attribute] = torch.empty_like(owner._buffers[attribute], device=device)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor._is_hf_initialized = name not in empty
    for prefix, module in model.named_modules():
        module._is_hf_initialized = not any(name.startswith(prefix + "." if prefix else "") for name in empty)
    model.initialize_weights()


def _initialize_adapters(model: nn.Module, device: torch.device | str) -> None:
    """Gives LoRA matrices on the meta device the values that `peft` would, drawn by name: equal on all ranks."""
    for name, layer in _adapted_layers(model):
        empty = {key: p for key, p in layer.named_parameters() if p.is_meta and not key.startswith("base_layer.")}
        if not empty:
            continue
        for key, parameter in empty.items():
            owner, _, attribute = key.rpartition(".")
            full = torch.zeros(parameter.shape, dtype=parameter.dtype)
            layer.get_submodule(owner)._parameters[attribute] = nn.Parameter(full, parameter.requires_grad)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(name.encode()))
            for adapter in layer.r:
                layer.reset_lora_parameters(adapter, getattr(layer, "init_lora_weights", True))
        for key, parameter in empty.items():
            owner, _, attribute = key.rpartition(".")
            module = layer.get_submodule(owner)
            value = module._parameters[attribute].detach().to(device)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            module._parameters[attribute] = nn.Parameter(value, parameter.requires_grad)


def check_equal_models(model: nn.Module, world: World) -> None:
    """
    Checks that a live model has the same parameters and buffers on all ranks, by their hashes.

    Args:
        model (`nn.Module`): The whole model.
        world ([`World`]): The ranks.

    Raises:
        `ValueError`: On every rank, naming the first parameter that differs and the ranks.
    """
    hashes = {name: _hash(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    whole = hashlib.blake2b(repr(list(hashes.items())).encode(), digest_size=16).hexdigest()
    if len(set(world.all_gather(whole, "comparing the models of the ranks"))) == 1:
        return
    tables = world.all_gather(hashes, "comparing the models of the ranks")
    every = dict.fromkeys(name for table in tables for name in table)
    name = next((name for name in every if len({table.get(name) for table in tables}) > 1), next(iter(every)))
    groups: dict[Any, list[int]] = {}
    for rank, table in enumerate(tables):
        groups.setdefault(table.get(name), []).append(rank)
    sides = " than on ".join(
        f"ranks {members}" if len(members) > 1 else f"rank {members[0]}" for members in groups.values()
    )
    raise ValueError(
        f"The model handed to the Trainer is not the same on all ranks: `{name}` is different on {sides}. Call "
        f"`set_seed` before building it, or pass a model id or folder."
    )


def _hash(tensor: torch.Tensor) -> str:
    """A hash of a tensor's type, shape and bytes."""
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    if not tensor.is_meta:
        flat = tensor.detach().cpu().contiguous().flatten()
        for start in range(0, flat.numel(), 1 << 24):
            digest.update(flat[start : start + (1 << 24)].view(torch.uint8).numpy().data)
    return digest.hexdigest()
