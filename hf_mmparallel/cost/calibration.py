"""Corrections of predicted costs, fitted to real runs, and layer costs with these corrections applied."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .. import __version__
from ..plan import ModelSpec
from .analytic import analytic_costs
from .devices import Hardware
from .layers import CostModel, LayerCost, LayerCosts, Polynomial
from .profile import LayerProfile, MeasuredLayers, measured_costs
from .run_log import KINDS, Kind, module_digests

CALIBRATION_VERSION = 1


@dataclass(frozen=True)
class TimeScale:
    """
    Correction of the times of one kind of task.

    Args:
        token (`float`, *optional*, defaults to 1.0): Factor of the time per token and of constant times.
        square (`float`, *optional*, defaults to 1.0): Factor of the time per squared sequence length.
        layer_ms (`float`, *optional*, defaults to 0.0): Additional milliseconds of a chunk in each layer.
        launch (`float`, *optional*): Factor of the time in which the host launches kernels, which may hide the rest;
            `None` if the runs don't determine it, used as 1.
        sum (`float`, *optional*): Factor of tensor-parallel all-reduces; `None` if the runs don't determine it.
    """

    token: float = 1.0
    square: float = 1.0
    layer_ms: float = 0.0
    launch: float | None = None
    sum: float | None = None

    @property
    def launches(self) -> float:
        """Factor of launch times, 1 if unknown."""
        return 1.0 if self.launch is None else self.launch

    @property
    def sums(self) -> float:
        """Factor of all-reduce times, 1 if unknown."""
        return 1.0 if self.sum is None else self.sum

    @property
    def is_plausible(self) -> bool:
        """Whether times grow with the size of a chunk."""
        return min(self.token, self.square) > 0.0

    def __call__(self, polynomial: Polynomial, is_layer: bool) -> Polynomial:
        """Corrected time of a layer; `is_layer` is `False` for the embeddings, a projector or a head."""
        constant = self.token * polynomial.constant + (self.layer_ms if is_layer else 0.0)
        return Polynomial(self.square * polynomial.square, self.token * polynomial.token, constant)


@dataclass(frozen=True)
class Accuracy:
    """Relative errors of predictions over some windows of a log."""

    median: float
    worst: float


@dataclass(frozen=True)
class Calibration:
    """
    Corrections of the costs of a model on a device, fitted to real runs; a small JSON file.

    Args:
        modules (`Mapping[str, str]`): Module -> digest of the shapes of its parameters.
        device (`str`): Name in the device table of the device whose costs are corrected.
        device_name (`str`): Name that the driver reports.
        dtype (`str`): Compute dtype of matrix products.
        value_bytes (`int`): Bytes of a value in matrix products.
        scales (`Mapping[str, Mapping[str, TimeScale]]`): Module -> `"forward"` and `"backward"` -> correction.
        activations (`float`, *optional*): Factor of activation bytes; `None` if no memory was measured.
        errors (`Mapping[str, Mapping[str, Accuracy]]`): Quantity (`"step"`, `"vision/forward"`, ...) -> `"before"` and
            `"after"` -> errors in the windows that were left out of the fit.
        windows (`int`, *optional*): Number of windows of the fit.
        profile ([`LayerProfile`], *optional*): The profile whose costs are corrected; `None` for operation counts.
        package (`str`, *optional*): Version of `hf_mmparallel` whose operation counts are corrected.
    """

    modules: Mapping[str, str]
    device: str
    device_name: str
    dtype: str
    value_bytes: int
    scales: Mapping[str, Mapping[Kind, TimeScale]]
    activations: float | None = None
    errors: Mapping[str, Mapping[str, Accuracy]] | None = None
    windows: int = 0
    profile: LayerProfile | None = None
    package: str = __version__

    def save(self, path: str | Path) -> None:
        """Writes the calibration as JSON, with its profile."""
        data = {"calibration": CALIBRATION_VERSION, **asdict(self)}
        data["profile"] = None if self.profile is None else self.profile.to_dict()
        Path(path).write_text(json.dumps(data, indent=1) + "\n")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], path: str | Path) -> Calibration:
        """Reads the content of the file `path`; raises `ValueError` for another version and missing fields."""
        values = dict(data)
        version = values.pop("calibration")
        if version != CALIBRATION_VERSION:
            raise ValueError(
                f"`{path}` is a calibration of version {version}; this version of hf_mmparallel reads "
                f"{CALIBRATION_VERSION}. Calibrate again with `hf-mmparallel calibrate`."
            )
        try:
            scales: dict[str, dict[Kind, TimeScale]] = {
                name: {kind: TimeScale(**entries[kind]) for kind in KINDS if kind in entries}
                for name, entries in values.pop("scales").items()
            }
            errors = {
                name: {when: Accuracy(**error) for when, error in entries.items()}
                for name, entries in (values.pop("errors") or {}).items()
            }
            profile = values.pop("profile")
            source = None if profile is None else LayerProfile.from_dict(profile, path)
            return cls(scales=scales, errors=errors, profile=source, **values)
        except (AttributeError, TypeError, KeyError) as error:
            raise ValueError(
                f"`{path}` is a calibration with fields missing ({error}). Write one with `hf-mmparallel calibrate`."
            ) from error

    def check(self, spec: ModelSpec, device: Hardware) -> None:
        """Raises `ValueError` for another model, device, dtype, or operation counts of another version."""
        digests = module_digests(spec)
        # adapters and frozen parameters make no difference
        shared = self.modules.keys() & digests.keys()
        other = sorted(name for name in shared if self.modules[name] != digests[name])
        if not shared or other:
            difference = (
                f"`{other[0]}` has parameters of other shapes"
                if other
                else f"it has {sorted(self.modules)}, the model {list(digests)}"
            )
            raise ValueError(
                f"The calibration is of another model: {difference}. Calibrate with logs of this model: "
                "`hf-mmparallel calibrate trainer_log.jsonl`."
            )
        if device.name != self.device:
            raise ValueError(
                f"The calibration corrects costs of `{self.device}` ({self.device_name}), not of `{device.name}`. Use "
                f"it for `{self.device}`, or calibrate with runs on `{device.name}`."
            )
        if self.profile is None and device.dtype != self.dtype:
            raise ValueError(
                f"The calibration is of runs in {self.dtype}, not in {device.dtype}. Plan for {self.dtype}, or "
                f"calibrate with runs in {device.dtype}."
            )
        if self.profile is None and _release(self.package) != _release(__version__):
            raise ValueError(
                f"The calibration corrects operation counts of hf_mmparallel {self.package}; those of {__version__} "
                "may differ. Train some steps with this version and calibrate again."
            )


def _release(version: str) -> list[str]:
    """The first two numbers of a version."""
    return version.split(".")[:2]


class CalibratedLayers:
    """Layer costs with the corrections of a [`Calibration`]; modules that it lacks, such as a generator, have none."""

    def __init__(self, base: LayerCosts, spec: ModelSpec, calibration: Calibration):
        self.base, self.spec, self.calibration = base, spec, calibration
        self.num_layers = {name: module.num_layers for name, module in spec.modules.items()}

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """See [`LayerCosts`]."""
        cost = self.base.layer(module, index, tp_size)
        scales, memory = self.calibration.scales.get(module, {}), self.calibration.activations or 1.0
        forward, backward = (scales.get(kind, TimeScale()) for kind in KINDS)
        is_layer = 0 <= index < self.num_layers[module]
        return replace(
            cost,
            forward=forward(cost.forward, is_layer),
            data_gradient=backward(cost.data_gradient, is_layer),
            weight_gradient=backward(cost.weight_gradient, is_layer=False),
            launch_ms=(cost.launch_ms[0] * forward.launches, cost.launch_ms[1] * backward.launches),
            sums=(cost.sums[0] * forward.sums, cost.sums[1] * backward.sums),
            activations=cost.activations * memory,
            frozen_activations=cost.frozen_activations * memory,
        )

    def starting_at(self, first_rank: int) -> CalibratedLayers:
        """See [`LayerCosts`]."""
        return CalibratedLayers(self.base.starting_at(first_rank), self.spec, self.calibration)


def calibrated_costs(spec: ModelSpec, device: Hardware, calibration: Calibration) -> CostModel:
    """Cost model with corrections; raises `ValueError` if they are of another model, device or dtype."""
    calibration.check(spec, device)
    if calibration.profile is not None:
        base = measured_costs(spec, device, calibration.profile)
    else:
        base = analytic_costs(spec, device, calibration.value_bytes)
    return replace(base, layers=CalibratedLayers(base.layers, spec, calibration))


def without_calibration(costs: CostModel) -> CostModel:
    """The cost model without its corrections, if it has any."""
    return replace(costs, layers=costs.layers.base) if isinstance(costs.layers, CalibratedLayers) else costs


def profile_digest(costs: CostModel | LayerProfile) -> str | None:
    """Digest (12 hexadecimal digits) of a profile, or of a cost model's profile; `None` for operation counts."""
    if isinstance(costs, CostModel):
        layers = without_calibration(costs).layers
        if not isinstance(layers, MeasuredLayers):
            return None
        costs = layers.profile
    return hashlib.sha256(json.dumps(costs.to_dict(), sort_keys=True).encode()).hexdigest()[:12]


def read_costs(path: str | Path) -> LayerProfile | Calibration:
    """Reads a file for `--profile` or `layer_profile`; raises `ValueError` for another format or version."""
    try:
        data = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(
            f"`{path}` holds no costs. Write a file with `hf-mmparallel profile` or `hf-mmparallel calibrate`."
        ) from error
    if isinstance(data, dict) and "calibration" in data:
        return Calibration.from_dict(data, path)
    return LayerProfile.load(path)


def costs_from(
    spec: ModelSpec, device: Hardware, value_bytes: int, source: LayerProfile | Calibration | None
) -> CostModel:
    """Cost model of a file, see [`read_costs`], or of operation counts; raises `ValueError` for another model."""
    # files define their own `value_bytes`
    if source is None:
        return analytic_costs(spec, device, value_bytes)
    if isinstance(source, LayerProfile):
        return measured_costs(spec, device, source)
    return calibrated_costs(spec, device, source)
