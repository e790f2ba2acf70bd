"""The examples in docstrings of public names run, with the names that a reader's script has."""

import doctest
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hf_mmparallel
from hf_mmparallel.plan import StepPlan
from tests import tiny
from tests.data import processors
from tests.markdown import blocks

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
