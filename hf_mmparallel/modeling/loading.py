"""Builds models without memory for weights, and reads from a checkpoint only the weights that a rank owns."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .._files import readable
from ..plan import ModelSpec
from ..world import World
from .adapter import Adapter, adapter_names, as_peft_model, wrap_as_peft_model
from .tensor_parallel import base_name
from .unowned import give_own_memory, is_unowned

# Reads chosen parameters of a model from safetensors files, with names and layouts of older checkpoints converted.

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"


def checkpoint_files(folder_or_id: str | Path) -> list[Path]:
    """Returns the safetensors files of a folder or of a model on the Hub; raises `ValueError` if there are none."""
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


def adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "base_layer")]


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Replaces layers with an adapter by their base layers, whose names are those of a base checkpoint."""
    layers = adapted_layers(model)

    def put(name: str, layer: nn.Module) -> None:
        parent, _, attribute = name.rpartition(".")
        model.get_submodule(parent)._modules[attribute] = layer

    for name, layer in reversed(layers):  # from the innermost of those around the same layer
        put(name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in layers:
            put(name, layer)


@contextmanager
def _showing_only(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Restricts `model.state_dict()` to some names, so that the loader skips other checkpoint keys as unexpected."""

    def keep(module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        for name in [name for name in state if name not in names]:
            del state[name]

    handle = model.register_state_dict_post_hook(keep)
    try:
        yield
    finally:
        handle.remove()


class CheckpointReader:
    """The safetensors files of a checkpoint, open and mapped; a context manager, which closes them."""

    def __init__(self, model: Any, source: str | Path):
        from safetensors import safe_open
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.model, self.source = model, str(source)
        _check_unquantized(model.config, self.source)
        self._slices: dict[str, Any] = {}
        self._file_names: dict[str, str] = {}
        with ExitStack() as opened:
            for file in checkpoint_files(source):
                with readable(file):
                    reader = opened.enter_context(safe_open(str(file), framework="pt"))
                for key in reader.keys():  # noqa: SIM118
                    self._slices[key], self._file_names[key] = reader.get_slice(key), file.name
            with _without_adapters(model):
                # One list for all calls: it notes which conversions were used, which saving reverts.
                self._conversions: Any = get_model_conversion_mapping(model)
                self._mixed: set[str] = set()  # parameters of which a shard is not made of shards of keys
                # parameter -> the keys that it is made of
                self._keys = self._keys_by_parameter()
            self._opened = opened.pop_all()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: Any) -> None:
        self._slices.clear()
        self._opened.close()

    def _renamed(self, key: str, expected: Any) -> tuple[str, Any]:
        """The parameter that a key is part of, and its converter if several keys or parameters belong together."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        renamings = [entry for entry in self._conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._conversions if isinstance(entry, WeightConverter)]
        name, pattern = rename_source_key(key, renamings, converters, self.model.base_model_prefix, expected)
        return name, next((entry for entry in converters if pattern in entry.source_patterns), None)

    def _keys_by_parameter(self) -> dict[str, list[str]]:
        expected, result = self.model.state_dict(), {}
        for key in self._slices:
            name, converter = self._renamed(key, expected)
            targets = [name] if converter is None else converter.target_patterns
            names = {name.replace(targets[0], target) for target in targets} | {key}
            for part in names:
                result.setdefault(part, []).append(key)
            if converter is not None and not _stacks(converter):
                self._mixed |= names
        return result

    def fill(self, names: Collection[str], device: torch.device | str) -> set[str]:
        """
        Replaces parameters and buffers on the meta device by those of the files, and returns the names that no file
        has. Raises `ValueError` if a tensor has another shape.
        """
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        plain = {base_name(name): name for name in names}
        slices = {key: self._slices[key] for name in plain for key in self._keys.get(name, ())}
        if not slices:
            return set(names)
        with _without_adapters(self.model), _showing_only(self.model, plain), _quiet(), self._whole(plain):
            self._check_shapes(slices)
            config = LoadStateDictConfig(device_map={"": torch.device(device)}, weight_mapping=self._conversions)
            # of a sharded parameter only the shard is read
            info, _ = convert_and_load_state_dict_in_model(self.model, slices, config)
        for name, shape, expected in sorted(info.mismatched_keys, key=str):
            raise ValueError(_wrong_shape(self.source, "its converted tensor", tuple(shape), name, tuple(expected)))
        for name, error in info.conversion_errors.items():
            reason = error.strip().splitlines()[-1]
            raise ValueError(f"`{self.source}`: the tensors of `{name}` can't be converted: {reason}")
        return {plain[name] for name in info.missing_keys}

    @contextmanager
    def _whole(self, names: Collection[str]) -> Iterator[None]:
        """Lets sharded parameters that can't be read by shards be read whole, and cuts them afterwards."""
        blanks: list[tuple[dict[str, Any], str, DTensor]] = []
        for name in self._mixed.intersection(names):
            parent, _, attribute = name.rpartition(".")
            home: Any = self.model.get_submodule(parent)._parameters
            if isinstance(blank := home.get(attribute), DTensor):
                blanks.append((home, attribute, blank))
                home[attribute] = nn.Parameter(torch.empty(blank.shape, dtype=blank.dtype, device="meta"))
        yield
        for home, attribute, blank in blanks:
            value = home[attribute].detach()
            home[attribute] = blank
            if not value.is_meta:
                home[attribute] = nn.Parameter(_cut_as(value, blank))
                give_own_memory(home[attribute])

    def _check_shapes(self, slices: dict[str, Any]) -> None:
        from transformers.core_model_loading import dot_natural_key

        expected = self.model.state_dict()
        for key in sorted(slices, key=dot_natural_key):
            name, converter = self._renamed(key, expected)
            if converter is None and name in expected:
                shape, wanted = tuple(slices[key].get_shape()), tuple(expected[name].shape)
                if shape != wanted:
                    what = f"`{key}` in `{self._file_names[key]}`"
                    raise ValueError(_wrong_shape(self.source, what, shape, name, wanted))


def _cut_as(value: torch.Tensor, blank: DTensor) -> DTensor:
    return distribute_tensor(value, blank.device_mesh, blank.placements, src_data_rank=None)


def _stacks(converter: Any) -> bool:
    """Whether operations only stack tensors, such as those of experts, of which the loader knows those of a shard."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *rest = converter.operations
    return isinstance(first, MergeModulelist) and all(isinstance(operation, Concatenate) for operation in rest)


def _check_unquantized(config: Any, source: str) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"The weights in `{source}` are quantized (`quantization_config`), so a rank can't read its part of them. "
            "Load them with `from_pretrained` on each rank and pass the model, with adapters or dequantized."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _wrong_shape(source: str, what: str, shape: tuple, name: str, expected: tuple) -> str:
    return (
        f"`{source}` is a checkpoint of another model: {what} has shape {shape}, the model's `{name}` has {expected}. "
        f"Give the checkpoint that belongs to this configuration."
    )


def another_model(model: nn.Module, source: str | Path, lost: list[str]) -> str:
    """Returns the error message for parameters that a checkpoint lacks."""
    others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return (
        f"`{source}` is a checkpoint of another model: none of its files has `{lost[0]}`{others} of "
        f"`{type(model).__name__}`. Give the checkpoint that belongs to this configuration."
    )


def build_on_meta(source: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """
    Builds the model of a model id, a folder or a configuration on the meta device; [`load_owned`] loads its weights. A
    live model is returned as it is. Raises `ValueError` if the configuration has no model class.
    """
    import transformers

    if isinstance(source, nn.Module):
        return source
    is_checkpoint = isinstance(source, (str, Path))
    from . import multimodal_model  # noqa: F401 (lets transformers know composed models)

    # `dtype` is that of the configuration by default; `kwargs` are such as `revision` or `trust_remote_code`
    config = transformers.AutoConfig.from_pretrained(source, **kwargs) if is_checkpoint else source
    dtype = dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
    with torch.device("meta"):
        model = _model_class(config)._from_config(config, dtype=dtype)
    for module in model.modules():  # what is drawn by a function that no device is told
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
    if is_checkpoint and model.can_generate():
        with suppress(OSError):  # the checkpoint may have none
            model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    return model


def _model_class(config: Any) -> Any:
    """Returns the model class named in a configuration, or the first one that an auto class maps it to."""
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


def load_owned(model: Any, folder_or_id: str | Path, device: torch.device | str = "cpu") -> None:
    """Loads a model's parameters and buffers as one layer, see [`load_layers`]."""
    for _ in load_layers(model, folder_or_id, device, ()):
        pass


def load_layers(
    model: Any, folder_or_id: str | Path, device: torch.device | str, layers: Iterable[Collection[str]]
) -> Iterator[list[str]]:
    """
    Loads the parameters and buffers of a pruned model that are on the meta device, in place, and reads nothing else;
    yields the parameters loaded after each of `layers`, and then all others. They may lose their memory before the
    next layer is loaded. Raises `ValueError` if the checkpoint lacks a parameter or has it in another shape.
    """
    state = _state(model)
    adapters = adapter_names(state)
    left = {name: None for name in state if state[name].is_meta and name not in adapters}
    trainable = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    missing: set[str] = set()
    with CheckpointReader(model, folder_or_id) as reader:
        for layer in (*layers, list(left)):
            names = [name for name in layer if name in left]
            for name in names:
                del left[name]
            # as `from_pretrained` converts older checkpoints; of a sharded parameter only the shard is read
            lost = reader.fill(names, device)
            missing |= lost
            loaded = [name for name in names if name not in lost]
            for name in loaded:
                if name in trainable:
                    model.get_parameter(name).requires_grad_(trainable[name])
            yield loaded
    missing -= _tie(model, missing)
    initialize_rest(model, missing, device, str(folder_or_id))
    # a base checkpoint has no LoRA matrices
    _initialize_adapters(model, device)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(trainable[name])


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return model.state_dict(keep_vars=True)


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
    empty = {name for name, b in model.named_buffers() if b.is_meta}
    empty |= {name for name, p in parameters.items() if p.is_meta} - adapter_names(parameters)
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
    with _own_layers_only(model):
        model.initialize_weights()


@contextmanager
def _own_layers_only(model: nn.Module) -> Iterator[None]:
    """Leaves layers of other stages out of the lists of layers, whose tensors a model's code may initialise."""
    lists = [(module, module._modules) for module in model.modules() if isinstance(module, nn.ModuleList)]
    for module, layers in lists:
        own = [layer for layer in layers.values() if not getattr(layer, "is_identity_layer", False)]
        module._modules = {str(index): layer for index, layer in enumerate(own)}
    try:
        yield
    finally:
        for module, layers in lists:
            module._modules = layers


def _initialize_adapters(model: nn.Module, device: torch.device | str) -> None:
    """Initialises LoRA matrices on the meta device as `peft` does, with a seed from the name: equal on all ranks."""
    for name, layer in adapted_layers(model):
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
                value = _cut_as(value, parameter)
            module._parameters[attribute] = nn.Parameter(value, parameter.requires_grad)


def check_equal_models(model: nn.Module, world: World) -> None:
    """Raises `ValueError` on every rank, with the first difference, unless all have the same live model."""
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
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    if not tensor.is_meta:
        flat = tensor.detach().cpu().contiguous().flatten()
        for start in range(0, flat.numel(), 1 << 24):
            digest.update(flat[start : start + (1 << 24)].view(torch.uint8).numpy().data)
    return digest.hexdigest()


# Assembles a whole model from gathered tensors.


def check_gatherable(part: Any) -> None:
    """Refuses a quantized model, whose weights can't be used without the state of its quantizer."""
    if getattr(part, "is_quantized", False):
        raise ValueError(
            f"The weights of this `{type(part).__name__}` are quantized, so the whole model can't be assembled. "
            "Save the adapter with `trainer.save_model(folder)`, and load it with `PeftModel.from_pretrained(base, "
            "folder)`."
        )


def whole_model(part: Any, spec: ModelSpec, state: Mapping[str, torch.Tensor], adapter: Adapter | None = None) -> Any:
    """
    Assembles the whole model, in evaluation mode, from its parameters, including tied names, and buffers, which are
    not copied; a `PeftModel` if there is an adapter.
    """
    base = {base_name(name): state[name] for name in state.keys() - adapter_names(state)}
    whole = fill(blank_model(part), part, base)
    if adapter is not None:
        whole = wrap_as_peft_model(whole, spec, adapter, state)
    return whole.eval()


def blank_peft_model(part: Any, spec: ModelSpec, adapter: Adapter) -> Any:
    """Makes the `PeftModel` of an adapter on the meta device, which knows its model card."""
    with torch.device("meta"):
        return as_peft_model(blank_model(part), spec, adapter)


def blank_model(part: Any) -> Any:
    """Makes a model on the meta device like the one that this rank holds a part of, without adapters."""
    with torch.device("meta"):
        # a model with more than a configuration, such as functions of the user, says how another one is made
        return part.without_weights() if hasattr(part, "without_weights") else type(part)(copy.deepcopy(part.config))


def fill(whole: Any, part: Any, state: Mapping[str, torch.Tensor]) -> Any:
    """Gives a model on the meta device its parameters and buffers, and the generation config of a rank's part."""
    persistent = whole.state_dict()
    whole.load_state_dict({name: state[name] for name in persistent if name in state}, strict=False, assign=True)
    whole.tie_weights()
    for name in state.keys() - persistent.keys():
        owner, _, attribute = name.rpartition(".")
        whole.get_submodule(owner)._buffers[attribute] = state[name]
    initialize_rest(whole, {name for name, p in whole.named_parameters() if p.is_meta}, "cpu", "The ranks' parts")
    if part.can_generate():
        whole.generation_config = part.generation_config
    return whole


def without_weights(model: Any) -> Any:
    """Copies a model, with whatever is attached to its modules; the copy's parameters are on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        blank: Any = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        blank.__dict__.update(parameter.__dict__)
        memo[id(parameter)] = blank
    return copy.deepcopy(model, memo)


def put_parts_of(source: Any, model: Any) -> None:
    """Replaces the submodules, parameters and buffers of a model by those of another one of the same class."""
    for attribute in ("_modules", "_parameters", "_buffers"):
        setattr(model, attribute, getattr(source, attribute))
