"""What a user installs: the public names, the dependencies, the packages, the console script."""

import ast
import configparser
import importlib.metadata
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hf_mmparallel

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_mmparallel"
DISTRIBUTION = {"PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn"}
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
EXTRAS = dict(SETUP["options.extras_require"])
SECTIONS = {"install_requires": SETUP["options"]["install_requires"], **EXTRAS}


def _requirements(text: str) -> dict[str, Requirement]:
    lines = [line for line in text.replace("%(test)s", "").split("\n") if line.strip()]
    return {requirement.name.lower().replace("_", "-"): requirement for requirement in map(Requirement, lines)}


def test_type_checkers_and_python_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    named = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(dir(hf_mmparallel)) == set(hf_mmparallel.__all__) == named | {"__version__"}
    for name in named:
        value = getattr(hf_mmparallel, name)
        assert value.__name__ == name and getattr(hf_mmparallel, name) is value


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="`Trainer`.*MultimodalParallelTrainer"):
        _ = hf_mmparallel.Trainer
    assert not hasattr(hf_mmparallel, "Trainer")


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder.name for folder in folders if not (folder / "__init__.py").exists()] == []
    assert (PACKAGE / "py.typed").exists()


def _libraries(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """What a file imports from elsewhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node, (node.module or "").split(".")[0]


def test_every_imported_library_is_a_dependency():
    declared = set(_requirements(SECTIONS["install_requires"]))
    optional = {name for text in EXTRAS.values() for name in _requirements(text)}
    missing = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        tree = ast.parse(text)
        # Files of kernels are only imported where Triton is, and `sft.py` where TRL is.
        own = {"triton"} if "@triton.jit" in text or path.stem.startswith("triton") else set()
        own |= {"trl"} if path.name == "sft.py" else set()
        for node, library in _libraries(tree):
            name = DISTRIBUTION.get(library, library).replace("_", "-")
            allowed = declared | (own if node in tree.body else optional)
            if library not in sys.stdlib_module_names and library != "hf_mmparallel" and name not in allowed:
                missing.add(f"{path.relative_to(ROOT)}: {library}")
    assert missing == set()


@pytest.mark.parametrize("section", ["install_requires", "peft", "deepspeed", "attention", "demo", "test"])
def test_the_tests_run_on_versions_within_the_bounds(section):
    requirements = _requirements(SECTIONS[section])
    assert requirements
    for name, requirement in requirements.items():
        installed = importlib.metadata.version(name)
        assert requirement.specifier.contains(installed, prereleases=True), f"{requirement} but {installed}"


@pytest.mark.parametrize("name", ["tested", "oldest"])
def test_constraints_are_within_the_bounds(name):
    """The oldest ones are the lower bounds themselves."""
    pins = dict(line.split("==") for line in (ROOT / f"constraints/{name}.txt").read_text().split())
    for text in SECTIONS.values():
        for required, requirement in _requirements(text).items():
            assert requirement.specifier.contains(pins[required], prereleases=True), f"{requirement}: {pins[required]}"
            lowest = next(one.version for one in requirement.specifier if one.operator in (">=", "=="))
            assert name != "oldest" or pins[required] == lowest


def test_the_console_script_exists():
    (line,) = SETUP["options.entry_points"]["console_scripts"].strip().splitlines()
    script, target = (part.strip() for part in line.split("="))
    module, function = target.split(":")
    assert script == "hf-mmparallel" and callable(getattr(importlib.import_module(module), function))


def test_a_warning_of_the_package_is_an_error():
    def warn(module: str) -> None:
        warnings.warn_explicit("old", DeprecationWarning, "file.py", 1, module=module)

    warn("transformers.trainer")
    with pytest.raises(DeprecationWarning):
        warn("hf_mmparallel.trainer.trainer")
