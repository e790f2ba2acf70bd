"""Where the tokens of features are in a task."""

from __future__ import annotations

import torch

from hf_mmparallel.plan import FeatureSpec
from hf_mmparallel.runtime.step_inputs import FeatureOrder, FeatureOwners

IMAGE, VIDEO, DEEP = FeatureSpec("image"), FeatureSpec("video"), FeatureSpec("image", "deep", 1, 0)


def test_tokens_lie_feature_by_feature_and_sample_by_sample():
    order = FeatureOrder([IMAGE, VIDEO, DEEP], (7, 4), {"image": [2, 1], "video": [0, 3]})
    assert order.sizes == [3, 3, 3] and order.num_tokens == 9
    assert order.positions((7, 4)).tolist() == list(range(9))
    assert order.positions((4, 7)).tolist() == [2, 0, 1, 3, 4, 5, 8, 6, 7]
    assert order.positions(()).tolist() == [] and order.positions(()).dtype == torch.int64
    cp_ranks, places = FeatureOwners(order).select((4,))
    assert cp_ranks is None and places.tolist() == [2, 3, 4, 5, 8]


def test_tokens_are_placed_feature_by_feature_on_each_cp_rank():
    of_feature = torch.tensor([1, 0, 1]), torch.tensor([1, 0, 0])
    owners = FeatureOwners(FeatureOrder([IMAGE, DEEP], (0,), {"image": [3]}), [of_feature, of_feature], 3)
    assert owners.sizes == [[1, 1], [2, 2], [0, 0]]
    cp_ranks, places = owners.select((0,))
    assert cp_ranks is not None and cp_ranks.tolist() == [1, 0, 1] * 2
    assert places.tolist() == [1, 0, 0, 3, 1, 2]
