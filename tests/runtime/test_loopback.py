"""The executor over messages in memory equals one process, whatever the layout, the arrangement and the freezing."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    Edge,
    ModulePlan,
    ParallelPlan,
    Stage,
    StepPlan,
)
from hf_mmparallel.plan.ownership import trainable_stages
from tests import tiny
from tests.runtime.loopback import assert_close, reference, run_loopback

torch.set_num_threads(1)

FREEZE = {
    "nothing": [],
    "vision": ["vision", "visual"],
    "tower": ["vision_tower", "visual.blocks"],
    "language model": ["language_model", "lm_head"],
    "all but the projector": ["vision_tower", "visual.blocks", "visual.patch_embed", "language_model", "lm_head"],
    "first layers": [r"language_model.layers.0", r"embed_tokens"],
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


def check(case: Case) -> None:
    model, _ = frozen_model(case.family, case.freeze)
    collator = tiny.collate(case.family)
    loss, count, gradients = reference(model, collator(case.dataset))
    found = run_loopback(model, case.plan, case.step, case.dataset, collator)
    assert found.num_targets == count
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert_close(found.gradients, gradients)


def assemble(spec, replicas: dict[str, list[list[tuple[tuple[int, int], int]]]], schedule) -> ParallelPlan:
    """`replicas[module][replica]` are (layers, rank) of each stage."""
    modules = {}
    for name, rows in replicas.items():
        module = spec.modules[name]
        stages = []
        for row in rows:
            trainable = trainable_stages(module, spec.tied, [layers for layers, _ in row])
            stages.append(
                tuple(Stage(layers, ((rank,),), t) for (layers, rank), t in zip(row, trainable, strict=True))
            )
        modules[name] = ModulePlan(tuple(stages))
    edges = tuple(Edge(n, LANGUAGE_MODEL, tuple(f.layer for f in spec.modules[n].features)) for n in spec.encoders)
    return ParallelPlan(modules, edges, schedule)


@st.composite
def plans(draw, spec) -> ParallelPlan:
    """Any number of replicas with stages of their own each, encoders on ranks of their own or among the others'."""
    replicas, used = {}, 0
    shared = draw(st.booleans())
    for name in (LANGUAGE_MODEL, *spec.encoders):
        module = spec.modules[name]
        most = 1 if module.inner_features else 2 if name != LANGUAGE_MODEL else 3
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
                    rank, used = used, used + 1
                row.append((layers, rank))
            rows.append(row)
        replicas[name] = rows
    ordered = {name: replicas[name] for name in spec.modules}
    return assemble(spec, ordered, draw(st.sampled_from(["1f1b", "gpipe"])))


@st.composite
def steps(draw, plan: ParallelPlan, dataset_size: int, max_items: int) -> StepPlan:
    """The contiguous arrangement, or any other; samples without images may be left out of the encoder."""
    if draw(st.booleans()):
        return contiguous_step(plan, range(dataset_size), draw(st.integers(1, 4)))
    microbatches = {}
    for name, module in plan.modules.items():
        rows = [[[] for _ in range(draw(st.integers(1, 3)))] for _ in range(module.dp_size)]
        for slot in draw(st.permutations(range(dataset_size))):
            text_only = (slot + 1) % (max_items + 1) == 0
            if name == LANGUAGE_MODEL or not text_only or draw(st.booleans()):
                row = draw(st.sampled_from(rows))
                draw(st.sampled_from(row)).append(slot)
        microbatches[name] = tuple(tuple(tuple(slots) for slots in row) for row in rows)
    targets = {edge.source: (edge.target,) for edge in plan.edges}
    return StepPlan(tuple(range(dataset_size)), microbatches, targets)


@st.composite
def cases(draw) -> Case:
    family = draw(st.sampled_from(["llava", "llava", "qwen3_vl", "gemma3"]))
    freeze = draw(st.sampled_from(list(FREEZE)))
    _, spec = frozen_model(family, freeze)
    plan = draw(plans(spec))
    max_items = draw(st.sampled_from([2, 2, 1, 0]))
    step = draw(steps(plan, draw(st.integers(1, 9)), max_items))
    step.check(plan)
    return Case(family, freeze, plan, step, max_items, draw(st.integers(0, 5)))


@settings(max_examples=25, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_layout_equals_one_process(case):
    note(f"{case.family}, {case.freeze} frozen: {case.plan.to_json()}\n{case.step}")
    check(case)
