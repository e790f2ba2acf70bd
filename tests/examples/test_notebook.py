"""The notebook runs from top to bottom, its launchers train as one process does, and it stores what it gives."""

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

from ..notebooks import EXAMPLES, ROOT, run_notebook

NOTEBOOK = EXAMPLES / "notebooks" / "finetune_small_vlm.ipynb"
LAUNCH = "notebook_launcher(train, (layout"
LAUNCHERS = """
from accelerate import debug_launcher

questions.num_samples = 16 * 5
notebook_launcher(train, (layout, folder / "notebook"), num_processes=2)
debug_launcher(train, (layout, folder / "debug"), num_processes=2)
train(None, folder / "alone")
questions.num_samples = 16 * 40
"""


def _outputs(notebook: NotebookNode, text: str) -> list[Any]:
    """The outputs of the cell that contains a text."""
    (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source)
    return cell.outputs


def _data(notebook: NotebookNode, text: str) -> dict[str, str]:
    """The value that a cell ends with, by the kind of what is shown of it; pictures are left out of HTML."""
    data = dict(_outputs(notebook, text)[-1].data)
    return data | {"text/html": re.sub(r"base64,[^\"]+", "", data.get("text/html", ""))}


def _log(folder: Path, name: str) -> list[float]:
    """The losses and gradient norms of a run."""
    history = json.loads((folder / "out" / "notebook" / name / "trainer_state.json").read_text())["log_history"]
    return [entry[key] for entry in history if "loss" in entry for key in ("loss", "grad_norm")]


@pytest.mark.deep
def test_it_runs_and_stores_what_it_gives(tmp_path: Path):
    found, stored = run_notebook(NOTEBOOK, tmp_path, {LAUNCH: LAUNCHERS}), nbformat.read(NOTEBOOK, nbformat.NO_CONVERT)
    for cell in ("answer = solve", "answer.plan", "answer.prediction.planned.step", "ParallelPlan.load"):
        shown = _data(found, cell)
        assert shown["text/html"] and shown["text/html"] == _data(stored, cell)["text/html"], cell
        assert shown["text/plain"] == _data(stored, cell)["text/plain"]
    assert _data(found, "answer = solve")["text/html"].count("<img") == 2
    assert _data(found, "answer.prediction.planned.step")["text/html"].count("<img") == 1
    for cell in ("timeline-30.png", "plt.show()", "picture(questions, shown)", "model.generate("):
        assert _data(found, cell)["image/png"] and _data(stored, cell)["image/png"], cell
    losses = _log(tmp_path, "model")[::2]
    assert len(losses) == 8 and losses[-1] < 0.6 * losses[0]
    (printed,) = (output.text for output in _outputs(found, "model.generate(") if output.get("name") == "stdout")
    assert re.search(r"^generated: +\S", printed, re.MULTILINE)

    alone = _log(tmp_path, "alone")
    assert len(alone) == 2
    assert _log(tmp_path, "notebook") == pytest.approx(alone, rel=2e-5)
    assert _log(tmp_path, "debug") == pytest.approx(alone, rel=2e-5)


def test_nothing_but_its_outputs_is_stored():
    text = NOTEBOOK.read_text()
    assert len(text) < 250_000 and str(ROOT) not in text and "site-packages" not in text
    stored = nbformat.read(NOTEBOOK, nbformat.NO_CONVERT)
    assert [cell.execution_count for cell in stored.cells if cell.cell_type == "code"] == list(range(1, 12))
