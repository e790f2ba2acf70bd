"""The best of groups is found without a sort of all."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.planning.combinations import best_per_group

SCORES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9) | st.just(np.inf)), max_size=80)


@given(pairs=SCORES, count=st.integers(1, 5))
def test_the_best_of_each_group_are_those_of_a_stable_sort(pairs: list, count: int):
    group = np.array([own for own, _ in pairs], np.int64)
    score = np.array([own for _, own in pairs], float)
    order = np.argsort(score, kind="stable")
    wanted = [index for own in range(7) for index in order[group[order] == own][:count].tolist()]
    assert best_per_group(group, score, count).tolist() == wanted
