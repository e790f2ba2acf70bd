"""The interpreter of Triton, without what makes it slow."""

import os
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Our functions that a kernel calls leave the language as the launch has patched it.

    The interpreter patches all of `triton.language` once more at each call, which takes half of its time.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch_and_call = interpreter.InterpretedFunction.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn.__module__.startswith("triton."):  # these name the language by another module
            return patch_and_call(function, *args, **kwargs)
        return function.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
