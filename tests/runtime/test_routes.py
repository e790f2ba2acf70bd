"""Tokens cross once between two meshes, arrive in place on every rank, and gradients take the adjoint way back."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_mmparallel.runtime.payloads import (
    Mesh,
    Route,
    compose,
    feature_routes,
    hidden_state_routes,
    num_tokens_of,
    select,
    slices,
)

SIZES = st.integers(1, 4)
WIDTH = 2


@given(st.integers(0, 40), SIZES, SIZES)
def test_slices_cut_the_tokens_for_the_consumers(num_tokens, num_producers, num_consumers):
    producers, consumers = range(10, 10 + num_producers), range(20, 20 + num_consumers)
    found = slices(num_tokens, producers, consumers)
    assert [token for part in found for token in range(part.start, part.stop)] == list(range(num_tokens))
    assert all(part.num_tokens > 0 for part in found)
    assert [part.consumer for part in found] == list(consumers)[: len(found)]
    assert all(part.producer == producers[consumers.index(part.consumer) % num_producers] for part in found)
    sizes = [part.num_tokens for part in found]
    assert len(set(sizes[:-1])) <= 1 and sizes == sorted(sizes, reverse=True)


def tokens_of(route: Route) -> list[int] | None:
    return None if route.tokens is None else route.tokens.tolist()


def test_features_go_to_the_cp_rank_of_their_token_and_hidden_states_stay_on_theirs():
    routes = feature_routes(3, ((7, 8),), ((1, 2), (3, 4)), None, torch.tensor([1, 0, 1]))
    assert [(route.producers, route.consumers, tokens_of(route)) for route in routes] == [
        ((7, 8), (1, 2), [1]),
        ((7, 8), (3, 4), [0, 2]),
    ]
    assert [(part.producer, part.consumer) for part in routes[1].slices] == [(7, 3), (8, 4)]
    routes = hidden_state_routes(3, ((7,), (8,)), ((1, 2), (3, 4)))
    assert [(route.producers, route.consumers, route.num_tokens, tokens_of(route)) for route in routes] == [
        ((7,), (1, 2), 3, None),
        ((8,), (3, 4), 3, None),
    ]


def test_features_of_several_cp_ranks_have_a_route_from_each_to_each():
    owners = torch.tensor([0, 1, 1, 0]), torch.tensor([1, 0, 1, 1])
    routes = feature_routes(4, ((5,), (6,)), ((1, 2), (3, 4)), *owners)
    assert [(route.producers, route.consumers, tokens_of(route)) for route in routes] == [
        ((5,), (1, 2), []),
        ((5,), (3, 4), [0, 3]),
        ((6,), (1, 2), [1]),
        ((6,), (3, 4), [2]),
    ]


def test_features_of_one_cp_rank_for_one_cp_rank_are_not_indexed():
    (route,) = feature_routes(4, ((5, 6),), ((1, 2),), None, None)
    assert (route.num_tokens, route.tokens) == (4, None)


@st.composite
def layouts(draw) -> tuple[Mesh, Mesh, Tensor, Tensor]:
    """Two meshes of any sizes, which may share ranks, and the cp rank of each token in both."""
    meshes, owners = [], []
    num_tokens = draw(st.integers(0, 12))
    for _ in range(2):
        cp_size, tp_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        ranks = draw(st.permutations(range(9)))[: cp_size * tp_size]
        meshes.append(tuple(tuple(ranks[start : start + tp_size]) for start in range(0, len(ranks), tp_size)))
        owners.append(draw(st.lists(st.integers(0, cp_size - 1), min_size=num_tokens, max_size=num_tokens)))
    computed_on, needed_on = (torch.tensor(own, dtype=torch.int64) for own in owners)
    return meshes[0], meshes[1], computed_on, needed_on


def moved(routes: list[Route], tokens: dict[int, dict[int, Tensor]], forward: bool) -> dict[int, dict[int, Tensor]]:
    """
    What each rank has after the slices have crossed: rank -> token -> its value. In the forward consumers gather
    among themselves; in the backward each rank of a producer's tp group has the sum over the group.
    """
    found: dict[int, dict[int, Tensor]] = {}
    for route in routes:
        members = torch.arange(route.num_tokens) if route.tokens is None else route.tokens
        arrived: dict[int, Tensor] = {}
        for part in route.slices:
            source = part.producer if forward else part.consumer
            for token in members[part.start : part.stop].tolist():
                assert token not in arrived, "a token crossed twice"
                arrived[token] = tokens[source][token]
        assert len(arrived) == route.num_tokens
        for rank in route.consumers if forward else route.producers:
            assert not found.setdefault(rank, {}).keys() & arrived.keys()
            found[rank] |= arrived
    return found


@given(layouts(), st.integers(0, 99))
def test_routes_between_any_cp_and_tp_sizes_are_exact_and_adjoint(layout, seed):
    producer, consumer, computed_on, needed_on = layout
    num_tokens = len(computed_on)
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(-9, 9, (2, num_tokens, WIDTH), generator=generator).double()
    owners = (
        None if len(producer) == 1 else computed_on,
        None if len(consumer) == 1 else needed_on,
    )
    routes = feature_routes(num_tokens, producer, consumer, *owners)
    assert sorted(chain.from_iterable(tokens_of(r) or range(r.num_tokens) for r in routes)) == list(range(num_tokens))

    def spread(mesh: Mesh, owners: Tensor, values: Tensor) -> dict[int, dict[int, Tensor]]:
        """The values that each rank of a mesh has."""
        return {
            rank: {token: values[token] for token in (owners == cp_rank).nonzero()[:, 0].tolist()}
            for cp_rank, group in enumerate(mesh)
            for rank in group
        }

    forward = moved(routes, spread(producer, computed_on, x), forward=True)
    backward = moved(routes, spread(consumer, needed_on, y), forward=False)
    for mesh, own, found, expected in ((consumer, needed_on, forward, x), (producer, computed_on, backward, y)):
        for cp_rank, group in enumerate(mesh):
            mine = (own == cp_rank).nonzero()[:, 0].tolist()
            for rank in group:
                assert sorted(found.get(rank, {})) == mine
                assert all(torch.equal(found[rank][token], expected[token]) for token in mine)
    ax_y = sum(float(value @ y[token]) for group in consumer for token, value in forward.get(group[0], {}).items())
    x_aty = sum(float(value @ x[token]) for group in producer for token, value in backward.get(group[0], {}).items())
    assert ax_y == x_aty


def test_tokens_that_are_all_in_order_are_not_copied():
    tokens = torch.randn(3, 2)
    assert select(tokens, None) is tokens
    assert select(tokens, torch.arange(3)) is tokens
    assert torch.equal(select(tokens, torch.tensor([2, 0])), tokens[[2, 0]])
    assert torch.equal(select(tokens, torch.tensor([1, 0, 2])), tokens[[1, 0, 2]])


def test_an_index_of_an_index():
    outer, inner = torch.tensor([5, 6, 7]), torch.tensor([2, 0])
    assert compose(None, None) is None
    assert compose(outer, None) is outer and compose(None, inner) is inner
    composed = compose(outer, inner)
    assert composed is not None and composed.tolist() == [7, 5]


@pytest.mark.parametrize(("shape", "count"), [((2, 3, 8), 6), ((4, 8), 4), ((0, 8), 0)])
def test_tokens_of_a_shape(shape, count):
    assert num_tokens_of(shape) == count
