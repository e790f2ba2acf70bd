"""Token counts of images of known sizes, from a model's configuration and code, without weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.auto_mappings import IMAGE_PROCESSOR_MAPPING_NAMES, PROCESSOR_MAPPING_NAMES

from ..cost.image_tokens import Crops, ImageRule, ImageTokens, PatchGrid
from ..modeling.features import flat_features
from ..modeling.spec import ModulePart, find_stack, layers_of, module_parts
from ..modeling.unowned import hidden_of
from ..plan import LANGUAGE_MODEL, ModelSpec
from ..plan.plugin import reject_unknown_keys

IMAGE = "image"
_SPLITTING = ("do_image_splitting", "split_image", "slice_mode")  # of image processors that cut by rules of their own
FITTING = "models with one image size (Llava, Gemma3, PaliGemma), the tiles of InternVL, or the patches of Qwen-VL"


def image_rule(model: PreTrainedModel, spec: ModelSpec, name: str) -> ImageRule:
    """
    Derives how many tokens images have in an encoder and in the language model; the model may be on the meta device.

    Raises `ValueError` if the configuration does not say into what an image is cut, or the encoder can't be run.
    """
    part = module_parts(model)[name]
    tower = model.get_submodule(part.tower)
    if "image_grid_thw" in part.input_names(IMAGE) and hasattr(tower.config, "spatial_merge_size"):
        config: Any = tower.config
        num_layers = spec.modules[name].num_layers  # all of them global: costs know the windows of the layers
        return PatchGrid(config.patch_size, config.spatial_merge_size, num_layers, num_layers)
    required = [
        parameter.name
        for parameter in inspect.signature(inspect.unwrap(part.features[IMAGE])).parameters.values()
        if parameter.name != "self"
        and parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
    ]
    image_size = getattr(tower.config, "image_size", None)
    varies = len(required) > 1 or "image_sizes" in inspect.signature(tower.forward).parameters
    if image_size is None or varies or _cuts_by_own_rule(model.config.model_type):
        raise _unknown_cut(model)
    height, width = image_size if isinstance(image_size, (list, tuple)) else (image_size, image_size)
    feature = next(feature for feature in spec.modules[name].features if feature.modality == IMAGE)
    try:
        tokens, rows = _run_once(model, part, feature.field, (height, width))
    except Exception as error:  # a model may raise anything for inputs of another shape
        text = str(error).partition("\n")[0].rstrip(".")
        raise _unknown_cut(model, f" Its encoder can't be run on one image of {height} x {width}: {text}.") from error
    return Crops(tokens, rows, _tiles(model.config.model_type, height, width))


@dataclass(frozen=True)
class ProcessedPatches:
    """The patches of images that their processor has resized."""

    grid: PatchGrid
    processor: Any

    def __call__(self, heights: NDArray, widths: NDArray) -> ImageTokens:
        sizes = zip(heights.tolist(), widths.tolist(), strict=True)
        tokens = np.array([self.processor.get_number_of_image_patches(*size) for size in sizes], dtype=np.int64)
        return ImageTokens(tokens, tokens.astype(float) ** 2, tokens // self.grid.merge_size**2)


def column_rules(
    columns: str | Mapping[str, str] | None,  # as of `ColumnMeasure`
    model: PreTrainedModel,
    spec: ModelSpec,
    processor: Any = None,  # without one nothing limits the sizes of images
) -> dict[str, ImageRule]:
    """Encoder -> the tokens of its images by their sides; raises `ValueError` where area does not tell them."""
    rules: dict[str, ImageRule] = {}
    named = {LANGUAGE_MODEL: columns} if isinstance(columns, str) else columns or {}
    for name, column in named.items():
        if "*" not in column:
            continue
        reject_unknown_keys("The model", [name], list(spec.modules))
        is_of_images = any(feature.modality == IMAGE for feature in spec.modules[name].features)
        grid = image_rule(model, spec, name) if is_of_images and column.count("*") == 1 else None
        if not isinstance(grid, PatchGrid):
            raise ValueError(
                f"`{column}` are sides of images, and `{name}` does not make one token of each square of an image. "
                "Name a column with numbers of tokens."
            )
        sizes = getattr(processor, "image_processor", None)
        rules[name] = ProcessedPatches(grid, sizes) if hasattr(sizes, "get_number_of_image_patches") else grid
    return rules


def _unknown_cut(model: PreTrainedModel, reason: str = "") -> ValueError:
    """The error for a model whose configuration does not determine how images are split."""
    return ValueError(
        f"`{type(model).__name__}` splits images of different sizes by its processor, not by its "
        f"configuration.{reason} Published sizes fit {FITTING}; give a dataset of your own, or `--seq-len` and "
        "`--image-tokens`."
    )


def _cuts_by_own_rule(model_type: str) -> bool:
    """Whether the model's processor cuts images by default in another way than [`_tiles`] counts, or may do so."""
    classes = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type) or {}
    if classes and "pil" not in classes:
        return True  # what it does by default can't be read without torchvision
    processor = _named(classes.get("pil"))
    return any(getattr(processor, name, False) for name in _SPLITTING)


def _run_once(model: PreTrainedModel, part: ModulePart, field: str, size: tuple[int, int]) -> tuple[int, int]:
    """Tokens of one image in the encoder's layers, and its feature tokens."""
    seen: list[int] = []

    def look(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # of `[1, tokens, hidden]` or `[1, rows, columns, hidden]`
        seen.append(hidden_of(args, kwargs)[..., 0].numel())

    layer = layers_of(model, find_stack(model, part.tower))[0]
    handle = layer.register_forward_pre_hook(look, with_kwargs=True)
    try:
        channels = getattr(model.get_submodule(part.tower).config, "num_channels", 3)
        pixels = torch.empty(1, channels, *size, dtype=model.dtype, device=model.device)
        with torch.no_grad():
            output = part.features[IMAGE](**{part.input_names(IMAGE)[0]: pixels})
    finally:
        handle.remove()
    return seen[0], flat_features(getattr(output, field)).shape[0]


def _tiles(model_type: str, height: int, width: int) -> Callable[[int, int], int] | None:
    """Default number of crops per image of the model's processor; `None` if always one."""
    defaults = getattr(_named(PROCESSOR_MAPPING_NAMES.get(model_type)), "images_kwargs", None) or {}
    classes = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type) or {}
    processor = _named(classes.get("pil"))
    if not defaults.get("crop_to_patches") or processor is None:
        return None
    options = {**defaults, "patch_size": {"height": height, "width": width}}
    count = processor().get_number_of_image_patches
    return lambda own_height, own_width: count(own_height, own_width, options)


def _named(name: str | None) -> Any:
    return None if name is None else getattr(transformers, name, None)
