"""The table of known devices, with lookups by name and by what a driver reports."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from .device_spec import device_of, read_device_file
from .devices import PEAK_OF_DTYPE, Hardware

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
