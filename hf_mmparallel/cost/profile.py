"""Costs of layers as they were timed on a machine: points, the curves through them, the file, the source of costs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from ..plan import LANGUAGE_MODEL, ModelSpec
from .analytic import DTYPE_BYTES, AnalyticLayers
from .devices import Hardware
from .layers import CostModel, LayerCost, LayerCosts, Polynomial
from .stage_times import windowed_squares

PROFILE_VERSION = 2
FIT_TOLERANCE = 0.15
"""A curve that is further than this share from one of its points does not fit."""
TIMES = ("forward", "data_gradient", "weight_gradient")
CURVES = (*TIMES, "activations", "frozen_activations")
"""The fields of [`LayerCost`] that are measured: times, and bytes."""
_CONSTANTS = {own.name for own in fields(Hardware) if own.type in ("float", "float | None")}
_CONSTANTS |= {"node_size", "network_cards"}
_REMEDY = "Write one with `hf-mmparallel profile --output`."
_ADAPTER = re.compile(r"\.(lora_|base_layer|original_module|modules_to_save)")


@dataclass(frozen=True)
class MeasuredPoint:
    """
    What a layer took for one chunk: `sequences` sequences that share `tokens` tokens evenly.

    Args:
        tokens (`int`): Tokens of the chunk, as its layers see them.
        sequences (`int`): Sequences among them, which attend apart.
        forward (`float`): Milliseconds.
        data_gradient (`float`): Milliseconds of the backward that gives the gradient of its input alone.
        weight_gradient (`float`): Milliseconds that the gradients of its weights add to that.
        activations (`float`): Bytes kept for the backward where the weights are trained.
        frozen_activations (`float`): Bytes kept where only a gradient of the input is wanted.
    """

    tokens: int
    sequences: int
    forward: float
    data_gradient: float
    weight_gradient: float
    activations: float
    frozen_activations: float

    @property
    def squares(self) -> float:
        """The sum of the squared lengths of the sequences."""
        return self.tokens**2 / self.sequences


@dataclass(frozen=True)
class Curve:
    """
    A polynomial through measured points.

    Args:
        polynomial (`Polynomial`): See there for its form; no coefficient is negative.
        r_squared (`float`): Share of the points' variance that it explains.
        worst_error (`float`): Its largest relative error at a point.
        worst_point (`tuple[int, int]`): Tokens and sequences of that point.
    """

    polynomial: Polynomial
    r_squared: float
    worst_error: float
    worst_point: tuple[int, int]

    @property
    def fits(self) -> bool:
        """Whether it is within [`FIT_TOLERANCE`] of every point."""
        return self.worst_error <= FIT_TOLERANCE


def attended_squares(point: MeasuredPoint, name: str, window: int, is_causal: bool) -> float:
    """
    The squares that a quantity of a layer grows with: of times those within its window, of bytes all of them, as plans
    count both.

    Args:
        point (`MeasuredPoint`): A chunk.
        name (`str`): The quantity, a field of [`LayerCost`].
        window (`int`): Tokens that a token attends to; 0 for all of its sequence.
        is_causal (`bool`): Whether these lie before it.
    """
    if not window or name not in TIMES:
        return point.squares
    return float(windowed_squares(point.tokens, point.squares, window, is_causal))


def fit_curve(points: Sequence[MeasuredPoint], name: str, window: int = 0, is_causal: bool = False) -> Curve:
    """
    Fits `a s + b x + c`, for one sequence `a x^2 + b x + c` (Entrain, section 4.4.1), by least squares of the relative
    errors with coefficients from 0. Where all sequences have one length, as the images of an encoder may, squares are
    not told apart from tokens, and `a` is 0.

    Args:
        points (`Sequence[MeasuredPoint]`): At least one.
        name (`str`): The quantity, a field of [`LayerCost`]. What trained weights add counts relative to the whole
            backward, of which it is the difference.
        window (`int`, *optional*, defaults to 0): See [`attended_squares`].
        is_causal (`bool`, *optional*, defaults to `False`): The same.
    """
    values = np.array([getattr(point, name) for point in points])
    scales = values + (np.array([point.data_gradient for point in points]) if name == "weight_gradient" else 0.0)
    sizes = np.array(
        [(attended_squares(point, name, window, is_causal), point.tokens, 1.0) for point in points], float
    )
    if np.ptp(sizes[:, 0] / sizes[:, 1]) == 0:
        sizes[:, 0] = 0.0
    weights = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    rows = sizes * weights[:, None]
    units = np.maximum(rows.max(axis=0), np.finfo(float).tiny)  # columns of one size keep the system well conditioned
    coefficients = nnls(rows / units, values * weights)[0] / units if weights.any() else np.zeros(3)
    residuals = sizes @ coefficients - values
    errors = np.abs(residuals) * weights
    worst = int(errors.argmax())
    variance = float(((values - values.mean()) ** 2).sum())
    explained = 1.0 - float((residuals**2).sum()) / variance if variance > 0 else float(errors[worst] < 1e-9)
    point = points[worst]
    return Curve(Polynomial(*coefficients.tolist()), explained, float(errors[worst]), (point.tokens, point.sequences))


@dataclass(frozen=True)
class MeasuredLayer:
    """
    The measurements of one kind of layer in one layout.

    Args:
        module (`str`): Its module.
        kind (`str`): Its class, or `"before"` and `"after"` for what a module computes outside of its layers.
        layers (`tuple[int, ...]`): The layers of this kind, of which one was measured: `-1` for what comes before
            the first one, `num_layers` for what comes after the last one.
        shapes (`str`): Digest of the shapes of its parameters, see [`shape_digest`].
        tp_size (`int`): Ranks that share its matrices.
        points (`tuple[MeasuredPoint, ...]`): In the order of measurement.
        curves (`Mapping[str, Curve]`): Field of [`LayerCost`] -> the curve through the points.
        window (`int`, *optional*, defaults to 0): Tokens that a token attends to; 0 for all of its sequence.
    """

    module: str
    kind: str
    layers: tuple[int, ...]
    shapes: str
    tp_size: int
    points: tuple[MeasuredPoint, ...]
    curves: Mapping[str, Curve]
    window: int = 0

    @classmethod
    def fitted(
        cls,
        module: str,
        kind: str,
        layers: Iterable[int],
        shapes: str,
        tp_size: int,
        points: Iterable[MeasuredPoint],
        window: int = 0,
    ) -> MeasuredLayer:
        """With curves through its points."""
        found = tuple(points)
        curves = {name: fit_curve(found, name, window, module == LANGUAGE_MODEL) for name in CURVES}
        return cls(module, kind, tuple(layers), shapes, tp_size, found, curves, window)

    def within(self, window: int) -> MeasuredLayer:
        """The same with curves for another window, such as one that the plan's attention function does not skip."""
        if window == self.window:
            return self
        return self.fitted(self.module, self.kind, self.layers, self.shapes, self.tp_size, self.points, window)

    def squares(self, point: MeasuredPoint, name: str) -> float:
        """The squares of a chunk that a quantity grows with, see [`attended_squares`]."""
        return attended_squares(point, name, self.window, self.module == LANGUAGE_MODEL)

    @property
    def cost(self) -> LayerCost:
        """The curves as costs, without sums over tensor-parallel ranks."""
        curves: dict[str, Any] = {name: self.curves[name].polynomial for name in CURVES}
        return LayerCost(**curves)

    @property
    def misfits(self) -> dict[str, Curve]:
        """The curves that do not fit."""
        return {name: curve for name, curve in self.curves.items() if not curve.fits}


def shape_digest(spec: ModelSpec, module: str, index: int) -> str:
    """
    Twelve hexadecimal digits of the names and shapes of a layer's parameters, adapters left out.

    Args:
        spec (`ModelSpec`): The model.
        module (`str`): A module.
        index (`int`): As in [`~LayerCosts.layer`].
    """
    prefix = f"{spec.modules[module].stack}.{index}."
    uses = spec.uses.get((module, index), ())
    names = {use.parameter.name.replace(".base_layer.", ".").removeprefix(prefix): use.parameter.shape for use in uses}
    found = sorted((name, list(shape)) for name, shape in names.items() if not _ADAPTER.search(f".{name}"))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class LayerProfile:
    """
    What the layers of a model took on a machine; a small JSON file.

    Args:
        model (`str`): Where the model came from, for people.
        device (`str`): Name of the device, as it calls itself.
        dtype (`str`): Of the weights.
        autocast (`str`, *optional*): Type that matrices are multiplied in where it is another one.
        attention (`str`): The attention function.
        versions (`Mapping[str, str]`): Package -> version.
        layers (`tuple[MeasuredLayer, ...]`): The measurements.
        left_out (`tuple[str, ...]`): What was asked for and is not measured, with the reasons.
        constants (`Mapping[str, float]`, *optional*):
            Field of [`Hardware`] -> what was measured of the device, by which what the profile lacks is counted.
    """

    model: str
    device: str
    dtype: str
    autocast: str | None
    attention: str
    versions: Mapping[str, str]
    layers: tuple[MeasuredLayer, ...]
    left_out: tuple[str, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)

    @property
    def value_bytes(self) -> int:
        """Bytes of a value that matrices are multiplied with."""
        return DTYPE_BYTES.get(self.autocast or self.dtype, 4)

    def of_module(self, module: str) -> list[MeasuredLayer]:
        """The measurements of a module."""
        return [layer for layer in self.layers if layer.module == module]

    def to_dict(self) -> dict[str, Any]:
        """What its file holds."""
        data = {"version": PROFILE_VERSION, **asdict(self)}
        for layer, own in zip(self.layers, data["layers"], strict=True):
            for name, curve in layer.curves.items():
                own["curves"][name]["fits"] = curve.fits
        return data

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> LayerProfile:
        """
        Reads a profile.

        Args:
            path (`str` or `Path`): A file that `hf-mmparallel profile` wrote.

        Raises:
            `ValueError`: If the file is something else, or of another version.
        """
        try:
            data = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"`{path}` is no profile of layers. {_REMEDY}") from error
        return cls.from_dict(data, path)

    @classmethod
    def from_dict(cls, data: Any, path: str | Path) -> LayerProfile:
        """
        Reads a profile.

        Args:
            data (`Mapping`): See [`~LayerProfile.to_dict`].
            path (`str` or `Path`): The file, for errors.

        Raises:
            `ValueError`: If it is something else, or of another version.
        """
        try:
            values = dict(data)
            version = values.pop("version")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"`{path}` is no profile of layers. {_REMEDY}") from error
        if version != PROFILE_VERSION:
            raise ValueError(
                f"`{path}` is a profile of version {version}; this version of hf_mmparallel reads {PROFILE_VERSION}. "
                "Measure again with `hf-mmparallel profile`."
            )
        try:
            layers = tuple(map(_read_layer, values.pop("layers")))
            unknown = sorted(set(values["constants"]) - _CONSTANTS)
            if unknown:
                raise ValueError(f"`{path}` is a profile with a constant `{unknown[0]}` that no device has. {_REMEDY}")
            return cls(layers=layers, left_out=tuple(values.pop("left_out")), **values)
        except (AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"`{path}` is a profile with fields missing ({error}). {_REMEDY}") from error

    def check(self, spec: ModelSpec) -> None:
        """
        Makes sure that the profile was measured for a model.

        Args:
            spec (`ModelSpec`): The model, with adapters or without, whatever of it is frozen.

        Raises:
            `ValueError`: With the first layer that has other parameters, or if they share no module.
        """
        if not any(layer.module in spec.modules for layer in self.layers):
            measured = sorted({layer.module for layer in self.layers})
            raise ValueError(self._another_model(f"it has {measured}, the model {list(spec.modules)}"))
        for layer in self.layers:
            if layer.module not in spec.modules:
                continue
            for index in layer.layers:
                if shape_digest(spec, layer.module, index) != layer.shapes:
                    raise ValueError(
                        self._another_model(f"layer {index} of `{layer.module}` has parameters of other shapes")
                    )

    def _another_model(self, difference: str) -> str:
        return (
            f"The profile was measured for `{self.model}`, which is another model: {difference}. "
            "Measure this model with `hf-mmparallel profile --model`."
        )


def _read_layer(data: Mapping[str, Any]) -> MeasuredLayer:
    """One entry of a file."""
    curves = {}
    for name in CURVES:
        own = data["curves"][name]
        polynomial = Polynomial(**own["polynomial"])
        curves[name] = Curve(polynomial, own["r_squared"], own["worst_error"], tuple(own["worst_point"]))
    points = tuple(MeasuredPoint(**point) for point in data["points"])
    return MeasuredLayer(**{**data, "layers": tuple(data["layers"]), "points": points, "curves": curves})


class MeasuredLayers:
    """
    Costs of layers from a profile; see [`LayerCosts`].

    The sums over tensor-parallel ranks are those of `fallback`, since they are not measured. What the profile lacks
    comes from `fallback`, times measured over counted costs of what is nearest in the profile: the same layer in
    another layout, else its module, else all of it.

    Args:
        spec (`ModelSpec`): The model.
        profile ([`LayerProfile`]): The measurements.
        fallback ([`LayerCosts`]): Costs of all layers.
    """

    def __init__(self, spec: ModelSpec, profile: LayerProfile, fallback: LayerCosts):
        self.spec, self.profile, self.fallback = spec, profile, fallback
        self._layers = [layer.within(window_of(spec, layer.module, layer.layers[0])) for layer in profile.layers]
        self._measured = {
            (layer.module, index, layer.tp_size): layer for layer in self._layers for index in layer.layers
        }
        self._known: dict[tuple[str, int, int], LayerCost] = {}
        self._missing: dict[tuple[str, int], str] = {}

    @property
    def missing(self) -> list[str]:
        """What was asked for so far that the profile lacks, and what it was taken from: a sentence each."""
        return list(self._missing.values())

    def starting_at(self, first_rank: int) -> MeasuredLayers:
        """See [`LayerCosts`]."""
        placed = MeasuredLayers(self.spec, self.profile, self.fallback.starting_at(first_rank))
        placed._missing = self._missing
        return placed

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """See [`LayerCosts`]."""
        key = (module, index, tp_size)
        if key not in self._known:
            own = self._measured.get(key)
            cost = self._scaled(*key) if own is None else own.cost
            self._known[key] = replace(cost, sums=self.fallback.layer(*key).sums)
        return self._known[key]

    def _scaled(self, module: str, index: int, tp_size: int) -> LayerCost:
        """Counted costs, times measured over counted costs of what is there."""
        source, nearest = next(self._nearest(module, index))
        counted = self.fallback.layer(module, index, tp_size)
        ratios = {name: self._ratio(nearest, name) for name in CURVES}
        self._missing.setdefault(
            (module, tp_size),
            f"`{module}` with tp {tp_size} is not in the profile: counted from operations, times "
            f"{ratios['forward'] or 1.0:.3g} in the forward as measured over counted of {source}.",
        )
        same = [layer.cost for layer in nearest if layer.module == module and index in layer.layers]
        found = {}
        for name, ratio in ratios.items():
            # Of what no operation is counted for, such as a lookup, nothing is divided over ranks either.
            uncounted = ratio is None and same
            found[name] = getattr(same[0], name) if uncounted else getattr(counted, name) * (ratio or 1.0)
        return LayerCost(**found)

    def _nearest(self, module: str, index: int) -> Iterator[tuple[str, list[MeasuredLayer]]]:
        """What a ratio can be taken from, nearest first; the last one is everything."""
        own = [layer for layer in self._layers if layer.module == module]
        same = [layer for layer in own if index in layer.layers]
        if same:
            yield f"tp {', '.join(str(layer.tp_size) for layer in same)}", same
        if own:
            yield f"`{module}`", own
        yield "the other modules", self._layers

    def _ratio(self, layers: Iterable[MeasuredLayer], name: str) -> float | None:
        """Measured over counted costs of all points of some layers; None if nothing is counted."""
        measured = counted = 0.0
        for layer in layers:
            polynomial = getattr(self.fallback.layer(layer.module, layer.layers[0], layer.tp_size), name)
            measured += sum(getattr(point, name) for point in layer.points)
            counted += sum(polynomial(point.tokens, layer.squares(point, name)) for point in layer.points)
        return measured / counted if counted else None


def window_of(spec: ModelSpec, module: str, index: int) -> int:
    """
    Tokens that a token attends to in a layer, 0 for all of its sequence.

    Args:
        spec (`ModelSpec`): The model.
        module (`str`): The layer's module; one that the model lacks has no windows.
        index (`int`): As in [`~LayerCosts.layer`].
    """
    part = spec.modules.get(module)
    return part.window(index) if part is not None and 0 <= index < part.num_layers else 0


def measured_costs(spec: ModelSpec, device: Hardware, profile: LayerProfile) -> CostModel:
    """
    The cost model of a profile.

    Args:
        spec (`ModelSpec`): The model, with what is frozen.
        device (`Hardware`): What each rank is: its memory, and its links as far as the profile has none; how fast it
            computes, and how long a launch takes, is in the profile.
        profile ([`LayerProfile`]): The measurements.

    Raises:
        `ValueError`: If the profile is of another model.
    """
    profile.check(spec)
    device = replace(device, **profile.constants)
    layers = MeasuredLayers(spec, profile, AnalyticLayers(spec, device, profile.value_bytes))
    return CostModel(spec, device, layers, profile.value_bytes)
