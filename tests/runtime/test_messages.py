"""Features arrive in place on every rank, and their gradients take the adjoint way back: executor and transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hf_mmparallel.data.context_tokens import ContextSharder
from hf_mmparallel.data.step_batch import StepData
from hf_mmparallel.data.step_dataset import RankInputs
from hf_mmparallel.kernels.bitfield_attention import encode_words
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ContextSettings,
    Edge,
    FeatureSpec,
    ModelSpec,
    ModulePlan,
    ModuleSpec,
    ParallelPlan,
    ParameterSpec,
    Stage,
    StepPlan,
    sync_groups,
)
from hf_mmparallel.runtime import message_queues
from hf_mmparallel.runtime.executor import Executor, StepFunctions
from hf_mmparallel.runtime.groups import ProcessGroups
from hf_mmparallel.runtime.message_queues import DistributedTransport, Transport
from hf_mmparallel.schedule import Program, build_program
from hf_mmparallel.world import World
from tests.distributed import run_distributed
from tests.runtime.loopback import LoopbackWorld, Membership, ThreadCollectives, ThreadGroup, run_threads

WIDTH = 3
PLACEHOLDERS = {"image": 1, "video": 2}
SIZES = st.integers(1, 4)
BOOLEANS = st.booleans()
WORLD_SIZE = 5


@dataclass
class Case:
    spec: ModelSpec
    plan: ParallelPlan
    step: StepPlan
    rows: dict[int, dict[str, int]]
    seed: int

    @property
    def program(self) -> Program:
        return build_program(self.plan, self.step, sync_groups(self.spec, self.plan))

    def values(self, salt: int) -> dict[tuple[int, int], torch.Tensor]:
        """(feature, batch index) -> whole numbers `[rows, WIDTH]`, which float64 adds without rounding."""
        generator = torch.Generator().manual_seed(100 * self.seed + salt)
        features = self.spec.modules["vision"].features
        return {
            (index, batch_index): torch.randint(
                -50, 50, (rows[feature.modality], WIDTH), generator=generator, dtype=torch.int64
            ).double()
            for index, feature in enumerate(features)
            for batch_index, rows in self.rows.items()
        }

    def packed(self, batch_indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """
        The tokens of samples in one row: a text token, then the placeholders of both modalities among each other.
        `origin` is the sample of each token, and its place among those of its kind.
        """
        columns = []
        for number, batch_index in enumerate(batch_indices, 1):
            tokens = [(0, batch_index, 0, number)]
            for modality, token in PLACEHOLDERS.items():
                tokens += [(token, batch_index, row, number) for row in range(self.rows[batch_index][modality])]
            columns += sorted(tokens, key=lambda token: (token[0] > 0, token[2]))
        ids, origins, rows, segments = torch.tensor(columns).T[:, None]
        return {
            "input_ids": ids,
            "labels": ids,
            "origin": torch.stack([origins, rows], -1),
            "attention_words": encode_words(segments),
        }


@st.composite
def cases(draw, sharing: st.SearchStrategy[bool] = BOOLEANS) -> Case:
    """
    An encoder and a decoder of one or two stages on any grids, which may share ranks, in any order; any samples in any
    order. The decoder's grid has one or several rows.
    """
    layers = draw(st.sampled_from([[0], [0, 0], [0, 1], [0, 0, 1]]))
    modalities = [draw(st.sampled_from(["image", "video"])) for _ in layers]
    features = tuple(FeatureSpec(m, f"f{i}", layers[i]) for i, m in enumerate(modalities))
    specs = {}
    for name, own in (("vision", features), (LANGUAGE_MODEL, ())):
        weights = tuple(ParameterSpec(f"{name}.{layer}", (1,), layer, "float64") for layer in range(2))
        specs[name] = ModuleSpec(name, name, 2, WIDTH, 12, 12, 12, weights, own)
    spec = ModelSpec(specs, placeholders=PLACEHOLDERS)
    shared = draw(sharing)
    modules, first = {}, 0
    for name, ranges in (("vision", [(0, 2)]), (LANGUAGE_MODEL, draw(st.sampled_from([[(0, 2)], [(0, 1), (1, 2)]])))):
        tp_size = draw(SIZES)
        cp_size = draw(st.integers(1, 1 if name == "vision" else 5 // tp_size))
        num_ranks = cp_size * tp_size
        rows = []
        for _ in range(draw(st.integers(1, 2))):
            stages = []
            for layers in ranges:
                if shared:
                    ranks = tuple(draw(st.permutations(range(WORLD_SIZE)))[:num_ranks])
                else:
                    ranks, first = tuple(range(first, first + num_ranks)), first + num_ranks
                grid = tuple(ranks[start : start + tp_size] for start in range(0, num_ranks, tp_size))
                stages.append(Stage(layers, grid))
            rows.append(tuple(stages))
        method = draw(st.sampled_from(["lpt", "zigzag", "random"]))
        modules[name] = ModulePlan(tuple(rows), context=ContextSettings(method, "row", draw(st.integers(1, 4))))
    plan = ParallelPlan(modules, (Edge("vision", LANGUAGE_MODEL, tuple(f.layer for f in features)),))
    batch_indices = range(draw(st.integers(1, 6)))
    rows = {batch_index: {m: draw(st.integers(0, 5)) for m in ("image", "video")} for batch_index in batch_indices}
    microbatches = {}
    for name, module in modules.items():
        boxes = [[[] for _ in range(2)] for _ in range(module.dp_size)]
        for batch_index in draw(st.permutations(batch_indices)):
            if name == LANGUAGE_MODEL or any(rows[batch_index].values()) or draw(st.booleans()):
                boxes[draw(st.integers(0, module.dp_size - 1))][draw(st.integers(0, 1))].append(batch_index)
        microbatches[name] = tuple(tuple(tuple(box) for box in row) for row in boxes)
    step = StepPlan(tuple(batch_indices), microbatches, {"vision": (LANGUAGE_MODEL,)})
    return Case(spec, plan, step, rows, draw(st.integers(0, 9)))


class EncoderStage:
    """Its output are leaves with the given values, so that their gradient is what came back."""

    own_layers: Mapping[int, Any] = {}

    def __init__(self, case: Case, x: dict, leaves: dict):
        self.case, self.x, self.leaves = case, x, leaves

    def __call__(self, batch, hidden, features):
        outputs = []
        for index in range(len(self.case.spec.modules["vision"].features)):
            pieces = [self.x[index, batch_index].clone().requires_grad_() for batch_index in batch["batch_indices"]]
            for batch_index, piece in zip(batch["batch_indices"], pieces, strict=True):
                self.leaves[index, batch_index] = piece
            outputs.append(torch.cat(pieces))
        return outputs


class DecoderStage:
    """Adds the features' products with `y` to what it received, and notes the features."""

    def __init__(self, case: Case, y: dict, seen: dict):
        self.case, self.y, self.seen = case, y, seen

    def input_shapes(self, batch):
        return [torch.Size((1, 1, WIDTH))]

    def __call__(self, batch, hidden, features):
        total = hidden[0] if hidden else torch.zeros(1, 1, WIDTH, dtype=torch.float64, requires_grad=True)
        for index, rows in enumerate(features.get("vision", ())):
            if rows is None:
                continue
            modality = self.case.spec.modules["vision"].features[index].modality
            held = batch["input_ids"][0] == PLACEHOLDERS[modality]
            for (batch_index, place), row in zip(batch["origin"][0, held].tolist(), rows, strict=True):
                self.seen.setdefault((index, batch_index), {})[place] = row.detach().clone()
                total = total + (row * self.y[index, batch_index][place]).sum() / WIDTH
        return [total]


Outcome = tuple[float, dict, dict]


def run_rank(case: Case, rank: int, transport: Transport, groups: Mapping[tuple[int, ...], Any]) -> Outcome:
    """A step on one rank: the loss, the features that it saw, the gradients of its encoder's outputs."""
    x, y = case.values(1), case.values(2)
    leaves, seen, stages = {}, {}, {}
    for name, replica, index in case.plan.stages_of_rank(rank):
        made = EncoderStage(case, x, leaves) if name == "vision" else DecoderStage(case, y, seen)
        stages[name, replica, index] = made
    sharder = ContextSharder(case.plan, rank, PLACEHOLDERS, frozenset())
    batches = {
        key: {"batch_indices": batch_indices, **case.packed(batch_indices)}
        for key, batch_indices in RankInputs(case.plan, rank).chunks(case.step).items()
    }
    cuts = {key: sharder(case.packed(batch_indices)) for key, batch_indices in sharder.chunks(case.step).items()}
    executor = Executor(
        case.plan,
        case.spec,
        stages,
        transport,
        groups,
        StepFunctions(lambda logits, labels, shifted: (logits.sum(), torch.tensor(1))),
        torch.device("cpu"),
    )
    result = executor.run(case.program, StepData(case.step, batches, cuts))
    loss = sum(
        float(loss)
        for task, (loss, _) in result.losses.items()
        if rank in [tp_group[0] for tp_group in case.plan.stage(*task.stage_key).mesh]
    )
    return loss, seen, {key: leaf.grad for key, leaf in leaves.items()}


def run_in_threads(case: Case) -> list[Outcome]:
    """A step on ranks that are threads, with collectives of their own."""
    stages = [stage for module in case.plan.modules.values() for _, _, stage in module.stages()]
    groups = {ranks: ThreadGroup(ranks) for stage in stages for ranks in (*stage.mesh, *stage.cp_groups)}
    world = LoopbackWorld(5.0)

    def body(rank: int) -> Outcome:
        members = {row: Membership(group, rank) for row, group in groups.items() if rank in row}
        return run_rank(case, rank, world.transport(rank), members)

    return run_threads(body, case.plan.world_size)


def run_in_processes(cases: Sequence[Case]) -> list[Outcome]:
    """A step of each case on this rank, over the groups that training makes."""
    outcomes = []
    for case in cases:
        groups = ProcessGroups(case.plan, sync_groups(case.spec, case.plan), World())
        outcomes.append(run_rank(case, dist.get_rank(), DistributedTransport(World()), groups.by_ranks))
    return outcomes


def assert_exact_and_adjoint(case: Case, outcomes: Sequence[Outcome]) -> None:
    """Every rank saw the features of its tokens, and every encoder rank got their gradients."""
    x, y = case.values(1), case.values(2)
    taken = [batch_index for row in case.step.microbatches["vision"] for box in row for batch_index in box]
    where = {batch_index: case.step.location_of["vision", batch_index][0] for batch_index in taken}
    for index, feature in enumerate(case.spec.modules["vision"].features):
        for batch_index in taken:
            replica = case.step.location_of[LANGUAGE_MODEL, batch_index][0]
            for stage in case.plan.modules[LANGUAGE_MODEL].replicas[replica]:
                if stage.layers[0] <= feature.layer < stage.layers[1]:
                    for column in stage.cp_groups:  # together its ranks saw each row once
                        seen = [
                            item for rank in column for item in outcomes[rank][1].get((index, batch_index), {}).items()
                        ]
                        assert sorted(place for place, _ in seen) == list(range(len(x[index, batch_index])))
                        for place, row in seen:
                            assert torch.equal(row, x[index, batch_index][place]), (column, index, batch_index, place)
            for rank in case.plan.stage("vision", where[batch_index], 0).all_ranks:
                gradient = outcomes[rank][2][index, batch_index]
                assert torch.equal(gradient, y[index, batch_index]), (rank, index, batch_index)
    forward = sum(loss for loss, _, _ in outcomes)
    backward = 0.0
    for batch_index in taken:
        rank = case.plan.stage("vision", where[batch_index], 0).all_ranks[0]
        for index in range(len(case.spec.modules["vision"].features)):
            backward += float((x[index, batch_index] * outcomes[rank][2][index, batch_index]).sum())
    assert forward == pytest.approx(backward, abs=1e-6)


@settings(max_examples=60)
@given(cases())
def test_routes_are_exact_and_adjoint(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_queues, "dist", ThreadCollectives)
        outcomes = run_in_threads(case)
    assert_exact_and_adjoint(case, outcomes)


@pytest.mark.distributed
@settings(max_examples=1, database=None, phases=[Phase.generate])
@given(st.lists(cases(st.just(True)), min_size=15, max_size=15))
def test_routes_are_exact_and_adjoint_over_process_groups(drawn):
    by_rank = run_distributed(run_in_processes, WORLD_SIZE, drawn)
    for case, *outcomes in zip(drawn, *by_rank, strict=True):
        assert_exact_and_adjoint(case, outcomes)
