"""
The search for a plan against brute force over all layouts, with a limit of memory.

Text-only and multimodal models, 8 to 64 GPUs, weights in float32 and bfloat16, short and long samples, packed samples
of one length and samples of published datasets, and such cases at random; copies divide nothing. In each case schedule
and arrangement are named, so that layouts alone are compared; the search is then asked again with both left open,
beside brute force over every schedule and arrangement of the layouts that are at most 10 % slower than the best.

```bash
python benchmarks/search_quality.py
python benchmarks/search_quality.py --quick --out out/bench  # the numbers mean nothing
```
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import torch
from brute_force import brute_force, brute_orders, named
from paper_samples import PUBLISHED
from planner_models import AUDIO, cornstarch_model
from rich.table import Table

from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.papers.compare import all_trained
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, SampleSizes
from hf_mmparallel.planning.problem import PlanningProblem
from hf_mmparallel.planning.search import search_plans
from hf_mmparallel.planning.simulations import cautious_ms

GOALS = {"slower": 0.01, "search_64_s": 5.0}
USABLE, GIB = 0.9, 2**30
NUM_DRAWN = 20
VISION = "vision"


@dataclass(frozen=True)
class Case:
    """
    A question.

    Args:
        model (`str`): Sizes of encoder and language model as in Cornstarch's table 1, `"-"` without an encoder.
        dtype (`str`): Of the weights.
        device (`str`): In the table of devices.
        num_ranks, batch (`int`): GPUs, and samples of a step.
        samples (`str`): A published dataset, or the tokens of each sample of a text-only model.
        frozen (`bool`, *optional*, defaults to `False`): Whether the encoder's tower is frozen.
        drawn (`bool`, *optional*, defaults to `False`): Whether it was drawn at random.
    """

    model: str
    dtype: str
    device: str
    num_ranks: int
    batch: int
    samples: str
    frozen: bool = False
    drawn: bool = False

    def __str__(self) -> str:
        frozen = " frozen" if self.frozen else ""
        name = f"{self.model}{frozen} {self.dtype}, {self.num_ranks} {self.device}, {self.batch} x {self.samples}"
        return f"{name} (drawn)" if self.drawn else name

    def problem(self) -> PlanningProblem:
        """A question to the planner."""
        if self.samples.isdigit():
            sizes = SampleSizes.uniform({LANGUAGE_MODEL: int(self.samples)}, self.batch)
        else:
            sizes = PUBLISHED[self.samples].draw(2048, 0)
        device = find_device(self.device)
        memory = USABLE * (device.memory_gib or 0.0) * GIB
        costs = analytic_costs(self.spec, device)
        return PlanningProblem(costs, sizes, self.num_ranks, self.batch, memory, zero_stages=(0,))

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        encoder, language = self.model
        spec = all_trained(cornstarch_model(f"{'S' if encoder == '-' else encoder}S{language}"))
        left_out = {AUDIO, VISION} if encoder == "-" else {AUDIO}
        modules = {name: module for name, module in spec.modules.items() if name not in left_out}
        if self.frozen:
            modules[VISION] = modules[VISION].with_frozen("tower")
        modules = {
            name: replace(module, parameters=tuple(replace(p, dtype=self.dtype) for p in module.parameters))
            for name, module in modules.items()
        }
        counts = {} if encoder == "-" else {"image": 1}
        return ModelSpec(modules, spec.tied, counts)


def text_cases() -> Iterator[Case]:
    """Language models alone."""
    for model, device in (("-M", "h100"), ("-M", "a100"), ("-S", "a40")):
        for dtype in ("float32", "bfloat16"):
            for num_ranks, tokens in ((8, "2048"), (8, "16384"), (16, "8192"), (32, "4096")):
                yield Case(model, dtype, device, num_ranks, 2 * num_ranks, tokens)
    yield Case("-L", "bfloat16", "h100", 64, 64, "4096")
    yield Case("-L", "bfloat16", "h100", 64, 64, "16384")


def multimodal_cases() -> Iterator[Case]:
    """An encoder of images before a language model."""
    for dataset in ("cocoqa", "synthchartnet"):
        for dtype in ("float32", "bfloat16"):
            yield Case("SM", dtype, "h100", 8, 32, dataset)
            yield Case("MM", dtype, "h100", 16, 64, dataset, frozen=True)
            yield Case("SS", dtype, "a40", 8, 32, dataset)
    yield Case("SM", "bfloat16", "a100", 16, 64, "chartqa")
    yield Case("SM", "bfloat16", "a100", 16, 64, "llava-150k", frozen=True)
    yield Case("MM", "bfloat16", "h100", 32, 128, "chartqa")
    yield Case("MM", "bfloat16", "h100", 64, 256, "synthchartnet", frozen=True)


def drawn_cases() -> Iterator[Case]:
    """Questions at random, of models whose weights, gradients and state take at most half of the memory."""
    rng = random.Random(0)
    while True:
        model, device = rng.choice(("-S", "-M", "SS", "SM", "MM")), rng.choice(("h100", "a100", "a40"))
        is_text, num_ranks = model[0] == "-", rng.choice((4, 8, 12, 16, 32))
        tokens = str(rng.randrange(512, 16384))
        samples, batch = tokens if is_text else rng.choice(sorted(PUBLISHED)), num_ranks * rng.choice((1, 2, 3, 4))
        dtype, frozen = rng.choice(("float32", "bfloat16")), not is_text and rng.random() < 0.5
        case = Case(model, dtype, device, num_ranks, batch, samples, frozen, drawn=True)
        held = 16 * sum(p.num_elements for module in case.spec.modules.values() for p in module.parameters)
        if held <= 0.5 * num_ranks * (find_device(device).memory_gib or 0.0) * GIB:
            yield case


def run(case: Case, limit_s: float) -> dict[str, Any]:
    """The search and brute force."""
    problem = case.problem()
    times, answers, proven = [], [], []
    for question in (named(problem), problem):
        start = time.process_time()
        found = search_plans(question)
        answers.append(found.best)
        proven.append(found.is_proven)
        times.append(time.process_time() - start)
    brute = brute_force(named(problem), limit_s)
    orders = brute_orders(problem, brute.close, limit_s)
    layouts, both = answers
    # a step with virtual stages or split backwards has to be faster, in the search as here
    open_ms = min(brute.step_ms, orders.cautious_ms)
    return {
        "case": str(case),
        "num_ranks": case.num_ranks,
        "search_ms": layouts.step_ms,
        "search_s": times[0],
        "plan": str(layouts.candidate),
        "open_ms": both.step_ms,
        "open_s": times[1],
        "open_plan": f"{both.candidate}; {both.candidate.schedule}, {both.candidate.arrangement}",
        "brute_ms": brute.step_ms,
        "brute_plan": str(brute.candidate),
        "brute_s": brute.seconds,
        "num_listed": brute.num_listed,
        "num_simulated": brute.num_simulated,
        "least_ratio": brute.least_ratio,
        "bound_ratio": brute.bound_ratio,
        "is_complete": brute.is_complete,
        "is_proven": proven[0],
        "open_is_proven": proven[1],
        "slower": layouts.step_ms / brute.step_ms - 1,
        "open_brute_ms": open_ms,
        "open_brute_s": orders.seconds,
        "open_simulated": orders.num_simulated,
        "open_is_complete": brute.is_complete and orders.is_complete,
        "open_slower": cautious_ms(both) / open_ms - 1,
    }


def reported(rows: list[dict[str, Any]]) -> tuple[Table, str]:
    """A row for each case, and the sum of them."""
    table = Table("case", "search ms", "s", "brute force ms", "s", "simulated", "slower", "open ms", "s", "slower")
    table.title, table.title_justify = "The search against brute force over all layouts", "left"
    for row in rows:
        table.add_row(
            row["case"],
            f"{row['search_ms']:.0f}",
            f"{row['search_s']:.1f}",
            f"{row['brute_ms']:.0f}",
            f"{row['brute_s']:.0f}",
            f"{row['num_simulated']} of {row['num_listed']}{'' if row['is_complete'] else ', not all'}",
            f"{row['slower']:+.1%}",
            f"{row['open_ms']:.0f}",
            f"{row['open_s']:.1f}",
            f"{row['open_slower']:+.1%}{'' if row['open_is_complete'] else ', not all'}",
        )
    proven = [sum(row[key] for row in rows) / len(rows) for key in ("is_proven", "open_is_proven")]
    bounds = statistics.median(row["bound_ratio"] for row in rows)
    late = [row["case"] for row in rows if row["slower"] > GOALS["slower"]]
    late += [f"{row['case']} (both open)" for row in rows if row["open_slower"] > GOALS["slower"]]
    note = (
        f"{len(rows)} cases, {sum(row['is_complete'] for row in rows)} of them complete: the search is slower by "
        f"{max(row['slower'] for row in rows):.2%} at most, by {max(row['open_slower'] for row in rows):.2%} with "
        f"schedule and arrangement open (goal {GOALS['slower']:.0%})"
        f"{'; above it: ' + '; '.join(late) if late else ''}. Simulated steps are at least "
        f"{min(row['least_ratio'] for row in rows):.2f} of their closed form. Proven are "
        f"{proven[0]:.0%} of the answers, {proven[1]:.0%} with both open; the lower bound is {bounds:.2f} of a step, "
        "the median over cases of the median over layouts."
    )
    return table, note


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cases, to try the script itself")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of brute force for each case (30)")
    parser.add_argument("--only", metavar="TEXT", help="cases with this in their name; the results of others are kept")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()
    cases = [*text_cases(), *multimodal_cases(), *itertools.islice(drawn_cases(), NUM_DRAWN)]
    if options.quick:
        cases = [Case("-S", "bfloat16", "h100", 2, 4, "512"), Case("SS", "bfloat16", "a40", 2, 2, "cocoqa")]
    kept_path = options.out / "search_quality.json"
    kept = {row["case"]: row for row in json.loads(kept_path.read_text())["cases"]} if kept_path.exists() else {}
    rows = {}
    for case in cases:
        if options.only and options.only not in str(case) and str(case) in kept:
            rows[str(case)] = kept[str(case)]
        elif not options.only or options.only in str(case):
            rows[str(case)] = run(case, 5.0 if options.quick else options.limit)
            row = rows[str(case)]
            print(
                f"{case}: {row['slower']:+.2%}, {row['search_s']:.1f} s, both open {row['open_slower']:+.2%}",
                flush=True,
            )
    table, note = reported(list(rows.values()))
    result = {"cases": list(rows.values()), "goals": GOALS, **common.machine(common.QUICK, load)}
    common.report("search_quality", [table], [note], result, options.out)


if __name__ == "__main__":
    main()
