"""What the papers' tables of times say of stage counts that they do not print, or print otherwise."""

from functools import cache

import numpy as np

from benchmarks.paper_tables import (
    CONFIGURATIONS,
    FIRST_MODULES,
    FIRST_RUN,
    ITERATION_TIMES,
    SECOND,
    SECOND_MODULES,
    SECOND_RUN,
    STAGE_TIMES,
    PublishedRun,
    StageTimes,
)
from benchmarks.shared_partition import partition_shared
from hf_mmparallel.planning.partition import partition_all

ENCODERS = {"V": "vision", "A": "audio"}
SECOND_STAGES = SECOND_RUN.num_gpus // SECOND_RUN.gpus_per_node


def possible_counts(times_ms: list[float], max_stages: int, tolerance: float) -> list[tuple[int, ...]]:
    """Stage counts of rows that hold the same module: times and counts multiply to the same total, fewest first."""
    times = np.asarray(times_ms)
    found = []
    for slowest in range(1, max_stages + 1):
        counts = np.rint(slowest * times.max() / times).astype(int)
        totals = counts * times
        if counts.max() <= max_stages and np.abs(totals / totals.mean() - 1).max() <= tolerance:
            found.append(tuple(counts.tolist()))
    return found


def llm_counts(rows: tuple[StageTimes, ...], max_stages: int) -> dict[StageTimes, int]:
    """The stages of the language model in each row, from its backward times; there is only one such set."""
    by_model: dict[tuple[str, str], list[StageTimes]] = {}  # on the same tokens
    for row in rows:
        by_model.setdefault((row.llm, row.model[0] if rows is STAGE_TIMES else ""), []).append(row)
    counts = {}
    for group in by_model.values():
        (only,) = possible_counts([row.llm_ms[1] for row in group], max_stages, 0.01)
        counts.update(zip(group, only, strict=True))
    return counts


@cache
def one_encoder_counts() -> dict[StageTimes, tuple[int, int]]:
    """
    Stages of the language model and of the encoder in each row of the first version that says enough.

    With `tp_size=2` the encoder's forward is the same whatever the language model; one needs seven stages in one row,
    though section 6.1 has six at most. With `tp_size=4` there are six stages in all.
    """
    llm = llm_counts(STAGE_TIMES, FIRST_RUN.max_stages)
    found = {}
    for model in dict.fromkeys(row.model for row in STAGE_TIMES):
        wide = [row for row in STAGE_TIMES if row.model == model and row.llm != "L"]
        sets = possible_counts([row.encoder_ms[0] for row in wide], FIRST_RUN.max_stages + 1, 0.04)
        found.update({row: (llm[row], count) for row, count in zip(wide, sets[0] if sets else (), strict=bool(sets))})
        aware, unaware = (row for row in STAGE_TIMES if row.model == model and row.llm == "L")
        rest = [6 - llm[row] for row in (aware, unaware)]
        options = [(one, two) for one in range(1, rest[0] + 1) for two in range(1, rest[1] + 1)]
        ratio = unaware.encoder_ms[0] / aware.encoder_ms[0]
        best = min(options, key=lambda option: abs(np.log(option[0] / option[1] / ratio)))
        found.update({row: (llm[row], count) for row, count in zip((aware, unaware), best, strict=True)})
    return found


@cache
def two_encoder_counts() -> dict[StageTimes, tuple[int, int]]:
    """Stages of the language model and of the colocated encoders in the second version, each on one node."""
    llm = llm_counts(ITERATION_TIMES, SECOND_RUN.max_stages)
    return {row: (count, SECOND_STAGES - count) for row, count in llm.items()}


def printed_counts(row: StageTimes) -> tuple[int, ...]:
    """The row's entry in table 9 of the first version."""
    (entry,) = (entry for entry in CONFIGURATIONS if (entry.llm, entry.model) == (row.llm, row.model))
    return entry.cornstarch if row.aware else entry.colocated


def slowest_stage_ms(row: StageTimes, totals_ms: tuple[float, float], counts: tuple[int, ...]) -> float:
    """The slowest stage when the layers of each module, all alike, are cut into that many stages."""
    both = row.source.startswith(SECOND)
    modules = SECOND_MODULES if both else FIRST_MODULES
    num_layers = modules["llm", row.llm].num_layers
    layer_ms = np.full(num_layers, totals_ms[0] / num_layers)
    llm_ms = partition_all(layer_ms, counts[0]).partition(counts[0]).slowest_stage_ms
    kinds = [("vision", row.model[0]), ("audio", row.model[1])] if both else [(ENCODERS[row.model[0]], row.model[-1])]
    encoders = [modules[kind] for kind in kinds]
    work = totals_ms[1] / sum(encoder.num_billions for encoder in encoders)
    layers = [np.full(encoder.num_layers, work * encoder.num_billions / encoder.num_layers) for encoder in encoders]
    return max(llm_ms, partition_shared(layers, counts[1]).slowest_stage_ms)


def best_counts(row: StageTimes, totals_ms: tuple[float, float], num_stages: int) -> tuple[int, int]:
    """How many of the stages the language model and the encoder get, for the fastest slowest stage."""
    options = [(count, num_stages - count) for count in range(1, num_stages)]
    return min(options, key=lambda option: slowest_stage_ms(row, totals_ms, option))


def totals_ms(row: StageTimes, counts: tuple[int, int], aware: bool) -> tuple[float, float]:
    """What the language model and the encoder take over all stages: forward and backward, or the forward alone."""
    llm, encoder = (sum(times) if aware else times[0] for times in (row.llm_ms, row.encoder_ms))
    return llm * counts[0], encoder * counts[1]


def iteration_ms(row: StageTimes, counts: tuple[int, ...], run: PublishedRun) -> float:
    """The closed form of a pipeline: each stage once, and the slowest for each further microbatch."""
    llm, encoder = sum(row.llm_ms), sum(row.encoder_ms)
    return counts[0] * llm + counts[1] * encoder + (run.num_microbatches - 1) * max(llm, encoder)
