"""
What the table chooses for 16-bit inputs, compiled for sm_80 and sm_90: what the machine code takes.

The compiler needs no GPU. It runs in a process of its own, since this one may have Triton's interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "kernel_resources.py"
pytest.importorskip("triton")


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("head_dim", [64, 72, 96, 128, 256])
def test_kernels_compile_fit_spill_nothing_and_use_tensor_cores(head_dim: int):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--json", "--only", f" D{head_dim} "]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    kernels = {kernel["name"]: kernel for kernel in found}
    assert len(kernels) == len(found)
    assert not [kernel for kernel in found if "error" in kernel]
    for arch in ("sm_80", "sm_90"):
        for kind in ("forward", "dkdv", "dq"):
            assert any(name.startswith(f"{arch} {kind} D{head_dim} ") for name in kernels)
    for name, kernel in kernels.items():
        assert not kernel["stack"], name
        assert kernel["shared"] <= kernel["shared_limit"], name
        # float32 products must not run on tensor cores: they are exact. Some kernels have none.
        without = any(word in name for word in (" fp32 ", " combine ", " row_stats "))
        assert (kernel["matrix_products"] == 0) == without, name
