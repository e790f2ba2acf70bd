"""Rows cross a boundary once, arrive in place on every rank, and their gradients take the adjoint way back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
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
from hf_mmparallel.runtime import executor as executor_module
from hf_mmparallel.runtime.boundary import RowSpace, parts
from hf_mmparallel.runtime.executor import Executor
from hf_mmparallel.runtime.transport import LoopbackWorld
from hf_mmparallel.schedule import build_program
from tests.runtime.loopback import Membership, RecordingTransport, ThreadCollectives, ThreadGroup, run_threads

WIDTH = 3
SIZES = st.integers(1, 4)


@given(st.integers(0, 40), SIZES, SIZES)
def test_parts_cut_the_rows_for_the_targets(num_rows, num_sources, num_targets):
    sources, targets = range(10, 10 + num_sources), range(20, 20 + num_targets)
    found = parts(num_rows, sources, targets)
    assert [row for part in found for row in range(part.start, part.stop)] == list(range(num_rows))
    assert all(part.num_rows > 0 for part in found)
    assert [part.target for part in found] == [targets[part.index] for part in found]
    assert all(part.source == sources[part.index % num_sources] for part in found)
    sizes = [part.num_rows for part in found]
    assert len(set(sizes[:-1])) <= 1 and sizes == sorted(sizes, reverse=True)


def test_rows_lie_feature_by_feature_and_sample_by_sample():
    features = [FeatureSpec("image"), FeatureSpec("video"), FeatureSpec("image", "deep", 1, 0)]
    space = RowSpace(features, (7, 4), {"image": [2, 1], "video": [0, 3]})
    assert space.sizes == [3, 3, 3] and space.num_rows == 9
    assert space.positions((7, 4)).tolist() == list(range(9))
    assert space.positions((4,)).tolist() == [2, 3, 4, 5, 8]
    assert space.positions((4, 7)).tolist() == [2, 0, 1, 3, 4, 5, 8, 6, 7]
    assert space.positions(()).tolist() == [] and space.positions(()).dtype == torch.int64
    assert [space.count(slots) for slots in ((7,), (4,), (4, 7), ())] == [4, 5, 9, 0]


def test_every_sample_must_have_its_rows():
    with pytest.raises(ValueError, match="zip"):
        RowSpace([FeatureSpec("image")], (1, 2), {"image": [3]})


@dataclass
class Case:
    spec: ModelSpec
    plan: ParallelPlan
    step: StepPlan
    rows: dict[int, dict[str, int]]
    seed: int

    def values(self, salt: int) -> dict[tuple[int, int], torch.Tensor]:
        """(feature, slot) -> whole numbers `[rows, WIDTH]`, which float64 adds without rounding."""
        generator = torch.Generator().manual_seed(100 * self.seed + salt)
        features = self.spec.modules["vision"].features
        return {
            (index, slot): torch.randint(
                -50, 50, (rows[feature.modality], WIDTH), generator=generator, dtype=torch.int64
            ).double()
            for index, feature in enumerate(features)
            for slot, rows in self.rows.items()
        }


@st.composite
def cases(draw) -> Case:
    """An encoder and a decoder of two stages on any grids, which may share ranks; any samples in any order."""
    layers = draw(st.sampled_from([[0], [0, 0], [0, 1], [0, 0, 1]]))
    modalities = [draw(st.sampled_from(["image", "video"])) for _ in layers]
    features = tuple(FeatureSpec(m, f"f{i}", layers[i]) for i, m in enumerate(modalities))
    specs = {}
    for name, own in (("vision", features), (LANGUAGE_MODEL, ())):
        weights = tuple(ParameterSpec(f"{name}.{layer}", (1,), layer) for layer in range(2))
        specs[name] = ModuleSpec(name, name, 2, WIDTH, 12, 12, 12, weights, own)
    spec = ModelSpec(specs)
    shared = draw(st.booleans())
    modules, first = {}, 0
    for name, ranges in (("vision", [(0, 2)]), (LANGUAGE_MODEL, draw(st.sampled_from([[(0, 2)], [(0, 1), (1, 2)]])))):
        tp_size = draw(SIZES)
        rows = []
        for _ in range(draw(st.integers(1, 2))):
            stages = []
            for layers in ranges:
                if shared:
                    ranks = tuple(draw(st.permutations(range(5)))[:tp_size])
                else:
                    ranks, first = tuple(range(first, first + tp_size)), first + tp_size
                stages.append(Stage(layers, (ranks,)))
            rows.append(tuple(stages))
        modules[name] = ModulePlan(tuple(rows))
    plan = ParallelPlan(modules, (Edge("vision", LANGUAGE_MODEL, tuple(f.layer for f in features)),))
    slots = range(draw(st.integers(1, 6)))
    rows = {slot: {m: draw(st.integers(0, 5)) for m in ("image", "video")} for slot in slots}
    microbatches = {}
    for name, module in modules.items():
        boxes = [[[] for _ in range(2)] for _ in range(module.dp_size)]
        for slot in draw(st.permutations(slots)):
            if name == LANGUAGE_MODEL or any(rows[slot].values()) or draw(st.booleans()):
                boxes[draw(st.integers(0, module.dp_size - 1))][draw(st.integers(0, 1))].append(slot)
        microbatches[name] = tuple(tuple(tuple(box) for box in row) for row in boxes)
    step = StepPlan(tuple(slots), microbatches, {"vision": (LANGUAGE_MODEL,)})
    return Case(spec, plan, step, rows, draw(st.integers(0, 9)))


class EncoderStage:
    """Its output are leaves with the given values, so that their gradient is what came back."""

    def __init__(self, case: Case, x: dict, leaves: dict):
        self.case, self.x, self.leaves = case, x, leaves

    def __call__(self, batch, hidden, features):
        outputs = []
        for index, feature in enumerate(self.case.spec.modules["vision"].features):
            pieces = [self.x[index, slot].clone().requires_grad_() for slot in batch["slots"]]
            for slot, piece in zip(batch["slots"], pieces, strict=True):
                self.leaves[index, slot] = piece
            assert all(len(p) == n for p, n in zip(pieces, batch["rows"][feature.modality], strict=True))
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
            for slot, piece in zip(batch["slots"], rows.split(batch["rows"][modality]), strict=True):
                self.seen[index, slot] = piece.detach().clone()
                total = total + (piece * self.y[index, slot]).sum() / WIDTH
        return [total]


def run(case: Case) -> list[tuple[float, dict, dict, dict]]:
    """For each rank: the loss, the features that it saw, the leaves of its encoder, the rows that it sent."""
    x, y = case.values(1), case.values(2)
    program = build_program(case.plan, case.step, sync_groups(case.spec, case.plan))
    rows = {stage.ranks[0] for module in case.plan.modules.values() for _, _, stage in module.stages()}
    groups = {row: ThreadGroup(row) for row in rows if len(row) > 1}
    world = LoopbackWorld(5.0)

    def body(rank: int):
        transport = RecordingTransport(rank, world)
        leaves, seen, stages = {}, {}, {}
        for name, replica, index in case.plan.stages_of_rank(rank):
            made = EncoderStage(case, x, leaves) if name == "vision" else DecoderStage(case, y, seen)
            stages[name, replica, index] = made
        members = {row: Membership(group, rank) for row, group in groups.items() if rank in row}
        batches = {}
        for key, chunks in case.step.chunks.items():
            for number, slots in enumerate(chunks):
                counts = {m: [case.rows[slot][m] for slot in slots] for m in ("image", "video")}
                ids = torch.zeros(len(slots), 1, dtype=torch.int64)
                batches[(*key, number)] = {"slots": slots, "rows": counts, "input_ids": ids, "labels": ids}
        executor = Executor(
            case.plan,
            case.spec,
            stages,
            transport,
            members,
            lambda logits, labels, shifted: (logits.sum(), torch.tensor(1)),
            lambda batch, spec: batch["rows"],
            torch.device("cpu"),
            torch.float64,
        )
        result = executor.run(program, case.step, batches)
        loss = sum(
            float(loss)
            for task, (loss, _) in result.losses.items()
            if case.plan.stage(*task.stage_key).all_ranks[0] == rank
        )
        return loss, seen, leaves, transport.rows

    return run_threads(body, case.plan.world_size)


@pytest.fixture(autouse=True)
def collectives(monkeypatch):
    monkeypatch.setattr(executor_module, "dist", ThreadCollectives)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_routes_are_exact_and_adjoint(case):
    x, y = case.values(1), case.values(2)
    outcomes = run(case)
    taken = [slot for row in case.step.microbatches["vision"] for box in row for slot in box]
    where = {slot: case.step.places["vision", slot][0] for slot in taken}
    for index, feature in enumerate(case.spec.modules["vision"].features):
        for slot in taken:
            replica = case.step.places[LANGUAGE_MODEL, slot][0]
            for stage in case.plan.modules[LANGUAGE_MODEL].replicas[replica]:
                if stage.layers[0] <= feature.layer < stage.layers[1]:
                    for rank in stage.all_ranks:
                        assert torch.equal(outcomes[rank][1][index, slot], x[index, slot]), (rank, index, slot)
            for rank in case.plan.stage("vision", where[slot], 0).all_ranks:
                gradient = outcomes[rank][2][index, slot].grad
                assert torch.equal(gradient, y[index, slot]), (rank, index, slot)
    forward = sum(loss for loss, _, _, _ in outcomes)
    backward = 0.0
    for slot in taken:
        rank = case.plan.stage("vision", where[slot], 0).all_ranks[0]
        for index in range(len(case.spec.modules["vision"].features)):
            backward += float((x[index, slot] * outcomes[rank][2][index, slot].grad).sum())
    assert forward == pytest.approx(backward, abs=1e-6)
