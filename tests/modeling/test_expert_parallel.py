"""Tokens of any ranks go to their experts and back with the results and gradients of one process, exactly."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_mmparallel.modeling.expert_parallel import experts_of, share_experts
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, resolve_plan
from hf_mmparallel.plan.resolve import possible_ep_sizes
from hf_mmparallel.runtime.groups import ProcessGroups
from hf_mmparallel.world import World
from tests.deep_cases import drawn_cases
from tests.distributed import run_distributed
from tests.plan.specs import model_spec, with_experts

WORLD_SIZE, NUM_EXPERTS = 4, 8
SPEC = with_experts(ModelSpec({LANGUAGE_MODEL: model_spec().language_model}), NUM_EXPERTS)
LAYOUTS = [
    {"dp_size": dp, "cp_size": cp, "tp_size": WORLD_SIZE // dp // cp, "ep_size": ep}
    for dp, cp in ((1, 2), (1, 4), (2, 1), (2, 2), (4, 1))  # of two heads
    for ep in possible_ep_sizes(NUM_EXPERTS, dp, cp, WORLD_SIZE // dp // cp)
]


@dataclass
class Case:
    """A layout, whose values are whole numbers, so that sums in any order are equal."""

    sizes: dict[str, int]
    lengths: list[int]  # tokens of each tp group
    num_chosen: int
    takes_blocks: bool
    seed: int

    def whole_numbers(self, number: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.seed + number)
        return torch.randint(-3, 4, shape, generator=generator).double()

    def model(self) -> nn.ModuleDict:
        weights = self.whole_numbers(1, NUM_EXPERTS, 2, 4), self.whole_numbers(2, NUM_EXPERTS, 2, 2)
        return nn.ModuleDict({"experts": (Blocks if self.takes_blocks else Pairs)(*weights)})

    def run(self, experts: nn.Module, row: int) -> tuple[Tensor, ...]:
        """What experts add to the tokens of a tp group, and the gradients of tokens and scores."""
        length, drawn = self.lengths[row], torch.Generator().manual_seed(100 * self.seed + row)
        hidden_TD = self.whole_numbers(10 + row, length, 2).requires_grad_()
        index_TK = torch.rand(length, NUM_EXPERTS, generator=drawn).topk(self.num_chosen).indices
        scores_TK = self.whole_numbers(20 + row, length, self.num_chosen).requires_grad_()
        if self.takes_blocks:
            scores_TE = torch.zeros(length, NUM_EXPERTS).double().scatter(1, index_TK, scores_TK)
            rows_BD = hidden_TD.repeat(NUM_EXPERTS, 1) * scores_TE.T.reshape(-1, 1)
            added_TD = experts(rows_BD).view(NUM_EXPERTS, length, 2).sum(0)
        else:
            added_TD = experts(hidden_TD, index_TK, scores_TK)
        added_TD.backward(self.whole_numbers(30 + row, length, 2))
        assert hidden_TD.grad is not None and scores_TK.grad is not None
        return added_TD.detach(), hidden_TD.grad, scores_TK.grad


class Experts(nn.Module):
    """Gated experts."""

    def __init__(self, up_EDF: Tensor, down_EFD: Tensor):
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.up, self.down = nn.Parameter(up_EDF), nn.Parameter(down_EFD)


class Pairs(Experts):
    """Those that are told which tokens are theirs."""

    _is_expert_parallel = True  # as `use_experts_implementation` marks them

    def forward(self, hidden_TD: Tensor, index_TK: Tensor, scores_TK: Tensor) -> Tensor:
        gate, up = (hidden_TD[:, None, None] @ self.up[index_TK]).chunk(2, dim=-1)
        return (((gate * up) @ self.down[index_TK])[:, :, 0] * scores_TK[..., None]).sum(1)


class Blocks(Experts):
    """Those that get a block of rows each, with zeros for tokens that are not theirs."""

    def forward(self, rows_BD: Tensor) -> Tensor:
        gate, up = torch.bmm(rows_BD.view(len(self.up), -1, 2), self.up).chunk(2, dim=-1)
        return torch.bmm(gate * up, self.down).view(-1, 2)


class OnAll(Experts):
    """Those that each get the rows of all tokens."""

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return (hidden_TD @ self.up)[..., :2] @ self.down


@st.composite
def cases(draw) -> Case:
    sizes = draw(st.sampled_from(LAYOUTS))
    num_rows = WORLD_SIZE // sizes["tp_size"]
    lengths = draw(st.lists(st.integers(0, 4), min_size=num_rows, max_size=num_rows))
    return Case(sizes, lengths, draw(st.integers(1, 3)), draw(st.booleans()), draw(st.integers(0, 9)))


Outcome = tuple[tuple[Tensor, ...], dict[str, Tensor]]
"""Of a rank: what its tokens got, with their gradients, and the gradients of its experts."""


def run_shared(cases: list[Case]) -> list[Outcome]:
    outcomes, rank = [], dist.get_rank()
    for case in cases:
        plan = resolve_plan(SPEC, {LANGUAGE_MODEL: ModulePlugin(**case.sizes)})  # type: ignore[arg-type]
        groups = ProcessGroups(plan, (), World())
        group = next(group for group in plan.modules[LANGUAGE_MODEL].expert_groups(0) if rank in chain(*group))
        tp_group = next(ranks for ranks in group if rank in ranks)
        row = next(ranks for ranks in zip(*group, strict=True) if rank in ranks)
        model: Any = case.model()
        mesh = groups.mesh(tuple(chain(*group)))
        assert mesh is not None
        names = [name for name, _ in model.named_parameters()]
        share_experts(model, names, mesh, groups.by_ranks.get(tp_group), groups.by_ranks.get(row))
        result = case.run(model.experts, rank // case.sizes["tp_size"])
        gradients = {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
            gradients[name] = parameter.grad.to_local()
        outcomes.append((result, gradients))
    return outcomes


def assert_equals_one_process(case: Case, outcomes: tuple[Outcome, ...]) -> None:
    ep_size, tp_size = case.sizes["ep_size"], case.sizes["tp_size"]
    for first in range(0, WORLD_SIZE, ep_size):  # the ranks of a group
        ranks = range(first, first + ep_size)
        model: Any = case.model()
        wanted = {row: case.run(model.experts, row) for row in dict.fromkeys(rank // tp_size for rank in ranks)}
        for place, rank in enumerate(ranks):
            found, gradients = outcomes[rank]
            assert all(map(torch.equal, found, wanted[rank // tp_size])), (case, rank)
            for name, parameter in model.named_parameters():
                own = parameter.grad.chunk(ep_size)[place]
                assert torch.equal(gradients[name], own), (case, rank, name)


@pytest.mark.distributed
def test_tokens_go_to_their_experts_and_gradients_the_way_back():
    drawn = drawn_cases(cases(), 24)
    for case, *outcomes in zip(drawn, *run_distributed(run_shared, WORLD_SIZE, drawn), strict=True):
        assert_equals_one_process(case, tuple(outcomes))


def test_experts_that_ranks_can_share_are_told_their_tokens_or_take_blocks():
    weights = torch.ones(NUM_EXPERTS, 2, 4), torch.ones(NUM_EXPERTS, 2, 2)
    kinds = {kind.__name__: kind(*weights) for kind in (Pairs, Blocks, OnAll)}
    kinds["biased"] = Blocks(*weights)
    kinds["biased"].bias = nn.Parameter(torch.ones(NUM_EXPERTS, 2))
    assert set(experts_of(nn.ModuleDict(kinds))) == {"Pairs", "Blocks"}
