"""The tables of reading and arranging samples in `docs/benchmarks.md`, and sentences about them, see `pages.py`."""

from __future__ import annotations

from collections.abc import Iterator

from figures import arranging, ratio, result, spread, table

BATCHES = ("512 over 4", "1,920 over 120", "1,920 over 120, single samples")


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


def quotes_of_sampler() -> Iterator[str]:
    """Sentences of `docs/benchmarks.md` outside of its tables."""
    waits: dict[int, list[float]] = {0: [], 1: []}
    for row in result("sampler_overhead")["hiding"]:
        waits[row["workers"]].append(row["waits_ms"]["median"])
    yield f"a loop waited {spread(waits[0], '{:.0f}'.format)} ms for the next one without workers"
    yield f"{spread(waits[1], '{:.0f}'.format)} ms with one worker"


BLOCKS = {function.__name__: function for function in (sampler_arranging, sizes_at_scale, sampler_reading)}
QUOTES = {"docs/benchmarks.md": quotes_of_sampler}
