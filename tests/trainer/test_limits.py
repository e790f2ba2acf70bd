"""Samples that are larger than a microbatch is predicted to hold run alone, and are told of once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, Workloads, resolve_plan
from hf_mmparallel.trainer import oversized_samples as limits
from hf_mmparallel.trainer import start_report as report
from hf_mmparallel.trainer.oversized_samples import LargeSamples, LimitWatch
from hf_mmparallel.trainer.training_sizes import StartSizes
from tests import tiny
from tests.distributed import run_distributed
from tests.plan.specs import model_spec

from . import runs

STEPS = {"max_steps": 3, "warmup_steps": 0}
PARALLEL = {"vision": {"dp_size": 1}, LANGUAGE_MODEL: {"dp_size": 2}}
LIMIT = 60


def sizes_of(vision: list[int], language: list[int]) -> SampleSizes:
    return SampleSizes.of_sequences({"vision": [[n] for n in vision], LANGUAGE_MODEL: [[n] for n in language]})


def said_of(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(module, "logger", SimpleNamespace(warning=said.append))
    return said


def test_samples_are_compared_with_the_limits_before_the_first_step():
    sizes = sizes_of([5, 30, 5, 5], [10, 10, 25, 10])
    found = LargeSamples.of(StartSizes(sizes, True), {"vision": 20, LANGUAGE_MODEL: 24})
    assert "20 tokens in `vision` and 24 tokens in `language_model`; 2 of 4" in str(found)
    assert "30 tokens in `vision` of at most 20" in found.warning and "25 tokens" in found.warning
    fits = LargeSamples.of(StartSizes(sizes, False), {LANGUAGE_MODEL: 25})
    assert "25 tokens in `language_model`; all 4" in str(fits) and not fits.warning


def test_a_sample_above_the_limit_is_told_of_once(monkeypatch: pytest.MonkeyPatch):
    said = said_of(monkeypatch, limits)
    plan = resolve_plan(model_spec(), {"vision": ModulePlugin(), LANGUAGE_MODEL: ModulePlugin()})
    work = Workloads.alike(plan.modules, 4)
    work = Workloads(work.forward_ms, work.backward_ratio, {**work.tokens, "vision": np.array([1, 1, 9, 1])}, {})
    watch = LimitWatch()
    watch.saw(arrange_step(plan, [4, 5, 6, 7], work, 2), work)
    assert not said
    limited = Workloads(work.forward_ms, work.backward_ratio, work.tokens, {"vision": 8})
    step = arrange_step(plan, [4, 5, 6, 7], limited, 2)
    watch.saw(step, limited)
    watch.saw(step, limited)
    assert len(said) == 1 and "Sample 6 has 9 tokens in `vision`" in said[0]


def shapes() -> list[tiny.Shape]:
    """Samples of which every other has more tokens than a microbatch may have."""
    return [tiny.Shape(index % 3, 0, 90 if index % 2 else 6) for index in range(runs.SAMPLES)]


def limited_run() -> tuple[runs.Run, list[str], list[tuple[int, int]]]:
    """A run, what was said, and for each microbatch of the last step its samples and tokens."""
    said: list[str] = []
    for module in (limits, report):
        module.logger = SimpleNamespace(warning=said.append)  # type: ignore[assignment]
    data: Any = tiny.make_dataset("llava", runs.SAMPLES, shapes=shapes())
    trainer = runs.make_trainer("llava", PARALLEL, data=data, max_tokens_per_microbatch=LIMIT, **STEPS)
    run = runs.run_of(trainer)
    step, tokens = trainer.engine.current_step, trainer.engine.current_sizes.tokens[LANGUAGE_MODEL]
    found = [(len(own), int(tokens[list(own)].sum())) for row in step.microbatches[LANGUAGE_MODEL] for own in row]
    return run, said, found


@pytest.mark.distributed
def test_a_run_with_samples_above_the_limit_equals_the_stock_trainer():
    data = tiny.make_dataset("llava", runs.SAMPLES, shapes=shapes())
    reference = runs.stock("llava", data=data, **STEPS)
    ranks = run_distributed(limited_run, 3)
    runs.assert_same_run(ranks[0][0], reference)
    assert any(tokens > LIMIT for _, tokens in ranks[0][2])
    assert all(tokens <= LIMIT or count == 1 for count, tokens in ranks[0][2])
    (said,) = ranks[0][1]
    assert "11 of 22" in said
