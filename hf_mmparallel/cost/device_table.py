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
    if wanted and len(keys) > 1:
        raise ValueError(f"`gpu_type={name}` may be any of {', '.join(f'`{key}`' for key in keys)}. Name one of them.")
    near = keys or [key for alias in difflib.get_close_matches(wanted, names, n=1) for key in names[alias]]
    hint = f"Did you mean `{near[0]}`?" if near else f"Known: {', '.join(device_table())}."
    raise ValueError(
        f"`gpu_type={name}` is not in the table of devices. {hint} Others are described in a file for `gpu_spec`."
    )


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
