"""
Training runs in which processes die at random points, compared with the stock Trainer on one process.

Each run is a real `Trainer` under `hf-mmparallel launch` on gloo. Its processes are killed, stopped, raise or exit in
reading samples, forwards, messages, sums of gradients, the norm, the optimizer's step, evaluations, checkpoints, and
in the recovery from another death. Some runs have several launchers, which stand for hosts: whole hosts are killed at
once, leave on SIGTERM, and join; of the first one, which keeps the store, only processes are lost. A run is at fault
if it hangs, if a process is missing at the end that did not die, if a launcher has another exit code than it should,
or if a loss, a norm, an evaluation, a weight or the moving average of one differs. A sample that is lost, or read
twice, changes the losses. Every checkpoint that is there at the end, or is said to be, is opened; from each the stock
Trainer goes on to the end, with the same numbers.

```bash
python benchmarks/chaos.py                       # until at least 200 processes have died
python benchmarks/chaos.py --seed 117 --runs 1   # one run again
python benchmarks/chaos.py --quick --out out/bench
```
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import torch
from chaos_runs import (
    LAYOUTS,
    ChaosRun,
    Death,
    Join,
    Layout,
    Reference,
    chaos_run,
    checkpoint_faults,
    faults,
    random_deaths,
    stock_run,
)
from rich.table import Table

GOAL_KILLS = 200
HALF_TOLERANCE = 0.03


@dataclass(frozen=True)
class Setting:
    """
    What a run trains with, beside its layout.

    Args:
        name (`str`): Shown in tables.
        layout (`str`): One of `LAYOUTS`.
        failures (`int`): Nodes that may be lost at once.
        options (`tuple[str, ...]`): Of `chaos_worker.py`.
        joins (`tuple[Join, ...]`): Processes that join.
        hosts (`int`): Launchers that it starts with.
    """

    name: str
    layout: str
    failures: int = 1
    options: tuple[str, ...] = ()
    joins: tuple[Join, ...] = ()
    hosts: int = 1

    @property
    def adapter(self) -> bool:
        return "--adapter" in self.options

    @property
    def equals_stock(self) -> bool:
        """Whether its numbers are those of the stock Trainer: not in half precision, nor with masks of dropout."""
        return not {"--bf16", "--dropout"}.intersection(self.options)


SETTINGS = (
    Setting("copies", "copies"),
    Setting("long pipelines", "long pipelines"),
    Setting("pipelines", "pipelines"),
    Setting("tensor parallel", "tensor parallel"),
    Setting("own ranks, data workers", "own ranks", options=("--workers", "1")),
    Setting("pipelines, saved beside", "pipelines", options=("--async_save", "--log_predictions")),
    Setting("four pairs, two at once", "four pairs", failures=2),
    Setting("long pipelines, LoRA", "long pipelines", options=("--adapter",)),
    Setting("three copies, trackers", "three copies", options=("--trackers", "--timelines", "--average")),
    Setting("copies, best, saved beside", "copies", options=("--best", "--async_save", "--average")),
    Setting("long pipelines, best", "long pipelines", options=("--best", "--trackers")),
    Setting("pipelines, bfloat16", "pipelines in bfloat16", options=("--bf16", "--async_save")),
    Setting("own ranks, dropout", "own ranks", options=("--dropout", "0.2")),
    Setting("copies, NCCL's aborts", "copies", options=("--nccl",)),
    Setting("pipelines, others join", "pipelines", joins=(Join(5), Join(9, 2))),
    Setting("unlike cuts, others join", "unlike cuts", joins=(Join(5, 2),)),
    Setting("shared state, others join", "shared state", joins=(Join(5, 2),)),
    Setting("hosts of one, another joins", "own ranks", joins=(Join(7),), hosts=4),
    Setting("hosts of two nodes", "copies", options=("--workers", "1", "--async_save"), joins=(Join(7, 2),), hosts=2),
    Setting("hosts are nodes, others join", "tensor parallel", joins=(Join(5, 2), Join(9, 2)), hosts=4),
)
"""Of the run with each seed, in turn."""
QUICK = (Setting("copies", "copies"),)


def run_of(seed: int, settings: tuple[Setting, ...], timeout_s: float, references: dict[Any, Reference]) -> Any:
    """The run of a seed: what it was, and what became of it."""
    setting = settings[seed % len(settings)]
    layout = replace(LAYOUTS[setting.layout], hosts=setting.hosts)
    deaths = random_deaths(layout, seed, setting.failures, setting.joins)
    with tempfile.TemporaryDirectory(prefix=f"chaos-{seed}-", ignore_cleanup_errors=True) as folder:
        options = [*setting.options, "--failures", str(setting.failures)]
        run = chaos_run(layout, deaths, Path(folder), timeout_s, options, setting.joins)
        found = (
            faults(run, layout, reference_of(setting, run, timeout_s, references)) if run.results else ["all ended"]
        )
        plain = stock_reference(setting.adapter, False, references) if setting.equals_stock else None
        if not setting.adapter:
            found += checkpoint_faults(Path(folder, "run"), run.output, plain)
    print(line_of(seed, setting, deaths, run, found), flush=True)
    if found:
        print(run.output[-6000:], flush=True)
    return setting, layout, run, found


def stock_reference(adapter: bool, best: bool, references: dict[Any, Reference]) -> Reference:
    """The run of the stock Trainer, made once."""
    key = adapter, best
    if key not in references:
        references[key] = stock_run(adapter=adapter, best=best)
    return references[key]


def reference_of(setting: Setting, run: ChaosRun, timeout_s: float, references: dict[Any, Reference]) -> Reference:
    """
    What a run is compared with: that of the stock Trainer; in half precision one in which nobody dies, whose sums are
    rounded elsewhere; and with dropout, whose masks change with the layout, what its first rank says.
    """
    if setting.equals_stock:
        return stock_reference(setting.adapter, "--best" in setting.options, references)
    if "--dropout" in setting.options:
        return Reference.of_run(run)
    if setting.name not in references:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            undisturbed = chaos_run(LAYOUTS[setting.layout], [], Path(folder), timeout_s, setting.options)
        references[setting.name] = Reference.of_run(undisturbed, HALF_TOLERANCE)
    return references[setting.name]


def line_of(seed: int, setting: Setting, deaths: list[Death], run: ChaosRun, found: list[str]) -> str:
    """What is printed of a run while the others go on."""
    result = f"at fault: {'; '.join(found[:3])}" if found else "as without"
    planned = " ".join(map(str, deaths))
    return f"seed {seed}, {setting.name}: {len(run.strikes)} died of {planned}; {result}, {run.seconds:.0f} s"


def recoveries(run: ChaosRun, layout: Layout) -> list[dict[str, Any]]:
    """Each recovery of a run, with the first death that it followed and its times from there on, in seconds."""
    by_member = {strike["dies"]: strike for strike in run.strikes}
    rows = []
    for event in run.events if run.results else ():
        struck = [by_member[member] for member in event["lost"] if member in by_member]
        if not struck:
            continue
        first = min(struck, key=lambda strike: strike["time"])
        ends = [end for result in run.results.values() for end in result["ends_s"]]
        recovered = event["lost_at"] + event["total_s"]
        rows.append(
            {
                "at": first["at"],
                "way": first["way"],
                "deaths": len(struck),
                "detected_s": event["lost_at"] - first["time"],
                "recovered_s": recovered - first["time"],
                "next_step_s": min((end for end in ends if end > recovered), default=recovered) - first["time"],
            }
        )
    return rows


def table_of(rows: list[dict[str, Any]], strikes: list[dict[str, Any]], key: str) -> Table:
    """Deaths and recoveries by one of their properties."""
    by_value = defaultdict(list)
    for row in rows:
        by_value[row[key]].append(row)
    table = Table(key, "died", "recoveries", "detected s", "recovered s", "next step s (max)")
    for value in sorted({strike[key] for strike in strikes}):
        own = by_value[value]
        cells = [_median(own, name) for name in ("detected_s", "recovered_s", "next_step_s")]
        longest = f" ({max(row['next_step_s'] for row in own):.2f})" if own else ""
        died = sum(strike[key] == value for strike in strikes)
        table.add_row(value, str(died), str(len(own)), *cells[:2], cells[2] + longest)
    return table


def _median(rows: list[dict[str, Any]], name: str) -> str:
    return f"{statistics.median(row[name] for row in rows):.2f}" if rows else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of four ranks")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each run has the next one")
    parser.add_argument("--runs", type=int, help="runs; by default as many as it takes")
    parser.add_argument("--kills", type=int, default=GOAL_KILLS, help="deaths after which no run is started")
    parser.add_argument("--timeout", type=float, default=240, help="seconds after which a run hangs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()
    settings, num_runs = (QUICK, 1) if options.quick else (SETTINGS, options.runs)
    references: dict[Any, Reference] = {}
    strikes: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    by_setting: dict[str, dict[str, Any]] = {}
    at_fault: dict[str, list[str]] = {}
    num_hangs = 0
    for done in itertools.count():
        if done == num_runs or (num_runs is None and len(strikes) >= options.kills):
            break
        seed = options.seed + done
        setting, layout, run, found = run_of(seed, settings, options.timeout, references)
        row = by_setting.setdefault(setting.name, {"runs": 0, "died": 0, "at_fault": 0})
        row["runs"], row["died"] = row["runs"] + 1, row["died"] + len(run.strikes)
        row["at_fault"] += bool(found)
        num_hangs += run.returncode is None
        strikes += run.strikes
        rows += recoveries(run, layout)
        if found:
            at_fault[str(seed)] = found
    overview = Table("runs", "number", "died", "at fault")
    for name, row in by_setting.items():
        overview.add_row(name, *(str(row[key]) for key in ("runs", "died", "at_fault")))
    result = {
        "first_seed": options.seed,
        "num_runs": sum(row["runs"] for row in by_setting.values()),
        "died": len(strikes),
        "hangs": num_hangs,
        "faults": at_fault,
        "by_setting": by_setting,
        "recoveries": [{key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()} for row in rows],
        "goal": GOAL_KILLS,
        **common.machine(common.QUICK, load),
    }
    ends = f"{num_hangs} hung, {len(at_fault)} at fault"
    notes = [f"{len(strikes)} processes died in {result['num_runs']} runs; {ends}."]
    tables = [overview, table_of(rows, strikes, "at"), table_of(rows, strikes, "way")]
    common.report("chaos", tables, notes, result, options.out)


if __name__ == "__main__":
    main()
