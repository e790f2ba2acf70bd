"""What a run says about the arrangement of its samples before the first step."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

from benchmarks.paper_samples import PUBLISHED, PUBLISHED_MODELS
from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.arrange.balance import Balance
from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.cost.arrangement_choice import ArrangementChoice
from hf_mmparallel.data.packing import RowChoice
from hf_mmparallel.data.size_sources import draw_samples
from hf_mmparallel.data.streams import StreamWindow
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import ModulePlugin, PlannedFor, SampleSizes, Workloads, resolve_plan, sync_groups
from hf_mmparallel.planning.answer import Inputs, predict_plan
from hf_mmparallel.planning.inputs import ModelSource, Samples
from hf_mmparallel.planning.settings import Settings
from hf_mmparallel.trainer import start_report as report
from hf_mmparallel.trainer.argument_table import settings_without_plan
from hf_mmparallel.trainer.model_card import RunSummary, plan_section
from hf_mmparallel.trainer.start_report import StepReport, arrangement_lines, settings_without_effect
from hf_mmparallel.trainer.training_sizes import StartSizes, TrainingSizes, representative_batch
from tests import tiny
from tests.plan.specs import model_spec
from tests.schedule.builders import chain, timeline_of
from tests.streams import Rows
from tests.trainer.contexts import arguments, context

LM = "language_model"
NO_TASKS = timeline_of(chain(1, 0).plan, chain(1, 0).step)
BEFORE = Balance({"vision": (np.array([1.0, 3.0]),), LM: (np.array([2.0, 8.0]),)}, {})
AFTER = Balance({"vision": (np.array([2.0, 2.0]),), LM: (np.array([4.5, 5.5]),)}, {}, deferred_fraction=0.25)


def prediction(before: Balance, after: Balance) -> StepReport:
    """Only what the sentences tell of."""
    planned: Any = None
    return StepReport(planned, NO_TASKS, None, 12.5, (before, after), before_ms=20.25)


def test_the_report_says_what_the_arrangement_evens_out():
    chosen, predicted = arrangement_lines("disttrain", "the column `length`", prediction(BEFORE, AFTER))
    assert "`disttrain`" in chosen and "the column `length`" in chosen
    assert "a step 20.2 -> 12.5 ms, the optimizer's with it;" in predicted
    assert "vision 1 -> 0 ms, language_model 3 -> 0.5 ms. 25% of samples" in predicted
    chosen, predicted = arrangement_lines("contiguous", "`sample_tokens`", prediction(BEFORE, BEFORE))
    assert "`contiguous`" in chosen and "`sample_tokens`" in predicted
    assert "a step 12.5 ms, the optimizer's with it;" in predicted
    assert "vision 1 ms, language_model 3 ms." in predicted
    choice = ArrangementChoice("tapered", {"hierarchical": 14.0, "tapered": 12.5, "contiguous": 20.25})
    told = arrangement_lines("tapered", "`sample_tokens`", replace(prediction(BEFORE, AFTER), choice=choice))[0]
    assert "12.5 ms a step (`hierarchical` 14, `contiguous` 20.25)" in told


def test_unknown_sizes_are_said_with_what_would_help():
    unknown = StepReport(prediction(BEFORE, AFTER).planned, NO_TASKS, None, 12.5)
    (line,) = arrangement_lines("disttrain", "the dataset's metadata", unknown)
    assert "unknown, all count the same" in line and "`token_columns`" in line
    assert "unknown" in arrangement_lines("contiguous", "the dataset's metadata", unknown)[0]


@pytest.mark.parametrize("named", [None, "contiguous"])
@pytest.mark.parametrize("is_searched", [False, True])
def test_the_report_of_a_plan_has_the_step_that_the_planner_predicts(named: str | None, is_searched: bool):
    """On the same batches, of the same samples: of all the ones that the planner measures, or those of the search."""
    spec, drawn = PUBLISHED_MODELS["llama3-1b"].spec, PUBLISHED["synthchartnet"].draw(200, 0)
    plan = resolve_plan(spec, {"vision": ModulePlugin(dp_size=2), LM: ModulePlugin(dp_size=2, pp_size=2)})
    costs, groups = analytic_costs(spec, find_device("a40")), sync_groups(spec, plan)
    request = PlannedFor(seed=5, num_samples=150)
    measured = drawn.take(draw_samples(200, 150, 5))
    settings = Settings(gpu_type="a40", global_batch_size=32, microbatch_size=4, microbatch_assignment=named)
    inputs = Inputs(ModelSource("", None, spec, {}), Samples("", measured), seed=5)
    answer = predict_plan(settings, inputs, costs, plan)

    run = context(range(200), per_device_train_batch_size=4, microbatch_assignment=named)
    sizes: Any = SimpleNamespace(
        context=run, of_rank=lambda data: drawn.take, at_start=lambda *_: StartSizes(drawn, True)
    )
    engine: Any = SimpleNamespace(costs=costs, plan=plan, sync_groups=groups)
    planner, told = report.predict(engine, sizes, 32, request, measured if is_searched else None)
    assert planner.arrangement == answer.arrangement
    assert told.step_ms == pytest.approx(answer.step_ms, rel=1e-9)
    assert told.timeline.bubble_fraction == pytest.approx(answer.drawn.bubble_fraction, rel=1e-9)
    assert told.memory == answer.memory and told.step_ms > told.timeline.iteration_ms
    if named is None:
        assert told.choice is not None
        assert told.choice.step_ms[planner.arrangement] == pytest.approx(told.step_ms, rel=1e-9)
    else:
        assert told.before_ms == pytest.approx(told.step_ms, rel=1e-9)


def test_microbatches_are_counted_as_they_are_arranged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "core_per_rank", lambda world: True)
    plan = resolve_plan(model_spec(), {"vision": ModulePlugin(), LM: ModulePlugin(dp_size=2)})
    step = SimpleNamespace(samples=range(32), microbatches={LM: [[()] * 3, [()] * 3]})
    sizes = TrainingSizes(context([], per_device_train_batch_size=4))
    predicted: Any = replace(prediction(BEFORE, AFTER), planned=SimpleNamespace(step=step))
    cases = ("hierarchical", "on average 5.33", 8, "a40"), ("contiguous", "up to 4", 32, "cpu")
    for arrangement, size, of_stock, device in cases:
        costs = analytic_costs(model_spec(), find_device(device))
        options = SimpleNamespace(module_settings={})
        engine: Any = SimpleNamespace(plan=plan, device=torch.device("cpu"), costs=costs, options=options)
        told = report.PlanReport(engine, sizes, 32, RowChoice(False, "`packing=False`"), stock_batch_size=of_stock)
        planner: Any = SimpleNamespace(arrangement=arrangement)
        first, second, *others = told.lines(planner, predicted)
        stock = " (the stock Trainer: 8)" if of_stock == 8 else ""
        assert f"32 samples{stock}, 3 microbatches of {size} " in first and "`packing=False`" in second
        # a CPU's speed is unknown
        assert any(" ms" in line for line in others) == (device == "a40")


@pytest.mark.parametrize(
    ("token_columns", "function", "dataset", "wanted"),
    [
        ("length", None, [], "the column `length`"),
        ({LM: "length", "vision": "patches"}, None, [], "the columns `length`, `patches`"),
        (None, len, [], "`sample_tokens`"),
        (None, None, SimpleNamespace(token_counts=len), "the dataset's `token_counts`"),
        (None, None, [], "the dataset's metadata"),
    ],
)
def test_the_origin_of_sizes_has_a_name(token_columns, function, dataset, wanted):
    assert report.size_origin(context(dataset, function, token_columns=token_columns)) == wanted


def test_a_run_measures_columns_with_sides_by_the_patches_of_its_model():
    model = tiny.FAMILIES["qwen2_5_vl"]()
    side = model.config.vision_config.patch_size * model.config.vision_config.spatial_merge_size
    rows = [{"words": 5, "width": [2 * side, side], "height": [3 * side, side]}]
    run = context(rows, token_columns={LM: "words+vision", "vision": "width*height"})
    source = TrainingSizes(replace(run, model=model, spec=build_model_spec(model))).of_rank(rows)
    assert source is not None
    tokens = source([0]).tokens
    assert (tokens["vision"].tolist(), tokens[LM].tolist()) == ([4 * 7], [5 + 7])


def test_the_prediction_is_for_samples_from_all_over_the_dataset():
    def drawn(dataset: Any, source: Any, **changes: Any) -> tuple[int, ...]:
        return representative_batch(dataset, source, 4, arguments(**changes)).samples

    def sizes(indices: Sequence[int]) -> SampleSizes:
        if 33 in indices:
            raise OSError("no header")
        if 66 in indices:
            raise ValueError("no length")
        return SampleSizes.uniform({LM: 1}, len(indices))

    assert drawn(range(100), None) == (0, 1, 2, 3)  # unknown, all the same
    assert drawn(range(67, 100), sizes) == (0, 10, 21, 32)
    assert drawn(range(34), sizes) == (0, 11, 22)
    assert drawn(range(100), sizes, on_bad_sample="skip") == (0, 99)
    with pytest.raises(ValueError, match="no length"):
        drawn(range(100), sizes)
    assert drawn([0, 1], sizes) == (0, 1)
    assert drawn([], sizes) == ()
    assert drawn(StreamWindow(Rows([{"n": number} for number in range(3)])), sizes) == (0, 1, 2)


@pytest.mark.parametrize("arrangement", ["entrain", "hierarchical"])
@pytest.mark.parametrize("num_pictures", [2, 64])
def test_far_fewer_microbatches_than_asked_for_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, arrangement: str, num_pictures: int
):
    """Of 64 samples for two replicas, with microbatches of four, all or two have an image."""
    said: list[str] = []
    monkeypatch.setattr(report, "logger", SimpleNamespace(warning=said.append))
    plan = resolve_plan(model_spec(), {name: ModulePlugin(dp_size=2) for name in ("vision", LM)})
    vision = np.where(np.arange(64) < num_pictures, 5.0, 0.0)
    alike = Workloads.alike(["vision", LM], 64)
    workloads = replace(alike, forward_ms={**alike.forward_ms, "vision": vision})
    planner: Any = SimpleNamespace(arrangement=arrangement, microbatch_size=4)
    report.warn_of_few_microbatches(planner, arrange_step(plan, range(64), workloads, 4, arrangement))
    assert len(said) == (arrangement == "entrain" and num_pictures == 2)
    assert all("1 microbatches or fewer" in text and "asks for 8" in text for text in said)


def test_settings_that_change_nothing_say_so():
    limits = {"max_tokens_per_microbatch": 64, "memory_limit_gib": 2.0}
    args = arguments(**limits, microbatch_assignment="disttrain")
    for line, (name, value) in zip(settings_without_effect(args, sizes_known=False), limits.items(), strict=True):
        assert f"`{name}={value}` has no effect" in line
    first, _ = settings_without_effect(args, sizes_known=True)
    assert "`max_tokens_per_microbatch=64`" in first and "hierarchical" in first
    assert settings_without_effect(arguments(microbatch_assignment="disttrain"), sizes_known=False) == []
    assert settings_without_effect(arguments(max_tokens_per_microbatch=64), sizes_known=True) == []


def test_settings_of_a_plan_are_idle_without_one():
    def said(args: TrainingArguments, **given: Any) -> list[str]:
        return list(settings_without_plan(args, given))

    assert said(arguments()) == said(arguments(), sample_tokens=None) == []
    assert said(TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])) == []
    plan, arrangement = said(arguments(on_bad_sample="skip", token_columns="length"))
    assert "`on_bad_sample='skip'`" in plan and "`parallel`" in plan
    assert "`token_columns='length'`" in arrangement and "`microbatch_assignment`" in arrangement
    assert said(arguments(token_columns="length", microbatch_assignment="disttrain"), sample_tokens=len) == []
    (line,) = said(arguments(), sample_tokens=len)
    assert "`sample_tokens`" in line and "`microbatch_assignment`" in line


def test_the_model_card_says_how_samples_were_arranged(tmp_path: Path):
    plan = resolve_plan(model_spec(), {"vision": ModulePlugin(), LM: ModulePlugin(pp_size=2)})
    engine: Any = SimpleNamespace(plan=plan, planner=SimpleNamespace(arrangement="disttrain"))
    (tmp_path / "workloads.png").touch()
    logs = [{"parallel/forward_ms_std/vision": 1.25, "loss": 2.0}, {"parallel/workload_std_before/vision": 12.0}]
    card = plan_section(tmp_path, engine, 8, RunSummary(logs))
    assert "`disttrain`" in card and "(workloads.png)" in card and "schedule.png" not in card
    rows = ["| forward std, vision (ms) | 1.25 |", "| workload std before, vision (ms) | 12 |"]
    assert card.splitlines()[-3:-1] == rows
