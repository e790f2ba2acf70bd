"""Reads chosen parameters of a model from safetensors files, with names and layouts of older checkpoints converted."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._files import readable
from .tensor_parallel import base_name

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
    """Lists names and modules of the layers with an adapter."""
    return [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "base_layer")]


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Replaces layers with an adapter by their base layers, whose names are those of a base checkpoint."""
    layers = adapted_layers(model)

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
                # parameter -> the keys that it is made of
                self._keys = self._keys_by_parameter()
            self._opened = opened.pop_all()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: Any) -> None:
        self._slices.clear()
        self._opened.close()

    def _renamed(self, key: str, expected: Any) -> tuple[str, Any]:
        """
        Returns the parameter that a key is part of, and its converter from several keys, or into several parameters.
        """
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
        with _without_adapters(self.model), _showing_only(self.model, plain), _quiet():
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

    def _check_shapes(self, slices: dict[str, Any]) -> None:
        """Refuses tensors without the shape of the whole parameter, which a shard might not show."""
        from transformers.core_model_loading import dot_natural_key

        expected = self.model.state_dict()
        for key in sorted(slices, key=dot_natural_key):
            name, converter = self._renamed(key, expected)
            if converter is None and name in expected:
                shape, wanted = tuple(slices[key].get_shape()), tuple(expected[name].shape)
                if shape != wanted:
                    what = f"`{key}` in `{self._file_names[key]}`"
                    raise ValueError(_wrong_shape(self.source, what, shape, name, wanted))


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
