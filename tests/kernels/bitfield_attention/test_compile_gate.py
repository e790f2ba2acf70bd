"""
What the table chooses for 16-bit inputs, compiled for sm_80 and sm_90: what the machine code takes.

The compiler needs no GPU. It runs in a process of its own, since this one may have Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
pytest.importorskip("triton")
pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]


def compiled(*arguments: str) -> list[dict[str, Any]]:
    """What `benchmarks/kernel_resources.py` found."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "benchmarks" / "kernel_resources.py"), "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    return compiled()


def test_all_kernels_compile(kernels: list[dict[str, Any]]):
    assert not [kernel for kernel in kernels if "error" in kernel]
    names = [kernel["name"] for kernel in kernels]
    assert len(names) == len(set(names))
    for arch in ("sm_80", "sm_90"):
        for head_dim in (64, 72, 96, 128, 256):
            for kernel in ("forward", "dkdv", "dq"):
                assert any(name.startswith(f"{arch} {kernel} D{head_dim} ") for name in names)


def test_nothing_is_spilled(kernels: list[dict[str, Any]]):
    assert not {kernel["name"]: kernel["stack"] for kernel in kernels if kernel["stack"]}


def test_shared_memory_fits(kernels: list[dict[str, Any]]):
    assert not {kernel["name"]: kernel["shared"] for kernel in kernels if kernel["shared"] > kernel["shared_limit"]}


def test_matrix_products_run_on_tensor_cores(kernels: list[dict[str, Any]]):
    """float32 products must not: they are exact. Some kernels have none."""
    for kernel in kernels:
        without = any(word in kernel["name"] for word in (" fp32 ", " combine ", " row_stats "))
        assert (kernel["matrix_products"] == 0) == without, kernel["name"]
