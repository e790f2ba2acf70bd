"""The chart example: what is drawn, how much samples differ, that a set is drawn once, and that the script runs."""

import io
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_chart_vlm as script  # noqa: E402
from charts import (  # noqa: E402
    COLOURS,
    KINDS,
    NUM_PATCHES,
    Chart,
    build_processor,
    chart_dataset,
    render,
)

from hf_mmparallel.data import ChatCollator  # noqa: E402

NUM_CHARTS = 400


@pytest.fixture(scope="module")
def charts() -> list[Chart]:
    return [Chart.draw(np.random.default_rng((1, index))) for index in range(NUM_CHARTS)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    return chart_dataset(60, cache_dir=str(tmp_path_factory.mktemp("charts")))


def pixels(chart: Chart) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(render(chart))))


def texts(sample: dict) -> list[str]:
    return ["".join(part["text"] or "" for part in turn["content"]) for turn in sample["messages"]]


def test_tables_are_what_is_drawn(charts):
    for chart in charts:
        header, *rows = chart.table.split("\n")
        assert header == f"label | {chart.title}"
        assert rows == [f"{label} | {value}" for label, value in zip(chart.labels, chart.values, strict=True)]
        assert len(set(chart.labels)) == len(chart.labels)
        assert min(chart.values) >= 1 and max(chart.values) <= 100
        if chart.kind == "pie":
            assert sum(chart.values) == 100


def test_bars_are_as_high_as_their_values():
    chart = Chart("bar", "blue", "sales", ("fig", "date"), (25, 75), 100, 100)
    coloured = pixels(chart)[..., 0] < 100
    assert coloured[:95, 5:50].any(1).sum() == pytest.approx(20, abs=2)
    assert coloured[:95, 50:95].any(1).sum() == pytest.approx(70, abs=2)


def test_every_sample_asks_about_what_it_shows(dataset):
    tasks = set(dataset["task"])
    for sample in dataset:
        task, num_images = sample["task"], len(sample["images"])
        parts = [part["type"] for turn in sample["messages"] for part in turn["content"]]
        question, answer = texts(sample)
        assert parts.count("image") == num_images
        if task == "drawn":
            colour, kind = answer.split()
            assert colour in COLOURS and kind in KINDS.values()
        elif task == "two_charts":
            assert num_images == len(answer.split(", ")) == 2
        elif task.startswith("text_"):
            values = [int(row.split(" | ")[1]) for row in question.split("\n")[1:-1]]
            assert not num_images and answer == str(len(values) if task == "text_rows" else max(values))
    assert {"table", "drawn", "two_charts"} < tasks and len(tasks & {"text_rows", "text_highest"}) > 0


@pytest.mark.deep
def test_a_set_is_drawn_once_and_alike_in_any_number_of_processes(tmp_path, monkeypatch):
    first, other = (chart_dataset(8, cache_dir=str(tmp_path / str(num)), num_proc=num) for num in (1, 2))
    assert first.data.table == other.data.table
    monkeypatch.setattr("charts.render", None)
    again = chart_dataset(8, cache_dir=str(tmp_path / "1"), num_proc=1)
    assert again._fingerprint == first._fingerprint == other._fingerprint
    assert again.cache_files == first.cache_files


def test_the_processor_keeps_texts_and_sizes_and_can_be_loaded(dataset, tmp_path):
    processor = build_processor(dataset)
    collator = ChatCollator(processor)
    assert build_processor(dataset).tokenizer.get_vocab() == processor.tokenizer.get_vocab()
    processor.save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    for sample in dataset.select(range(12)):
        encoded = collator.encode(sample)
        said = encoded["labels"][encoded["labels"] != -100]
        assert processor.tokenizer.decode(said) == f"{texts(sample)[1]}<|im_end|>"
        grids = encoded.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.long))
        for grid, image in zip(grids, sample["images"], strict=True):
            assert NUM_PATCHES[0] <= int(grid.prod()) <= NUM_PATCHES[2]
            ratio = image.size[0] * int(grid[1]) / (image.size[1] * int(grid[2]))
            assert 0.5 < ratio < 2
        again = ChatCollator(loaded).encode(sample)
        assert all(torch.equal(value, again[name]) for name, value in encoded.items())


@pytest.mark.deep
def test_the_script_trains_evaluates_and_asks_what_it_saved(monkeypatch, capsys, tmp_path):
    sizes = "--num_train_samples 8 --num_eval_samples 6 --hidden_size 48 --vision_hidden_size 32 --num_hidden_layers 2"
    flags = f"{sizes} --global_batch_size 4 --max_steps 2 --logging_steps 1 --use_cpu --disable_tqdm true"
    monkeypatch.setattr(sys, "argv", ["train_chart_vlm.py", *flags.split(), "--output_dir", str(tmp_path / "out")])
    monkeypatch.setattr(script, "chart_dataset", partial(chart_dataset, cache_dir=str(tmp_path / "data"), num_proc=1))
    monkeypatch.setattr(script, "MOST_NEW_TOKENS", 3)
    torch.set_num_threads(1)
    script.main()
    printed = capsys.readouterr().out
    assert printed.count(", right is '") == script.NUM_SHOWN
    metrics = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert 0 < metrics["eval_loss"] < 8
    assert {f"eval_right/{task}" for task in chart_dataset(6, 1, str(tmp_path / "data"), 1)["task"]} <= set(metrics)
    assert "generator" not in (tmp_path / "out" / "README.md").read_text()


def test_answers_are_right_only_as_a_whole():
    labels = np.array([[-100, -100, 5, 6], [-100, 4, 7, -100], [-100, -100, 5, 6]])
    predictions = np.array([[0, 5, 6, 9], [4, 7, 1, 1], [0, 5, 8, 9]])
    metric = script.AnswersRight(["drawn", "rows", "drawn"])
    assert metric(script.EvalPrediction(predictions, labels)) == {"right/drawn": 0.5, "right/rows": 1.0}
