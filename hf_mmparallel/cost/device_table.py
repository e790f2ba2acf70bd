"""The table of known devices, and how one is found by a name or by what a driver reports."""

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
_MOST_OF_A_PART = 0.75  # of the multiprocessors, where the name does not say so; chips differ by a few
_SAME_MEMORY = 0.05
_HOST_LINK_GB_PER_S = 16.0  # parts of a device reach each other through the host's memory
_GIB = 2**30


@cache
def device_table() -> Mapping[str, Hardware]:
    """Name -> device, of all devices in `devices.yaml`."""
    import yaml

    table: dict[str, Hardware] = {}
    for name, entry in yaml.safe_load(_TABLE.read_text(encoding="utf-8")).items():
        table[name] = device_of(name, entry, table.__getitem__, f"`{_TABLE.name}`, `{name}`")
    return table


def normalized_name(name: str) -> str:
    """A name in lower case with hyphens between its words, without the maker's: `NVIDIA H100 PCIe` -> `h100-pcie`."""
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return "-".join(word for word in words if word not in _MAKERS)


@cache
def _names() -> Mapping[str, tuple[str, ...]]:
    """Normalised name -> the devices that are called so."""
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for key, device in device_table().items():
        for alias in (key, *device.aliases):
            names[normalized_name(alias)][key] = None
    return {name: tuple(keys) for name, keys in names.items()}


def find_device(name: str) -> Hardware:
    """
    Looks a device up.

    Args:
        name (`str`): Such as `"h100"`, `"a100-pcie-40gb"`, or as the driver reports it, in either case.

    Raises:
        `ValueError`: For a name that is not in the table, or that does not say which of several it is.
    """
    wanted, names = normalized_name(name), _names()
    keys = names.get(wanted, ()) if not name.endswith("-") else ()
    if len(keys) == 1:
        return device_table()[keys[0]]
    keys = keys or sorted({key for alias, own in names.items() if alias.startswith(f"{wanted}-") for key in own})
    words = set(wanted.split("-"))
    keys = keys or sorted({key for alias, own in names.items() if words <= set(alias.split("-")) for key in own})
    if wanted and len(keys) > 1:
        raise ValueError(f"`gpu_type={name}` may be any of {', '.join(f'`{key}`' for key in keys)}. Name one of them.")
    near = keys or _similar(wanted)
    hint = f"Did you mean `{near[0]}`?" if near else f"Known: {', '.join(device_table())}."
    raise ValueError(
        f"`gpu_type={name}` is not in the table of devices. {hint} Others are described in a file for `gpu_spec`."
    )


def _similar(wanted: str) -> list[str]:
    """The devices of the most similar name, of those with the memory that the name says, if it does."""
    size = re.search(r"(\d+)gb$", wanted)
    names = {
        alias: keys
        for alias, keys in _names().items()
        if size is None or any(_has_memory(device_table()[key], float(size[1])) for key in keys)
    }
    return [key for alias in difflib.get_close_matches(wanted, names, n=1) for key in names[alias]]


def _has_memory(device: Hardware, memory_gib: float) -> bool:
    """Whether a device has so much memory, within what drivers and makers name differently."""
    return device.memory_gib is not None and abs(memory_gib / device.memory_gib - 1) < _SAME_MEMORY


def device_from(gpu_type: str, gpu_spec: str | None = None) -> Hardware:
    """The device of a file, where one is given, else the one of that name; see [`find_device`]."""
    return find_device(gpu_type) if gpu_spec is None else read_device_file(gpu_spec, find_device)


def recognize_device(reported: str, memory_bytes: int, multiprocessors: int) -> Hardware | None:
    """
    The device that a driver reports.

    Its memory is what the driver says, whatever the table says. A MIG instance, or a device with far fewer
    multiprocessors than the whole one has (a partition of AMD's), is a part of it: peaks go with the multiprocessors,
    the memory's rate with the memory, and parts reach each other through the host.

    Args:
        reported (`str`): Name, such as `"NVIDIA A100-SXM4-40GB MIG 1g.5gb"`. All of its words count.
        memory_bytes (`int`): Memory of the device or of the part.
        multiprocessors (`int`): Of the device or of the part.

    Returns:
        `Hardware`, or `None` for a device that is not in the table.
    """
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
    if not _PART.search(reported) and (whole is None or multiprocessors > _MOST_OF_A_PART * whole):
        return replace(device, memory_gib=memory_gib)
    if whole is None:
        return None
    share = min(1.0, multiprocessors / whole)
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
    """
    The device of a longer name that has the memory which is reported, where `device` has another one: drivers name an
    H20 with 141 GB as they name one with 96. `device` itself where there is none.
    """
    if _has_memory(device, memory_gib):
        return device
    keys = {key for alias, own in _names().items() if alias.startswith(f"{name}-") for key in own}
    others = [device_table()[key] for key in keys]
    fitting = [o for o in others if o.multiprocessors == device.multiprocessors and _has_memory(o, memory_gib)]
    return fitting[0] if len(fitting) == 1 else device
