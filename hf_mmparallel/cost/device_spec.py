"""Device descriptions from users: parsing, and checks for wrong units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..plan.reading import read_mapping
from .devices import PEAK_OF_DTYPE, Hardware

_NUMBERS = {
    field.name: field for field in fields(Hardware) if field.type in ("float", "int", "float | None", "int | None")
}
_FIELDS = (*_NUMBERS, "aliases", "source")
_NEEDED = tuple(name for name, field in _NUMBERS.items() if field.default is MISSING)
# factors between units that are easily confused
_FACTORS = {1000: "1,000", 2**20: "2^20", 1e6: "10^6", 2**30: "2^30", 1e9: "10^9", 1e12: "10^12"}


@dataclass(frozen=True)
class _Range:
    """Valid range of a number, its unit, and whether 0 is allowed as well."""

    least: float
    most: float
    unit: str
    or_zero: bool = False

    def check(self, what: str, value: float) -> None:
        """Raises `ValueError` with the factor by which the unit seems to be wrong."""
        if self.least <= value <= self.most or self.or_zero and value == 0:
            return
        fits = [text for factor, text in _FACTORS.items() if self.least <= value / factor <= self.most]
        raised = [text for factor, text in _FACTORS.items() if self.least <= value * factor <= self.most]
        hint = "Correct it."
        if value > self.most and fits:
            hint = f"If the unit is another one, divide by {fits[0]}."
        elif 0 < value < self.least and raised:
            hint = f"If the unit is another one, multiply by {raised[0]}."
        raise ValueError(f"{what} is not between {self.least:g} and {self.most:g} {self.unit}. {hint}")


_TFLOPS = _Range(0.01, 20_000, "10^12 operations a second (dense)")
_MICROSECONDS = _Range(0.3, 1000, "microseconds; 0 leaves it out", or_zero=True)
_SHARE = _Range(0.005, 1, "(a share of the peak)")
_COUNT = _Range(1, 2048, "(a number of them)")
_RANGES = {
    **dict.fromkeys(PEAK_OF_DTYPE.values(), _TFLOPS),
    "memory_gib": _Range(1, 2048, "GiB (2^30 bytes)"),
    "memory_gb_per_s": _Range(5, 50_000, "GB/s (10^9 bytes a second)"),
    "link_gb_per_s": _Range(0.05, 5_000, "GB/s (10^9 bytes a second, one way)"),
    "node_link_gb_per_s": _Range(0.11, 1_000, "GB/s (10^9 bytes a second, one way)"),
    "host_link_gb_per_s": _Range(0.5, 1_000, "GB/s (10^9 bytes a second, one way)"),
    "host_memory_gib": _Range(8, 65_536, "GiB (2^30 bytes)"),
    "host_memory_gb_per_s": _Range(5, 50_000, "GB/s (10^9 bytes a second)"),
    **dict.fromkeys(("node_size", "network_cards", "multiprocessors"), _COUNT),
    "message_gb_per_s": _Range(0.05, 5_000, "GB/s (10^9 bytes a second, one way)"),
    "node_message_gb_per_s": _Range(0.05, 1_000, "GB/s (10^9 bytes a second, one way)"),
    **dict.fromkeys(("link_latency_us", "node_link_latency_us", "launch_us"), _MICROSECONDS),
    **dict.fromkeys(("collective_latency_us", "node_collective_latency_us"), _MICROSECONDS),
    **dict.fromkeys(("masked_attention_share", "block_attention_share"), _Range(0.01, 10, "(of flash attention)")),
    **dict.fromkeys(("matmul_efficiency", "attention_efficiency", "memory_efficiency", "overlap_efficiency"), _SHARE),
}
_MAX_DIFFERENCE = 100  # maximum ratio between a number and that of the `like` device
# two fields -> range of the ratio of the first to the second over all known devices
_RATIOS = {
    ("fp16_tflops", "bf16_tflops"): (0.05, 50),
    ("tf32_tflops", "bf16_tflops"): (0.02, 10),
    ("fp32_tflops", "bf16_tflops"): (0.003, 10),
    ("bf16_tflops", "memory_gb_per_s"): (0.0005, 2),
    ("memory_gb_per_s", "memory_gib"): (0.01, 2_000),
    ("link_gb_per_s", "memory_gb_per_s"): (0.0005, 1),
    ("message_gb_per_s", "link_gb_per_s"): (0.003, 10),
}


def device_of(name: str, entry: Any, find: Callable[[str], Hardware], where: str) -> Hardware:
    """
    Builds a device from fields of [`Hardware`]; with `like`, which `find` looks up, omitted fields are those of that
    device. Raises `ValueError` for fields that are unknown, missing, of a wrong type, or outside the range of real
    devices.
    """
    given = dict(read_mapping(entry, where, known=(*_FIELDS, "like")))
    like = given.pop("like", None)
    if like is None:
        read_mapping(given, where, needed=_NEEDED, known=_FIELDS)
    for key, value in given.items():
        _check_field(key, value, where)
    given |= {"name": name, "aliases": tuple(given.get("aliases", ())), "source": given.get("source", where)}
    if like is None:
        device = Hardware(**given)
    else:
        base = find(str(like))
        _check_like(given, base, where)
        if "node_size" in given and "network_cards" not in given:  # the network bandwidth of each device stays
            given["network_cards"] = max(1, round(base.network_cards * given["node_size"] / base.node_size))
        device = replace(base, **given)
    _check_together(device, where)
    return device


def _check_field(key: str, value: Any, where: str) -> None:
    """Raises `ValueError` for an invalid value of a field."""
    what = f"{where}: `{key}={value}`"
    if key == "source":
        valid, needed = isinstance(value, str), "a string"
    elif key == "aliases":
        valid = isinstance(value, list) and all(isinstance(alias, str) for alias in value)
        needed = "a list of names"
    else:
        kind = str(_NUMBERS[key].type)
        valid = isinstance(value, int | float) and not isinstance(value, bool) or (value is None and "None" in kind)
        valid = valid and not ("int" in kind and isinstance(value, float))
        needed = "a whole number" if "int" in kind else "a number, in the unit of the field's name"
    if not valid:
        raise ValueError(f"{what} must be {needed}.")
    if key in _RANGES and isinstance(value, int | float):
        _RANGES[key].check(what, value)


def _check_together(device: Hardware, where: str) -> None:
    """Raises `ValueError` for numbers that contradict each other."""
    peak = max(device.bf16_tflops, device.fp16_tflops)
    for field in ("tf32_tflops", "fp32_tflops"):
        if getattr(device, field) > peak:
            raise ValueError(
                f"{where}: `{field}={getattr(device, field):g}` is above the 16-bit peak, {peak:g}. Correct "
                "one of them; both are peaks of dense products, in 10^12 operations a second."
            )
    for field in ("link_gb_per_s", "node_link_gb_per_s"):
        if getattr(device, field) > device.memory_gb_per_s:
            raise ValueError(
                f"{where}: `{field}={getattr(device, field):g}` is faster than the memory, "
                f"`memory_gb_per_s={device.memory_gb_per_s:g}`. Both are in GB/s; 8 Gb/s are 1 GB/s."
            )
    for (one, other), (least, most) in _RATIOS.items():
        first, second = getattr(device, one), getattr(device, other)
        if first is not None and second is not None and not least <= first / second <= most:
            raise ValueError(
                f"{where}: the ratio of `{one}={first:g}` to `{other}={second:g}`, {first / second:.3g}, is not "
                f"between {least:g} and {most:g}, the range of known devices. Correct the unit of one of them."
            )


def _check_like(given: Mapping[str, Any], base: Hardware, where: str) -> None:
    """Raises `ValueError` for a number that is far from that of the `like` device."""
    for field, value in given.items():
        theirs = getattr(base, field)
        if "float" not in str(getattr(_NUMBERS.get(field), "type", "")) or not value or not theirs:
            continue
        times = max(value / theirs, theirs / value)
        if times > _MAX_DIFFERENCE:
            factor = _FACTORS[min(_FACTORS, key=lambda known: max(known / times, times / known))]
            direction, remedy = ("above", "divide") if value > theirs else ("below", "multiply")
            raise ValueError(
                f"{where}: `{field}={value:g}` is {times:,.0f} times {direction} the {theirs:g} of `{base.name}`. If "
                f"the unit is another one, {remedy} by {factor}; if it is right, describe the device without `like`."
            )


def read_device_file(path: str, find: Callable[[str], Hardware]) -> Hardware:
    """
    Reads a file for `--gpu-spec`: YAML or JSON, the fields of [`Hardware`] with a `name`, or with `like: h100` those
    that differ. Raises `ValueError` if it can't be read, and for descriptions that [`device_of`] rejects.
    """
    import yaml

    try:
        entry = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"`gpu_spec={path}` can't be read: {error.strerror}. Give a YAML file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"`gpu_spec={path}` is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(entry, Mapping):
        raise ValueError(f"`gpu_spec={path}` must have `key: value` lines, such as `like: h100` and `memory_gib: 94`.")
    entry = dict(entry)
    name = entry.pop("name", None) or Path(path).stem
    if not isinstance(name, str):
        raise ValueError(f"`{path}`: `name={name}` must be a string.")
    return device_of(name, entry, find, f"`{path}`")
