"""Measured layer costs: points, fitted curves, the profile file, and the cost source."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from .._portable import on_grid, weighted_sum
from ..plan import LANGUAGE_MODEL, ModelSpec
from .analytic import DTYPE_BYTES, AnalyticLayers
from .devices import Hardware
from .layer_table import windowed_squares
from .layers import CostModel, LayerCost, LayerCosts, Polynomial

FIT_TOLERANCE = 0.15  # maximum relative error of a curve at any of its points
TIMES = ("forward", "data_gradient", "weight_gradient")
CURVES = (*TIMES, "activations", "frozen_activations")  # the measured fields of `LayerCost`: times and bytes
_CONSTANTS = {entry.name for entry in fields(Hardware) if entry.type in ("float", "float | None")}
_CONSTANTS |= {"node_size", "network_cards"}
_ADAPTER = re.compile(r"\.(lora_|base_layer|original_module|modules_to_save)")


@dataclass(frozen=True)
class MeasuredPoint:
    """Measurement of a layer for one chunk: sequences of equal length; times are milliseconds."""

    tokens: int  # of the chunk in the layers
    sequences: int  # which do not attend to each other
    forward: float
    data_gradient: float  # a backward to the input only
    weight_gradient: float  # additional time of a backward to the weights as well
    activations: float  # bytes saved for the backward with trained weights
    frozen_activations: float  # bytes saved if only the gradient of the input is needed

    @property
    def squares(self) -> float:
        """Sum of squared sequence lengths."""
        return self.tokens**2 / self.sequences

    def times(self, share: float) -> MeasuredPoint:
        """The point with a share of each quantity."""
        return replace(self, **{name: share * getattr(self, name) for name in CURVES})


@dataclass(frozen=True)
class Curve:
    """A polynomial fitted to measured points."""

    polynomial: Polynomial  # no coefficient is negative
    worst_error: float  # its largest relative error at a point
    worst_point: tuple[int, int]  # tokens and sequences of that point

    @property
    def fits(self) -> bool:
        """Whether it is within [`FIT_TOLERANCE`] of every point."""
        return self.worst_error <= FIT_TOLERANCE


def attended_squares(point: MeasuredPoint, name: str, window: int, is_causal: bool) -> float:
    """Sum of squared sequence lengths that a field `name` of [`LayerCost`] grows with."""
    # within the window for times, without it for bytes, as in plans
    if not window or name not in TIMES:
        return point.squares
    return float(windowed_squares(point.tokens, point.squares, window, is_causal))


def fit_curve(points: Sequence[MeasuredPoint], name: str, window: int = 0, is_causal: bool = False) -> Curve:
    """
    Fits `a s + b x + c`, for one sequence `a x^2 + b x + c` (Entrain, section 4.4.1), to a field `name` of
    [`LayerCost`] by non-negative least squares of relative errors.
    """
    values = np.array([getattr(point, name) for point in points])
    # `weight_gradient` is a difference of whole backwards, so its errors are relative to these
    scales = values + (np.array([point.data_gradient for point in points]) if name == "weight_gradient" else 0.0)
    sizes = np.array(
        [(attended_squares(point, name, window, is_causal), point.tokens, 1.0) for point in points], float
    )
    # squares and tokens of sequences of one length, such as an encoder's images, can't be told apart
    if np.ptp(sizes[:, 0] / sizes[:, 1]) == 0:
        sizes[:, 0] = 0.0
    weights = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    rows = sizes * weights[:, None]
    units = np.maximum(rows.max(axis=0), np.finfo(float).tiny)  # equal column norms, for the condition number
    coefficients = on_grid(nnls(rows / units, values * weights)[0] / units) if weights.any() else np.zeros(3)
    errors = np.abs(weighted_sum(sizes, coefficients) - values) * weights
    worst = int(errors.argmax())
    point = points[worst]
    return Curve(Polynomial(*coefficients.tolist()), float(errors[worst]), (point.tokens, point.sequences))


@dataclass(frozen=True)
class MeasuredLayer:
    """Measurements of one kind of layer at one tensor-parallel size."""

    module: str
    kind: str  # its class, or `"before"` and `"after"` for the parts outside of the layers
    # layers of this kind, of which one was measured: -1 for the part before the first one, `num_layers` for the part
    # after the last one
    layers: tuple[int, ...]
    shapes: str  # digest of the shapes of its parameters, see [`shape_digest`]
    tp_size: int
    points: tuple[MeasuredPoint, ...]
    window: int = 0  # size of the attention window in tokens; 0 for none

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Field of [`LayerCost`] -> the curve fitted to the points."""
        return {name: fit_curve(self.points, name, self.window, self.module == LANGUAGE_MODEL) for name in CURVES}

    def squares(self, point: MeasuredPoint, name: str) -> float:
        """Sum of squared lengths that a quantity grows with, see [`attended_squares`]."""
        return attended_squares(point, name, self.window, self.module == LANGUAGE_MODEL)

    @property
    def cost(self) -> LayerCost:
        """The curves as costs, without tensor-parallel all-reduces."""
        curves: dict[str, Any] = {name: self.curves[name].polynomial for name in CURVES}
        return LayerCost(**curves)

    @property
    def misfits(self) -> dict[str, Curve]:
        """The curves with an error above [`FIT_TOLERANCE`]."""
        return {name: curve for name, curve in self.curves.items() if not curve.fits}


def shape_digest(spec: ModelSpec, module: str, index: int) -> str:
    """Digest (12 hexadecimal digits) of the names and shapes of a layer's parameters, without adapters."""
    prefix = f"{spec.modules[module].stack}.{index}."
    uses = spec.uses.get((module, index), ())
    names = {use.parameter.name.replace(".base_layer.", ".").removeprefix(prefix): use.parameter.shape for use in uses}
    shown = sorted((name, list(shape)) for name, shape in names.items() if not _ADAPTER.search(f".{name}"))
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class LayerProfile:
    """Measurements of a model's layers on a machine."""

    model: str  # its source, for people
    device: str  # name that the driver reports
    dtype: str  # of the weights
    autocast: str | None  # compute dtype of matrix products if it differs
    attention: str  # the attention function
    versions: Mapping[str, str]  # package -> version
    layers: tuple[MeasuredLayer, ...]
    left_out: tuple[str, ...] = ()  # requested measurements that failed, with the reasons
    # field of [`Hardware`] -> measured value, for the analytic costs of what the profile lacks
    constants: Mapping[str, float] = field(default_factory=dict)

    @property
    def value_bytes(self) -> int:
        """Bytes of a value in matrix products."""
        return DTYPE_BYTES.get(self.autocast or self.dtype, 4)

    def of_module(self, module: str) -> list[MeasuredLayer]:
        """Measurements of a module."""
        return [layer for layer in self.layers if layer.module == module]

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON."""
        Path(path).write_text(json.dumps({"profile": asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> LayerProfile:
        """Reads the output of `hf-mmparallel profile`; raises `ValueError` for a file without a profile."""
        return cls.from_file(read_cost_file(path), path)

    @classmethod
    def from_file(cls, data: Mapping[str, Any], path: str | Path) -> LayerProfile:
        """Reads the profile in the content of a file, see [`read_cost_file`]."""
        remedy = "Write one with `hf-mmparallel profile --output`."
        values = data.get("profile")
        if values is None:
            raise ValueError(f"`{path}` has no layer profile. {remedy}")
        try:
            layers = tuple(map(_read_layer, values["layers"]))
            profile = cls(**{**values, "layers": layers, "left_out": tuple(values["left_out"])})
            unknown = sorted(set(profile.constants) - _CONSTANTS)
        except (AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"`{path}` is a profile with fields missing ({error}). {remedy}") from error
        if unknown:
            raise ValueError(f"`{path}` is a profile with a constant `{unknown[0]}` that no device has. {remedy}")
        return profile

    def check(self, spec: ModelSpec) -> None:
        """
        Checks that the profile was measured for a model, with or without adapters and frozen parameters.

        Raises:
            `ValueError`: If a layer has other parameters, naming the first one, or if they share no module.
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
    """Parses one entry of a file."""
    points = tuple(MeasuredPoint(**point) for point in data["points"])
    return MeasuredLayer(**{**data, "layers": tuple(data["layers"]), "points": points})


def read_cost_file(path: str | Path) -> dict[str, Any]:
    """Reads what `hf-mmparallel profile` and `calibrate` write: `"profile"`, `"calibration"` or both of them."""
    try:
        data = json.loads(Path(path).read_text())
        if data.keys() & {"profile", "calibration"}:
            return data
    except (ValueError, AttributeError):
        pass
    raise ValueError(
        f"`{path}` holds no costs. Write a file with `hf-mmparallel profile` or `hf-mmparallel calibrate`."
    )


class MeasuredLayers:
    """Layer costs of a profile, with all-reduces of the analytic `fallback`, which are not measured."""

    def __init__(self, spec: ModelSpec, profile: LayerProfile, fallback: LayerCosts):
        self.spec, self.profile, self.fallback = spec, profile, fallback
        # windows are those of the model, whose attention function may not skip what the measured one did
        self._layers = [
            replace(layer, window=window_of(spec, layer.module, layer.layers[0])) for layer in profile.layers
        ]
        self._measured = {
            (layer.module, index, layer.tp_size): layer for layer in self._layers for index in layer.layers
        }
        self._whole: LayerCosts | None = None  # those of what was measured, if a layout computes something else
        self._known: dict[tuple[str, int, int], LayerCost] = {}
        self._missing: dict[tuple[str, int], str] = {}

    @property
    def missing(self) -> list[str]:
        """A sentence for each request that the profile lacks, with the measurements used instead."""
        return list(self._missing.values())

    def starting_at(self, first_rank: int) -> MeasuredLayers:
        """See [`LayerCosts`]."""
        placed = copy(self)  # with the same curves and missing requests
        placed.fallback, placed._known = self.fallback.starting_at(first_rank), {}
        return placed

    def with_spec(self, spec: ModelSpec) -> MeasuredLayers:
        """See [`LayerCosts`]; what was measured changes as what is counted does."""
        shared = copy(self)
        shared.fallback, shared._whole, shared._known = self.fallback.with_spec(spec), self._whole or self.fallback, {}
        return shared

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """See [`LayerCosts`]."""
        key = (module, index, tp_size)
        if key not in self._known:
            measured = self._measured.get(key)
            cost = self._scaled(*key) if measured is None else measured.cost
            counted = self.fallback.layer(*key)
            if measured is not None and self._whole is not None:
                cost = _like(cost, counted, self._whole.layer(*key))
            # of the forward as large a part as is counted
            ratio = cost.forward.token / counted.forward.token if counted.forward.token else 0.0
            uncounted = {name: getattr(counted, name) for name in ("sums", "travels", "gathers")}
            self._known[key] = replace(cost, **uncounted, elementwise=counted.elementwise * ratio)
        return self._known[key]

    def _scaled(self, module: str, index: int, tp_size: int) -> LayerCost:
        """Analytic costs, times the ratio of measured to analytic costs of the nearest measurements."""
        source, nearest = self._nearest(module, index)
        counted = self.fallback.layer(module, index, tp_size)
        ratios = {name: self._ratio(nearest, name) for name in CURVES}
        self._missing.setdefault(
            (module, tp_size),
            f"`{module}` with tp {tp_size} is not in the profile: counted from operations, times "
            f"{ratios['forward'] or 1.0:.3g} in the forward as measured over counted of {source}.",
        )
        same = [layer.cost for layer in nearest if layer.module == module and index in layer.layers]
        costs = {}
        for name, ratio in ratios.items():
            # Quantities without analytic costs, such as the time of a lookup, are not divided by the tp size either.
            uncounted = ratio is None and same
            costs[name] = getattr(same[0], name) if uncounted else getattr(counted, name) * (ratio or 1.0)
        return LayerCost(**costs)

    def _nearest(self, module: str, index: int) -> tuple[str, list[MeasuredLayer]]:
        """The layer at other tensor-parallel sizes, else its module, else all of the profile."""
        in_module = [layer for layer in self._layers if layer.module == module]
        same = [layer for layer in in_module if index in layer.layers]
        if same:
            return f"tp {', '.join(str(layer.tp_size) for layer in same)}", same
        return (f"`{module}`", in_module) if in_module else ("the other modules", self._layers)

    def _ratio(self, layers: Iterable[MeasuredLayer], name: str) -> float | None:
        """Measured over analytic costs, summed over all points; `None` if the analytic cost is 0."""
        measured = counted = 0.0
        for layer in layers:
            polynomial = getattr(self.fallback.layer(layer.module, layer.layers[0], layer.tp_size), name)
            measured += sum(getattr(point, name) for point in layer.points)
            counted += sum(polynomial(point.tokens, layer.squares(point, name)) for point in layer.points)
        return measured / counted if counted else None


def _like(cost: LayerCost, wanted: LayerCost, counted: LayerCost) -> LayerCost:
    """A cost whose parts that grow with tokens are scaled as from one counted cost to another."""
    scaled = {}
    for name in CURVES:
        own, to, since = (getattr(part, name) for part in (cost, wanted, counted))
        scaled[name] = replace(own, token=own.token * (to.token / since.token if since.token else 1.0))
    return replace(cost, **scaled)


def window_of(spec: ModelSpec, module: str, index: int) -> int:
    """Size of a layer's attention window in tokens, 0 for none, and in modules that the model lacks."""
    module_spec = spec.modules.get(module)
    return module_spec.window(index) if module_spec is not None and 0 <= index < module_spec.num_layers else 0


def measured_costs(spec: ModelSpec, device: Hardware, profile: LayerProfile) -> CostModel:
    """
    Cost model of a profile, with the memory of `device` and its links as far as the profile has not measured them;
    raises `ValueError` if the profile is of another model.
    """
    profile.check(spec)
    device = replace(device, **profile.constants)
    layers = MeasuredLayers(spec, profile, AnalyticLayers(spec, device, profile.value_bytes))
    return CostModel(spec, device, layers, profile.value_bytes)
