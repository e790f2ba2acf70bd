"""The figures of `docs/papers.md`, made from `benchmarks/results`; see `pages.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from figures import arranging, attention, balance, percent, ratio, result, spread, table

OWN_PLAN, DIP_PLAN = "disttrain, its own plan", "sub_microbatches, DIP's own plan"
Case = Mapping[str, Any]


def simulated(dataset: str | None = None) -> list[Case]:
    """The arrangements of all datasets, or of one, with each model."""
    cases = result("microbatch_balance")["simulated"]
    return [case["arrangements"] for case in cases if dataset in (None, case["dataset"])]


def steps(cases: Sequence[Case], slower: str, faster: str) -> list[float]:
    """Step of one arrangement over that of another, for each case."""
    return [case[slower]["iteration_ms"] / case[faster]["iteration_ms"] for case in cases]


def deviations(cases: Sequence[Case], module: str, less: str) -> str:
    """Deviation of DistTrain's order over that of an arrangement."""
    found = [case["disttrain"]["std_ms"][module] / case[less]["std_ms"][module] for case in cases]
    return " and ".join(f"{value:.1f}" for value in found)


def peaks(cases: Sequence[Case], name: str) -> str:
    """Activations of the fullest rank."""
    return " and ".join(f"{max(case[name]['peak_gib']):.1f}" for case in cases)


def papers_arrangement() -> str:
    """Entrain's claims and the simulated results of the arrangements."""
    chart_net, every = simulated("synthchartnet"), simulated()
    exceeded = "exceeded, by other means"
    faster = {name: spread(steps(every, OWN_PLAN, name), ratio) for name in ("hierarchical", "tapered, eager")}
    rows = [
        (
            "deviation of the encoder's microbatches up to 10.6 times below DistTrain's",
            "section 4.7.4, table 4.3",
            exceeded,
            f"`hierarchical`: {deviations(chart_net, 'vision', 'hierarchical')} times with Llama 1b and 3b. It "
            "exchanges samples until microbatches are even, which the paper's algorithm 4 does not do",
        ),
        (
            "the same for the language model: up to 4.1 times",
            "table 4.3",
            exceeded,
            f"`hierarchical`: {deviations(chart_net, 'language_model', 'hierarchical')} times. For Llama 1b the table "
            "repeats the encoder's figures for three datasets, which are therefore not compared",
        ),
        (
            "up to 1.40 times DistTrain's throughput",
            "section 4.7.2",
            "reached, by other means, simulated",
            "`hierarchical` compared with DistTrain's order on DistTrain's plan, all datasets: "
            f"{faster['hierarchical']} times; `tapered` with eager forwards {faster['tapered, eager']}. Below 1 with "
            "CocoQA and 3b, where DistTrain's stage counts are better",
        ),
        *own_algorithm(chart_net, every),
    ]
    return table("| claim (SynthChartNet) | where | | figure |", [f"| {' | '.join(row)} |" for row in rows])


def own_algorithm(cases: Sequence[Case], every: Sequence[Case]) -> list[tuple[str, str, str, str]]:
    """The rows of Entrain's algorithm as written and of DIP's own schedule; `cases` are of SynthChartNet."""

    def both(values: Sequence[float], text: Callable[[float], str]) -> str:
        return " and ".join(map(text, values))

    shorter = [1 - 1 / value for value in steps(cases, "entrain, no deferral", "entrain")]
    added = [max(c["entrain"]["peak_gib"]) / max(c["entrain, no deferral"]["peak_gib"]) - 1 for c in cases]
    speeds = steps(every, "DIP", "entrain")
    largest = max(max(case["DIP"]["peak_gib"]) for case in every)
    more = [max(c["DIP"]["peak_gib"]) - max(c["entrain"]["peak_gib"]) for c in cases]
    return [
        (
            "the three claims above, with the paper's own algorithm",
            "algorithm 4",
            "reproduced, simulated",
            f"`entrain`: {deviations(cases, 'vision', 'entrain')} times for the encoder, "
            f"{deviations(cases, 'language_model', 'entrain')} for the language model, "
            f"{both(steps(cases, OWN_PLAN, 'entrain'), ratio)} times DistTrain's speed, each on its own plan",
        ),
        (
            "faster than DIP",
            "figure 4.12",
            "not",
            f"`entrain` is {spread(speeds, ratio)} times as fast as DIP with DIP's own schedule, slower in "
            f"{sum(speed < 1 for speed in speeds)} of {len(speeds)} cases. The cost of colocation in DIP is not "
            f"modelled, and its peak of up to {largest:.0f} GiB of activations exceeds the memory of the paper's A40",
        ),
        (
            "deferral costs almost no memory, and peaks fall",
            "section 4.7.2, figure 4.14",
            "not",
            f"with deferral a step of `entrain` is {both(shorter, percent)} % shorter, and the fullest rank has "
            f"{both(added, percent)} % more activations. The peak is {peaks(cases, 'entrain')} GiB, with DistTrain's "
            f"order {peaks(cases, 'disttrain')} GiB: even microbatches lower it, deferral raises it",
        ),
        (
            "DIP needs 12 GB more than Entrain",
            "figure 4.14",
            "not",
            f"{both(more, '{:.1f}'.format)} GiB more with Llama 1b and 3b, three times as much: in these plans each "
            "rank has a stage of the encoder and saves its activations for all 32 microbatches",
        ),
    ]


def papers_masks() -> str:
    """The heaviest of 8 ranks over the mean on the papers' masks, at each length."""
    rows = []
    for kind, words in (("EP", "prepended (EP)"), ("EE", "embedded (EE)"), ("MP", "packed (MP)")):
        cells = []
        for method in ("zigzag", "contiguous", "random", "ours"):
            found = [balance("papers", kind, length, method)["work"]["mean"] for length in (16384, 32768, 65536)]
            cells.append(", ".join(f"{value:.3f}" if method == "ours" else f"{value:.2f}" for value in found))
        rows.append(f"| {words} | " + " | ".join(cells) + " |")
    return table("| mask, at 16k, 32k and 64k tokens | zigzag | ring, contiguous | random | LPT (ours) |", rows)


def quotes_of_papers() -> Iterator[str]:
    """Sentences of `docs/papers.md` outside of its tables of results."""
    planner = result("planner")["parts"]
    mean = planner["frozen"]["mean_improvement"]
    yield (
        f"{ratio(mean['printed times, six stages'])} with the times of its table on the same stages, "
        f"{mean['printed times, 24 GPUs']:.3f} on the same 24 GPUs"
    )
    counted = mean["counted, six stages"], mean["counted and recomputed, six stages"]
    on_gpus = ratio(mean["counted, 24 GPUs"])
    yield f"{spread(counted, ratio)} with counted operations on these stages, {on_gpus} on these GPUs"
    yield f"{1000 * planner['speed']['allocation']['1296']['s']['processor']['median']:.0f} ms on one core"
    cases = {case["case"]: case for case in planner["others"]["cases"]}
    ours, other = (cases["chartqa, llama3-1b, 16 A40"][key] for key in ("step_ms", "others"))
    yield f"{ours:,.0f} ms, the same search in the sampler's order {other['frozen-unaware']['step_ms']:,.0f} ms"
    slower = [case["others"]["frozen-unaware"]["times_slower"] for case in cases.values()]
    yield f"in {sum(value < 1 for value in slower)} of {len(slower)} cases"
    distribution = [arranging("1,920 over 120", method) for method in ("disttrain", "hierarchical")]
    published_ms = result("sampler_overhead")["published_ms"]["DistTrain, 1,920 over 120"]
    yield (
        f"DistTrain's order {distribution[0]:.1f} ms, `hierarchical` {distribution[1]:.1f} ms, which is "
        f"{distribution[1] / published_ms:.1f} times the paper's"
    )
    waits: dict[int, list[float]] = {0: [], 1: []}
    for row in result("sampler_overhead")["hiding"]:
        waits[row["workers"]].append(row["waits_ms"]["median"])
    yield f"waits {spread(waits[1], '{:.0f}'.format)} ms for a step with one worker"
    yield f"{spread(waits[0], '{:.0f}'.format)} without"
    counted = [balance("papers", kind, 65536, "zigzag")["work"]["mean"] - 1 for kind in ("EP", "EE", "MP")]
    yield f"the heaviest rank has {spread(counted, '{:.0%}'.format).replace('%', '')} % more than the mean"
    scattered = [balance("papers", kind, 65536, "random")["work"]["mean"] - 1 for kind in ("EP", "EE", "MP")]
    yield f"blocks of 128 tokens at random are {100 * max(scattered):.0f} % off at 64k"
    for method, words in (("zigzag", "zigzag takes {} times LPT's"), ("contiguous", "ring {}")):
        told = [
            balance("papers", kind, 65536, method)["published_ms"]
            / balance("papers", kind, 65536, "ours")["published_ms"]
            for kind in ("EP", "EE", "MP")
        ]
        yield words.format(spread(told, ratio))
    forward = attention(16384, "forward")
    yield f"{100 * forward['memory_share']:.0f} % of the memory of a dense mask at 16,384 tokens, forward, on a CPU"
    yield f"{forward['times_faster']:.1f} times faster than a dense mask, forward, 16,384 packed tokens, on a CPU"
    times = result("context_parallel_balance")["times"]
    blocks = [times[f"{kind}: workloads and blocks of each rank"]["median"] for kind in ("packed", "causal")]
    yield f"{spread(blocks, '{:.1f}'.format)} ms"
    for method in ("ours", "capped LPT"):
        values = [balance("papers", kind, 65536, method)["work"]["mean"] for kind in ("EP", "EE", "MP")]
        yield f"{max(values):.4f} times the mean at most"
    gains = [placement_gain(name) for name in ("shared ranks", "own ranks")]
    yield f"up to {gains[0]} % more on shared ranks and up to {gains[1]} % more on ranks of their own"
    ratios = [disttrain_gains(name) for name in ("single layout", "DistTrain")]
    yield f"one layout for all modules takes {ratios[0]} times our step, DistTrain's allocation {ratios[1]} times"
    yield f"one layout takes {disttrain_gains('single layout', 'DistTrain')} times the step of DistTrain's allocation"
    whole = [disttrain_gains(name, trains_all=True) for name in OTHERS_OF_DISTTRAIN]
    yield f"DistTrain's allocation takes {whole[0]} times our step, one layout for all modules {whole[1]} times"
    yield f"ranks by operations {whole[2]} times"
    found = [c["plans"]["ours"]["mfu"] for c in result("disttrain")["cases"] if c["trained"] == "all"]
    yield f"{spread([100 * mfu for mfu in found], '{:.1f}'.format)} % MFU"
    yield f"one layout takes {disttrain_gains('single layout', 'DistTrain', trains_all=True)} times that step"
    modelled = result("simulator_error")["modelled"]["median_error"]
    yield f"modelled tasks on 4 and 8 ranks differ by {percent(modelled)} %"


def _table_of_placements(cell: Callable[[dict[str, Any]], str]) -> str:
    """A cell for the best plan of each of three kinds, by model and context; empty where none fits."""
    cases = result("placements")["cases"]
    contexts = list(dict.fromkeys(case["context"] for case in cases))
    rows = []
    for model in dict.fromkeys(case["model"] for case in cases):
        own = [case for case in cases if case["model"] == model]
        encoder, language = own[0]["billions"]
        for name in own[0]["plans"]:
            found = [case["plans"][name] for case in own]
            cells = " | ".join("" if plan is None else cell(plan) for plan in found)
            rows.append(f"| {encoder:.1f}B, {language:.1f}B | {name} | {cells} |")
    return table(f"| encoder, language model | plan | {' | '.join(f'{c // 1024}k' for c in contexts)} |", rows)


def placements() -> str:
    """TFLOP/s per GPU."""
    return _table_of_placements(lambda plan: f"{plan['tflops_per_gpu']:.0f}")


def placement_boundaries() -> str:
    """What crosses the boundary of encoder and language model in a step."""

    def cell(plan: dict[str, Any]) -> str:
        crossing = plan["boundary"]
        exposed = crossing["exposed_ms"] / plan["step_ms"]
        return f"{crossing['feature_bytes'] / 2**30:.1f} GiB, {crossing['message_ms']:,.0f} ms, {100 * exposed:.1f} %"

    return _table_of_placements(cell)


def placement_gain(name: str) -> str:
    """The most that a kind of plan gains over one layout, in percent."""
    gains = [case["gains"][name] for case in result("placements")["cases"] if name in case["gains"]]
    return percent(max(gains))


OTHERS_OF_DISTTRAIN = ("DistTrain", "single layout", "ratio-based")


def disttrain() -> str:
    """MFU of the planner's plans and DistTrain's, and step times of all methods over the planner's."""
    rows = []
    for case in result("disttrain")["cases"]:
        plans, ours = case["plans"], case["plans"]["ours"]
        found = [plans.get(name) for name in OTHERS_OF_DISTTRAIN]
        ratios = " | ".join(_times_ours(row, ours) for row in found)
        mfu = " | ".join("-" if row is None else f"{100 * row['mfu']:.1f} %" for row in (ours, found[0]))
        rows.append(f"| {case['model']} | {case['trained']} | {case['ranks']:,} | {mfu} | {ratios} |")
    heads = " | ".join(f"{name} / ours" for name in OTHERS_OF_DISTTRAIN)
    return table(f"| model | trained | GPUs | our MFU | DistTrain's | {heads} |", rows)


def _times_ours(row: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    """A step over ours, marked where it needs more memory than a rank has."""
    if row is None:
        return "-"
    return f"{row['step_ms'] / ours['step_ms']:.2f}{' (too large)' if 'more than a rank has' in row['note'] else ''}"


def disttrain_gains(name: str, over: str = "ours", figure: str = "step_ms", trains_all: bool = False) -> str:
    """Range of a figure of a method over that of another one, of runs that train all modules or of the others."""
    cases = [case for case in result("disttrain")["cases"] if (case["trained"] == "all") is trains_all]
    plans = [case["plans"] for case in cases if {name, over} <= case["plans"].keys()]
    return spread([own[name][figure] / own[over][figure] for own in plans], "{:.2f}".format)


BLOCKS: dict[str, Callable[[], str]] = {
    "disttrain": disttrain,
    "papers_arrangement": papers_arrangement,
    "papers_masks": papers_masks,
    "placement_boundaries": placement_boundaries,
    "placements": placements,
}
QUOTES: dict[str, Callable[[], Iterator[str]]] = {"docs/papers.md": quotes_of_papers}
