"""Split backwards: the closed form of their bubble, torch's own schedule, memory, no deadlock, and wrong programs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModulePlugin,
    MultimodalParallelPlugin,
    ParallelPlan,
    ShardingSettings,
    StepPlan,
)
from hf_mmparallel.plan.ownership import sync_groups
from hf_mmparallel.plan.resolve import resolve_plan
from hf_mmparallel.schedule import (
    Program,
    ProgramError,
    Timeline,
    build_graph,
    build_program,
    find_representatives,
    in_flight_limits,
    lower,
    order_tasks,
    simulate,
)
from hf_mmparallel.schedule.action_lists import PartActions, ProgramActions
from hf_mmparallel.schedule.kinds import KINDS
from hf_mmparallel.schedule.lowering import Proof, blocking_order
from hf_mmparallel.schedule.scheduler import default_cost
from tests.plan.specs import model_spec
from tests.schedule.builders import Case, cases, make_plan, make_step, module_spec, splitting
from tests.schedule.checker import check, check_program
from tests.schedule.torch_orders import torch_length_ms

VISION, LM = "vision", LANGUAGE_MODEL
PARTS = ("forward", "inputs", "weights")


def pipeline(num_ranks: int, num_microbatches: int, vp_size: int = 1) -> tuple[ParallelPlan, StepPlan]:
    """A language model whose stages may split their backwards."""
    count = num_ranks * vp_size
    _, plan = make_plan({LM: [[(i % num_ranks,) for i in range(count)]]}, {LM: module_spec(LM, count)})
    return splitting(plan), make_step({LM: [[[index] for index in range(num_microbatches)]]})


def timeline_of(plan: ParallelPlan, step: StepPlan, times_ms: np.ndarray) -> Timeline:
    """A step whose stages take `times_ms[part, stage]` for the parts of the work."""

    def cost(task) -> float:
        return float(sum(times_ms[PARTS.index(part), task.stage] for part in task.row.work if part in PARTS))

    return simulate(find_representatives(plan, ()), step, cost)


def most_between(timeline: Timeline, stage: int, first: Sequence[str], last: Sequence[str]) -> int:
    """The most microbatches of a stage that have begun with one of some kinds, and not ended with one of others."""
    changes = [
        (span.end_ms if span.task.kind in last else span.start_ms, -1 if span.task.kind in last else 1)
        for span in timeline.spans
        if span.task.stage == stage and span.task.kind in (*first, *last)
    ]
    return max(np.cumsum([change for _, change in sorted(changes)]).tolist())


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.1, 0.9), (1.0, 0.9, 1.1), (1.0, 1.3, 0.8)])
def test_the_bubble_of_equal_stages_is_that_of_the_closed_form(num_ranks, times):
    """
    Qi et al. 2023, table 2: `(p - 1) (F + I - W)` for ZB-H1; a step that ends with all of its gradients is never
    shorter than its work and the first forwards, `(p - 1) F`.
    """
    forward, inputs, weights = times
    for rounds in (1, 2, 4):
        count = num_ranks * rounds
        timeline = timeline_of(*pipeline(num_ranks, count), np.array(times)[:, None].repeat(num_ranks, axis=1))
        bubble_ms = timeline.iteration_ms - count * sum(times)
        assert bubble_ms == pytest.approx((num_ranks - 1) * max(forward + inputs - weights, forward))
        for stage in range(num_ranks):
            # memory of activations as under 1F1B, and in all no more than on its first stage
            assert most_between(timeline, stage, ("fwd",), ("bwd", "bwd_input")) <= num_ranks - stage
            assert most_between(timeline, stage, ("fwd",), ("bwd", "bwd_weight")) <= num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4, 6])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.3, 0.7)])
def test_more_memory_leaves_the_first_forwards_alone(num_ranks, times):
    """Qi et al. 2023, section 2.3: no rank of ZB-H2 waits between its first task and its last, if F = I = W."""
    plan, step = pipeline(num_ranks, 3 * num_ranks)
    timeline = timeline_of(
        replace(plan, schedule="zero_bubble_h2"), step, np.array(times)[:, None].repeat(num_ranks, axis=1)
    )
    work_ms = 3 * num_ranks * sum(times)
    assert timeline.iteration_ms == pytest.approx(work_ms + (num_ranks - 1) * times[0])
    if len(set(times)) == 1:
        for rank in range(num_ranks):
            spans = [span for span in timeline.spans if span.rank == rank]
            assert max(s.end_ms for s in spans) - min(s.start_ms for s in spans) == pytest.approx(work_ms)
    assert max(timeline.peak_in_flight.values()) == max(timeline.peak_held.values()) == 2 * num_ranks - 1


@pytest.mark.parametrize(("num_ranks", "vp_size", "num_microbatches"), [(2, 1, 4), (4, 1, 8), (8, 1, 32), (4, 2, 8)])
def test_unlike_stages_take_no_longer_than_in_the_order_of_torch(num_ranks, vp_size, num_microbatches):
    plan, step = pipeline(num_ranks, num_microbatches, vp_size)
    generator = np.random.default_rng(0)
    ratios = []
    for _ in range(10):
        times_ms = np.array([[1.0], [1.1], [0.9]]) * generator.uniform(0.9, 1.1, num_ranks * vp_size)
        theirs = torch_length_ms(ScheduleInterleavedZeroBubble, num_ranks, num_microbatches, times_ms)
        ratios.append(timeline_of(plan, step, times_ms).iteration_ms / theirs)
    assert np.median(ratios) <= 1.02, ratios


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.one_of(cases(split=True), cases(joint=True, split=True)), st.integers(0, 9))
def test_any_layout_ends_with_a_program_that_is_proved(case: Case, seed: int):
    times = np.random.default_rng(seed).uniform(0.0, 5.0, (len(KINDS), 8))

    def cost(task) -> float:
        return float(times[list(KINDS).index(task.kind), task.stage] * (1 + task.microbatch % 3))

    timeline = simulate(find_representatives(case.plan, case.sync_groups), case.step, cost)
    graph = timeline.graph
    assert len(timeline.end_ms) == graph.num_tasks and np.isfinite(timeline.end_ms).all()
    check_program(case.plan, case.step, case.sync_groups, build_program(case.plan, case.step, case.sync_groups, cost))
    # of a chunk there is a whole backward or both parts, and of joint tasks all are of one kind
    kinds: dict[tuple, set[str]] = {}
    for task in graph.tasks:
        kinds.setdefault(task.key, set()).add(task.kind)
    assert {frozenset(own - {"fwd"}) for own in kinds.values()} <= {
        frozenset(),
        frozenset({"bwd"}),
        frozenset({"bwd_input", "bwd_weight"}),
    }
    if graph.joint is not None:
        assert np.array_equal(graph.kind, graph.kind[graph.joint])
    sources = {message.source.kind for message in graph.messages if message.kind == "grad"}
    assert sources <= {"bwd", "bwd_input"}


def test_a_stage_splits_where_weights_are_enough_of_its_backward():
    spec = model_spec()

    def splits(schedule="zero_bubble", **settings_of_module) -> list[bool]:
        plan = resolve_plan(spec, {LM: ModulePlugin(pp_size=2, **settings_of_module)}, schedule=schedule)
        assert ParallelPlan.from_dict(plan.to_dict()) == plan
        return [stage.splits_backward for _, _, stage in plan.modules[LM].stages()]

    assert splits() == [True, True] and splits("1f1b") == [False, False]
    assert splits("1f1b", split_backward=True) == [True, True] and splits(split_backward=False) == [False, False]
    assert splits(activation_checkpointing=True) == [False, False]
    assert splits(activation_checkpointing=True, split_backward=True) == [True, True]
    # of a stage with too little to train a user may want it all the same
    few = [r"layers\.0\.mlp", r"layers\.1\.", "embed", r"layers\.2"]
    assert splits(freeze=few) == [False, True] and splits(freeze=few, split_backward=True) == [True, True]
    alone = {VISION: ModulePlugin(freeze=True), LM: ModulePlugin(split_backward=True)}  # sends no gradient
    for modules in ({LM: ModulePlugin(pp_size=2, freeze=True, split_backward=True)}, alone):
        with pytest.raises(ValueError, match="split_backward"):
            resolve_plan(spec, modules)
    assert not resolve_plan(spec, {}, schedule="zero_bubble").modules[VISION].splits_backward
    # nothing before the second stage is trained
    frozen = {VISION: ModulePlugin(freeze=True), LM: ModulePlugin(pp_size=2, freeze=["embed", r"layers\.[01]\."])}
    assert not resolve_plan(spec, frozen, schedule="zero_bubble").modules[LM].splits_backward
    # ZeRO-2 divides gradients of experts at once, which would be whole until those of linear layers come
    language = spec.modules[LM]
    experts = replace(language.parameters[1], name="model.language_model.layers.0.experts", shape=(4, 16, 16))
    mixture = replace(language, parameters=(*language.parameters, experts))
    for zero_stage in (1, 2):
        sizes = {LM: ModulePlugin(dp_size=2, pp_size=2, zero_stage=zero_stage)}
        plan = resolve_plan(replace(spec, modules={**spec.modules, LM: mixture}), sizes, schedule="zero_bubble")
        assert plan.modules[LM].splits_backward == (zero_stage == 1)
    with pytest.raises(ValueError, match="split_backward"):
        MultimodalParallelPlugin({LM: ModulePlugin(split_backward=True)}, auto=True)
    MultimodalParallelPlugin(schedule="zero_bubble", auto=True)  # which the search keeps


def test_a_text_only_replica_splits_with_the_one_that_it_runs_jointly_with():
    spec, plan = make_plan({VISION: [[(0,)]], LM: [[(1,)], [(2,)]]})
    sharding = replace(plan.modules[LM].sharding, zero_stage=2)
    plan = splitting(replace(plan, modules={**plan.modules, LM: replace(plan.modules[LM], sharding=sharding)}), [LM])
    step = make_step({VISION: [[[0]]], LM: [[[0]], [[1]]]})  # sample 1 has no image, so that its gradient goes nowhere
    graph = build_graph(plan, step)
    kinds = {replica: {task.kind for task in graph.tasks if task.stage_key == (LM, replica, 0)} for replica in (0, 1)}
    assert kinds[0] == kinds[1] == {"fwd", "bwd_input", "bwd_weight"}
    build_program(plan, step, sync_groups(spec, plan))


def changes_of(rows: PartActions, words: Sequence[str], joint: bool) -> Iterator[tuple[str, PartActions]]:
    """Lists with one mistake that only split backwards allow, each with the name of its class."""
    graph = rows.graph
    weight, sums = (graph.kind == words.index("bwd_weight")), rows.first_sum
    for rank, (start, stop) in enumerate(pairwise(rows.starts.tolist())):
        own = rows.codes[start:stop].tolist()
        tasks = [code for code in own if code < graph.num_tasks]
        for code in (code for code in tasks if weight[code]):
            at, before = own.index(code), own.index(int(graph.after[code]))
            changed = own.copy()
            changed[at], changed[before] = changed[before], changed[at]
            yield "weights before inputs", with_list(rows, rank, changed)
            behind = [place for place, other in enumerate(own) if other >= sums]
            if behind:
                yield "weights behind their sum", with_list(rows, rank, [*own[:at], *own[at + 1 :], code])
            if joint:
                yield "only one of joint tasks", with_list(rows, rank, [other for other in own if other != code])
                place = tasks.index(code)
                if place + 1 < len(tasks):
                    following = own.index(tasks[place + 1])
                    changed = own.copy()
                    changed[at], changed[following] = changed[following], changed[at]
                    yield "one of joint tasks elsewhere", with_list(rows, rank, changed)


def with_list(rows: PartActions, rank: int, codes: Sequence[int]) -> PartActions:
    """The lists with another one of a rank."""
    lists = [rows.codes[start:stop] for start, stop in pairwise(rows.starts.tolist())]
    lists[rank] = np.array(codes, np.int64)
    starts = np.cumsum([0, *map(len, lists)])
    return PartActions(rows.graph, starts, np.concatenate(lists), rows.list_of)


@pytest.mark.parametrize("joint", [False, True])
def test_wrong_programs_of_split_backwards_are_refused(joint):
    """By the proof, and by the checker, which runs the lists."""
    sharding = {LM: ShardingSettings(2)} if joint else {}
    spec, plan = make_plan({VISION: [[(0,)]], LM: [[(1,), (2,)], [(3,), (4,)]]}, sharding=sharding)
    plan, rows_of = splitting(plan), [[[0], [1], [2]], [[3], [4], [5]]]
    step = make_step({VISION: [[[0, 3], [1, 4], [2, 5]]], LM: rows_of})
    groups = sync_groups(spec, plan)
    graph = build_graph(plan, step)
    order = order_tasks(plan, graph, [default_cost(task) for task in graph.tasks], in_flight_limits(plan, step))
    rows, places = lower(plan, graph, order, groups), blocking_order(graph, order, groups)
    assert Proof(plan, graph, groups, rows).breach(places) is None
    check(plan, graph, groups, Program(dict(ProgramActions([rows]))), is_part=True)
    refused = Counter[str]()
    for name, mutant in changes_of(rows, list(KINDS), joint):
        assert Proof(plan, graph, groups, mutant).breach(places) is not None, name
        if name == "one of joint tasks elsewhere":
            # harmless where no other rank waits for the task that it changes places with
            with suppress(ProgramError):
                check(plan, graph, groups, Program(dict(ProgramActions([mutant]))), is_part=True)
                continue
        else:
            with pytest.raises(ProgramError):
                check(plan, graph, groups, Program(dict(ProgramActions([mutant]))), is_part=True)
        refused[name] += 1
    assert min(refused.values()) >= 3 and len(refused) == (4 if joint else 2), refused
