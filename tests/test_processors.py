"""Every processor decides alike: with its vector units and without, from arithmetic that is the same everywhere."""

import ast
import json
import os
import subprocess
import sys
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from hf_mmparallel import _portable
from tests.test_architecture import PACKAGE

ROOT = PACKAGE.parent
DECIDING = ("arrange", "cost", "data", "plan", "planning", "resilience", "schedule")
MEASURING = ("device_constants", "device_detection", "layer_profile", "layer_runs", "links")  # what one rank measures
UNEQUAL = {
    *("dot", "vdot", "inner", "matmul", "tensordot", "linalg", "convolve", "correlate", "polyfit"),
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "power", "pow", "float_power", "cbrt"),
    *("sin", "cos", "tan", "sinh", "cosh", "tanh", "argpartition", "lstsq", "solve"),
}
"""Functions of `numpy` and `math` whose results differ between processors."""


def other_processor() -> dict[str, str]:
    """
    An environment in which numpy, its BLAS and the C library use no vector unit that only some processors have, and
    sets of strings have another order.
    """
    core = "numpy._core" if np.__version__ >= "2" else "numpy.core"
    numbers: Any = import_module(f"{core}._multiarray_umath")
    known = [name for name in numbers.__cpu_dispatch__ if numbers.__cpu_features__.get(name)]
    return {
        **os.environ,
        "PYTHONHASHSEED": "1",
        "NPY_DISABLE_CPU_FEATURES": " ".join(known),
        "OPENBLAS_CORETYPE": "Nehalem",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-AVX2,-AVX2_Usable,-FMA_Usable",
    }


def start(*arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def output(process: subprocess.Popen) -> str:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


@pytest.mark.deep
def test_all_decisions_are_the_same_without_vector_units():
    """Of the arrangement, tokens, schedules, search, recovery and fits, over random cases; floats to the last bit."""
    environments = {**os.environ, "PYTHONHASHSEED": "0"}, other_processor()
    processes = [start("-m", "tests.decisions", env=env) for env in environments]
    own, other = (json.loads(output(process)) for process in processes)
    assert len(own) == 6 and own == other


def test_the_other_processor_differs():
    """Otherwise the test above would compare a processor with itself."""
    code = (
        "import numpy as np; x = np.arange(1, 999) / 7; print(x.dot(x), np.exp(-x).sum(), np.argsort(x % 3 // 1)[:9])"
    )
    if not other_processor()["NPY_DISABLE_CPU_FEATURES"]:
        pytest.skip("this processor has no vector unit that numpy could do without")
    assert output(start("-c", code)) != output(start("-c", code, env=other_processor()))


def unequal_name(node: ast.AST) -> str | None:
    """The arithmetic of a node of a file, if it differs between processors."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return "@"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        is_square = isinstance(node.right, ast.Constant) and node.right.value == 2
        is_whole = isinstance(node.left, ast.Constant) and isinstance(node.left.value, int)
        return None if is_square or is_whole else "**"
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("np", "math"):
        return node.attr if node.attr in UNEQUAL else None
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "argsort":
        kinds = [getattr(keyword.value, "value", "") for keyword in node.keywords if keyword.arg == "kind"]
        return None if kinds == ["stable"] else 'argsort without `kind="stable"`'
    return None


def unequal_arithmetic(text: str) -> list[tuple[int, str]]:
    """Lines of a file with arithmetic that differs between processors."""
    found = [(getattr(node, "lineno", 0), unequal_name(node)) for node in ast.walk(ast.parse(text))]
    return [(line, name) for line, name in found if name is not None]


def test_what_decides_uses_equal_arithmetic():
    paths = [path for package in DECIDING for path in (PACKAGE / package).rglob("*.py")]
    found = {str(path): unequal_arithmetic(path.read_text()) for path in paths if path.stem not in MEASURING}
    assert not any(found.values()), {path: own for path, own in found.items() if own}  # use `_portable.py`


def test_unequal_arithmetic_is_found():
    unequal = ["a @ b", "np.exp(a)", "math.log(a)", "a**0.5", "x.argsort()"]
    equal = ["a**2", "2**a", 'np.argsort(x, kind="stable")']
    assert {line for line, _ in unequal_arithmetic("\n".join(unequal + equal))} == {1, 2, 3, 4, 5}


def test_the_grid():
    values = np.random.default_rng(0).lognormal(0, 20, 10_000) * np.array([1, -1])[:, None]
    rounded = _portable.on_grid(values)
    assert (np.abs(rounded - values) <= 2.4e-10 * np.abs(values)).all()
    for near in (np.nextafter(values, np.inf), np.nextafter(values, -np.inf)):
        assert (_portable.on_grid(near) == rounded).mean() > 0.999
    assert _portable.on_grid(rounded).tolist() == rounded.tolist()
    assert _portable.on_grid(np.array([0.0, np.inf])).tolist() == [0.0, np.inf]
    near, third = (_portable.on_grid(value, 1e3) for value in (1 / 3 + 1e-12, 1 / 3))
    assert isinstance(_portable.on_grid(0.1), float) and near == third


def test_the_smallest_values_come_by_value_then_by_index():
    random = np.random.default_rng(0)
    for _ in range(50):
        values = random.integers(0, 4, (random.integers(1, 6), random.integers(1, 6))).astype(float)
        for count in (1, 3, values.size, 99):
            expected = sorted(range(values.size), key=lambda index: (values.flat[index], index))[:count]
            assert _portable.smallest(values, count).tolist() == expected
