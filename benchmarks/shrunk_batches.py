"""
Samples of any tiny model, by rule: media are guessed from the names of the arguments of `get_image_features` and its
like, the first guess that the method takes is used, and it says how many placeholders the item has.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shrunk_models import CHANGES, FIRST_SPECIAL, PADDING, SIDE, setting
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

GRID = (1, 4, 4)
"""Patches of an image."""
NUM_PATCHES = GRID[0] * GRID[1] * GRID[2]
MODALITIES = ("image", "video", "audio")


@dataclass(frozen=True)
class Samples:
    """Samples of one family, a list of which `collate` makes a batch."""

    rows: list[dict[str, Tensor]]
    axes: Mapping[str, int]  # entry of items -> the dimension along which the items of a batch are joined

    def collate(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Pads tokens to the right, and joins items."""
        length = max(len(sample["input_ids"]) for sample in samples)
        batch = {}
        for name in dict.fromkeys(name for sample in samples for name in sample):
            values = [sample[name] for sample in samples if name in sample]
            if name in self.axes:
                batch[name] = torch.cat(values, self.axes[name])
            else:
                fill = -100 if name == "labels" else PADDING
                batch[name] = torch.stack([nn.functional.pad(v, (0, length - len(v)), value=fill) for v in values])
        return batch


@dataclass(frozen=True)
class Media:
    """The items of a modality: a function of their number to their tensors, and the feature tokens of one."""

    modality: str
    draw: Callable[[int], dict[str, Tensor]]
    token: int | None  # the placeholder
    num_tokens: int

    def axes(self) -> dict[str, int]:
        """The dimension of each tensor that grows with the number of items."""
        one, two = self.draw(1), self.draw(2)
        grown = {name: [a != b for a, b in zip(one[name].shape, two[name].shape, strict=True)] for name in one}
        return {name: of_name.index(True) if True in of_name else 0 for name, of_name in grown.items()}


def make_samples(model: PreTrainedModel, family: str, count: int) -> Samples:
    """
    Samples of several lengths. The first, the third, ... have an item of each modality, all have one if the model
    takes no others. Raises what the model raises for a batch of them.
    """
    media = [m for m in (find_media(model, modality) for modality in MODALITIES) if m is not None]
    if any(m.modality == "image" for m in media):
        media = [m for m in media if m.modality != "video"]
    change = CHANGES[family].batch if family in CHANGES else None
    failures = []
    for fed, step in ((fed, step) for fed in ([media] if media else _fed_to_forward(model)) for step in (2, 1)):
        samples = _samples(model, fed, count, step, change)
        try:
            with torch.no_grad():
                loss = model(**samples.collate(samples.rows), use_cache=False).loss
            if loss is None or not bool(torch.isfinite(loss)):
                raise ValueError(f"the loss is {loss}")
            return samples
        except Exception as error:
            failures.append(error)
    raise failures[-1]


def _samples(
    model: PreTrainedModel,
    media: Sequence[Media],
    count: int,
    step: int,
    change: Callable[[dict[str, Tensor]], None] | None,
) -> Samples:
    """Samples of which each `step`-th has items."""
    parameters = inspect.signature(model.forward).parameters
    axes = {name: axis for m in media for name, axis in m.axes().items()}
    generator = torch.Generator().manual_seed(1)

    def words(number: int) -> Tensor:
        return torch.randint(3, 90, (number,), generator=generator)

    rows = []
    for index in range(count):
        own = media if index % step == 0 else []
        pieces, row = [words(4 + index % 3)], {}
        for m in own:
            if m.token is not None:
                pieces += [torch.full((m.num_tokens,), m.token), words(2)]
            row |= m.draw(1)
        ids = torch.cat([*pieces, words(6 + index)])
        labels = ids.masked_fill(ids >= FIRST_SPECIAL, -100)
        labels[:2] = -100
        kinds = torch.zeros_like(ids)
        for m in own:
            if m.token is not None:
                kinds[ids == m.token] = MODALITIES.index(m.modality) + 1
        row = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids), **row}
        if "mm_token_type_ids" in parameters:
            row["mm_token_type_ids"] = kinds.int()
        if "token_type_ids" in parameters and media:
            row["token_type_ids"] = (kinds == 1).long()
        if change is not None:
            change(row)
        rows.append(row)
    return Samples(rows, axes)


def find_media(model: PreTrainedModel, modality: str) -> Media | None:
    """How items of a modality are given to the model; `None` if it takes none, `ValueError` if no guess is right."""
    owner = next((o for o in (model.base_model, model) if hasattr(o, f"get_{modality}_features")), None)
    tokens = (getattr(model.config, f"{modality}_token_{end}", None) for end in ("id", "index"))
    token = next((token for token in tokens if isinstance(token, int)), None)
    if owner is None or token is None or setting(model.config, f"{modality}_config", 0) is None:
        return None
    method = getattr(owner, f"get_{modality}_features")
    parameters = inspect.signature(inspect.unwrap(method)).parameters
    names = [name for name in parameters if name not in ("self", "kwargs")]
    # what may be left out is at first, since the sizes of images that are whole tell nothing
    fewer = [n for n in names if n != "image_sizes" or parameters[n].default is inspect.Parameter.empty]
    errors = []
    for draw in (
        draw for some in dict.fromkeys([tuple(fewer), tuple(names)]) for draw in _guesses(model, modality, some)
    ):
        try:
            with torch.no_grad():
                output = method(**draw(2))
            return Media(modality, draw, token, _count_tokens(output, modality) // 2)
        except Exception as error:  # a wrong guess
            errors.append(f"{type(error).__name__}: {error}")
    if modality == "video":  # images are enough
        return None
    raise ValueError(f"No guess of the arguments {names} of `get_{modality}_features` is right: {errors}")


def _fed_to_forward(model: PreTrainedModel) -> Iterator[list[Media]]:
    """Guesses of images or clips that the model's forward takes without placeholders, such as for cross-attention."""
    names = [n for n in inspect.signature(model.forward).parameters if re.search("pixel_values$|input_features$", n)]
    if not names:
        yield []
    for name in names[:1]:
        modality = "image" if "pixel" in name else "audio"
        yield from ([Media(modality, draw, None, 0)] for draw in _guesses(model, modality, [name]))


def _count_tokens(output: Any, modality: str) -> int:
    """The feature tokens in the output of a feature method."""
    valid = getattr(output, "attention_mask", None)
    if isinstance(valid, Tensor) and modality == "audio":
        return int(valid.sum())
    features: Any = output
    for name in ("last_hidden_state", "pooler_output"):
        features = getattr(output, name, None) if getattr(output, name, None) is not None else features
    if features is output and hasattr(output, "deepstack_features"):  # (layer, features of each item) alone
        features = output.deepstack_features[0][1]
    if isinstance(features, Tensor):
        return features.reshape(-1, features.shape[-1]).shape[0]
    return sum(_count_tokens(item, modality) for item in features)


# Guesses


@dataclass(frozen=True)
class _Items:
    """Some items, of which the main tensor is known."""

    count: int
    value: Tensor
    frames: int  # dimension of time in sound

    @property
    def sides(self) -> tuple[int, int]:
        return (self.value.shape[-2], self.value.shape[-1]) if self.value.dim() > 2 else GRID[1:]


def _positions(items: _Items) -> Tensor:
    side = torch.arange(GRID[1])
    grid = torch.stack(torch.meshgrid(side, side, indexing="ij"), -1).flip(-1).reshape(1, -1, 2)
    return grid.expand(*items.value.shape[:-2], -1, -1).contiguous()


def _pixel_mask(items: _Items) -> Tensor:
    shape = items.value.shape
    return torch.ones(shape[:2] if items.value.dim() == 3 else (*shape[:-3], *items.sides), dtype=torch.int64)


BESIDE: tuple[tuple[str, Callable[[_Items], Tensor]], ...] = (
    (r"grid_thw$", lambda items: torch.tensor([GRID] * items.count)),
    (r"grid_hw$", lambda items: torch.tensor([GRID[1:]] * items.count)),
    (r"merge_sizes$", lambda items: torch.full((items.count,), 2)),
    (r"target_sizes|spatial_shapes", lambda items: torch.tensor([GRID[1:]] * items.count)),
    (r"^image_sizes$", lambda items: torch.tensor([items.sides] * items.count)),
    (r"position_ids$", _positions),
    (r"^pixel_attention_mask$", _pixel_mask),
    (r"features_mask$|attention_mask$|padding_mask$|values_mask$",
     lambda items: torch.ones(items.count, items.value.shape[items.frames], dtype=torch.int64)),
    (r"^high_res_pixel_values$", lambda items: normal(items.count, 3, 2 * SIDE, 2 * SIDE)),
    (r"^qformer_input_ids$", lambda items: torch.arange(3, 9).repeat(items.count, 1)),
)  # fmt: skip
"""Pattern of an argument's name -> its value for some items."""
MAIN = re.compile("pixel_values|input_features|input_values|flattened_patches|patches|input_ids")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _number(config: Any, *names: str) -> int:
    """The first of some settings among those of a config, its parts, and their parts; 0 without one."""
    parts = [config]
    for part in parts:
        for name in names:
            value = setting(part, name)
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        parts += [p for n in getattr(part, "sub_configs", ()) if isinstance(p := setting(part, n), PreTrainedConfig)]
    return 0


def _guesses(
    model: PreTrainedModel, modality: str, names: Sequence[str]
) -> Iterator[Callable[[int], dict[str, Tensor]]]:
    """Functions of the number of items to arguments of these names, the likely ones first."""
    main = next(filter(MAIN.search, names), names[0])
    kinds = ("audio",) if modality == "audio" else ("vision", "vq", "image", "vit")
    configs = [setting(model.config, f"{kind}_config") for kind in kinds]
    own = next((config for config in configs if config is not None), model.config)
    shapes = _sound_shapes(own) if modality == "audio" else _pixel_shapes(own, names)
    for shape, frames in shapes:

        def draw(
            count: int, shape: Callable[[int], tuple[int, ...]] = shape, frames: int = frames
        ) -> dict[str, Tensor]:
            value = normal(*shape(count))
            items = _Items(count, value.abs().long() if "input_ids" in main else value, frames)
            beside = {
                n: next((make(items) for p, make in BESIDE if re.search(p, n)), None) for n in names if n != main
            }
            return {main: items.value, **{name: value for name, value in beside.items() if value is not None}}

        yield draw


Shape = tuple[Callable[[int], tuple[int, ...]], int]


def _sound_shapes(config: Any) -> Iterator[Shape]:
    mel = (
        _number(config, "num_mel_bins", "n_mel_bins", "input_feat_size", "feature_size", "input_dim", "mel_dim") or 128
    )
    mel *= _number(config, "num_stacked_frames") or 1
    longest = 2 * _number(config, "max_source_positions")
    for size in dict.fromkeys(filter(None, (longest, 64, 32, 128, 1920, 3200, 6400))):
        for shape, frames in (((mel, size), -1), ((size, mel), -2), ((size,), -1), ((1, size), -1)):
            yield lambda n, shape=shape: (n, *shape), frames


def _pixel_shapes(config: Any, names: Sequence[str]) -> Iterator[Shape]:
    patch = _number(config, "patch_size", "vision_patch_size") or 8
    time = _number(config, "temporal_patch_size", "patch_temporal") or 1
    channels = _number(config, "in_channels", "num_channels", "in_chans") or 3
    side = _number(config, "image_size") or SIDE
    area, image = patch * patch, (channels, side, side)
    if any(re.search("grid_t?hw", name) for name in names):
        for shape in (
            (channels * time * area,),
            (channels * area,),
            (channels, patch, patch),
            (channels, time, patch, patch),
            (2 * patch, 2 * patch, channels),
        ):
            yield lambda n, shape=shape: (n * NUM_PATCHES, *shape), 0
        return
    if any("target_sizes" in name for name in names):
        yield lambda n: (1, channels, patch, n * NUM_PATCHES * patch), 0
        return
    rows = (NUM_PATCHES, channels * area)
    by_patch = any(re.search("position_ids|spatial_shapes", name) for name in names)
    for shape in (*(rows,) * by_patch, image, (1, *image), (2, *image), (channels, 2 * side, 2 * side), rows):
        yield lambda n, shape=shape: (n, *shape), 0
    yield lambda n: (n * NUM_PATCHES, time, patch, patch, channels), 0
