"""Renders the content of a page as HTML."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from ..arrange.balance import Balance
from ..cost.stage_memory import GIB
from ..plan import layout_data
from .page_data import MemoryCurves, PlanChoice, PlanPage, RankRow, TextTable, module_colors, rank_rows, timeline_data

MAX_REPLICAS = 8
MAX_ROWS = 64
SCRIPTS = ("numbers.js", "picture.js", "page.js")  # one scope
BAR_HEIGHT = 100
PIXELS = 1.5  # of a picture in a notebook, for each pixel of a page


def write_page(path: str | Path, page: PlanPage) -> None:
    """Writes a self-contained HTML file, without network resources. Equal content gives equal bytes."""
    Path(path).write_text(render_page(page), encoding="utf-8")


def render_page(page: PlanPage) -> str:
    """Renders a page as HTML."""
    environment = _environment()
    script = "".join(_source(environment, name) for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    rows = rank_rows(page.timeline, MAX_ROWS)
    return environment.get_template("page.html.jinja").render(
        page=page,
        script=script,
        script_hash=_hash(script),
        style=_source(environment, "page.css"),
        data=timeline_data(page.plan, page.timeline, rows, page.memory),
        ranks=_ranks_table(page, rows),
        strips=_strips(page.workloads, module_colors(page.plan)),
        evenness=_evenness_table(page.workloads),
        max_replicas=MAX_REPLICAS,
        num_shown=sum(len(row.ranks) for row in rows),
        choices={
            "Runners-up": _choices(page, page.runners_up),
            "Beside other methods": _choices(page, page.comparison),
        },
        plan_yaml=yaml.safe_dump(
            layout_data(page.plan, page.modules, page.planned_for), sort_keys=False, default_flow_style=None
        ),
    )


def render_repr(
    facts: Sequence[tuple[str, str]] = (),  # labels and texts, below the table
    table: TextTable | None = None,
    pictures: Sequence[tuple[str, bytes]] = (),  # titles and PNGs
    caption: str = "",  # of the table
) -> str:
    """Renders what a notebook shows of an object: HTML without scripts, in the colors of the notebook."""
    images = [
        {"title": title, "data": base64.b64encode(png).decode(), "width": round(int.from_bytes(png[16:20]) / PIXELS)}
        for title, png in pictures
    ]
    template = _environment().get_template("repr.html.jinja")
    return template.render(facts=facts, table=table, images=images, caption=caption)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hf_mmparallel.planning"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment


def _source(environment: Environment, name: str) -> str:
    """A file without template processing: its braces are not template syntax."""
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _hash(script: str) -> str:
    """Hash of the only script that the content security policy allows."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.4g} ms"


def _ranks_table(page: PlanPage, rows: Sequence[RankRow]) -> TextTable:
    """The timeline chart in numbers."""
    length_us = 1e3 * page.timeline.iteration_ms
    memory: MemoryCurves | None = page.memory
    has_sums = any(row.sums for row in rows)
    columns = ["ranks", "stages", "tasks", "busy", *(["gradient sums", "idle beside sums"] if has_sums else ["idle"])]
    has_lanes = any(row.lanes for row in rows)
    columns += ["communication beside tasks", "exposed"] if has_lanes else []
    columns += ["peak GiB"] if memory else []
    cells = []
    for row in rows:
        idle = 1 - (row.busy_us + row.sums_us) / length_us if length_us else 0.0
        peak = [f"{max(map(memory.peak_bytes, row.ranks)) / GIB:.3g}"] if memory else []
        stages = ", ".join(f"{name} replica {replica} stage {stage}" for name, replica, stage in row.stages)
        sums = [_ms(row.sums_us / 1e3)] if has_sums else []
        sent = [_ms(row.communication_us(exposed) / 1e3) for exposed in (False, True)] if has_lanes else []
        cells.append(
            [row.label, stages, str(len(row.tasks)), _ms(row.busy_us / 1e3), *sums, f"{idle:.1%}", *sent, *peak]
        )
    return TextTable(columns, cells, columns[2:])


def _choices(page: PlanPage, choices: Sequence[PlanChoice]) -> list[dict[str, Any]]:
    """Rows of plans, this one first, each with the length of its bar relative to the longest."""
    if not choices:
        return []
    layouts = "; ".join(f"{name}: {module.layout}" for name, module in page.plan.modules.items())
    longest = max([page.compared_ms, *(choice.step_ms or 0.0 for choice in choices)])
    rows = []
    for choice in [PlanChoice("this plan", layouts, page.compared_ms), *choices]:
        row: dict[str, Any] = {"choice": choice, "share": 0.0, "step": "does not fit", "difference": ""}
        if choice.step_ms is not None:
            row["step"] = _ms(choice.step_ms)
            row["share"] = choice.step_ms / longest if longest else 0.0
            if rows and page.compared_ms:
                row["difference"] = choice.difference or f"{choice.step_ms / page.compared_ms - 1:+.1%}"
        rows.append(row)
    return rows


def _strips(workloads: Mapping[str, Balance], colors: Mapping[str, str]) -> list[dict[str, Any]]:
    """Module -> arrangement -> a strip of bars per replica, on one scale per module."""
    modules = next(iter(workloads.values())).forward_ms if workloads else ()
    result = []
    for name in modules:
        highest = max(float(times.max(initial=0.0)) for b in workloads.values() for times in b.forward_ms[name]) or 1.0
        panels = []
        for heading, balance in workloads.items():
            deferred = balance.deferred_ms.get(name, [None] * len(balance.forward_ms[name]))
            pairs = list(zip(balance.forward_ms[name], deferred, strict=True))[:MAX_REPLICAS]
            strips = [_strip(replica, *pair, highest) for replica, pair in enumerate(pairs)]
            panels.append({"heading": heading, "strips": strips, "num_replicas": len(balance.forward_ms[name])})
        result.append({"name": name, "color": colors.get(name, "#777777"), "highest": _ms(highest), "panels": panels})
    return result


def _strip(replica: int, forward_ms: np.ndarray, deferred_ms: np.ndarray | None, highest: float) -> dict[str, Any]:
    """One SVG: paths of the bars and of their deferred parts, the height of the mean, and a text description."""
    mean, largest = (float(f(forward_ms)) if len(forward_ms) else 0.0 for f in (np.mean, np.max))
    return {
        "width": 10 * max(1, len(forward_ms)),
        "bars": _bars(forward_ms, highest),
        "deferred": "" if deferred_ms is None else _bars(deferred_ms, highest),
        "mean_y": round(BAR_HEIGHT * (1 - mean / highest)),
        "words": f"replica {replica}: {len(forward_ms)} microbatches, mean {_ms(mean)}, largest {_ms(largest)}",
    }


def _bars(values: np.ndarray, highest: float) -> str:
    """An SVG path of upright bars, ten units apart."""
    heights = np.rint(BAR_HEIGHT * np.asarray(values) / highest).astype(int)
    return "".join(f"M{10 * i + 1} {BAR_HEIGHT}v{-h}h8v{h}z" for i, h in enumerate(heights.tolist()) if h)


def _evenness_table(workloads: Mapping[str, Balance]) -> TextTable | None:
    """Balance of the arrangements in numbers."""
    if not workloads:
        return None
    columns = ["module", "arrangement", "deviation", "largest microbatch", "largest replica", "deferred"]
    rows = [
        [
            name,
            heading,
            _ms(balance.std_ms(name)),
            f"{balance.microbatch_excess(name):+.1%}",
            f"{balance.replica_excess(name):+.1%}",
            f"{balance.deferred_fraction:.1%}" if name in balance.deferred_ms else "",
        ]
        for name in next(iter(workloads.values())).forward_ms
        for heading, balance in workloads.items()
    ]
    return TextTable(columns, rows, columns[2:])
