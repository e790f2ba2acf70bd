"""Iteration times with and without knowledge of frozen modules, for the nine models of Cornstarch's table 2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from paper_tables import ITERATION_TIMES, SECOND_RUN, StageTimes
from planner_models import AUDIO, VISION, cornstarch_model, cornstarch_sizes
from shared_partition import partition_shared

from hf_mmparallel.cost import CostModel, LayerCost, LayerCosts, analytic_costs, find_device, layer_table
from hf_mmparallel.papers.compare import UnawareOptions, all_trained
from hf_mmparallel.plan import LANGUAGE_MODEL
from hf_mmparallel.plan.layout import ModuleLayout
from hf_mmparallel.planning.candidates import CandidateSpace
from hf_mmparallel.planning.partition import partition_all
from hf_mmparallel.planning.problem import Candidate, PlanningProblem
from hf_mmparallel.planning.simulations import step_planner

DEVICE = find_device("a40")
MICROBATCH = SECOND_RUN.microbatch_samples
BATCH = SECOND_RUN.num_microbatches * MICROBATCH
TP_SIZE = SECOND_RUN.gpus_per_node
NUM_STAGES = SECOND_RUN.num_gpus // TP_SIZE
MEMORY_BYTES = 46 * 2**30  # of 48 GB, without the context and what fragments
SIMULATED, PER_FAMILY = 12, 2
RULES = ("aware", "unaware")

ROWS: Mapping[str, Mapping[bool, StageTimes]] = {
    row.model: {other.aware: other for other in ITERATION_TIMES if other.model == row.model} for row in ITERATION_TIMES
}


@dataclass(frozen=True)
class ScaledLayers:
    """
    Costs of layers of which some modules take longer or shorter.

    Args:
        layers (`LayerCosts`): The costs.
        factors (`Mapping[str, float]`): Module -> by how much everything is longer.
        backward (`Mapping[str, float]`): Module -> forwards that the gradient of its input takes.
    """

    layers: LayerCosts
    factors: Mapping[str, float]
    backward: Mapping[str, float]

    def starting_at(self, first_rank: int) -> ScaledLayers:
        """See [`LayerCosts`]."""
        return replace(self, layers=self.layers.starting_at(first_rank))

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """See [`LayerCosts`]."""
        own, factor = self.layers.layer(module, index, tp_size).with_sums, self.factors.get(module, 1.0)
        data = own.forward * self.backward[module] if module in self.backward else own.data_gradient
        return replace(
            own,
            forward=own.forward * factor,
            data_gradient=data * factor,
            weight_gradient=own.weight_gradient * factor,
        )


@dataclass(frozen=True)
class ThreeForwards:
    """Cost of a layer as estimated from forwards only: the backward counts as two more of them."""

    layers: LayerCosts

    def starting_at(self, first_rank: int) -> ThreeForwards:
        """See [`LayerCosts`]."""
        return replace(self, layers=self.layers.starting_at(first_rank))

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """See [`LayerCosts`]."""
        own = self.layers.layer(module, index, tp_size).with_sums
        return replace(own, data_gradient=own.forward, weight_gradient=own.forward)


def language_stages(llm: str) -> dict[StageTimes, int]:
    """The stages of a language model in each row with it: its backward times are to each other as whole numbers."""
    rows = [row for row in ITERATION_TIMES if row.llm == llm]
    times = np.array([row.llm_ms[1] for row in rows])
    for slowest in range(1, SECOND_RUN.max_stages + 1):
        counts = np.rint(slowest * times.max() / times)
        totals = counts * times
        if counts.max() <= SECOND_RUN.max_stages and np.abs(totals / totals.mean() - 1).max() < 0.01:
            return dict(zip(rows, counts.astype(int).tolist(), strict=True))
    raise AssertionError(f"the backward times of language model {llm} fit no stage counts")


def printed_costs(name: str, counted: CostModel) -> CostModel:
    """
    Costs under which the modules take what the paper's table says, means of the rows that hold them: the forwards of a
    microbatch through both encoders and through the language model, and the latter's backward over its forward.
    """
    stages = {row: count for llm in "SML" for row, count in language_stages(llm).items()}
    encoders = [row.encoder_ms[0] * (NUM_STAGES - stages[row]) for row in stages if row.model[:2] == name[:2]]
    own = [(row.llm_ms[0] * stages[row], row.llm_ms[1] / row.llm_ms[0]) for row in stages if row.llm == name[2]]
    sizes = cornstarch_sizes(1)
    ours = {}
    for module in counted.spec.modules:
        tokens, squares = (MICROBATCH * float(values[module][0]) for values in (sizes.tokens, sizes.squares))
        ours[module] = float((layer_table(counted, module, TP_SIZE).forward @ [squares, tokens, 1.0]).sum())
    encoder = float(np.mean(encoders)) / (ours[VISION] + ours[AUDIO])
    forward_ms, ratio = np.mean(own, axis=0).tolist()
    factors = {VISION: encoder, AUDIO: encoder, LANGUAGE_MODEL: forward_ms / ours[LANGUAGE_MODEL]}
    return replace(counted, layers=ScaledLayers(counted.layers, factors, {LANGUAGE_MODEL: ratio}))


def as_trained(costs: CostModel) -> CostModel:
    """The costs as estimated without knowledge of frozen modules."""
    return replace(costs, spec=all_trained(costs.spec), layers=ThreeForwards(costs.layers))


def problem_of(costs: CostModel) -> PlanningProblem:
    """The paper's run."""
    return PlanningProblem(
        costs,
        cornstarch_sizes(BATCH),
        SECOND_RUN.num_gpus,
        BATCH,
        MEMORY_BYTES,
        MICROBATCH,
        arrangement="contiguous",
        zero_stages=(0,),
    )


def iteration(problem: PlanningProblem, candidate: Candidate) -> tuple[float, float]:
    """Simulated time of a step in s, and GiB of its fullest rank."""
    planner = step_planner(replace(problem, memory_bytes=None), candidate)
    found = planner.predict_batch(problem.sizes)
    return found.step_ms / 1000, found.peak_memory_bytes / 2**30


# The same stages


def six_stages(costs: CostModel, known: CostModel, recomputed: bool) -> dict[str, Any]:
    """
    Six stages on four GPUs each, those of both encoders in front: how many, and which layers, by the costs that are
    `known`.
    """
    sizes = cornstarch_sizes(BATCH)
    layers_ms = {
        name: layer_table(known, name, TP_SIZE, recomputed).step_ms(
            MICROBATCH * float(sizes.tokens[name][0]), MICROBATCH * float(sizes.squares[name][0])
        )
        for name in known.spec.modules
    }
    options = []
    for count in range(1, NUM_STAGES):
        encoders = partition_shared([layers_ms[VISION], layers_ms[AUDIO]], count)
        depth = NUM_STAGES - count
        language = partition_all(layers_ms[LANGUAGE_MODEL], depth).partition(depth)
        options.append((max(encoders.slowest_stage_ms, language.slowest_stage_ms), encoders.layers, language.layers))
    _, encoders, language = min(options)
    cuts = dict(zip((VISION, AUDIO, LANGUAGE_MODEL), (*encoders, language), strict=True))
    layouts = {
        name: ModuleLayout(cut, tp_size=TP_SIZE, activation_checkpointing=recomputed) for name, cut in cuts.items()
    }
    candidate = Candidate(layouts, {AUDIO: VISION}, SECOND_RUN.num_microbatches)
    seconds, gib = iteration(problem_of(costs), candidate)
    return {"iteration_s": seconds, "gib": gib, "stages": [len(encoders[0]), len(language)]}


# The same GPUs


class ColocatedEncoders(CandidateSpace):
    """Encoders together on separate ranks, as in the paper's table."""

    def placements(self) -> list[dict[str, str]]:
        return [{AUDIO: VISION}]


def same_gpus(costs: CostModel, known: CostModel, aware: bool, most: int = SIMULATED) -> dict[str, Any]:
    """The planner's sizes for 24 GPUs by the costs that are `known`, in the memory that is really needed."""
    fixed = {name: {"cp_size": 1} for name in costs.spec.modules}
    problem = replace(problem_of(costs), fixed=fixed)
    space = ColocatedEncoders(problem)
    if not aware:
        space.options.update({name: UnawareOptions(problem, name, known) for name in space.options})
    judged = []
    for candidate in _unlike(space):
        seconds, gib = iteration(problem, candidate)
        if gib <= MEMORY_BYTES / 2**30:
            thought = seconds if aware else iteration(replace(problem, costs=known), candidate)[0]
            judged.append((thought, seconds, gib, candidate))
        if len(judged) == most:
            break
    _, seconds, gib, candidate = min(judged, key=lambda own: own[0])
    layouts = {name: str(layout) for name, layout in candidate.layouts.items()}
    gpus = [candidate.layouts[name].num_ranks for name in (VISION, LANGUAGE_MODEL)]
    return {"iteration_s": seconds, "gib": gib, "gpus": gpus, "layouts": layouts}


def _unlike(space: CandidateSpace) -> Iterator[Candidate]:
    """The fastest by the closed form, a few of each family."""
    seen: Counter = Counter()
    for own in sorted(space, key=lambda own: own.step_ms):
        seen[own.family] += 1
        if seen[own.family] <= PER_FAMILY:
            yield space.candidate(own)


# All models


def frozen_models(names: list[str], most: int = SIMULATED) -> dict[str, Any]:
    """Every model by every source of costs: what the aware rule gains."""
    rows = []
    for name in names:
        counted = analytic_costs(cornstarch_model(name), DEVICE)
        printed = printed_costs(name, counted)
        row: dict[str, Any] = {"model": name, "paper": paper_row(name)}
        for key, costs, recomputed in (
            ("counted, six stages", counted, False),
            ("counted and recomputed, six stages", counted, True),
            ("printed times, six stages", printed, False),
        ):
            row[key] = {
                rule: six_stages(costs, costs if rule == "aware" else as_trained(costs), recomputed) for rule in RULES
            }
        for key, costs in (("counted, 24 GPUs", counted), ("printed times, 24 GPUs", printed)):
            row[key] = {
                rule: same_gpus(costs, costs if rule == "aware" else as_trained(costs), rule == "aware", most)
                for rule in RULES
            }
        for key in SETTINGS:
            row[key]["improvement"] = row[key]["unaware"]["iteration_s"] / row[key]["aware"]["iteration_s"]
        rows.append(row)
    means = {key: float(np.mean([row[key]["improvement"] for row in rows])) for key in SETTINGS}
    return {
        "models": rows,
        "mean_improvement": means,
        "goal": float(np.mean([paper_row(n)["improvement"] for n in names])),
    }


SETTINGS = (
    "counted, six stages",
    "counted and recomputed, six stages",
    "printed times, six stages",
    "counted, 24 GPUs",
    "printed times, 24 GPUs",
)


def paper_row(name: str) -> dict[str, Any]:
    """The sentence about the table."""
    aware, unaware = ROWS[name][True], ROWS[name][False]
    counts = language_stages(name[2])
    stages = {rule: [NUM_STAGES - counts[row], counts[row]] for rule, row in (("aware", aware), ("unaware", unaware))}
    times = {"aware_s": aware.iteration_s, "unaware_s": unaware.iteration_s}
    return {**times, "improvement": unaware.iteration_s / aware.iteration_s, "stages": stages}
