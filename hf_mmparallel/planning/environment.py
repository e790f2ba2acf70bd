"""Versions, devices and settings of the machine, for a bug report."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .._environment import launcher_variables

PACKAGES = (
    *("torch", "transformers", "accelerate", "triton", "peft", "trl", "datasets", "deepspeed", "bitsandbytes"),
    *("liger-kernel", "safetensors", "numpy"),
)


def environment() -> dict[str, str]:
    """Returns names -> versions, devices and settings."""
    import torch
    from accelerate.commands.config.config_args import default_config_file

    from .. import __version__
    from .device_detection import find_known_device

    entries = {"hf_mmparallel": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            entries[package] = version(package)
        except PackageNotFoundError:
            entries[package] = "not installed"
    entries["torch.distributed"] = ", ".join(_backends()) or "not available"
    entries["cpu threads"] = str(torch.get_num_threads())
    count = torch.cuda.device_count()
    entries["cuda"] = f"{torch.version.cuda or 'not built'}, {count} device{'' if count == 1 else 's'}"
    if count:
        from torch.cuda import nccl

        entries["nccl"] = ".".join(map(str, nccl.version()))
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        known = find_known_device(torch.device("cuda", index))
        name = "not in the table of devices" if known is None else f"`{known.name}` in the table of devices"
        entries[f"cuda:{index}"] = f"{device.name}, {device.total_memory / 2**30:.1f} GiB, {name}"
    config = Path(default_config_file)
    if config.is_file():
        entries["accelerate config"] = "; ".join(config.read_text().splitlines())
    return entries | launcher_variables()


def _backends() -> list[str]:
    """Communication backends of this build of torch."""
    import torch.distributed as dist

    if not dist.is_available():
        return []
    return [
        name
        for name, available in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available()))
        if available
    ]


def print_environment() -> None:
    """Prints [`environment`] as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in environment().items():
        table.add_row(name, value)
    Console(soft_wrap=True).print(table)
