"""More to choose from never gives a slower plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.plan import LANGUAGE_MODEL
from hf_mmparallel.search.ranking import AS_FAST
from hf_mmparallel.search.search import nested_problems, search_plans
from tests.cost.models import PLAIN

from .test_search import problem_of

SLOW = replace(
    PLAIN, node_size=4, link_gb_per_s=2.0, node_link_gb_per_s=0.5, link_latency_us=5.0, node_link_latency_us=12.0
)
CHOICES = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]


def step_ms(problem) -> float:
    try:
        return search_plans(problem).best.step_ms
    except ValueError:
        return float("inf")


@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from([2, 4, 6]),
    st.sampled_from([4, 12, 24]),
    st.sampled_from([(), ("vision",)]),
    st.integers(0, 9),
    st.sampled_from([None, 1.2e9]),
)
def test_more_zero_stages_are_never_slower(ranks, batch, frozen, seed, memory_bytes):
    asked = problem_of(ranks, batch, frozen, seed, device=SLOW, memory_bytes=memory_bytes, effort=4)
    found = [step_ms(replace(asked, zero_stages=stages)) for stages in CHOICES]
    for fewer, more in zip(found, found[1:], strict=False):
        assert more <= AS_FAST * fewer


@pytest.mark.parametrize(("ranks", "batch", "seed", "effort"), [(6, 24, 0, 4), (6, 24, 1, 32)])
def test_more_zero_stages_were_slower_here(ranks, batch, seed, effort):
    """Where latency counts, layouts that divide nothing are fastest."""
    asked = problem_of(ranks, batch, ("vision",), seed, device=SLOW, effort=effort)
    found = [step_ms(replace(asked, zero_stages=stages)) for stages in CHOICES[:3]]
    assert found[1] <= AS_FAST * found[0] and found[2] <= AS_FAST * found[1]


def test_choices_grow_one_by_one_on_few_ranks():
    asked = problem_of(4, 8, zero_stages=(0, 1, 2, 3))
    assert [own.zero_stages for own in nested_problems(asked)] == CHOICES
    assert nested_problems(replace(asked, num_ranks=64)) == [replace(asked, num_ranks=64)]
    named = {name: {"zero_stage": 1} for name in ("vision", LANGUAGE_MODEL)}
    assert len(nested_problems(replace(asked, fixed=named))) == 1
