"""
Everything that is decided from numbers, over random cases, as a digest for each kind: `python -m tests.decisions`.

Hosts with unlike processors must decide alike, see `tests/test_processors.py`. Inputs are made of whole numbers, which
are the same everywhere.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from hf_mmparallel.arrange import ARRANGEMENTS, arrange_step
from hf_mmparallel.arrange.rank_batches import RANK_ARRANGEMENTS, arrange_for_ranks, whole_model_workloads
from hf_mmparallel.arrange.token_assignment import assign_rows
from hf_mmparallel.arrange.token_segments import assign_segments
from hf_mmparallel.cost import batch_workloads
from hf_mmparallel.cost.profile import MeasuredPoint, fit_curve
from hf_mmparallel.cost.step_planner import StepPlanner
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.papers.sample_presets import SAMPLE_PRESETS
from hf_mmparallel.papers.stable_batch import StabilityTest, draw_from, minimum_stable_batch
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.plan.methods import SCHEDULES
from hf_mmparallel.planning.problem import PlanningProblem
from hf_mmparallel.planning.search import search_plans
from hf_mmparallel.resilience.model_chain import TypicalMicrobatches, model_chain
from hf_mmparallel.resilience.pipelines import PipelinePlans
from hf_mmparallel.resilience.resilient_planner import ResilientPlanner
from tests.arrange.token_rows import packed_row
from tests.cost.models import h100, model, module

SPEC = ModelSpec({name: module(name) for name in ("vision", "audio", LANGUAGE_MODEL)})
LAYOUTS = {
    "apart": {
        "vision": ModulePlugin(dp_size=4),
        "audio": ModulePlugin(dp_size=2),
        LANGUAGE_MODEL: ModulePlugin(dp_size=4, pp_size=2, tp_size=2),
    },
    "shared": {
        "vision": ModulePlugin(dp_size=4, pp_size=2),
        "audio": ModulePlugin(dp_size=4, pp_size=2, colocate_with="vision"),
        LANGUAGE_MODEL: ModulePlugin(dp_size=3, pp_size=2),
    },
}


def sizes_of(num_samples: int, seed: int, names: tuple[str, ...] = tuple(SPEC.modules)) -> SampleSizes:
    """Texts of unlike lengths, of which some have an image and some a sound; many are alike."""
    random = np.random.default_rng(seed)
    lengths = {name: random.integers(1, 12, num_samples) * random.integers(1, 60, num_samples) for name in names}
    for name in sorted({*names} & {"vision", "audio"}):
        lengths[name][random.integers(0, 4, num_samples) == 0] = 0
    return SampleSizes.of_sequences({name: [[length] for length in own.tolist()] for name, own in lengths.items()})


def arrangements() -> Iterator[Any]:
    for seed, (kind, layouts) in enumerate(LAYOUTS.items()):
        plan, costs = resolve_plan(SPEC, layouts), h100(SPEC)
        for number in range(2):
            sizes = sizes_of(96, 10 * seed + number)
            workloads = batch_workloads(costs, plan, sizes, memory_bytes=60 * 2**30)
            yield workloads.forward_ms, workloads.backward_ratio, workloads.token_limits, workloads.row_ms
            for name in ARRANGEMENTS:
                yield kind, name, arrange_step(plan, range(96), workloads, 3, name).microbatches
            whole = whole_model_workloads(workloads)
            has = {name: sizes.tokens[name] > 0 for name in ("vision", "audio")}
            for name in RANK_ARRANGEMENTS:
                yield name, arrange_for_ranks(whole, has, 4, 4, name)


def tokens() -> Iterator[Any]:
    for seed in range(20, 23):
        first, last, ids = packed_row(65536, seed)
        inside = np.arange(65536) - first
        image = (inside >= 32) & (inside < 608)
        seen = np.where(image & (np.append(ids[576:], np.zeros(576)) == ids), first + 607, last).astype(np.int32)
        for ends in (last, seen):
            for assign in (assign_segments(first, ends, ids, 8), assign_rows(first, ends, 8)):
                yield assign.blocks, assign.layout, assign.gathered, assign.work


def schedules() -> Iterator[Any]:
    for seed, layouts in enumerate(LAYOUTS.values()):
        for schedule in SCHEDULES:
            plan = replace(resolve_plan(SPEC, layouts), schedule=schedule)
            sizes = sizes_of(48, seed)
            groups = sync_groups(SPEC, plan)
            planner = StepPlanner(h100(SPEC), plan, groups, 4, "hierarchical", sizes.take, memory_bytes=60 * 2**30)
            planned = planner(GlobalBatch(tuple(range(48)), 0))
            yield planned.step.microbatches, planned.program.checksum
            prediction = planner.predict_batch(sizes)
            yield prediction.timeline.iteration_ms, [memory.total_gib for memory in prediction.memory.values()]


def searches() -> Iterator[Any]:
    for num_ranks, batch, frozen, order in ((2, 4, (), {}), (3, 6, ("vision",), {"schedule": "1f1b"})):
        sizes = sizes_of(3 * batch, num_ranks, ("vision", LANGUAGE_MODEL))
        never = dict.fromkeys(("vision", LANGUAGE_MODEL), False)
        costs = h100(model(frozen))
        problem = PlanningProblem(costs, sizes, num_ranks, batch, checkpointing=never, zero_stages=(0, 1), **order)
        found = search_plans(problem)
        yield found.num_candidates, found.num_simulated, found.reasons
        yield [(ranked.plan.to_json(), ranked.step_ms) for ranked in (found.best, *found.runners_up)]
    work = {name: np.maximum(own, 1) / 3 for name, own in sizes_of(2000, 5).tokens.items()}
    report = minimum_stable_batch(draw_from(work), lambda drawn: drawn, 16, 1, test=StabilityTest())
    yield report.batch_size, report.split, [trials.reference for trials in report.history]


def recoveries() -> Iterator[Any]:
    spec = model(tied=False)
    microbatches = TypicalMicrobatches(sizes_of(4, 0, tuple(spec.modules)), 2, 8)
    chain = model_chain(h100(spec), {}, microbatches, 60 * 2**30)
    planner = ResilientPlanner(PipelinePlans(chain, 1, 24), 9, 2)
    state = planner.first()
    yield [state.plan.to_json(), *(template.stages for template in planner.templates)]
    random = np.random.default_rng(0)
    for _ in range(4):
        lost = random.permutation(state.nodes)[:2].tolist()
        mended = planner.without(state, lost)
        yield mended.plan.to_json(), mended.nodes, mended.microbatches
        back = planner.with_nodes(mended, lost)
        yield back.plan.to_json(), back.nodes, back.microbatches


def fits() -> Iterator[Any]:
    random = np.random.default_rng(0)
    for _ in range(20):
        points = [
            MeasuredPoint(int(n), int(s), *(random.integers(1, 1000, 5) * float(n) / 700).tolist())
            for n, s in zip(random.integers(64, 4096, 7), random.integers(1, 5, 7), strict=True)
        ]
        yield [fit_curve(points, name).polynomial for name in ("forward", "weight_gradient", "activations")]
    for name, preset in SAMPLE_PRESETS.items():
        drawn = preset.draw_images(2000, 0)
        yield name, drawn.heights, drawn.widths, drawn.text_tokens


KINDS = (arrangements, tokens, schedules, searches, recoveries, fits)


def plain(value: Any) -> Any:
    """A value of which `json` makes the same text for the same numbers, to the last bit."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {str(key): plain(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(own) for own in value]
    return value if isinstance(value, (str, int, float, type(None))) else repr(value)


def digests() -> dict[str, str]:
    """Kind of decision -> digest of all its cases."""
    return {
        kind.__name__: hashlib.sha256(json.dumps([plain(case) for case in kind()]).encode()).hexdigest()
        for kind in KINDS
    }


if __name__ == "__main__":
    print(json.dumps(digests()))
