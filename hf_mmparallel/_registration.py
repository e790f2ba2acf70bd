"""
Makes our attention functions and the tested `peft` known to transformers when transformers is there, and imports
nothing before. A model that is built later must still find the names: until transformers is imported, a finder waits
for the module that holds the table of attention functions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_TABLE = "transformers.modeling_utils"


class _TableFinder(MetaPathFinder):
    """Finds the module with the table as always, and registers once it has been executed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None):
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _TABLE else None
        if spec is not None and spec.loader is not None:
            _run_after(spec)
        return spec


def _run_after(spec: ModuleSpec) -> None:
    """Lets the loader of the module register after it has executed the module."""
    loader = spec.loader
    assert loader is not None
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _register()

    vars(loader)["exec_module"] = exec_module


def _register() -> None:
    """Registers all; the table must be complete."""
    for name in (".kernels.bitfield_attention.hf", ".kernels.varlen_attention"):
        # a module whose own import of transformers led here has none yet, and registers at its end
        getattr(import_module(name, __package__), "register", lambda: None)()
    import_module("._versions", __package__).accept_tested_peft()


def register() -> None:
    """Registers now if transformers has its table of attention functions, else as soon as it has."""
    if hasattr(sys.modules.get(_TABLE), "AttentionInterface"):
        _register()
    elif not any(isinstance(finder, _TableFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TableFinder())
