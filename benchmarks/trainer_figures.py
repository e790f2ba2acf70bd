"""The tables of README and of runs of the Trainer and the engine, and sentences about them, see `pages.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from figures import attention, chart_net, deviations, percent, ratio, result, result_names, spread, steps, table


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
    """When and where each result was measured, by processor."""
    by_processor: dict[str, list[str]] = {}
    for source in result_names():
        found = result(source)
        parts = found.get("runs") or {
            name: part["run"] for name, part in found.get("parts", {}).items() if "run" in part
        }
        for name, run in (parts or {"": found}).items():
            described = {**found, **run}
            words = f"`{source}`{f' {name}' if name else ''} ({described['commit']}, {described['date'][:10]})"
            processor = described["processor"].replace("(R)", "").replace(" Processor", "")
            by_processor.setdefault(processor, []).append(words)
    rows = [f"| {processor} | {', '.join(sources)} |" for processor, sources in sorted(by_processor.items())]
    return table("| processor | results, with commit and date |", rows)


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
    three = [case["error"] for case in modelled["cases"] if case["generator"]]
    on_eight = [case["error"] for case in modelled["cases"] if case["world_size"] == 8]
    name = worst["case"].replace("8 ranks, the same, GPipe", "8 ranks, GPipe")
    goal = {key: f"{100 * value:.0f} %" for key, value in goals.items()}
    return table(
        "| case | error | goal |",
        [
            "| real computation, 2 ranks on 2 cores, costs fitted to the preceding six steps, median of 20 steps "
            f"| {percent(found['real']['median_error'])} % | {goal['real']} |",
            "| modelled durations in the real engine and transport, 4 and 8 ranks, median of "
            f"{len(modelled['cases'])} cases | {percent(modelled['median_error'])} % | {goal['modelled']} |",
            f"| the {len(on_eight)} of these on 8 ranks, with cp of encoders, shared experts and unlike layouts on "
            f"shared ranks, median | {percent(statistics.median(on_eight))} % | {goal['modelled']} |",
            f"| the {len(three)} of these with a generator behind the language model, largest "
            f"| {100 * max(three):.1f} % | {goal['modelled']} |",
            f"| the worst of these cases ({name}) | {100 * modelled['largest_error']:.1f} % | {goal['modelled']} |",
        ],
    )


def memory_error() -> str:
    errors = result("memory_error")["errors"]
    rows = []
    for key, words in (
        ("named", "that cover every kind of parallelism"),
        ("padded", "with grouped key heads, padded"),
        ("packed", "with grouped key heads, packed"),
        ("shared", "with cp of encoders, shared experts and unlike layouts on shared ranks"),
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


def attention_gpu_times() -> str:
    masks = {"causal": "causal", "embedded": "images in one sample", "packed": "packed samples with images"}
    masks["window"] = "window of 4,096"
    timed = [row for row in result("attention-h100-80gb-hbm3")["speed"] if "ms" in row]
    ms = {(row["mask"], row["direction"], row["contestant"]): row["ms"] for row in timed}
    rows = []
    for mask, text in masks.items():
        for direction in ("forward", "backward"):
            ours, flex = (ms[mask, direction, name] for name in ("bitfield", "flex"))
            cudnn = ms.get((mask, direction, "sdpa cudnn_attention"))
            last = "" if cudnn is None else f"{cudnn:.2f} ms"
            rows.append(f"| {text} | {direction} | {ours:.2f} ms | {flex:.2f} ms | {flex / ours:.2f}x | {last} |")
    return table("| mask | pass | bitfield | FlexAttention | faster | cuDNN |", rows)


def gpu_step_times() -> str:
    rows = [
        f"| {row['variant']} | {row['seconds_per_step']:.2f} | {row['tokens_per_second']:,.0f} "
        f"| {row['of_stock']:.2f} | {row['peak_gib']:.1f} | {row['waits_per_step']:,.0f} |"
        for row in result("gpu_step")["rows"]
    ]
    return table("| loop | s a step | tokens/s | of stock | GiB | waits a step |", rows)


def quotes_of_runs() -> Iterator[str]:
    """Sentences of `docs/benchmarks.md` outside of its tables."""
    rounds = result("trainer_overhead")["one_process"]["ours"]["ratio"]
    yield f"its rounds range from {ratio(rounds['min'])} to {ratio(rounds['max'])}"
    real = result("simulator_error")["real"]
    again, own = real["difference %, the same step run twice"], real["error %, given the step's own task times"]
    yield f"differed from itself by {again['median']:.1f} % in the median"
    yield f"own durations the simulator was off by {own['median']:.1f} %"
    worst = max(result("simulator_error")["modelled"]["cases"], key=lambda case: case["error"])
    yield f"the error of the worst case falls to {percent(worst['error_with_own_times'])} %"
    step = result("gpu_step")["rows"]
    yield f"The largest difference of a loss is {max(row['difference'] for row in step):.1e}"
    largest = max(row["difference"] for row in result("gpu_check")["rows"])
    yield f"a Qwen3-VL of both layouts differs by {largest:.1e}"


TABLES = (
    measured,
    runs,
    trainer_overhead,
    simulator_error,
    memory_error,
    attention_times,
    attention_gpu_times,
    gpu_step_times,
)
BLOCKS = {function.__name__: function for function in TABLES}
QUOTES = {"docs/benchmarks.md": quotes_of_runs}
