"""
The tables of Cornstarch and DistTrain for comparison with the planner, as printed.

Cornstarch has two versions with models, samples and runs of their own: tables 1 to 11 of the first, and tables 1 and 2
of the second, which Cornstarch's chapter of the dissertation repeats as its tables 3.1 and 3.2 without a difference.
Everything is frozen but the projectors. Nothing here is corrected; what contradicts what:

- Table 9 of the first version names other stage counts than the times of tables 3, 10 and 11 allow: backward time per
  stage times stages has to be the same for a language model whatever its encoder, and is for one set of counts only.
  Section 6.4 has as many stages in both cases; so have the counts that the times allow, for the medium language model.
- In table 11 the unaware VLM-S has the forward time of four stages (106.26) and the backward time of five (171.38).
- Table 6 has 5, 2 stages for the colocated VALM-LL with the small language model, table 7 has 1, 6; for VALM-ML with
  the large one table 6 has 4, 3, table 8 has 6, 1.
- Tables 5 and 6 use `tp_size=2` and `cp_size=2`, four GPUs a stage: 5 of 36 and 38 of 54 of their configurations need
  more than the 24 GPUs that there are, and so does one of table 9.
- Section 6.4 sums VLM-L's unaware encoder to 137.45, with the forward of the language model in place of its backward.
- Section 6.1 has 24 microbatches of one sample; the throughputs are those of 24 microbatches of four samples divided
  by the number of stages, not of GPUs.
- Section 4.2 takes the backward of a frozen module behind a trained one for as long as its forward. In the tables the
  language model takes 1.0 to 2.1 forwards for it (first version) and 3.4 to 10.7 (second version).
- Table 2 of the second version prints 1.00x for SSL, whose iteration times are 0.994 of each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

FIRST = "Cornstarch, first version"
SECOND = "Cornstarch, second version"


@dataclass(frozen=True)
class PublishedRun:
    """
    The runs of a paper.

    Args:
        num_microbatches (`int`): Of one iteration.
        microbatch_samples (`int`): Samples of a microbatch.
        num_gpus (`int`): GPUs of the testbed, NVIDIA A40 of 48 GB.
        gpus_per_node (`int`): Those that share a node.
        max_stages (`int`): Most stages of a module.
    """

    num_microbatches: int
    microbatch_samples: int
    num_gpus: int
    gpus_per_node: int
    max_stages: int


@dataclass(frozen=True)
class PublishedModule:
    """
    One row of the tables of models.

    Args:
        architecture (`str`): The family.
        num_layers (`int`): Its layers.
        hidden_size (`int`): Its width.
        num_billions (`float`): Parameters, in billions.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_billions: float


@dataclass(frozen=True)
class StageTimes:
    """
    One row of the tables of times. A time is the mean over the stages of a module: products with the number of stages
    agree between rows where layers don't divide evenly.

    Args:
        source (`str`): Paper and table.
        model (`str`): The row's name: sizes of the encoders, and in the second version that of the language model.
        llm (`str`): Size of the language model, `"S"`, `"M"` or `"L"`.
        aware (`bool`): Whether stages are balanced by the forward and backward that frozen modules have.
        encoder_ms (`tuple[float, float]`): Forward and backward of a stage of the encoder, colocated if there are two.
        llm_ms (`tuple[float, float]`): Forward and backward of a stage of the language model.
        throughput (`float`, *optional*): Inputs per second and GPU (first version).
        iteration_s (`float`, *optional*): Iteration time (second version).
    """

    source: str
    model: str
    llm: str
    aware: bool
    encoder_ms: tuple[float, float]
    llm_ms: tuple[float, float]
    throughput: float = math.nan
    iteration_s: float = math.nan


@dataclass(frozen=True)
class StageCounts:
    """
    One row of the tables of configurations.

    Args:
        source (`str`): Paper and table.
        model (`str`): The row's name.
        llm (`str`): Size of the language model.
        colocated (`tuple[int, ...]`): Stages of the language model and of its colocated encoders, unaware of freezing.
        cornstarch (`tuple[int, ...]`): Stages of the language model and of each encoder, aware of it.
        tp_size (`int`): Ranks that share each layer.
        cp_size (`int`): Ranks that share each sequence.
    """

    source: str
    model: str
    llm: str
    colocated: tuple[int, ...]
    cornstarch: tuple[int, ...]
    tp_size: int
    cp_size: int


@dataclass(frozen=True)
class ColocationThroughput:
    """
    One row of the tables that compare encoders on the same stages with encoders on separate stages.

    Args:
        source (`str`): Paper and table.
        model (`str`): The row's name: sizes of the vision and the audio encoder.
        llm (`str`): Size of the language model.
        colocated (`tuple[int, ...]`): Stages of the language model and of both encoders together.
        colocated_throughput (`float`): Inputs per second and GPU.
        parallel (`tuple[int, ...]`): Stages of the language model, the vision and the audio encoder.
        parallel_throughput (`float`): Inputs per second and GPU.
    """

    source: str
    model: str
    llm: str
    colocated: tuple[int, ...]
    colocated_throughput: float
    parallel: tuple[int, ...]
    parallel_throughput: float


# Section 6.1 of the first version, section 7.1 of the second. The second prints no stage counts. Its backward times of
# a language model stand 5 : 3 : 2 to each other, and with six stages, one on each node, one is left to the encoders.
FIRST_RUN = PublishedRun(num_microbatches=24, microbatch_samples=1, num_gpus=24, gpus_per_node=4, max_stages=6)
SECOND_RUN = PublishedRun(num_microbatches=12, microbatch_samples=4, num_gpus=24, gpus_per_node=4, max_stages=5)

# Table 1 of each version: (module, size) -> model.
FIRST_MODULES: Mapping[tuple[str, str], PublishedModule] = {
    ("llm", "S"): PublishedModule("Llama 3.1", 16, 2048, 1.2),
    ("llm", "M"): PublishedModule("Llama 3.1", 32, 4096, 8),
    ("llm", "L"): PublishedModule("Llama 3.1", 64, 5120, 32),
    ("vision", "S"): PublishedModule("EVA-CLIP", 40, 1408, 1),
    ("vision", "M"): PublishedModule("EVA-CLIP", 32, 4096, 8),
    ("vision", "L"): PublishedModule("EVA-CLIP", 48, 5120, 18),
    ("audio", "S"): PublishedModule("Whisper", 32, 1920, 1.4),
    ("audio", "M"): PublishedModule("Whisper", 40, 3840, 7),
    ("audio", "L"): PublishedModule("Whisper", 48, 5120, 15),
}
SECOND_MODULES: Mapping[tuple[str, str], PublishedModule] = {
    ("llm", "S"): PublishedModule("Llama-3", 16, 2048, 1),
    ("llm", "M"): PublishedModule("Llama-3", 32, 4096, 8),
    ("llm", "L"): PublishedModule("Llama-3", 64, 5120, 32),
    ("vision", "S"): PublishedModule("Qwen2 Vision", 32, 1280, 0.6),
    ("vision", "M"): PublishedModule("Qwen2 Vision", 48, 2560, 3.9),
    ("vision", "L"): PublishedModule("Qwen2 Vision", 64, 3840, 11.6),
    ("audio", "S"): PublishedModule("Phi4 Audio", 24, 1024, 0.5),
    ("audio", "M"): PublishedModule("Phi4 Audio", 32, 3072, 3.4),
    ("audio", "L"): PublishedModule("Phi4 Audio", 48, 5120, 12.4),
}

# Figure 3b of the first version: CLIP and Mistral-7b on one A40, two samples, activation checkpointing. Module ->
# forward and backward in ms, with both models frozen and with both trained; the projector is trained in both.
FROZEN_MS: Mapping[str, tuple[float, float]] = {
    "encoder": (67.89, 0.01),
    "projector": (3.74, 9.01),
    "llm": (397.11, 530.67),
}
TRAINED_MS: Mapping[str, tuple[float, float]] = {
    "encoder": (67.94, 205.09),
    "projector": (3.75, 9.47),
    "llm": (400.87, 1184.65),
}

# Table 2 of DistTrain, MLLM-72B: GPUs -> samples of the global batch, and time of the allocation in ms.
ALLOCATION_MS: Mapping[int, tuple[int, float]] = {1296: (1920, 922), 648: (960, 641), 324: (480, 441), 112: (240, 133)}


def _fields(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().splitlines()]


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _times(number: int, llm: str, table: str) -> tuple[StageTimes, ...]:
    """Rows of the first version: encoder and language model forward, then backward, then throughput."""
    rows = []
    for model, aware, *figures in _fields(table):
        encoder_forward, llm_forward, encoder_backward, llm_backward, throughput = map(float, figures)
        pairs = (encoder_forward, encoder_backward), (llm_forward, llm_backward)
        rows.append(StageTimes(f"{FIRST}, table {number}", model, llm, aware == "aware", *pairs, throughput))
    return tuple(rows)


def _iterations(table: str) -> tuple[StageTimes, ...]:
    """Rows of the second version, whose last column is the iteration time."""
    rows = []
    for model, aware, *figures in _fields(table):
        encoder_forward, llm_forward, encoder_backward, llm_backward, seconds = map(float, figures)
        pairs = (encoder_forward, encoder_backward), (llm_forward, llm_backward)
        source = f"{SECOND}, table 2"
        rows.append(StageTimes(source, model, model[-1], aware == "aware", *pairs, iteration_s=seconds))
    return tuple(rows)


def _configurations(number: int, table: str) -> tuple[StageCounts, ...]:
    return tuple(
        StageCounts(
            f"{FIRST}, table {number}", model, llm[-1], _counts(colocated), _counts(aware), int(tp_size), int(cp_size)
        )
        for llm, model, colocated, aware, tp_size, cp_size in _fields(table)
    )


def _throughputs(number: int, llm: str, table: str) -> tuple[ColocationThroughput, ...]:
    return tuple(
        ColocationThroughput(
            f"{FIRST}, table {number}",
            model,
            llm,
            _counts(colocated),
            float(colocated_throughput),
            _counts(parallel),
            float(parallel_throughput),
        )
        for model, colocated, colocated_throughput, parallel, parallel_throughput in _fields(table)
    )


# Frozen-aware and -unaware stages of one encoder and a language model, `cp_size=1`; `tp_size` is in CONFIGURATIONS.
STAGE_TIMES: tuple[StageTimes, ...] = (
    *_times(
        10,
        "S",
        """
VLM-S aware 25.57 15.51 0.05 15.09 12.64
VLM-S unaware 32.80 18.80 0.06 20.09 13.79
VLM-M aware 75.67 17.31 0.15 20.08 7.85
VLM-M unaware 45.25 17.61 0.09 20.33 7.63
VLM-L aware 98.27 26.22 0.11 30.50 4.81
VLM-L unaware 122.50 47.39 0.13 60.31 6.05
ALM-S aware 57.52 42.73 0.20 70.21 7.13
ALM-S unaware 30.14 42.30 0.10 70.22 5.34
ALM-M aware 92.19 32.54 0.17 52.63 4.85
ALM-M unaware 59.18 72.90 0.12 105.22 4.09
ALM-L aware 97.77 33.27 0.12 52.88 4.29
ALM-L unaware 76.81 62.01 0.09 105.22 3.59
""",
    ),
    *_times(
        3,
        "M",
        """
VLM-S aware 49.06 27.46 0.12 43.03 6.47
VLM-S unaware 26.49 28.13 0.16 51.32 5.30
VLM-M aware 75.04 28.15 0.27 51.30 5.15
VLM-M unaware 45.90 45.26 0.16 84.89 3.73
ALM-S aware 57.25 81.73 0.38 157.12 1.94
ALM-S unaware 57.79 81.94 0.38 157.14 1.94
ALM-M aware 176.80 82.19 0.64 157.51 1.96
ALM-M unaware 93.39 98.25 0.34 189.11 1.70
VLM-L aware 101.02 34.67 0.20 63.77 3.17
VLM-L unaware 70.42 67.03 0.15 127.34 2.06
ALM-L aware 308.16 100.20 0.73 188.50 1.98
ALM-L unaware 145.97 121.21 0.33 235.23 1.69
""",
    ),
    *_times(
        11,
        "L",
        """
VLM-S aware 52.54 88.58 0.10 171.72 2.39
VLM-S unaware 85.83 106.26 0.10 171.38 2.10
VLM-M aware 249.38 88.95 0.49 171.68 2.29
VLM-M unaware 132.16 113.64 0.26 213.58 1.85
VLM-L aware 481.44 106.53 0.74 215.06 1.76
VLM-L unaware 246.22 146.62 0.38 287.14 1.81
ALM-S aware 76.84 286.16 0.24 596.40 0.72
ALM-S unaware 78.80 285.07 0.24 594.31 0.73
ALM-M aware 197.21 287.37 0.45 597.47 0.72
ALM-M unaware 101.97 359.27 0.24 743.91 0.62
ALM-L aware 319.31 286.31 0.50 596.50 0.71
ALM-L unaware 177.29 356.06 0.27 742.80 0.61
""",
    ),
)

# The stages of STAGE_TIMES, as printed.
CONFIGURATIONS: tuple[StageCounts, ...] = _configurations(
    9,
    """
LLM-S VLM-S 4,4 4,2 2 1
LLM-S VLM-M 1,4 2,4 2 1
LLM-S VLM-L 1,5 1,4 2 1
LLM-S ALM-S 3,2 5,1 2 1
LLM-S ALM-M 2,3 4,2 2 1
LLM-S ALM-L 2,4 4,3 2 1
LLM-M VLM-S 3,1 6,1 2 1
LLM-M VLM-M 4,3 5,2 2 1
LLM-M VLM-L 3,5 5,4 2 1
LLM-M ALM-S 5,1 6,1 2 1
LLM-M ALM-M 4,4 6,1 2 1
LLM-M ALM-L 5,5 4,2 2 1
LLM-L VLM-S 3,5 5,1 4 1
LLM-L VLM-M 5,1 5,1 4 1
LLM-L VLM-L 4,2 4,1 4 1
LLM-L ALM-S 5,1 5,1 4 1
LLM-L ALM-M 3,1 5,1 4 1
LLM-L ALM-L 4,2 5,1 4 1
""",
)

# Of the end-to-end runs, for which no times of stages are printed: one encoder, then two.
END_TO_END: tuple[StageCounts, ...] = _configurations(
    5,
    """
LLM-S VLM-S 5,2 4,2 2 2
LLM-S VLM-M 2,3 3,3 2 2
LLM-S VLM-L 1,4 2,4 2 2
LLM-S ALM-S 3,2 3,1 2 2
LLM-S ALM-M 3,5 2,3 2 2
LLM-S ALM-L 2,6 3,5 2 2
LLM-M VLM-S 3,1 5,1 2 2
LLM-M VLM-M 3,2 3,1 2 2
LLM-M VLM-L 2,3 3,2 2 2
LLM-M ALM-S 4,2 5,1 2 2
LLM-M ALM-M 3,3 4,2 2 2
LLM-M ALM-L 2,4 4,2 2 2
LLM-L VLM-S 5,1 5,1 2 2
LLM-L VLM-M 4,1 5,1 2 2
LLM-L VLM-L 3,2 4,1 2 2
LLM-L ALM-S 5,1 5,1 2 2
LLM-L ALM-M 5,1 5,1 2 2
LLM-L ALM-L 5,2 5,1 2 2
""",
) + _configurations(
    6,
    """
LLM-S VALM-SS 3,4 3,1,1 2 2
LLM-S VALM-SM 1,3 3,1,4 2 2
LLM-S VALM-SL 1,4 3,1,5 2 2
LLM-S VALM-MS 2,4 3,3,1 2 2
LLM-S VALM-MM 1,4 3,2,3 2 2
LLM-S VALM-ML 1,5 3,2,4 2 2
LLM-S VALM-LS 1,4 3,5,1 2 2
LLM-S VALM-LM 1,6 2,4,3 2 2
LLM-S VALM-LL 5,2 2,3,3 2 2
LLM-M VALM-SS 5,2 5,1,1 2 2
LLM-M VALM-SM 4,3 5,1,1 2 2
LLM-M VALM-SL 3,4 4,1,2 2 2
LLM-M VALM-MS 4,4 4,2,1 2 2
LLM-M VALM-MM 3,4 4,1,1 2 2
LLM-M VALM-ML 2,4 3,1,1 2 2
LLM-M VALM-LS 2,4 4,2,1 2 2
LLM-M VALM-LM 2,4 4,2,2 2 2
LLM-M VALM-LL 2,5 5,1,1 2 2
LLM-L VALM-SS 5,1 5,1,1 2 2
LLM-L VALM-SM 5,2 5,1,1 2 2
LLM-L VALM-SL 5,2 5,1,1 2 2
LLM-L VALM-MS 4,1 5,1,1 2 2
LLM-L VALM-MM 4,2 5,1,1 2 2
LLM-L VALM-ML 4,3 5,1,1 2 2
LLM-L VALM-LS 4,2 5,1,1 2 2
LLM-L VALM-LM 4,3 5,1,1 2 2
LLM-L VALM-LL 4,3 5,1,1 2 2
""",
)

COLOCATION: tuple[ColocationThroughput, ...] = (
    *_throughputs(
        7,
        "S",
        """
VALM-SS 3,4 6.31 3,1,1 8.82
VALM-SM 1,3 5.20 3,1,4 4.99
VALM-SL 1,4 4.31 3,1,5 4.61
VALM-MS 2,4 5.18 3,3,1 5.24
VALM-MM 1,4 3.93 3,2,3 4.66
VALM-ML 1,5 3.40 3,2,4 3.78
VALM-LS 1,4 3.82 3,5,1 3.96
VALM-LM 1,6 2.96 2,4,3 3.42
VALM-LL 1,6 2.76 2,3,3 3.25
""",
    ),
    *_throughputs(
        2,
        "M",
        """
VALM-SS 6,1 3.09 6,1,1 2.68
VALM-SM 6,2 2.64 6,1,1 2.73
VALM-SL 6,2 2.57 6,1,2 2.25
VALM-MS 6,2 2.57 6,2,1 2.29
VALM-MM 6,3 2.21 6,1,1 2.22
VALM-ML 6,4 1.91 6,2,2 2.05
VALM-LS 6,4 1.95 6,3,1 1.92
VALM-LM 6,4 1.88 6,3,1 1.97
VALM-LL 6,5 1.74 6,3,2 1.82
""",
    ),
    *_throughputs(
        8,
        "L",
        """
VALM-SS 5,1 1.57 5,1,1 1.33
VALM-SM 5,2 1.37 5,1,1 1.36
VALM-SL 5,2 1.33 5,1,1 1.37
VALM-MS 4,1 1.57 5,1,1 1.37
VALM-MM 4,2 1.32 5,1,1 1.37
VALM-ML 6,1 1.04 5,1,1 0.93
VALM-LS 4,2 1.31 5,1,1 1.36
VALM-LM 4,3 1.10 5,1,1 1.33
VALM-LL 4,3 1.09 5,1,1 1.36
""",
    ),
)

# Two encoders, colocated; the letters are the sizes of vision, audio and language model.
ITERATION_TIMES: tuple[StageTimes, ...] = _iterations(
    """
SSS aware 301.61 149.40 1.04 518.43 21.81
SSS unaware 207.13 296.25 0.86 1032.63 25.67
MMS aware 903.86 102.61 2.72 346.54 40.34
MMS unaware 635.56 297.62 1.19 1032.12 41.21
LLS aware 1240.50 298.37 1.41 1029.98 66.14
LLS unaware 1259.13 297.92 1.15 1030.14 66.20
SSM aware 464.98 331.43 3.53 3017.01 66.56
SSM unaware 388.33 388.73 2.30 4030.74 73.94
MMM aware 2330.90 273.89 2.09 2418.27 70.37
MMM unaware 712.72 1159.76 1.60 12113.67 173.01
LLM aware 2199.91 376.11 4.15 4023.22 87.43
LLM unaware 1403.97 1161.76 1.56 12109.73 177.39
SSL aware 773.10 741.17 3.55 6309.11 138.45
SSL unaware 774.19 708.62 3.84 6306.18 137.62
MML aware 2280.58 705.73 3.11 6311.23 138.97
MML unaware 1015.60 1154.85 2.78 10546.34 180.28
LLL aware 5316.08 736.05 4.00 6315.46 143.76
LLL unaware 1597.36 1686.28 3.06 15878.58 247.79
"""
)
