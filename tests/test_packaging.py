"""What a user installs: the public names, the dependencies, the packages, the console script."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import importlib.util
import sys
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hf_mmparallel

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_mmparallel"
DISTRIBUTION = {"PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn"}


def _setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def _requirements(text: str) -> dict[str, Requirement]:
    requirements = [Requirement(line) for line in text.split("\n") if line.strip()]
    return {requirement.name.lower().replace("_", "-"): requirement for requirement in requirements}


def _names_for_type_checkers() -> set[str]:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    return {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_type_checkers_and_python_see_the_same_names():
    lazy = set(hf_mmparallel._MODULE_OF)
    assert _names_for_type_checkers() == lazy
    assert set(hf_mmparallel.__all__) == lazy | {"__version__"}
    assert set(dir(hf_mmparallel)) == set(hf_mmparallel.__all__)


@pytest.mark.parametrize("name", hf_mmparallel.__all__)
def test_a_public_name_loads(name):
    value = getattr(hf_mmparallel, name)
    assert name == "__version__" or value.__name__ == name
    assert getattr(hf_mmparallel, name) is value


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute `Trainer`. Public names: .*MultimodalParallelTrainer"):
        _ = hf_mmparallel.Trainer
    assert not hasattr(hf_mmparallel, "Trainer")


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder.name for folder in folders if not (folder / "__init__.py").exists()] == []
    assert (PACKAGE / "py.typed").exists()


def test_every_imported_library_is_a_dependency():
    setup = _setup()
    declared = set(_requirements(setup["options"]["install_requires"]))
    optional = {name for text in setup["options.extras_require"].values() for name in _requirements(text)}
    missing = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        kernels = {"triton"} if "@triton.jit" in path.read_text() or path.stem.startswith("triton") else set()
        top_level = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            for module in modules:
                library = module.split(".")[0]
                name = DISTRIBUTION.get(library, library).replace("_", "-")
                # Files of kernels are only imported where Triton is.
                allowed = declared | kernels if id(node) in top_level else declared | optional
                if library not in sys.stdlib_module_names and library != "hf_mmparallel" and name not in allowed:
                    missing.add(f"{path.relative_to(ROOT)}:{node.lineno}: {library}")
    assert missing == set()


@pytest.mark.parametrize("section", ["install_requires", "peft", "deepspeed", "gpu", "demo", "test"])
def test_the_tests_run_on_versions_within_the_bounds(section):
    setup = _setup()
    group = "options" if section == "install_requires" else "options.extras_require"
    requirements = _requirements(setup[group][section])
    assert requirements
    for name, requirement in requirements.items():
        installed = importlib.metadata.version(name)
        assert requirement.specifier.contains(installed, prereleases=True), f"{requirement} but {installed}"


@pytest.mark.parametrize("name", ["tested", "oldest"])
def test_constraints_are_within_the_bounds(name):
    """The oldest ones are the lower bounds themselves."""
    setup = _setup()
    texts = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    lines = [line for line in (ROOT / f"constraints/{name}.txt").read_text().split() if line]
    pins = dict(line.split("==") for line in lines)
    for text in texts:
        for required, requirement in _requirements(text.replace("%(test)s", "")).items():
            assert requirement.specifier.contains(pins[required], prereleases=True), f"{requirement}: {pins[required]}"
            lowest = next(one.version for one in requirement.specifier if one.operator in (">=", "=="))
            assert name != "oldest" or pins[required] == lowest


def test_the_console_script_exists():
    (line,) = _setup()["options.entry_points"]["console_scripts"].strip().splitlines()
    script, target = (part.strip() for part in line.split("="))
    module, function = target.split(":")
    assert script == "hf-mmparallel"
    assert importlib.util.find_spec(module) is not None
    assert callable(getattr(importlib.import_module(module), function))


def test_a_warning_of_the_package_is_an_error():
    def warn(module: str) -> None:
        warnings.warn_explicit("old", DeprecationWarning, "file.py", 1, module=module)

    warn("transformers.trainer")
    with pytest.raises(DeprecationWarning):
        warn("hf_mmparallel.trainer.trainer")
