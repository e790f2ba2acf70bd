"""
The figures of README and `docs/benchmarks.md`, made from `benchmarks/results`: tables (`BLOCKS`) and fragments of
sentences (`QUOTES`), see `pages.py`.

Rounding: ratios have two decimals below ten and one from ten on; shares and errors in percent one below ten and none
from ten on; times in ms one below ten and none from ten on. What has more or fewer decimals says so by itself.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@cache
def result(name: str) -> dict[str, Any]:
    """A result in `benchmarks/results`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


# Rounding


def ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def percent(share: float) -> str:
    """A share as a number of percent, without the sign."""
    return f"{100 * share:.1f}" if 100 * share < 9.95 else f"{100 * share:.0f}"


def ms(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def pair(values: Mapping[str, float], digits: int) -> str:
    """Mean and worst."""
    return f"{values['mean']:.{digits}f} / {values['worst']:.{digits}f}"


def spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """The least and the most."""
    return f"{text(min(values))} to {text(max(values))}"


def table(header: str, rows: Sequence[str]) -> str:
    """A table in Markdown; `header` is its first line."""
    return "\n".join([header, "|" + "---|" * (header.count("|") - 1), *rows])


# What several tables read


def arrangements(dataset: str, model: str) -> dict[str, Any]:
    """The simulated arrangements of a dataset and a model."""
    cases = result("microbatch_balance")["simulated"]
    return next(c["arrangements"] for c in cases if (c["dataset"], c["model"]) == (dataset, model))


def all_arrangements() -> list[dict[str, Any]]:
    return [case["arrangements"] for case in result("microbatch_balance")["simulated"]]


def chart_net() -> list[dict[str, Any]]:
    return [arrangements("synthchartnet", model) for model in ("llama3-1b", "llama3-3b")]


def steps(cases: Sequence[Mapping[str, Any]], slower: str, faster: str) -> list[float]:
    """Step of one arrangement over that of another, for each case."""
    return [case[slower]["iteration_ms"] / case[faster]["iteration_ms"] for case in cases]


def deviations(module: str, more: str, less: str) -> list[float]:
    """Deviation of one arrangement over that of another, on SynthChartNet with both models."""
    return [case[more]["std_ms"][module] / case[less]["std_ms"][module] for case in chart_net()]


def balance(part: str, kind: str, length: int, method: str) -> dict[str, Any]:
    cases = result("context_parallel_balance")[part]
    return next(c for c in cases if (c["kind"], c["length"], c["method"]) == (kind, length, method))


def attention(length: int, which: str) -> dict[str, Any]:
    return next(r for r in result("attention")["rows"] if (r["length"], r["pass"]) == (length, which))


def arranging(batch: str, method: str) -> float:
    """Milliseconds of an arrangement."""
    rows = result("sampler_overhead")["arranging"]
    return next(r["arrange_ms"]["median"] for r in rows if (r["batch"], r["method"]) == (batch, method))


BATCHES = ("512 over 4", "1,920 over 120", "1,920 over 120, single samples")


# Tables


def measured() -> str:
    """The table of README."""
    simulator, trainer = result("simulator_error"), result("trainer_overhead")["one_process"]["ours"]["ratio"]
    forward, both = (attention(16384, which) for which in ("forward", "forward + backward"))
    same_plan = steps(chart_net(), "disttrain", "hierarchical"), steps(chart_net(), "disttrain", "tapered, eager")
    lower = min(deviations("vision", "disttrain", "hierarchical"))
    rows = [
        "| iteration time, real computation on 2 ranks | its prediction | measured "
        f"| {percent(simulator['real']['median_error'])} % off |",
        "| iteration time, modelled durations on 4 and 8 ranks | its prediction | measured "
        f"| {percent(simulator['modelled']['median_error'])} % off |",
        f"| speed with every size 1 | the stock Trainer | measured | {ratio(trainer['median'])} times (rounds "
        f"{ratio(trainer['min'])} to {ratio(trainer['max'])}, on a busy machine) |",
        *(
            f"| attention of 16k packed tokens with images, {which} | a dense mask | measured "
            f"| {ratio(row['times_faster'])} times faster, {100 * row['memory_share']:.0f} % of the memory |"
            for which, row in (("forward", forward), ("forward and backward", both))
        ),
        *(
            f"| step with samples arranged as the Trainer chooses, {mode} rows | the best of three baselines, same "
            f"plan | simulated | {ratio(1 / own['slowest_over_best_baseline'])} to "
            f"{ratio(1 / own['fastest_over_best_baseline'])} times faster |"
            for mode, own in result("microbatch_balance_modes")["summary"].items()
        ),
        *(
            f"| step with {words}, packed rows, sizes of SynthChartNet | DistTrain's order, same plan | simulated "
            f"| {spread(times, ratio)} times faster |"
            for words, times in zip(("`hierarchical`", "`tapered` and schedule `eager`"), same_plan, strict=True)
        ),
        "| standard deviation of the encoder's microbatches with `hierarchical`, same samples | DistTrain's order "
        f"| simulated | {lower:.0f} times lower |",
    ]
    return table("| what | compared with | how | figure |", rows)


def runs() -> str:
    """When and where each result was measured."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        found = result(path.stem)
        parts = found.get("runs") or {
            name: part["run"] for name, part in found.get("parts", {}).items() if "run" in part
        }
        for name, run in (parts or {"": found}).items():
            described = {**found, **run}
            rows.append(
                f"| `{path.stem}`{f' {name}' if name else ''} | {described['commit']} | {described['date'][:10]} "
                f"| {described['processor'].replace('(R)', '').replace(' Processor', '')} |"
            )
    return table("| result | commit | date | processor |", rows)


def trainer_overhead() -> str:
    found = result("trainer_overhead")
    one, four = found["one_process"], found["four_processes"]["ours"]
    rows = (
        ("ours with every size 1, one process", "stock Trainer", one["ours"]),
        ("ours, the engine on one process", "stock Trainer", one["ours, engine"]),
        ("ours, vision dp 2 and LM pp 2, four processes", "stock DDP on the same four", four),
    )
    return table(
        "| variant | peer | samples/s | processor time |",
        [
            f"| {name} | {peer} | {ratio(row['ratio']['median'])} | {ratio(row['cpu_ratio']['median'])} |"
            for name, peer, row in rows
        ],
    )


def simulator_error() -> str:
    found = result("simulator_error")
    modelled, goals = found["modelled"], found["goals"]
    worst = max(modelled["cases"], key=lambda case: case["error"])
    name = worst["case"].replace("8 ranks, the same, GPipe", "8 ranks, GPipe")
    goal = {key: f"{100 * value:.0f} %" for key, value in goals.items()}
    return table(
        "| case | error | goal |",
        [
            "| real computation, 2 ranks on 2 cores, costs fitted to the preceding six steps, median of 20 steps "
            f"| {percent(found['real']['median_error'])} % | {goal['real']} |",
            "| modelled durations in the real engine and transport, 4 and 8 ranks, median of "
            f"{len(modelled['cases'])} cases | {percent(modelled['median_error'])} % | {goal['modelled']} |",
            f"| the worst of these cases ({name}) | {100 * modelled['largest_error']:.1f} % | {goal['modelled']} |",
        ],
    )


def planner_frozen() -> str:
    mean = result("planner")["parts"]["frozen"]["mean_improvement"]
    published = statistics.mean(
        case["paper"]["improvement"] for case in result("planner")["parts"]["frozen"]["models"]
    )
    rows = [f"| the paper's table | {ratio(published)} | |"]
    for name, words in (
        ("counted", "counted operations"),
        ("counted and recomputed", "counted, activations recomputed"),
        ("printed times", "the forward times and backward ratios of the paper's table"),
    ):
        chosen = mean.get(f"{name}, 24 GPUs")
        last = "" if chosen is None else f"{ratio(chosen)} "
        rows.append(f"| {words} | {ratio(mean[f'{name}, six stages'])} | {last}|")
    return table("| costs | six stages of four GPUs | 24 GPUs, sizes chosen by the planner |", rows)


def planner_plans() -> str:
    parts = result("planner")["parts"]
    rows = []
    for words, found in (
        ("real computation, 2 ranks", parts["real"]),
        ("modelled durations, 4 ranks", parts["slept"]["4"]),
        ("modelled durations, 8 ranks", parts["slept"]["8"]),
    ):
        rows.append(
            f"| {words} | {ratio(found['rank_correlation'])} | {percent(found['median_error'])} % "
            f"| {percent(found['largest_error'])} % |"
        )
    alone = [plan for plan in parts["real"]["plans"] if "tp " not in plan["plan"]]
    errors = [abs(plan["predicted_ms"] / plan["measured_ms"] - 1) for plan in alone]
    order = rank_correlation([p["predicted_ms"] for p in alone], [p["measured_ms"] for p in alone])
    without = f"the same without the {10 - len(alone)} plans with tensor parallelism"
    rows.insert(
        1, f"| {without} | {ratio(order)} | {percent(statistics.median(errors))} % | {percent(max(errors))} % |"
    )
    return table("| plans | rank correlation | median error | largest |", rows)


def planner_others() -> str:
    cases = result("planner")["parts"]["others"]["cases"]
    names = list(cases[0]["others"])
    rows = []
    for device, words in (
        ("A40", f"mean of {_count(cases, 'A40')} cases"),
        ("H100", f"mean of {_count(cases, 'H100')} cases"),
    ):
        own = [case for case in cases if case["case"].endswith(device)]
        times = {name: [case["others"][name]["times_slower"] for case in own] for name in names}
        rows.append(f"| {device}, {words} | " + " | ".join(ratio(statistics.mean(times[n])) for n in names) + " |")
        rows.append(f"| {device}, least and most | " + " | ".join(spread(times[n], ratio) for n in names) + " |")
    return table("| | " + " | ".join(names) + " |", rows)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, of numbers that all differ."""
    places = [[sorted(values).index(value) for value in values] for values in (first, second)]
    count = len(first)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(*places, strict=True)) / (count * (count**2 - 1))


def _count(cases: Sequence[Mapping[str, Any]], device: str) -> int:
    return sum(case["case"].endswith(device) for case in cases)


WAYS = {
    "ours": "ours, by blocks (`lpt`): LPT in rounds, then exchanges",
    "capped LPT": "plain LPT with a cap",
    "PTRR": "PTRR, torch's balancer for FlexAttention",
    "zigzag": "zigzag",
    "contiguous": "contiguous",
    "random": "random",
}


def context_parallel() -> str:
    rows = []
    for method, words in WAYS.items():
        short, long = (balance("row", "packed", length, method) for length in (8192, 65536))
        few, many = (
            (2, 2)
            if method in ("zigzag", "contiguous", "random")
            else (3, 4 if "LPT" in method or method == "ours" else 3)
        )
        rows.append(
            f"| {words} | {pair(short['work'], few)} | {pair(long['work'], many)} | {pair(long['visited'], few)} |"
        )
    whole = next(
        c for c in result("context_parallel_balance")["segments"] if (c["kind"], c["length"]) == ("packed", 65536)
    )
    rows.append(f"| ours, whole segments | falls back to blocks | {pair(whole['work'], 3)} | |")
    return table("| sharding of the row | 8k tokens | 64k tokens | 64k tokens, without the 0.3 |", rows)


def context_parallel_papers() -> str:
    """The papers' masks: work as counted here, and times as measured in the first version of Cornstarch."""
    rows = []
    for method, words in WAYS.items():
        cells = []
        for kind in ("EP", "EE", "MP"):
            found = balance("papers", kind, 65536, method)
            best = balance("papers", kind, 65536, "ours")
            digits = 4 if method == "ours" else 3 if method in ("capped LPT", "PTRR") else 2
            printed = found.get("published_ms")
            told = "" if printed is None else f" ({ratio(printed / best['published_ms'])})"
            cells.append(f"{pair(found['work'], digits)}{told}")
        rows.append(f"| {words} | " + " | ".join(cells) + " |")
    return table("| sharding of the row | prepended | embedded | packed |", rows)


def sampler_arranging() -> str:
    methods = list(dict.fromkeys(row["method"] for row in result("sampler_overhead")["arranging"]))
    rows = []
    for method in methods:
        cells = [arranging(batch, method) for batch in BATCHES]
        rows.append(f"| `{method}` | " + " | ".join(f"{value:.1f} ms" for value in cells) + " |")
    every = [
        [row["program_ms"]["median"] for row in result("sampler_overhead")["arranging"] if row["batch"] == batch]
        for batch in BATCHES
    ]
    cells = [spread(values, lambda value: f"{value:.0f}") for values in every]
    rows.append("| the whole plan of a step, with program and checks | " + " | ".join(f"{c} ms" for c in cells) + " |")
    columns = (
        "512 samples, 4 replicas, 32 microbatches",
        "1,920 samples, 120 replicas, 4 microbatches",
        "1,920 samples, 120 replicas, 16 microbatches",
    )
    return table(f"| arrangement | {' | '.join(columns)} |", rows)


def sizes_at_scale() -> str:
    found = result("sizes_at_scale")
    ids, each = found["token_ids"], found["one_conversation"]
    rows = [
        f"| {ids['samples']:,} samples of token ids, counted in Arrow columns | {ids['seconds']:.0f} s "
        f"({ids['microseconds_a_sample']:.1f} us per sample; one by one {ids['microseconds_one_by_one']:.0f} us) "
        f"| {ids['cached_seconds']:.1f} s |",
        f"| one conversation, measured with many others | {each['milliseconds']:.2f} ms (alone "
        f"{each['milliseconds_one_by_one']:.2f} ms; all conversations on one process: {each['hours_of_all']:.2f} h) "
        "| |",
    ]
    for parallel in dict.fromkeys(row["parallel"] for row in found["first_steps"]):
        first, again = (row for row in found["first_steps"] if row["parallel"] == parallel)
        words = '`parallel="auto"`' if parallel == "auto" else "layout given"
        for what, name in (("constructor", "constructor"), ("until the first step has ended", "first_step")):
            times = " | ".join(f"{run[f'{name}_seconds']:.1f} s" for run in (first, again))
            rows.append(f"| {first['samples']:,} conversations, {words}, two ranks: {what} | {times} |")
    return table("| what | time | a second run |", rows)


def sampler_reading() -> str:
    found = result("sampler_overhead")["reading"]
    stock = found["stock"]
    rows = [
        f"| stock, whole samples ({stock['samples_per_second']['median']:.0f} samples/s) | 1 | 1 "
        f"| {stock['processor_ms']:.1f} ms |"
    ]
    for name, words in (
        ("language model", "a rank of the language model, which decodes no images"),
        ("encoder", "a rank of the encoder"),
        ("both", "a rank with both modules, each with its own inputs"),
    ):
        own = found[name]
        rows.append(
            f"| {words} | {own['ratio']:.1f} | {ratio(own['processor_ratio'])} | {own['processor_ms']:.1f} ms |"
        )
    return table("| loader | samples/s, clock time | samples/s, processor time | processor time per sample |", rows)


def memory_error() -> str:
    errors = result("memory_error")["errors"]
    rows = []
    for key, words in (
        ("named", "that cover every kind of parallelism"),
        ("padded", "with grouped key heads, padded"),
        ("packed", "with grouped key heads, packed"),
        ("random", "random, not seen before"),
    ):
        own = errors[key]
        of_any = own["largest_error_of_any_rank"]
        rows.append(
            f"| {own['plans']} {words} | {percent(own['median_error'])} % | {percent(own['largest_error'])} % "
            f"| {own['ranks_within_goal']} of {own['ranks']} (largest {percent(of_any)} %) "
            f"| {own['ranks_underestimated']} (median {percent(own['median_underestimate'])} %, "
            f"largest {percent(own['largest_underestimate'])} %) |"
        )
    columns = (
        "median error on the fullest rank",
        "largest",
        "ranks within 15 %",
        "ranks that need more than predicted",
    )
    return table(f"| plans | {' | '.join(columns)} |", rows)


def attention_times() -> str:
    def time_text(value: float) -> str:
        return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.0f} ms"

    rows = []
    for row in result("attention")["rows"]:
        times = [row["time_ms"][name]["median"] for name in ("bitfield", "sdpa, dense mask")]
        memory = [row["memory_mib"][name] for name in ("bitfield", "sdpa, dense mask")]
        which = row["pass"].replace(" + ", " and ")
        rows.append(
            f"| {row['length']:,} | {which} | {time_text(times[0])} | {time_text(times[1])} "
            f"| {row['times_faster']:.1f}x | {memory[0]:.0f} of {memory[1]:,.0f} MiB |"
        )
    return table("| tokens | pass | bitfield | dense mask | faster | memory |", rows)


BLOCKS: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        measured,
        runs,
        trainer_overhead,
        simulator_error,
        planner_frozen,
        planner_plans,
        planner_others,
        context_parallel,
        context_parallel_papers,
        sampler_arranging,
        sizes_at_scale,
        sampler_reading,
        memory_error,
        attention_times,
    )
}


# Sentences


def quotes_of_benchmarks() -> Iterator[str]:
    """Sentences of `docs/benchmarks.md` outside of its tables."""
    rounds = result("trainer_overhead")["one_process"]["ours"]["ratio"]
    yield f"its rounds range from {ratio(rounds['min'])} to {ratio(rounds['max'])}"
    real = result("simulator_error")["real"]
    again, own = real["difference %, the same step run twice"], real["error %, given the step's own task times"]
    yield f"differed from itself by {again['median']:.1f} % in the median"
    yield f"own durations the simulator was off by {own['median']:.1f} %"
    worst = max(result("simulator_error")["modelled"]["cases"], key=lambda case: case["error"])
    yield f"the error of the worst case falls to {percent(worst['error_with_own_times'])} %"
    planner = result("planner")["parts"]
    mean = planner["frozen"]["mean_improvement"]
    yield f"as large on the same GPUs ({mean['printed times, 24 GPUs']:.3f} against 1.424)"
    speed = planner["speed"]
    allocation, search = speed["allocation"]["1296"]["s"]["median"], speed["search"]
    yield (
        f"the allocation takes {1000 * allocation:.0f} ms, the search {search['64']['s']['median']:.1f} s and "
        f"{search['1024']['s']['median']:.0f} s, the profiling batch size "
        f"{1000 * speed['profiling_batch']['s']['median']:.0f} ms"
    )
    cases = planner["others"]["cases"]
    slower = [other["times_slower"] for case in cases for other in case["others"].values()]
    sharded = [case["others"]["FSDP-like"]["times_slower"] for case in cases]
    yield (
        f"slower than ours in all {len(cases)} cases, by {percent(min(slower) - 1)} % at least, FSDP-like by "
        f"{100 * (min(sharded) - 1):.0f} %"
    )
    small = result("context_parallel_balance")["small"]
    over = statistics.mean(case["ours"]["mean"] for case in small) - 1
    worst_of_small = max(case["ours"]["worst"] for case in small) - 1
    yield f"ours is {100 * over:.2f} % above the exact optimum on average and {100 * worst_of_small:.1f} % at worst"
    whole = next(
        c for c in result("context_parallel_balance")["segments"] if (c["kind"], c["length"]) == ("packed", 65536)
    )
    yield f"one more block of padding for each rank ({100 * whole['padding']['mean']:.1f} %)"
    yield f"cost {100 * (1 - whole['total work']['mean']):.1f} % less work"
    times = {name: values["median"] for name, values in result("context_parallel_balance")["times"].items()}
    blocks = [times[f"{kind}: workloads and blocks of each rank"] for kind in ("packed", "causal")]
    index = [times[f"{kind}: and the index of each token"] for kind in ("packed", "causal")]
    yield f"takes {blocks[0]:.1f} ms (packed) to {blocks[1]:.1f} ms (causal)"
    yield f"to the index of each token {index[0]:.1f} and {index[1]:.1f} ms"
    yield f"whole segments of 64k tokens take {times['whole segments, 65536 tokens packed']:.1f} ms"
    waits: dict[int, list[float]] = {0: [], 1: []}
    for row in result("sampler_overhead")["hiding"]:
        waits[row["workers"]].append(row["waits_ms"]["median"])
    yield f"a loop waited {spread(waits[0], '{:.0f}'.format)} ms for the next one without workers"
    yield f"{spread(waits[1], '{:.0f}'.format)} ms with one worker"


def rows_of_microbatch_balance() -> Iterator[str]:
    """The rows of the table of arrangements in `docs/benchmarks.md`, and the sentences about them."""
    for case in result("microbatch_balance")["simulated"]:
        found = case["arrangements"]
        order, own_plan = found["disttrain"], found["disttrain, its own plan"]["iteration_ms"]
        published, even, tapered = (found[name] for name in ("entrain", "hierarchical", "tapered, eager"))
        deviations = [
            " / ".join(f"{own['std_ms'][module]:.1f}" for own in (order, published, even))
            for module in ("vision", "language_model")
        ]
        faster = [
            f"{order['iteration_ms'] / own['iteration_ms']:.2f}, {own_plan / own['iteration_ms']:.2f}"
            for own in (published, even, tapered)
        ]
        over_even = even["iteration_ms"] / even["bounds_ms"]["even"]
        over_best = tapered["iteration_ms"] / tapered["bounds_ms"]["best"]
        peaks = " / ".join(f"{max(own['peak_gib']):.1f}" for own in (order, published, even, tapered))
        start = f"| {case['dataset']} | {case['model']} | {deviations[0]} | {deviations[1]} | {faster[0]} "
        yield f"{start}| {faster[1]} | {over_even:.3f} | {faster[2]} | {over_best:.3f} | {peaks} |"
    yield from quotes_of_entrain()
    unlike = result("microbatch_balance")["unlike"]
    for way in ("as many each", "by their speed"):
        yield " / ".join(f"{unlike[samples][way]['iteration_ms']:.0f}" for samples in ("alike", "log-normal")) + " ms"
    measured_ms = {case["arrangement"]: case["measured_ms"] for case in result("microbatch_balance")["slept"]}
    for name in ("disttrain", "entrain", "hierarchical", "tapered"):
        yield f"{measured_ms[name]:,.0f} for `{name}`"


def quotes_of_entrain() -> Iterator[str]:
    """Sentences about Entrain's algorithm, its deferral, and DIP."""

    def both(value: Callable[[dict[str, Any]], float], digits: int) -> str:
        return " and ".join(f"{value(case):.{digits}f}" for case in chart_net())

    def step(case: dict[str, Any], name: str) -> float:
        return case[name]["iteration_ms"]

    def peak(case: dict[str, Any], name: str) -> float:
        return max(case[name]["peak_gib"])

    def fewer(module: str) -> str:
        return both(lambda case: case["disttrain"]["std_ms"][module] / case["entrain"]["std_ms"][module], 1)

    without = "entrain, no deferral"
    yield f"deviations {fewer('vision')} times below"
    yield f"{fewer('language_model')} times in the language model"
    yield f"at {both(lambda case: step(case, 'disttrain, its own plan') / step(case, 'entrain'), 2)} times its speed"
    yield f"{both(lambda case: 100 * (1 - step(case, 'entrain') / step(case, without)), 1)} % and takes"
    yield f"{both(lambda case: 100 * (peak(case, 'entrain') / peak(case, without) - 1), 1)} % more memory"
    every = all_arrangements()
    more = [peak(case, "DIP") - peak(case, "entrain") for case in every]
    yield f"{spread(more, '{:.1f}'.format)} GiB more activations"
    slower = [step(case, "hierarchical") / step(case, "entrain") for case in every]
    yield f"{spread(slower, '{:.3f}'.format)} of the step of `entrain`"


def quotes_of_benchmarks_page() -> Iterator[str]:
    yield from quotes_of_benchmarks()
    yield from rows_of_microbatch_balance()


QUOTES = {"docs/benchmarks.md": quotes_of_benchmarks_page}
