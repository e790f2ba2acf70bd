"""Builds models without memory for weights, and reads from a checkpoint only the weights that a rank owns."""

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

from .._files import readable
from ..world import World
from .tensor_parallel import base_name
from .unowned import is_unowned

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"


def build_on_meta(source: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """
    Builds the model that `source` describes, without memory for its weights.

    Args:
        source (`str`, `Path`, `PretrainedConfig` or `PreTrainedModel`):
            A model id, a folder or a configuration. A live model is returned as it is.
        dtype (`torch.dtype`, *optional*): Dtype of the weights; that of the configuration by default.
        kwargs: Arguments of `AutoConfig.from_pretrained`, such as `revision` or `trust_remote_code`.

    Returns:
        `PreTrainedModel`: The model on the meta device; [`load_owned`] loads its weights.

    Raises:
        `ValueError`: If the configuration has no model class.
    """
    import transformers

    if isinstance(source, nn.Module):
        return source
    is_checkpoint = isinstance(source, (str, Path))
    config = transformers.AutoConfig.from_pretrained(source, **kwargs) if is_checkpoint else source
    dtype = dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
    with torch.device("meta"):
        model = _model_class(config)._from_config(config, dtype=dtype)
    if is_checkpoint and model.can_generate():
        with suppress(OSError):  # the checkpoint may have none
            model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    return model


def _model_class(config: Any) -> Any:
    """The model class named in a configuration, or the first one that an auto class maps it to."""
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
            classes = auto._model_mapping[type(config)]
            return classes[0] if isinstance(classes, (list, tuple)) else classes
    raise ValueError(
        f"`{type(config).__name__}` has no model class. Register one with `AutoModel.register` or pass a model."
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
        path = cached_file(str(folder_or_id), name, _raise_exceptions_for_missing_entries=False)
        return None if path is None else Path(path)

    index = find(WEIGHTS_INDEX)
    if index is not None:
        with readable(index):
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [find(name) for name in names]
        missing = [name for name, file in zip(names, files, strict=True) if file is None]
        if missing:
            raise ValueError(f"`{folder_or_id}` has no `{missing[0]}`, which its index names. Copy the file there.")
        return [file for file in files if file is not None]
    single = find(WEIGHTS)
    if single is None:
        raise ValueError(
            f"`{folder_or_id}` has neither `{WEIGHTS}` nor `{WEIGHTS_INDEX}`. Give a folder written by "
            f"`save_pretrained`; to convert other formats, load and save the model once."
        )
    return [single]


def load_owned(model: Any, folder_or_id: str | Path, device: torch.device | str = "cpu") -> None:
    """
    Loads the parameters and buffers of `model` that are on the meta device, in place, and reads nothing else.

    Names and layouts of older checkpoints are converted as in `from_pretrained`. Of a sharded parameter only the shard
    is read. LoRA matrices, which a base checkpoint does not have, are initialised equally on every rank.

    Args:
        model (`PreTrainedModel`): The pruned model of this rank, before or after tensor parallelism.
        folder_or_id (`str` or `Path`): Folder or model id of the weights.
        device (`torch.device`, *optional*, defaults to `"cpu"`): Device of the loaded tensors.

    Raises:
        `ValueError`: If the checkpoint lacks a parameter or has it in another shape, and so is of another model.
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
    """Parameters, including tied names, and persistent buffers."""
    return model.state_dict(keep_vars=True)


def adapter_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters of a model's adapters."""
    return {
        f"{name}.{parameter}"
        for name, layer in _adapted_layers(model)
        for parameter, _ in layer.named_parameters()
        if not parameter.startswith("base_layer.")
    }


def _adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Names and modules of the layers with an adapter."""
    return [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "base_layer")]


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Replaces layers with an adapter by their base layers, whose names are those of a base checkpoint."""
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
    """
    Restricts `model.state_dict()` to some names, so that the loader skips all other checkpoint keys as unexpected.
    """

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
    Replaces the meta tensors `names` of a model by tensors from the files.

    Returns:
        `set[str]`: Names that are not in the files.

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
        slices, file_names = {}, {}
        for file in files:
            with readable(file):
                reader = stack.enter_context(safe_open(str(file), framework="pt"))
            for key in reader.keys():  # noqa: SIM118
                slices[key], file_names[key] = reader.get_slice(key), file.name
        stack.enter_context(_without_adapters(model))
        stack.enter_context(_showing_only(model, plain))
        stack.enter_context(_quiet())
        _check_shapes(model, slices, file_names, source)
        config = LoadStateDictConfig(
            device_map={"": torch.device(device)}, weight_mapping=cast(Any, get_model_conversion_mapping(model))
        )
        info, _ = convert_and_load_state_dict_in_model(model, slices, config)
    for name, shape, expected in sorted(info.mismatched_keys, key=str):
        raise ValueError(_wrong_shape(source, "its converted tensor", tuple(shape), name, tuple(expected)))
    for name, error in info.conversion_errors.items():
        raise ValueError(f"`{source}`: the tensors of `{name}` can't be converted: {error.strip().splitlines()[-1]}")
    return {plain[name] for name in info.missing_keys}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the progress bar of transformers' loader."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _check_shapes(model: Any, slices: dict[str, Any], file_names: dict[str, str], source: str) -> None:
    """Raises `ValueError` for tensors whose shape differs from the whole parameter's; a shard might not show it."""
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
            shape, wanted = tuple(slices[key].get_shape()), tuple(expected[name].shape)
            if shape != wanted:
                raise ValueError(_wrong_shape(source, f"`{key}` in `{file_names[key]}`", shape, name, wanted))


def _wrong_shape(source: str, what: str, shape: tuple, name: str, expected: tuple) -> str:
    return (
        f"`{source}` is a checkpoint of another model: {what} has shape {shape}, the model's `{name}` has {expected}. "
        f"Give the checkpoint that belongs to this configuration."
    )


def another_model(model: nn.Module, source: str | Path, lost: list[str]) -> str:
    """Error message for parameters that a checkpoint lacks."""
    others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return (
        f"`{source}` is a checkpoint of another model: none of its files has `{lost[0]}`{others} of "
        f"`{type(model).__name__}`. Give the checkpoint that belongs to this configuration."
    )


def _tie(model: Any, missing: set[str]) -> set[str]:
    """Ties parameters that are missing in the checkpoint to loaded ones; returns the names of the tied ones."""
    tied = set()
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        for empty, full in ((target, source), (source, target)):
            if empty not in missing or full in missing:
                continue
            parent, _, attribute = empty.rpartition(".")
            value = model.get_parameter(full)
            if not value.is_meta and not is_unowned(value):
                model.get_submodule(parent)._parameters[attribute] = value
                tied.add(empty)
    return tied


def initialize_rest(model: Any, missing: set[str], device: torch.device | str, source: str) -> None:
    """Computes buffers that are not in checkpoints; raises `ValueError` for missing parameters."""
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
    """Initialises LoRA matrices on the meta device as `peft` does, with a seed from the name: equal on all ranks."""
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
    Compares the hashes of a live model's parameters and buffers over all ranks.

    Args:
        model (`nn.Module`): The whole model.
        world ([`World`]): The ranks.

    Raises:
        `ValueError`: On every rank, with the first parameter that differs and the ranks.
    """
    hashes = {name: _hash(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    whole = hashlib.blake2b(repr(list(hashes.items())).encode(), digest_size=16).hexdigest()
    if len(set(world.all_gather(whole, "comparing the models of the ranks"))) == 1:
        return
    tables = world.all_gather(hashes, "comparing the models of the ranks")
    names = dict.fromkeys(name for table in tables for name in table)
    name = next((name for name in names if len({table.get(name) for table in tables}) > 1), next(iter(names)))
    groups: dict[Any, list[int]] = {}
    for rank, table in enumerate(tables):
        groups.setdefault(table.get(name), []).append(rank)
    listing = " than on ".join(
        f"ranks {members}" if len(members) > 1 else f"rank {members[0]}" for members in groups.values()
    )
    raise ValueError(
        f"The model passed to the Trainer is not the same on all ranks: `{name}` is different on {listing}. Call "
        f"`set_seed` before building it, or pass a model id or folder."
    )


def _hash(tensor: torch.Tensor) -> str:
    """A hash of a tensor's dtype, shape and bytes."""
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    if not tensor.is_meta:
        flat = tensor.detach().cpu().contiguous().flatten()
        for start in range(0, flat.numel(), 1 << 24):
            digest.update(flat[start : start + (1 << 24)].view(torch.uint8).numpy().data)
    return digest.hexdigest()
