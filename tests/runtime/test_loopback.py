"""The executor over messages in memory equals one process, whatever the layout, the arrangement and the freezing."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, ContextSettings, ModulePlan, ParallelPlan, Stage, StepPlan
from hf_mmparallel.plan.methods import SCHEDULES, Schedule
from hf_mmparallel.plan.ownership import trainable_stages
from tests import tiny
from tests.deep_cases import third
from tests.runtime.loopback import LoopbackTransport, LoopbackWorld, Outcome, assert_close, reference, run_loopback
from tests.schedule.builders import splitting

torch.set_num_threads(1)

CONTEXT = ContextSettings(block=8)
FREEZE = {
    "nothing": [],
    "vision": ["vision", "visual"],
    "encoders": ["vision", "visual", "projector", "audio"],
    "tower": ["vision_tower", "visual.blocks"],
    "language model": ["language_model", "lm_head"],
    "all but the projector": ["vision_tower", "visual.blocks", "visual.patch_embed", "language_model", "lm_head"],
    "first layers": [r"language_model.layers.0", r"embed_tokens"],
    "vision and first layers": ["vision", "projector", "visual", r"language_model.layers.0", r"embed_tokens"],
    "last layers": [r"language_model.layers.3", r"lm_head", "norm"],
}


@functools.cache
def frozen_model(family: str, freeze: str):
    """A tiny model with some parameters frozen; never changed."""
    model = tiny.FAMILIES[family]().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(pattern in name for pattern in FREEZE[freeze]))
    return model, build_model_spec(model)


@dataclass
class Case:
    family: str
    freeze: str
    plan: ParallelPlan
    step: StepPlan
    max_items: int
    seed: int

    @property
    def dataset(self) -> list[dict]:
        return tiny.make_dataset(self.family, len(self.step.samples), self.seed, self.max_items)


def run(case: Case, dataset: Any = None, **options: Any) -> Outcome:
    model, _ = frozen_model(case.family, case.freeze)
    return run_loopback(model, case.plan, case.step, dataset or case.dataset, tiny.collate(case.family), **options)


def check(case: Case, training: bool = True, **options: Any) -> Outcome:
    """Compares with one process."""
    model, _ = frozen_model(case.family, case.freeze)
    loss, count, gradients = reference(model, tiny.collate(case.family)(case.dataset))
    found = run(case, training=training, **options)
    assert found.num_targets == count
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert_close(found.gradients, gradients if training else {})
    return found


def assemble(spec, replicas: dict[str, list[list[tuple[tuple[int, int], Any]]]], schedule) -> ParallelPlan:
    """`replicas[module][replica]` are (layers, rank, or ranks that share a row of tokens) of each stage."""
    modules = {}
    for name, rows in replicas.items():
        module = spec.modules[name]
        stages = []
        for row in rows:
            trainable = trainable_stages(module, spec.tied, [layers for layers, _ in row])
            stages.append(
                tuple(
                    Stage(layers, tuple((rank,) for rank in ([ranks] if isinstance(ranks, int) else ranks)), t)
                    for (layers, ranks), t in zip(row, trainable, strict=True)
                )
            )
        modules[name] = ModulePlan(tuple(stages), context=CONTEXT)
    return ParallelPlan(modules, spec.edges, schedule)


@st.composite
def plans(draw, spec) -> ParallelPlan:
    """
    Any number of replicas with stages of their own each, encoders on ranks of their own or among the others'. Ranks of
    the language model may share the tokens of a row.
    """
    replicas, used = {}, 0
    shared = draw(st.booleans())
    cp_size = draw(st.sampled_from([1, 1, 2, 3])) if len(spec.encoders) == 1 else 1
    for name in (LANGUAGE_MODEL, *spec.encoders):
        module = spec.modules[name]
        most = 2 if name != LANGUAGE_MODEL else 3
        rows = []
        for _ in range(draw(st.integers(1, 3))):
            count = draw(st.integers(1, most))
            inner = st.sets(st.integers(1, module.num_layers - 1), min_size=count - 1, max_size=count - 1)
            bounds = [0, *sorted(draw(inner)), module.num_layers]
            row = []
            for layers in zip(bounds, bounds[1:], strict=False):
                if shared and name != LANGUAGE_MODEL:
                    rank = draw(st.integers(0, used - 1))
                else:
                    count = cp_size if name == LANGUAGE_MODEL else 1
                    rank, used = tuple(range(used, used + count)), used + count
                row.append((layers, rank))
            rows.append(row)
        replicas[name] = rows
    ordered = {name: replicas[name] for name in spec.modules}
    plan = assemble(spec, ordered, draw(st.sampled_from(SCHEDULES)))
    return splitting(plan) if draw(st.booleans()) else plan


def has_items(module: str, batch_index: int, max_items: int) -> bool:
    """Whether a sample of the tiny datasets has something for an encoder."""
    return (batch_index + (module != "audio")) % (max_items + 1) > 0


@st.composite
def steps(draw, plan: ParallelPlan, dataset_size: int, max_items: int) -> StepPlan:
    """The contiguous arrangement; deferral, with what has nothing for an encoder left out of it; or any other."""
    kind = draw(st.sampled_from(["contiguous", "deferral", "deferral", "any"]))
    if kind == "contiguous":
        return contiguous_step(plan, range(dataset_size), draw(st.integers(1, 4)))
    count = draw(st.integers(1, 4))
    taken: dict[int, int] = {}
    microbatches = {}
    for name in (LANGUAGE_MODEL, *(name for name in plan.modules if name != LANGUAGE_MODEL)):
        # An encoder may have more microbatches than the language model, of which the last ones may be empty.
        count += draw(st.integers(0, 1)) if name != LANGUAGE_MODEL else 0
        most = draw(st.integers(1, 3)) if kind == "any" else count
        rows = [[[] for _ in range(most)] for _ in range(plan.modules[name].dp_size)]
        for batch_index in draw(st.permutations(range(dataset_size))):
            needed = name == LANGUAGE_MODEL or has_items(name, batch_index, max_items)
            if not needed and (kind == "deferral" or draw(st.booleans())):
                continue
            index = draw(st.integers(0, most - 1))
            if kind == "deferral" and name != LANGUAGE_MODEL:
                index = max(0, taken[batch_index] - draw(st.integers(0, 1)))
            elif name == LANGUAGE_MODEL:
                taken[batch_index] = index
            draw(st.sampled_from(rows))[index].append(batch_index)
        microbatches[name] = tuple(tuple(tuple(batch_indices) for batch_indices in row) for row in rows)
    targets = {edge.source: (edge.target,) for edge in plan.edges}
    return StepPlan(tuple(range(dataset_size)), {name: microbatches[name] for name in plan.modules}, targets)


@st.composite
def cases(draw) -> Case:
    family = draw(st.sampled_from(["llava", "llava", "qwen3_vl", "gemma3", "qwen2_5_omni"]))
    freeze = draw(st.sampled_from(list(FREEZE)))
    _, spec = frozen_model(family, freeze)
    plan = draw(plans(spec))
    max_items = draw(st.sampled_from([2, 2, 1, 0]))
    step = draw(steps(plan, draw(st.integers(1, 9)), max_items))
    step.check(plan)
    return Case(family, freeze, plan, step, max_items, draw(st.integers(0, 5)))


@settings(max_examples=16, print_blob=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_layout_equals_one_process(case):
    note(f"{case.family}, {case.freeze} frozen: {case.plan.to_json()}\n{case.step}")
    check(case)


def case_of(family: str, freeze: str, rows: dict, microbatches: dict, schedule: Schedule = "1f1b") -> Case:
    """`rows` as in `assemble`, `microbatches[module][replica][microbatch]` batch indices."""
    _, spec = frozen_model(family, freeze)
    plan = assemble(spec, {name: rows[name] for name in spec.modules}, schedule)
    frozen = {n: tuple(tuple(tuple(m) for m in r) for r in rows) for n, rows in microbatches.items()}
    size = sum(len(batch_indices) for replica in frozen[LANGUAGE_MODEL] for batch_indices in replica)
    step = StepPlan(tuple(range(size)), frozen, dict.fromkeys(spec.encoders, (LANGUAGE_MODEL,)))
    step.check(plan)
    return Case(family, freeze, plan, step, 2, 0)


CUT = [((0, 1), (2, 3)), ((1, 4), (4, 5))]
ONE, TWO = [((0, 4), 0)], [((0, 2), 1), ((2, 4), 2)]
OUT_OF_ORDER = (
    "qwen3_vl",
    "nothing",
    {"vision": [ONE, [((0, 4), 3)]], LANGUAGE_MODEL: [TWO]},
    {"vision": [[[3], [0]], [[], [4, 1]]], LANGUAGE_MODEL: [[[1, 3], [], [0, 2, 4]]]},
)
# Samples 2 and 5 have no image, samples 0 and 3 no sound; both encoders defer other samples.
TWO_ENCODERS = (
    {"vision": [ONE], "audio": [[((0, 2), 5), ((2, 4), 6)]], LANGUAGE_MODEL: [TWO, [((0, 4), 3)]]},
    {
        "vision": [[[0, 1, 3], [4], []]],
        "audio": [[[1], [4, 2, 5], [], []]],
        LANGUAGE_MODEL: [[[0], [1, 2]], [[], [3, 4], [5]]],
    },
)
FIXED = {
    "two encoder copies feed a microbatch out of order": OUT_OF_ORDER,
    "a text chunk of a trained encoder before a frozen language model": (
        "llava",
        "language model",
        {"vision": [ONE], LANGUAGE_MODEL: [[((0, 4), 1)]]},
        {"vision": [[[0, 1], [2]]], LANGUAGE_MODEL: [[[0, 1], [2]]]},
    ),
    "two copies of two stages, each on two ranks, and a chunk without images": (
        "qwen3_vl",
        "nothing",
        {"vision": [ONE, [((0, 4), 1)]], LANGUAGE_MODEL: [CUT, [((0, 4), (6, 7))]]},
        {"vision": [[[0, 1]], [[3], [4]]], LANGUAGE_MODEL: [[[1, 4]], [[0, 2], [3]]]},
    ),
    "a trained projector, a sample of which some ranks have no image": (
        "llava",
        "all but the projector",
        {"vision": [ONE], LANGUAGE_MODEL: [[((0, 2), (1, 2, 3)), ((2, 4), (4, 5, 6))]]},
        {"vision": [[[0]]], LANGUAGE_MODEL: [[[0]]]},
    ),
    "copies with one and two stages share the encoder's ranks": (
        "gemma3",
        "first layers",
        {"vision": [ONE, [((0, 3), 2), ((3, 4), 1)]], LANGUAGE_MODEL: [TWO, ONE]},
        {"vision": [[[0], [3]], [[1], [4]]], LANGUAGE_MODEL: [[[0], [1]], [[4, 2], [3]]]},
    ),
    "two encoders that defer": ("qwen2_5_omni", "nothing", *TWO_ENCODERS),
}


@pytest.mark.parametrize("name", third(FIXED))
def test_a_fixed_case_equals_one_process(name):
    check(case_of(*FIXED[name]))


@pytest.mark.parametrize(
    "name", [name for name, (_, freeze, *_) in FIXED.items() if freeze in ("nothing", "first layers")]
)
def test_split_backwards_give_the_bits_of_whole_ones(name):
    case = case_of(*FIXED[name])
    found = [run(replace(case, plan=plan)) for plan in (case.plan, splitting(case.plan))]
    kinds = [{task.kind for result in one.results for task, *_ in result.marks} for one in found]
    assert kinds[0] == {"fwd", "bwd"} and {"fwd", "bwd_input", "bwd_weight"} <= kinds[1]
    whole, split = (one.gradients for one in found)
    assert found[0].loss == found[1].loss and whole.keys() == split.keys()
    assert [name for name in whole if not torch.equal(whole[name], split[name])] == []


def test_evaluation_gives_the_loss_and_no_gradients():
    check(case_of(*OUT_OF_ORDER), training=False)


class NotingTransport(LoopbackTransport):
    """Notes what is sent and when a send is waited for; a send is complete only then."""

    def __init__(self, rank: int, world: LoopbackWorld, log: list[tuple[str, int, int, torch.dtype | None]]):
        super().__init__(rank, world)
        self.log = log

    def send(self, tensor: torch.Tensor, target: int) -> Any:
        self.log.append(("send", self.rank, target, tensor.dtype))
        super().send(tensor, target)
        return self

    def wait(self) -> None:
        self.log.append(("wait", self.rank, -1, None))

    def is_completed(self) -> bool:
        return False


def test_a_frozen_encoder_waits_for_no_send_before_its_last_one():
    log: list = []
    case = case_of("qwen2_5_omni", "encoders", *TWO_ENCODERS, schedule="eager")
    check(case, transport=lambda rank, world: NotingTransport(rank, world, log))
    for rank in (0, 5, 6):
        own = [kind for kind, other, *_ in log if other == rank]
        count = own.count("send")
        assert count >= 3 and own == ["send"] * count + ["wait"] * count


def test_a_sample_that_no_encoder_takes_is_named():
    rows = {"vision": [ONE], LANGUAGE_MODEL: [TWO]}
    case = case_of("llava", "nothing", rows, {"vision": [[[0]]], LANGUAGE_MODEL: [[[0], [1, 2]]]})
    case = replace(case, step=replace(case.step, samples=(7, 8, 9)))
    with pytest.raises(ValueError, match="Sample 8 has 8 placeholders of `image`"):
        run(case, dict(zip(case.step.samples, case.dataset, strict=True)))


def test_frozen_layers_before_the_first_trained_one_run_no_backward():
    rows = {"vision": [ONE], LANGUAGE_MODEL: [[((0, 1), 1), ((1, 4), 2)]]}
    microbatches = {"vision": [[[0, 1]]], LANGUAGE_MODEL: [[[0], [1]]]}
    found = check(case_of("llava", "vision and first layers", rows, microbatches))
    ran = [{timed.task.kind for timed in result.record.timeline} for result in found.results]
    assert ran == [{"fwd"}, {"fwd"}, {"fwd", "bwd"}]


def test_each_edge_has_its_dtype_and_rounds_nothing_that_one_process_does_not_round():
    rows = {"vision": [ONE], "audio": [[((0, 4), 1)]], LANGUAGE_MODEL: [[((0, 2), 2), ((2, 4), 3)]]}
    case = case_of("qwen2_5_omni", "nothing", rows, dict.fromkeys(rows, [[[0, 1, 2, 3]]]))
    model = tiny.FAMILIES[case.family]().train()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "audio" in name else torch.bfloat16)
    collator, log = tiny.collate(case.family), []
    loss, _, gradients = reference(model, collator(case.dataset))
    found = run_loopback(
        model,
        case.plan,
        case.step,
        case.dataset,
        collator,
        transport=lambda rank, world: NotingTransport(rank, world, log),
    )
    sent = {(source, target, dtype) for kind, source, target, dtype in log if kind == "send"}
    edges = {(0, 2, torch.bfloat16), (1, 2, torch.float32), (2, 3, torch.bfloat16)}
    assert sent == edges | {(target, source, dtype) for source, target, dtype in edges}
    assert found.loss == loss
    assert_close(found.gradients, gradients, tolerance=1e-6)
