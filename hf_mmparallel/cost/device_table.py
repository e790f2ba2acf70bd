"""The table of known devices, with lookups by name and by what a driver reports."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..plan.reading import read_mapping
from .devices import PEAK_OF_DTYPE, Hardware

# Device descriptions from users: parsing, and checks for wrong units.

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
    "float8_speedup": _Range(1, 4, "(times 16-bit products)"),
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


_TABLE = Path(__file__).with_name("devices.yaml")
_MAKERS = ("nvidia", "amd", "tesla", "quadro", "geforce", "instinct")
_PART = re.compile(r"\s+MIG\s+\S+.*$")  # NVIDIA H100 80GB HBM3 MIG 1g.10gb
_MIN_WHOLE_SHARE = 0.75  # of the multiprocessors of a whole device; chips of one model differ by a few
_SAME_MEMORY = 0.05
_HOST_LINK_GB_PER_S = 16.0  # partitions of a device communicate through host memory
_GIB = 2**30


@cache
def device_table() -> Mapping[str, Hardware]:
    """Name -> device, for all devices in `devices.yaml`."""
    import yaml

    table: dict[str, Hardware] = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where PyYAML has libyaml
    for name, entry in yaml.load(_TABLE.read_text(encoding="utf-8"), loader).items():
        table[name] = device_of(name, entry, table.__getitem__, f"`{_TABLE.name}`, `{name}`")
    return table


def normalized_name(name: str) -> str:
    """Name in lower case, words joined by hyphens, without the maker: `NVIDIA H100 PCIe` -> `h100-pcie`."""
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return "-".join(word for word in words if word not in _MAKERS)


@cache
def _names() -> Mapping[str, tuple[str, ...]]:
    """Normalized name -> keys of the devices with this name or alias."""
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for key, device in device_table().items():
        for alias in (key, *device.aliases):
            names[normalized_name(alias)][key] = None
    return {name: tuple(keys) for name, keys in names.items()}


def find_device(name: str) -> Hardware:
    """
    Looks a device up.

    Args:
        name (`str`): Such as `"h100"`, `"a100-pcie-40gb"`, or the name that the driver reports; case is ignored.

    Raises:
        `ValueError`: For a name that is unknown or ambiguous.
    """
    wanted, names = normalized_name(name), _names()
    keys = names.get(wanted, ()) if not name.endswith("-") else ()
    if len(keys) == 1:
        return device_table()[keys[0]]
    keys = keys or sorted({key for alias, ids in names.items() if alias.startswith(f"{wanted}-") for key in ids})
    words = set(wanted.split("-"))
    keys = keys or sorted({key for alias, ids in names.items() if words <= set(alias.split("-")) for key in ids})
    if wanted and len(keys) > 1:
        raise ValueError(f"`gpu_type={name}` may be any of {', '.join(f'`{key}`' for key in keys)}. Name one of them.")
    near = keys or _similar(wanted)
    hint = f"Did you mean `{near[0]}`?" if near else f"Known: {', '.join(device_table())}."
    raise ValueError(
        f"`gpu_type={name}` is not in the table of devices. {hint} Describe other devices in a file for `gpu_spec`."
    )


def _similar(wanted: str) -> list[str]:
    """Devices with the most similar name; if the name includes a memory size, only those of that size."""
    size = re.search(r"(\d+)gb$", wanted)
    names = {
        alias: keys
        for alias, keys in _names().items()
        if size is None or any(_has_memory(device_table()[key], float(size[1])) for key in keys)
    }
    return [key for alias in difflib.get_close_matches(wanted, names, n=1) for key in names[alias]]


def _has_memory(device: Hardware, memory_gib: float) -> bool:
    """Whether a device has this much memory, with a tolerance for rounding by drivers and makers."""
    return device.memory_gib is not None and abs(memory_gib / device.memory_gib - 1) < _SAME_MEMORY


def device_from(gpu_type: str, gpu_spec: str | None = None) -> Hardware:
    """Device of `gpu_spec` if given, else of the name `gpu_type`; see [`find_device`]."""
    return find_device(gpu_type) if gpu_spec is None else read_device_file(gpu_spec, find_device)


def recognize_device(reported: str, memory_bytes: int, multiprocessors: int) -> Hardware | None:
    """Looks up the device that a driver reports, with the reported memory; `None` if the table lacks it."""
    # all words of the reported name must match
    keys = _names().get(normalized_name(_PART.sub("", reported)), ())
    known = [device_table()[key] for key in keys]
    if len(known) > 1:
        known = [device for device in known if device.multiprocessors == multiprocessors]
    if len(known) != 1:
        return None
    (device,) = known
    if not _PART.search(reported):
        device = _with_memory(device, normalized_name(reported), memory_bytes / _GIB)
    memory_gib, whole = memory_bytes / _GIB, device.multiprocessors
    # a MIG instance, or a device with far fewer multiprocessors than the whole one (an AMD partition), is a partition
    if not _PART.search(reported) and (whole is None or multiprocessors > _MIN_WHOLE_SHARE * whole):
        return replace(device, memory_gib=memory_gib)
    if whole is None:
        return None
    share = min(1.0, multiprocessors / whole)
    # peaks scale with multiprocessors, memory bandwidth with memory; partitions communicate through the host
    peaks = {field: share * getattr(device, field) for field in PEAK_OF_DTYPE.values()}
    return replace(
        device,
        name=f"{device.name}, {multiprocessors} of {whole} multiprocessors",
        **peaks,
        memory_gib=memory_gib,
        memory_gb_per_s=device.memory_gb_per_s * min(1.0, memory_gib / (device.memory_gib or memory_gib)),
        link_gb_per_s=min(device.link_gb_per_s, _HOST_LINK_GB_PER_S),
        multiprocessors=multiprocessors,
    )


def _with_memory(device: Hardware, name: str, memory_gib: float) -> Hardware:
    """The device of a longer name with the reported memory; `device` itself if it has that, or there is none."""
    if _has_memory(device, memory_gib):
        return device
    # drivers report an H20 with 141 GB under the same name as one with 96
    keys = {key for alias, ids in _names().items() if alias.startswith(f"{name}-") for key in ids}
    others = [device_table()[key] for key in keys]
    fitting = [o for o in others if o.multiprocessors == device.multiprocessors and _has_memory(o, memory_gib)]
    return fitting[0] if len(fitting) == 1 else device
