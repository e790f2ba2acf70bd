"""
The pages: links lead somewhere, and each block is what its language says. Commands are parsed by their programs,
Python is compiled, YAML is read; `test_page_code.py` runs them.
"""

import argparse
import ast
import doctest
import importlib
import inspect
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from accelerate.commands.launch import launch_command_parser
from mkdocs.commands.build import build
from mkdocs.config import load_config
from PIL import Image
from torch.distributed.run import get_args_parser
from transformers import HfArgumentParser, TrainingArguments

import hf_mmparallel
from hf_mmparallel import MultimodalParallelPlugin, MultimodalTrainingArguments
from hf_mmparallel.cli.launch_command import launch_parser
from hf_mmparallel.cli.main import build_parser, main
from hf_mmparallel.cost import find_device
from hf_mmparallel.cost.device_table import read_device_file
from hf_mmparallel.plan import StepPlan
from tests import tiny
from tests.data import processors
from tests.markdown import PAGES, ROOT, Block, blocks, commands

LAUNCHERS = {"accelerate": launch_command_parser, "hf-mmparallel": launch_parser}
NOT_RUN = "not run: "
"""What the comment before a block begins with that nothing runs or checks; a reason follows."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


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


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A folder with the files that arguments on the pages name, on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    Path("out").mkdir()
    Path("plan.yaml").write_text("language_model: {}")
    for name in ("ds.json", "ds_config.json"):
        Path(name).write_text('{"zero_optimization": {"stage": 2}}')
    return monkeypatch


class _Parsed(Exception):
    """Raised where a script has parsed its arguments."""


def _parse_only(script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a script until it has parsed its arguments; one without a parser gets none."""
    source = (ROOT / script).read_text()
    if "ArgumentParser" not in source:
        compile(source, script, "exec")
        assert arguments == [], script
        return

    def parse(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        _, rest = known(parser, arguments)
        raise _Parsed(rest)

    known = argparse.ArgumentParser.parse_known_args
    with monkeypatch.context() as patch, pytest.raises(_Parsed) as raised:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
        patch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert raised.value.args == ([],), (script, arguments)


def _arguments(script: str, line: list[str]) -> None:
    """Parses the arguments of an example as it does, and those of a script of the reader as ours."""
    types: list = [MultimodalTrainingArguments]
    defaults = {"output_dir": "out"}
    if (ROOT / script).is_file():
        module = runpy.run_path(str(ROOT / script))
        types = [module.get("MultimodalTrainingArguments", TrainingArguments)]
        types += [module["ScriptArguments"]] if "ScriptArguments" in module else []
        defaults |= module["DEFAULTS"]
    parser = HfArgumentParser(types)
    parser.set_defaults(**defaults)
    parser.parse_args_into_dataclasses(line)


def _check_launch(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parses the arguments of a launcher; returns the command that it starts."""
    if words[0] == "torchrun":
        args = get_args_parser().parse_args(words[1:])
        return ["python"][args.no_python :] + [args.training_script, *args.training_script_args]
    monkeypatch.setattr(sys, "argv", words)  # accelerate's help reads them
    args = LAUNCHERS[words[0]]().parse_args(words[2:])
    assert args.config_file is None or (ROOT / args.config_file).is_file(), words
    return ["python", args.training_script, *args.training_script_args]


def _check_command(line: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the program of a command is not known here or does not take the command."""
    if words[0] == "torchrun" or words[1:2] == ["launch"]:
        words = _check_launch(words, monkeypatch)
    program, *rest = words
    if program == "make":
        subprocess.run(["make", "--dry-run", *rest], cwd=ROOT, check=True, capture_output=True)
    elif program == "pip":
        _check_install(rest)
    elif program == "hf-mmparallel":
        build_parser().parse_args(rest)
    elif program == "python" and re.search(r"\btrain\w*\.py$", rest[0]):
        _arguments(*rest[:1], rest[1:])
    elif program == "python":
        _parse_only(*rest[:1], rest[1:], monkeypatch)
    else:
        assert program in ("echo", "mkdir"), f"nothing checks `{program}`"
        subprocess.run(["bash", "-euc", line], check=True)


def _check_install(words: list[str]) -> None:
    """Fails if a file of versions or an extra is missing, or for a package that setup.cfg does not know."""
    assert words.pop(0) == "install"
    if "--constraint" in words:
        place = words.index("--constraint")
        assert (ROOT / words[place + 1]).is_file()
        del words[place : place + 2]
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for name in (word for word in words if word != "--no-deps"):
        package, extra = re.fullmatch(r"([\w.]+)(?:\[(\w+)\])?", name).groups()
        own, extras = package in (".", "hf_mmparallel"), setup["options.extras_require"]
        required = "\n".join([setup["options"]["install_requires"], *dict(extras).values()])
        assert (extra in extras if extra else own) or re.search(rf"^{package}\b", required, re.MULTILINE)


def _check(block: Block, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a block is not what its language says, or if nothing here knows the language."""
    if block.language == "bash":
        for line, words in commands(block.text).items():
            _check_command(line, words, monkeypatch)
    elif block.language == "yaml":
        Path("page.yaml").write_text(block.text)
        if "like" in yaml.safe_load(block.text):
            read_device_file("page.yaml", find_device)
        else:
            MultimodalParallelPlugin.from_any("page.yaml")
    elif block.language == "text":  # by `test_pages.py`, `test_page_code.py` and `test_troubleshooting.py`
        printed = ("printed: by the command above", "printed: by a run")
        assert block.comment.startswith("results: ") or block.comment in printed, "a comment has to say what it is"
    else:
        assert block.language in ("python", "diff"), f"nothing checks `{block.language}`"
        if page.name != "CONTRIBUTING.md":  # whose code is applied by `test_contributing.py`
            _check_python(block.code)
        elif block.language == "python":
            ast.parse(block.code)


def _check_python(code: str) -> None:
    """Fails if code is none, or imports what does not exist from here."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_mmparallel"):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], node.module


@pages
def test_blocks_are_what_their_language_says(page, reader):
    for block in blocks(page):
        if not block.comment.startswith(NOT_RUN):
            _check(block, page, reader)


def test_what_scripts_say_of_their_use_is_taken(reader):
    for script in sorted(ROOT.glob("examples/*.py")):
        for block in blocks(script, "bash"):
            for line, words in commands(block.text).items():
                _check_command(line, words, reader)


def test_few_blocks_are_neither_run_nor_checked():
    found = [(page.name, block.comment) for page in PAGES for block in blocks(page)]
    left = [name for name, comment in found if comment.startswith(NOT_RUN)]
    assert left == ["design.md"] * 5


@pages
def test_arguments_in_sentences_are_taken(page, reader):
    """`--fsdp true` was none: "Unknown `fsdp` option: true"."""
    known = {field.name: field for field in fields(MultimodalTrainingArguments)}
    for name, value in re.findall(r"`--(\w+)\s*([^`]*)`", page.read_text()):
        if name in known and (value or known[name].type is bool or name == "fsdp"):
            _arguments("train.py", [f"--{name}", *shlex.split(value)])


@pages
def test_files_of_commands_exist(page):
    for block in blocks(page, "bash"):
        for path in re.findall(r"\b(?:examples|benchmarks|tests|docs)/[\w./-]+", block.text):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_makefile_runs_files_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    paths = re.findall(r"\b(?:examples|benchmarks|tests|constraints)/[\w./-]+\.(?:py|yaml)\b", makefile)
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.skipif(not transformers.__version__.startswith("5.24"), reason="the facts are of one release")
@pytest.mark.parametrize(
    "block", re.findall(r"```python\n(.*?)```", (ROOT / "docs/upstream.md").read_text(), re.DOTALL)
)
def test_what_transformers_lacks_is_still_lacking(block):
    exec(compile(block, "docs/upstream.md", "exec"), {})  # noqa: S102 (our own documentation)


def _areas(picture: Image.Image) -> dict[tuple[int, ...], int]:
    """Pixels of each color that fills a hundredth of a picture or more: those of its bars, not of its letters."""
    counts = picture.convert("RGB").getcolors(2**24) or []
    return {color: count for count, color in counts if count > picture.width * picture.height // 100}


def test_the_picture_is_of_a_plan_that_its_command_predicts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = [words for block in blocks(ROOT / "README.md", "bash") for words in commands(block.text).values()]
    (arguments,) = (rest for _, *rest in words if rest[-1:] == ["docs/images/schedule.png"])
    picture = tmp_path / "schedule.png"
    assert main([*arguments[:-1], str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "\nStep " in printed and "Does not fit" not in printed
    drawn, kept = Image.open(picture), Image.open(ROOT / "docs/images/schedule.png")
    if drawn.info["Software"] == kept.info["Software"]:
        assert picture.read_bytes() == (ROOT / "docs/images/schedule.png").read_bytes()
    else:  # another matplotlib draws letters otherwise
        assert drawn.size == kept.size and _areas(drawn) == pytest.approx(_areas(kept), rel=0.01)


DOCUMENTED = {**{name: getattr(hf_mmparallel, name) for name in hf_mmparallel.__all__}, "StepPlan": StepPlan}
WITHOUT = {
    "MultimodalConfig": "as `MultimodalModel` makes it",
    "MultimodalSFTConfig": "as `docs/trl.md` shows, of which the Trainer is made by `parallelize`",
    "MultimodalSFTTrainer": "the same",
    "ParallelMetricsCallback": "the Trainer adds it",
    "ParallelModel": "what `prepare` returns",
    "__version__": "a string",
    "start_anew_at_samples": "`PackingCollator` calls it",
}


def _texts(name: str) -> Iterator[str]:
    """The docstrings of a name and of its own methods."""
    value = DOCUMENTED[name]
    yield inspect.getdoc(value) or ""
    for member in vars(value).values() if inspect.isclass(value) else ():
        function = getattr(member, "__func__", member)
        if inspect.isfunction(function):
            yield inspect.cleandoc(function.__doc__ or "")


def _examples(name: str) -> list[str]:
    found = [block.text for text in _texts(name) for block in blocks(text, "python")]
    return [text for text in found if ">>> " in text]


def test_names_have_examples():
    assert {name for name in DOCUMENTED if not _examples(name)} == set(WITHOUT)


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if name not in WITHOUT])
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    model = tiny.FAMILIES["llava"]()
    names: dict[str, Any] = {name: getattr(hf_mmparallel, name) for name in hf_mmparallel.__all__}
    names |= {"StepPlan": StepPlan, "torch": torch, "model": model, "processor": processors.llava()}
    names |= {"encoder": model.model.vision_tower, "language_model": tiny.FAMILIES["llama"]()}
    names |= {"dataset": tiny.make_dataset("llava", 16), "collator": tiny.collate("llava")}
    names["args"] = hf_mmparallel.MultimodalTrainingArguments("out")
    for text in _examples(name):
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        said: list[str] = []
        runner.run(doctest.DocTestParser().get_doctest(text, dict(names), name, None, None), out=said.append)
        assert not runner.summarize(verbose=False).failed, "".join(said)


@pytest.mark.deep
def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    build(config)
    pages = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("index.html")}
    assert {
        "trl",
        "own_loop",
        "readme",
        "changelog",
        "examples/sft_digits",
        "examples/finetune_small_vlm",
        "examples/accelerate_configs",
    } <= pages
    named = set(re.findall(r'id="hf_mmparallel\.(\w+)"', (tmp_path / "api" / "index.html").read_text()))
    assert named == set(hf_mmparallel.__all__) - {"__version__"}
    for page in tmp_path.rglob("*.html"):  # a link to a file that has no page would lead nowhere
        assert not re.search(r'href="[^"]*\.(?:md|py)["#]', page.read_text()), page
