"""
The executor carries what a graph of modules hands over: encoders that feed encoders, generators behind the language
model, and any number of cp and tp ranks at both ends of each edge.

Stages are linear maps of whole numbers in float64, so that what ranks compute is compared exactly with one process.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_mmparallel.data.context_tokens import ContextSharder, ContextSharding
from hf_mmparallel.data.step_batch import StepData
from hf_mmparallel.data.step_dataset import RankInputs
from hf_mmparallel.kernels.bitfield_attention import encode_words
from hf_mmparallel.modeling.shared_tokens import SharedTokens
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
from hf_mmparallel.runtime.executor import Executor, StepFunctions
from hf_mmparallel.runtime.groups import ProcessGroups
from hf_mmparallel.runtime.message_queues import DistributedTransport, Transport
from hf_mmparallel.schedule import Task, build_program
from hf_mmparallel.world import World
from tests.deep_cases import drawn_cases
from tests.distributed import run_distributed
from tests.runtime.loopback import run_ranks

WIDTHS = {"audio": 2, "vision": 3, LANGUAGE_MODEL: 4, "speech": 4}  # a generator gets rows of the language model
PLACEHOLDERS = {"sound": 1, "image": 2, "voice": 3, "video": 4}
FEATURES = {
    "audio": (FeatureSpec("sound", layer=1),),
    "vision": (FeatureSpec("image"), FeatureSpec("image", "deepstack_features", 1, 0), FeatureSpec("video")),
    LANGUAGE_MODEL: (FeatureSpec("voice"),),
}
TARGETS = {"audio": "vision", "vision": LANGUAGE_MODEL, LANGUAGE_MODEL: "speech"}
SOURCES = {target: source for source, target in TARGETS.items()}
LOSSES = (LANGUAGE_MODEL, "speech")  # modules whose last stage makes logits, or the sum of what would be logits
WORLD_SIZE = 5  # of modules that share ranks


def _module(name: str) -> ModuleSpec:
    weights = tuple(ParameterSpec(f"{name}.{layer}", (1,), layer, "float64") for layer in range(2))
    return ModuleSpec(name, name, 2, WIDTHS[name], 1, 1, 1, weights, FEATURES.get(name, ()))


SPEC = ModelSpec({name: _module(name) for name in WIDTHS}, placeholders=PLACEHOLDERS)


def whole_numbers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


@dataclass
class Case:
    plan: ParallelPlan
    step: StepPlan
    tokens: dict[int, dict[str, int]]
    seed: int

    def length(self, sample: int) -> int:
        """Tokens of a sample: one of text, and its placeholders."""
        return 1 + sum(self.tokens[sample].values())

    def ids(self, sample: int) -> Tensor:
        """A text token, then the placeholders of all kinds among each other."""
        kinds = [(row, PLACEHOLDERS[kind]) for kind, count in self.tokens[sample].items() for row in range(count)]
        return torch.tensor([0, *(token for _, token in sorted(kinds))])

    @functools.cached_property
    def cuts(self) -> dict[tuple[str, int, int, int], Any]:
        """How the tokens of every task of a module with several cp ranks are cut."""
        cuts = {}
        for (module, replica, index), chunks in self.step.chunks.items():
            if self.plan.modules[module].cp_size > 1:
                alone = replace(self.plan, modules={LANGUAGE_MODEL: self.plan.modules[module]}, edges=())
                sharder = ContextSharder(alone, PLACEHOLDERS, frozenset())
                for chunk, samples in enumerate(chunks):
                    if samples:
                        cut = sharder(self.packed(samples))
                        if module in ("audio", "vision"):
                            cut = self.whole(cut, samples, self.plan.modules[module].cp_size)
                        cuts[module, replica, index, chunk] = cut
        return cuts

    def whole(self, cut: ContextSharding, samples: Sequence[int], cp_size: int) -> ContextSharding:
        """A cut in which each sample is whole on some cp rank, and ranks have unlike numbers of tokens, or none."""
        ranks = [(self.seed + sample**2) % cp_size for sample in samples for _ in range(self.length(sample))]
        order: Any = [torch.tensor(ranks).eq(rank).nonzero()[:, 0] for rank in range(cp_size)]
        ids, owners = self.packed(samples)["input_ids"][0], {}
        for kind, token in PLACEHOLDERS.items():
            places = [(rank, int((ids[own] == token).sum())) for rank, own in enumerate(order)]
            found = torch.full((len(ids), 2), -1)
            for rank, count in places:
                own = order[rank][ids[order[rank]] == token]
                found[own] = torch.stack([torch.full((count,), rank), torch.arange(count)], 1)
            owners[kind] = tuple(found[ids == token].T)
        return replace(cut, order=order, owners=owners)

    def embedded(self, module: str, sample: int) -> Tensor:
        """What a module's first layer starts from: `[tokens, width]`."""
        return whole_numbers(1000 * self.seed + 10 * sample + len(module), self.length(sample), WIDTHS[module])

    def projector(self, module: str, number: int) -> Tensor:
        """From the hidden states of a module to a feature of it."""
        return whole_numbers(7 * self.seed + number, WIDTHS[module], WIDTHS[TARGETS[module]])

    def head(self, module: str, sample: int) -> Tensor:
        """What logits are the products with."""
        return whole_numbers(3 * self.seed + 20 * sample + len(module) + 1, self.length(sample), WIDTHS[module])

    def packed(self, samples: Sequence[int]) -> dict[str, Tensor]:
        """Samples in one row. `origin` is the number of each token's sample, from 1, and its place in the sample."""
        ids = torch.cat([self.ids(sample) for sample in samples])[None]
        origin = [(sample + 1, place) for sample in samples for place in range(self.length(sample))]
        segments = [number for number, sample in enumerate(samples, 1) for _ in range(self.length(sample))]
        return {
            "input_ids": ids,
            "labels": ids,
            "origin": torch.tensor(origin)[None],
            "attention_words": encode_words(torch.tensor(segments)[None]),
        }


def enter(hidden: Tensor, ids: Tensor, spec: FeatureSpec, feature: Tensor) -> Tensor:
    """Hidden states with a feature added at its placeholders."""
    wanted = (ids == PLACEHOLDERS[spec.modality]).nonzero()[:, 0]
    return hidden.index_add(0, wanted, feature)


def one_process(case: Case) -> tuple[float, dict[tuple[str, int], Tensor]]:
    """The loss, and its gradient with respect to what each module starts from, by (module, sample)."""
    leaves, total = {}, torch.zeros((), dtype=torch.float64)
    for sample in case.tokens:
        ids, features = case.ids(sample), []
        for module in WIDTHS:
            if (module, sample) not in case.step.location_of:
                features = []
                continue
            leaf = leaves[module, sample] = case.embedded(module, sample).requires_grad_()
            hidden = leaf
            for spec, feature in zip(FEATURES.get(SOURCES.get(module, ""), ()), features, strict=bool(features)):
                hidden = enter(hidden, ids, spec, feature)
            features = [
                hidden[ids == PLACEHOLDERS[spec.modality]] @ case.projector(module, number)
                for number, spec in enumerate(FEATURES.get(module, ()))
            ]
            if module in LOSSES:
                total = total + (hidden * case.head(module, sample)).sum()
    total.backward()
    return float(total), {key: torch.zeros_like(x) if x.grad is None else x.grad for key, x in leaves.items()}


class LinearStage:
    """A stage of a module: what enters is added to the hidden states; the last one makes features and logits."""

    own_layers: Mapping[int, Any] = {}
    shared_tokens = SharedTokens()

    def __init__(self, case: Case, key: tuple[str, int, int], leaves: dict):
        self.case, self.leaves = case, leaves
        self.module, replica, index = key
        stages = case.plan.modules[self.module].replicas[replica]
        self.layers, self.is_first, self.is_last = stages[index].layers, index == 0, index == len(stages) - 1

    def input_shapes(self, batch: Mapping[str, Any]) -> list[torch.Size]:
        return [torch.Size((1, batch["input_ids"].shape[1], WIDTHS[self.module]))]

    def tokens(self, batch: Mapping[str, Any]) -> list[tuple[int, int, int]]:
        """The (place on this rank, sample, place in the sample) of each token that is no padding."""
        rows = enumerate(batch["origin"][0].tolist())
        return [(here, number - 1, place) for here, (number, place) in rows if number]

    def num_targets(self, batch: Mapping[str, Any]) -> int:
        return 1

    def embed(self, batch: Mapping[str, Any]) -> Tensor:
        """Hidden states of this rank's tokens, from a leaf for each sample."""
        rows = [torch.zeros(WIDTHS[self.module], dtype=torch.float64)] * batch["input_ids"].shape[1]
        for here, sample, place in self.tokens(batch):
            if sample not in self.leaves:
                self.leaves[sample] = self.case.embedded(self.module, sample).requires_grad_()
            rows[here] = self.leaves[sample][place]
        return torch.stack(rows) if rows else torch.zeros(0, WIDTHS[self.module], dtype=torch.float64)

    def __call__(
        self, batch: Mapping[str, Any], hidden: Any, features: Mapping[str, Any], num_tokens: Any
    ) -> list[Tensor]:
        ids = batch["input_ids"][0]
        assert (hidden is None) == self.is_first
        states = self.embed(batch) if hidden is None else hidden[0][0]
        for source, tensors in features.items():
            for spec, feature in zip(FEATURES[source], tensors, strict=True):
                assert (feature is not None) == (self.layers[0] <= spec.layer < self.layers[1])
                if feature is not None:
                    states = enter(states, ids, spec, feature)
        if not self.is_last:
            return [states[None]]
        outputs = []
        if self.module in LOSSES:
            heads = torch.zeros_like(states)
            for here, sample, place in self.tokens(batch):
                heads[here] = self.case.head(self.module, sample)[place]
            outputs.append((states * heads)[None] if self.module == LANGUAGE_MODEL else (states * heads).sum())
        for number, spec in enumerate(FEATURES.get(self.module, ())):
            chosen = states[ids == PLACEHOLDERS[spec.modality]]
            outputs.append(chosen @ self.case.projector(self.module, number))
        return outputs


BOOLEANS = st.booleans()


@st.composite
def cases(draw, sharing: st.SearchStrategy[bool] = BOOLEANS) -> Case:
    """Any meshes, stages, replicas and microbatches of the four modules, on ranks of their own or shared."""
    shared = draw(sharing)
    modules, first = {}, 0
    for name in WIDTHS:
        cp_size, tp_size = draw(st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 1), (3, 1), (2, 2)]))
        context = ContextSettings(draw(st.sampled_from(["lpt", "zigzag", "random"])), "row", draw(st.integers(1, 3)))
        replicas = []
        for _ in range(draw(st.integers(1, 2)) if shared else 1):
            stages = []
            for layers in draw(st.sampled_from([[(0, 2)], [(0, 1), (1, 2)]])):
                if shared:
                    ranks = draw(st.permutations(range(WORLD_SIZE)))[: cp_size * tp_size]
                else:
                    ranks = range(first, first + cp_size * tp_size)
                    first += cp_size * tp_size
                mesh = tuple(tuple(ranks[start : start + tp_size]) for start in range(0, len(ranks), tp_size))
                stages.append(Stage(layers, mesh))
            replicas.append(tuple(stages))
        modules[name] = ModulePlan(tuple(replicas), context=context)
    edges = tuple(Edge(s, t, tuple(feature.layer for feature in FEATURES[s])) for s, t in TARGETS.items())
    samples = range(draw(st.integers(1, 4)))
    tokens = {sample: {kind: draw(st.integers(0, 3)) for kind in PLACEHOLDERS} for sample in samples}
    needed = {"audio": ("sound",), "vision": ("sound", "image", "video"), "speech": ("voice",)}
    microbatches = {}
    for name, module in modules.items():
        lists = [[[] for _ in range(2)] for _ in range(module.dp_size)]
        for sample in draw(st.permutations(samples)):
            if name == LANGUAGE_MODEL or any(tokens[sample][kind] for kind in needed[name]) or draw(st.booleans()):
                lists[draw(st.integers(0, module.dp_size - 1))][draw(st.integers(0, 1))].append(sample)
        microbatches[name] = tuple(tuple(tuple(own) for own in replica) for replica in lists)
    step = StepPlan(tuple(samples), microbatches, {source: (target,) for source, target in TARGETS.items()})
    return Case(ParallelPlan(modules, edges), step, tokens, draw(st.integers(0, 9)))


Outcome = tuple[dict[Task, float], dict[tuple[str, int, int], dict[int, Tensor]]]
"""Of a rank: the losses of its tasks, and the gradients that arrived at its first stages, by sample."""


def run_rank(case: Case, rank: int, transport: Transport, groups: Mapping[tuple[int, ...], Any]) -> Outcome:
    leaves: dict = {key: {} for key in case.plan.stages_of_rank(rank)}
    executor = Executor(
        case.plan,
        SPEC,
        {key: LinearStage(case, key, own) for key, own in leaves.items()},  # type: ignore
        transport,
        groups,
        StepFunctions(lambda logits, labels, shifted: (logits.sum(), torch.tensor(1))),
        torch.device("cpu"),
    )
    keys = RankInputs(case.plan, rank).chunks(case.step)
    batches: dict = {key: case.packed(samples) for key, samples in keys.items() if samples}
    program = build_program(case.plan, case.step, sync_groups(SPEC, case.plan))
    result = executor.run(program, StepData(case.step, batches, case.cuts))
    gradients = {
        key: {sample: leaf.grad for sample, leaf in own.items() if leaf.grad is not None}
        for key, own in leaves.items()
    }
    return {task: float(loss) for task, (loss, _) in result.losses.items()}, gradients


def run_in_threads(case: Case) -> list[Outcome]:
    stages = [stage for module in case.plan.modules.values() for _, _, stage in module.stages()]
    groups = dict.fromkeys(ranks for stage in stages for ranks in (*stage.mesh, *stage.cp_groups))
    return run_ranks(
        case.plan.world_size, groups, lambda rank, world, own: run_rank(case, rank, world.transport(rank), own)
    )


def run_in_processes(cases: Sequence[Case]) -> list[Outcome]:
    """A step of each case on this rank, over the groups that training makes."""
    rank, outcomes = dist.get_rank(), []
    for case in cases:
        groups = ProcessGroups(case.plan, sync_groups(SPEC, case.plan), World())
        outcomes.append(run_rank(case, rank, DistributedTransport(World()), groups.by_ranks))
    return outcomes


def assert_equals_one_process(case: Case, outcomes: Sequence[Outcome]) -> None:
    expected_loss, expected = one_process(case)
    total = 0.0
    for rank, (losses, _) in enumerate(outcomes):
        for task, loss in losses.items():
            leader = next(row[0] for row in case.plan.stage(*task.stage_key).mesh if rank in row)
            assert loss == outcomes[leader][0][task], (task, rank)
            total += loss if rank == leader else 0.0
    assert total == expected_loss
    for (module, sample), gradient in expected.items():
        replica, _ = case.step.location_of[module, sample]
        for column in case.plan.stage(module, replica, 0).cp_groups:  # each cp rank has the gradient of its tokens
            found = torch.zeros_like(gradient)
            for rank in column:
                found += outcomes[rank][1][module, replica, 0].get(sample, 0)
            assert torch.equal(found, gradient), (module, sample, column)


@settings(max_examples=30)
@given(cases())
def test_any_graph_of_modules_equals_one_process(case):
    assert_equals_one_process(case, run_in_threads(case))


@pytest.mark.distributed
def test_process_groups_carry_what_threads_do():
    drawn = drawn_cases(cases(st.just(True)), 12)
    by_rank = run_distributed(run_in_processes, WORLD_SIZE, drawn)
    for case, *outcomes in zip(drawn, *by_rank, strict=True):
        assert_equals_one_process(case, outcomes)
