"""The tree is the architecture: imports point down, and the pure levels stay pure."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from hf_mmparallel.schedule.kinds import KINDS

PACKAGE = Path(__file__).parent.parent / "hf_mmparallel"
NAME = "hf_mmparallel"

LEVELS = {
    "_device": 0,
    "_environment": 0,
    "_files": 0,
    "_html_repr": 0,
    "_portable": 0,
    "_registration": 0,
    "_versions": 0,
    "plan": 0,
    "kernels": 0,
    "world": 0,
    "schedule": 1,
    "arrange": 1,
    "cost": 2,
    "modeling": 2,
    "data": 3,
    "resilience": 3,
    "runtime": 4,
    "planning": 5,
    "cli": 6,
    "papers": 6,
    "trainer": 6,
}
# Rooms, and files of others, that decide: they run without torch.
PURE = ("plan", "arrange", "cost", "schedule", "resilience", "papers")
PURE_PLANNING = ("candidates", "combinations", "comparison", "explain", "gantt", "options", "page", "page_data")
PURE_PLANNING += ("partition", "problem", "recovery_chart", "search", "simulations", "workload_chart")
FORBIDDEN = ("torch", "transformers", "accelerate")


@cache
def import_nodes(text: str) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import of a file, and whether it is outside of functions; those for type checkers are."""
    tree = ast.parse(text)
    pending, outside = list(tree.body), set()
    while pending:
        node = pending.pop()
        outside.add(node)
        if isinstance(node, ast.If):
            pending += [*node.body, *node.orelse]
    return [(node, node in outside) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(path: Path, root: Path, inside_functions: bool = True) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of every import of a file."""
    parts = (root.name, *path.relative_to(root).with_suffix("").parts)
    package = parts[:-1]  # of `__init__.py`, too: its own name is dropped
    for node, is_outside in import_nodes(path.read_text()):
        if not is_outside and not inside_functions:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        else:
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def edges(root: Path) -> Iterator[tuple[str, str, str]]:
    """Where, from which part of the package, and what each import takes; the package's own `__init__` is left out."""
    for path in sorted(root.rglob("*.py")):
        source = path.relative_to(root).parts[0].removesuffix(".py")
        if source != "__init__":
            yield from ((f"{path.relative_to(root)}:{line}", source, name) for line, name in imports_of(path, root))


def part_of(name: str, root: Path) -> str | None:
    """The part of the package that an imported name is from."""
    return name.split(".")[1] if name.startswith(f"{root.name}.") else None


def violations(root: Path) -> list[str]:
    """Every import that points up, and every impure import of a pure level."""
    found = []
    for where, source, name in edges(root):
        if source not in LEVELS:
            found.append(f"{where}: `{source}` has no level; give it one in LEVELS")
            continue
        stem = where.partition(":")[0].rpartition("/")[2].removesuffix(".py")
        is_pure = source in PURE or (source == "planning" and stem in PURE_PLANNING)
        if is_pure and name.split(".")[0] in FORBIDDEN:
            found.append(f"{where}: `{source}` is pure and may not import `{name}`")
        target = part_of(name, root)
        if target in LEVELS and LEVELS[target] > LEVELS[source]:
            found.append(f"{where}: `{source}` may not import `{target}`, which is above it")
    return found


def cycle_of(graph: dict[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def cycle(root: Path) -> list[str] | None:
    """Parts of the package that import each other, or `None`."""
    graph: dict[str, set[str]] = {}
    for _, source, name in edges(root):
        target = part_of(name, root)
        if target in LEVELS and target != source:
            graph.setdefault(source, set()).add(target)
    return cycle_of(graph)


def file_cycle(root: Path) -> list[str] | None:
    """Files that need each other, at load time or for their types, or `None`; imports inside functions don't count."""
    names = {".".join((root.name, *path.relative_to(root).with_suffix("").parts)): path for path in root.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        if path.name == "__init__.py":
            continue
        for _, imported in imports_of(path, root, inside_functions=False):
            target = imported if imported in names else imported.rpartition(".")[0]
            if target in names and target != name:
                graph.setdefault(name, set()).add(target)
    return cycle_of(graph)


def test_imports_point_down_and_never_in_a_circle():
    assert violations(PACKAGE) == []
    assert cycle(PACKAGE) is None
    assert file_cycle(PACKAGE) is None


def test_only_the_package_imports_the_trainer_and_nothing_the_methods_of_papers():
    imports = [(where.rpartition(":")[0], part, f"{name}.") for where, part, name in edges(PACKAGE)]
    importers = {file for file, _, name in imports if name.startswith(f"{NAME}.trainer.trainer.")}
    assert importers == {"trainer/__init__.py", "trainer/parallelize.py", "trainer/sft.py"}
    assert [file for file, part, name in imports if part != "papers" and name.startswith(f"{NAME}.papers.")] == []


def test_no_two_files_of_the_package_have_one_name():
    names = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def _tree(folder: Path, files: dict[str, str]) -> Path:
    root = folder / NAME
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("plan/__init__.py", "from hf_mmparallel.trainer import x", "may not import `trainer`"),
        ("modeling/b/c.py", "def f():\n    from ...runtime.groups import g", "may not import `runtime`"),
        ("schedule/a.py", "from .. import cli", "may not import `cli`"),
        ("cost/a.py", "def f():\n    import torch.distributed as dist", "may not import `torch.distributed`"),
        ("planning/search.py", "from torch import distributed", "may not import `torch.distributed`"),
        ("novel/a.py", "import os", "has no level"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, file, line, complaint):
    (found,) = violations(_tree(tmp_path, {file: line}))
    assert found.startswith(file) and complaint in found


def test_allowed_imports_pass_and_a_cycle_is_found(tmp_path):
    files = {
        "plan/a.py": "import yaml\nfrom . import b\nfrom .b import c",
        "planning/search.py": "import numpy\nfrom ..cost import x\nfrom .. import _environment",
        "trainer/a.py": "from ..planning import x\nimport hf_mmparallel.runtime.engine",
    }
    root = _tree(tmp_path, files)
    assert violations(root) == [] and cycle(root) is None
    _tree(tmp_path, {"data/a.py": "from ..modeling import x", "modeling/a.py": "from ..data import y"})
    assert set(cycle(root) or ()) == {"data", "modeling"}


@pytest.mark.parametrize("back", ["from .a import A", "if TYPE_CHECKING:\n    from .a import A"])
def test_files_that_need_each_other_are_found(tmp_path, back):
    files = {"plan/a.py": "from .b import B", "plan/b.py": f"from typing import TYPE_CHECKING\n{back}"}
    assert set(file_cycle(_tree(tmp_path, files)) or ()) == {f"{NAME}.plan.a", f"{NAME}.plan.b"}
    files["plan/b.py"] = "def f():\n    from .a import A"
    assert file_cycle(_tree(tmp_path, files)) is None


def test_importing_loads_no_heavy_package():
    names = [NAME, *(f"{NAME}.{part}" for part in PURE), *(f"{NAME}.planning.{name}" for name in PURE_PLANNING)]
    code = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
    heavy = {{"triton", *{FORBIDDEN}}} & set(sys.modules)
    assert not heavy, (name, heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


def test_only_the_rows_and_the_executor_name_a_kind_of_work():
    named = {PACKAGE / "schedule" / "kinds.py", PACKAGE / "runtime" / "executor.py"}
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(set(PACKAGE.rglob("*.py")) - named)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in KINDS
    ]
    assert found == []
