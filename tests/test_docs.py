"""The pages: links lead somewhere, Python examples compile, commands name files and targets that exist."""

import ast
import importlib
import re
import runpy
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import HfArgumentParser, TrainingArguments

from hf_mmparallel import MultimodalTrainingArguments

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in _anchors(linked), f"{page.name} links to {target}"


@pages
def test_commands_name_what_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block in _blocks(page, "bash"):
        for path in re.findall(r"\b(?:examples|benchmarks|tests|docs)/[\w./-]+", block):
            assert (ROOT / path).exists(), f"{page.name} names {path}"
        for target in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE):
            assert target in targets, f"{page.name} names `make {target}`"


def _arguments(script: str, line: list[str]) -> None:
    """Parses the arguments of an example as it does, and those of a script of the reader as ours."""
    types: list = [MultimodalTrainingArguments]
    defaults = {"output_dir": "out"}
    if (ROOT / script).is_file():
        module = runpy.run_path(str(ROOT / script))
        types = [module["ScriptArguments"], module.get("MultimodalTrainingArguments", TrainingArguments)]
        defaults |= module["DEFAULTS"]
    parser = HfArgumentParser(types)
    parser.set_defaults(**defaults)
    parser.parse_args_into_dataclasses(line)


@pages
def test_arguments_of_training_scripts_are_taken(page, tmp_path, monkeypatch):
    """`--fsdp true` was none: "Unknown `fsdp` option: true"."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    Path("out").mkdir()
    Path("plan.yaml").write_text("language_model: {}")
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    for block in _blocks(page, "bash"):
        for content, name in re.findall(r"^echo '(.*)' > (\S+)$", block, re.MULTILINE):
            Path(name).write_text(content)
        for script, rest in re.findall(r"(\S*train\w*\.py)(.*)$", block.replace("\\\n", " "), re.MULTILINE):
            _arguments(script, shlex.split(rest, comments=True))
    known = {field.name: field for field in fields(MultimodalTrainingArguments)}
    for name, value in re.findall(r"`--(\w+)\s*([^`]*)`", page.read_text()):
        if name in known and (value or known[name].type is bool or name == "fsdp"):
            _arguments("train.py", [f"--{name}", *shlex.split(value)])


def test_the_makefile_runs_files_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    paths = re.findall(r"\b(?:examples|benchmarks|tests|constraints)/[\w./-]+\.(?:py|yaml)\b", makefile)
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


@pages
def test_python_examples_compile_and_import_names_that_exist(page):
    """Those of CONTRIBUTING import the code that they add, see `test_contributing.py`."""
    for block in _blocks(page, "python"):
        compile(block, str(page), "exec")
        for node in ast.walk(ast.parse(block)) if page.name != "CONTRIBUTING.md" else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_mmparallel"):
                module = importlib.import_module(str(node.module))
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert missing == [], f"{page.name} imports {missing} from {node.module}"
