"""The numbers behind the picture, computed by node and by numpy."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import hf_mmparallel.planning
from hf_mmparallel.planning.gantt import COLORS
from hf_mmparallel.planning.page_data import rank_rows, timeline_data
from hf_mmparallel.schedule.kinds import KINDS
from tests.planning.pages import example_page

TEMPLATES = Path(hf_mmparallel.planning.__file__).parent / "templates"
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")

VIEWS = [{"start": 0.0, "end": 100.0}, {"start": 12.5, "end": 37.25}, {"start": 99.0, "end": 100.0}]


def evaluate(expression: str, **values):
    """What a JavaScript expression over `numbers.js` and some values gives."""
    names = "".join(f"const {name} = values.{name};\n" for name in values)
    code = (
        'const values = JSON.parse(require("fs").readFileSync(0));\n'
        f"{(TEMPLATES / 'numbers.js').read_text()}\n{names}"
        f"console.log(JSON.stringify({expression}, (_, v) => ArrayBuffer.isView(v) ? Array.from(v) : v));"
    )
    done = subprocess.run(
        [str(NODE), "-e", code], input=json.dumps(values), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_script_parses(tmp_path):
    source = "\n".join((TEMPLATES / name).read_text() for name in ("numbers.js", "picture.js", "page.js"))
    (tmp_path / "page.js").write_text(f'"use strict";\n(() => {{\n{source}\n}})();')
    subprocess.run([str(NODE), "--check", tmp_path / "page.js"], check=True, timeout=60)


def test_rows_are_decoded():
    page = example_page()
    rows = rank_rows(page.timeline)
    data = timeline_data(page.plan, page.timeline, rows, page.memory)
    decoded = evaluate(
        "data.rows.map((row, i) => decodeRow(data, row, i))"
        ".map((row) => Array.from(row.code, (_, i) => taskOf(data, row, i)))",
        data=data,
    )
    for row, tasks in zip(rows, decoded, strict=True):
        assert [(t["text"], t["start"], t["end"]) for t in tasks] == [(str(t), a, b) for t, a, b in row.tasks]


def test_gradient_sums_lanes_and_memory_are_decoded():
    row = {"task": [], "gap": [], "duration": [], "stage": 0, "label": "rank 0", "ranks": 8}
    full = {
        **row,
        "sums": {"gap": [3, 0, 4], "duration": [2, 5, 1]},
        "lanes": [{"gap": [0, 2], "duration": [1, 1]}, {"gap": [], "duration": []}],
    }
    memory = {"static": 7, "gap": [3, 4, 0], "change": [5, -2, 9]}
    bare, found, held = evaluate(
        "[...rows.map((row) => decodeRow({stages: [[0, 0, 0]]}, row, 0)), decodeMemory(memory)]",
        rows=[row, full],
        memory=memory,
    )
    assert bare["sums"] == {"start": [], "end": []}
    assert found["sums"] == {"start": [3, 5, 14], "end": [5, 10, 15]}
    assert found["lanes"] == [{"ranks": 1, "start": [0, 3], "end": [1, 4]}, {"ranks": 1, "start": [], "end": []}]
    assert held == {"static": 7, "time": [3, 7, 7], "value": [5, 3, 12], "peak": 19}


def test_columns_show_the_highest_value():
    rng = np.random.default_rng(0)
    times = np.sort(rng.uniform(0, 100, 300)).tolist()
    values = rng.integers(0, 50, 300).tolist()
    memory = {"static": 3, "time": times, "value": values}
    found = evaluate("views.map((v) => columnMax(memory, v, new Float64Array(40)))", memory=memory, views=VIEWS)
    edges = np.array([-np.inf, *times, np.inf])
    held = np.array([3, *(np.array(values) + 3)])
    for view, columns in zip(VIEWS, found, strict=True):
        borders = np.linspace(view["start"], view["end"], 41)
        expected = [
            held[(edges[:-1] <= right) & (edges[1:] > left)].max()
            for left, right in zip(borders[:-1], borders[1:], strict=True)
        ]
        assert columns == expected


def test_busy_shares_are_areas():
    rng = np.random.default_rng(1)
    rows = []
    for ranks in (1, 8):
        cuts = np.sort(rng.uniform(0, 100, 60)).tolist()
        rows.append({"ranks": ranks, "start": cuts[::2], "end": cuts[1::2]})
    found = evaluate("views.map((v) => busyShare(rows, v, 30))", rows=rows, views=VIEWS)
    for view, shares in zip(VIEWS, found, strict=True):
        borders = np.linspace(view["start"], view["end"], 31)
        expected = np.zeros(30)
        for row in rows:
            for start, end in zip(row["start"], row["end"], strict=True):
                covered = np.minimum(end, borders[1:]) - np.maximum(start, borders[:-1])
                expected += row["ranks"] / 9 * np.maximum(0, covered) / np.diff(borders)
        assert shares == pytest.approx(expected, abs=1e-9)


def test_a_zoom_keeps_its_place_and_stays_within_the_step():
    zooms = [[VIEWS[0], 0.5, 30.0], [VIEWS[1], 0.9, 20.0], [VIEWS[1], 1.5, 20.0], [VIEWS[2], 8.0, 99.5]]
    found = evaluate("zooms.map(([view, factor, at]) => zoomed(view, factor, at, 100))", zooms=zooms)
    for (view, factor, at), new in zip(zooms, found, strict=True):
        length = view["end"] - view["start"]
        assert new["end"] - new["start"] == pytest.approx(max(20, factor * length))
        assert new["start"] >= 0 and new["end"] <= 100 + 1e-9
        if new["start"] > 0 and new["end"] < 100 - 1e-9:
            share = (at - view["start"]) / length
            assert (at - new["start"]) / (new["end"] - new["start"]) == pytest.approx(share)
    assert evaluate("zoomed(view, 100, 5, 100)", view=VIEWS[1]) == VIEWS[0]
    assert evaluate("moved(view, -500, 100)", view=VIEWS[1]) == {"start": 0, "end": 24.75}


def test_ticks_are_round_and_about_as_many_as_wanted_and_memory_is_in_words():
    views = [{"start": 0, "end": 7.83e6}, {"start": 1234567, "end": 1234667}, {"start": 3e5, "end": 4.1e5}]
    for view, found in zip(views, evaluate("views.map((view) => ticks(view, 8))", views=views), strict=True):
        times = np.array(found["times"])
        assert 4 <= len(times) <= 12
        assert times.min() >= view["start"] and times.max() <= view["end"]
        step = np.diff(times)[0]
        first_digit = step / 10 ** np.floor(np.log10(step))
        assert any(first_digit == pytest.approx(digit) for digit in (1, 2, 5))
        shown = np.round(times / 1e3, found["digits"])
        assert shown == pytest.approx(times / 1e3)
    assert evaluate("[0, 2 ** 20, 1.5 * 2 ** 30, 80 * 2 ** 30].map(bytes)") == ["0 KiB", "1 MiB", "1.5 GiB", "80 GiB"]


def test_numbers_on_bars_can_be_read():
    """WCAG 2.1, success criterion 1.4.3: a contrast of at least 4.5."""

    def luminance(color):
        parts = np.array(color) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    tints = sorted({kind.tint for kind in KINDS.values()})
    shades = "[false, true].flatMap((dark) => tints.map((tint) => shadeOf(c, tint, dark)))"
    found = evaluate(f"colors.flatMap((c) => {shades}).map((c) => [c, textOn(c)])", colors=COLORS, tints=tints)
    assert found[len(tints) - 1][0] == [0x2F, 0x6D, 0xB5] and len(found) == 2 * len(tints) * len(COLORS)
    for color, text in found:
        low, high = sorted((luminance(color), luminance([int(text[i : i + 2], 16) for i in (1, 3, 5)])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (color, text)
