"""Plans, steps and predictions draw themselves in notebooks, with all names escaped."""

import base64
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter
from IPython.lib.pretty import pretty
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, MultimodalParallelPlugin
from hf_mmparallel.planning.answer import Answer, Inputs, solve
from hf_mmparallel.planning.inputs import Samples, read_model
from hf_mmparallel.planning.settings import Settings
from hf_mmparallel.planning.text import plan_cells
from tests import tiny
from tests.planning.test_page import HOSTILE, Reader
from tests.schedule.builders import make_step


def shown(value: Any) -> tuple[Reader, int]:
    """What a notebook shows of a value, and the number of its pictures."""
    formats = DisplayFormatter().format(value)[0]
    assert len(formats["text/plain"]) < 1000  # notebooks store it, too
    reader = Reader(formats["text/html"])
    pictures = [attributes for tag, attributes in reader.elements if tag == "img"]
    for picture in pictures:
        kind, _, data = str(picture["src"]).partition(",")
        assert kind == "data:image/png;base64"
        colors = Image.open(BytesIO(base64.b64decode(data))).convert("RGB").getcolors()
        assert colors is not None and {(255, 255, 255), (243, 244, 246)} <= {color for _, color in colors}  # as drawn
        assert picture["alt"] and 0 < int(str(picture["width"])) < 2000
    assert not {"script", "link", "iframe"} & {tag for tag, _ in reader.elements}
    return reader, len(pictures)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    folder = tmp_path_factory.mktemp("model")
    tiny.FAMILIES["llava"]().config.save_pretrained(folder)
    layout = {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(pp_size=2)}
    settings = Settings(plugin=MultimodalParallelPlugin(layout), global_batch_size=8, gpu_type="h100")
    return solve(settings, Inputs(read_model(str(folder), {}, []), Samples("all samples alike")))


def test_a_plan_is_its_table(answer: Answer):
    reader, num_pictures = shown(answer.plan)
    assert reader.text_of("caption") == ["Plan for 4 ranks"] and num_pictures == 0
    cells = plan_cells(answer.plan, None, None, None)
    assert reader.text_of("th") == [*cells.columns] and "in flight" not in cells.columns
    assert reader.text_of("td") == [cell for row in cells.rows for cell in row if cell]
    assert any("schedule 1f1b, arranged by contiguous" in text for text in reader.text_of("dd"))


def test_a_prediction_has_its_memory_and_pictures_and_an_answer_the_rest(answer: Answer):
    reader, num_pictures = shown(answer.prediction)
    assert num_pictures == 2 and {"in flight", "GiB a rank"} <= {*reader.text_of("th")}
    assert reader.text_of("dt") == ["Plan", "Step", "Memory"]
    assert pretty(answer.prediction).replace("`", "").splitlines()[0] == f"Plan: {reader.text_of('dd')[0]}"
    reader, num_pictures = shown(answer)
    assert num_pictures == 2 and {"params", "in flight", "GiB a rank"} <= {*reader.text_of("th")}
    assert answer.bound in reader.text_of("dd")


def test_a_step_is_the_number_of_samples_of_each_microbatch(monkeypatch: pytest.MonkeyPatch):
    saved, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, file: (saved.append(self), save(self, file)))
    step = make_step({"vision": [[[0, 1, 2], [3]]], LANGUAGE_MODEL: [[[0], [1, 2], [3]]]})
    assert shown(step)[1] == 1
    for axis, (name, (microbatches,)) in zip(saved[0].axes, step.microbatches.items(), strict=True):
        heights = [patch.get_height() for patch in axis.patches if isinstance(patch, Rectangle)]
        assert heights[: len(microbatches)] == list(map(len, microbatches)), name
        assert f"{name}: mean {len(step.samples) / len(microbatches):.3g} samples" in axis.get_title(loc="left")


def test_names_are_escaped(answer: Answer):
    modules = {HOSTILE if name == "vision" else name: module for name, module in answer.plan.modules.items()}
    reader, num_pictures = shown(replace(answer.plan, modules=modules, edges=()))
    assert HOSTILE.strip() in reader.text_of("td") and num_pictures == 0
