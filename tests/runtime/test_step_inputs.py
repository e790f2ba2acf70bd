"""Where the tokens of features are in a task."""

from __future__ import annotations

import pytest
import torch

from hf_mmparallel.plan import FeatureSpec
from hf_mmparallel.runtime.step_inputs import FeatureOrder, FeatureOwners


def test_tokens_lie_feature_by_feature_and_sample_by_sample():
    features = [FeatureSpec("image"), FeatureSpec("video"), FeatureSpec("image", "deep", 1, 0)]
    order = FeatureOrder(features, (7, 4), {"image": [2, 1], "video": [0, 3]})
    assert order.sizes == [3, 3, 3] and order.num_tokens == 9
    assert order.positions((7, 4)).tolist() == list(range(9))
    assert order.positions((4,)).tolist() == [2, 3, 4, 5, 8]
    assert order.positions((4, 7)).tolist() == [2, 0, 1, 3, 4, 5, 8, 6, 7]
    assert order.positions(()).tolist() == [] and order.positions(()).dtype == torch.int64


def test_features_of_an_edge_lie_one_behind_the_other():
    features = [FeatureSpec("image"), FeatureSpec("image", "deep", 1, 0)]
    order = FeatureOrder(features, (7, 4), {"image": [2, 1], "video": [0, 3]})
    assert order.positions((7,)).tolist() == [0, 1, 3, 4]


def test_tokens_are_placed_feature_by_feature_on_each_cp_rank():
    order = FeatureOrder([FeatureSpec("image"), FeatureSpec("image", "deep", 1, 0)], (0,), {"image": [3]})
    of_feature = torch.tensor([1, 0, 1]), torch.tensor([1, 0, 0])
    owners = FeatureOwners(order, [of_feature, of_feature], 3)
    assert owners.sizes == [[1, 1], [2, 2], [0, 0]]
    cp_ranks, places = owners.select((0,))
    assert cp_ranks is not None and cp_ranks.tolist() == [1, 0, 1] * 2
    assert places.tolist() == [1, 0, 0, 3, 1, 2]


def test_a_single_cp_rank_has_all_tokens_in_their_order():
    order = FeatureOrder([FeatureSpec("image")], (3, 5), {"image": [2, 1]})
    owners = FeatureOwners(order)
    cp_ranks, places = owners.select((5,))
    assert owners.sizes == [[3]] and cp_ranks is None and places.tolist() == [2]


def test_every_sample_must_have_its_tokens():
    with pytest.raises(ValueError, match="zip"):
        FeatureOrder([FeatureSpec("image")], (1, 2), {"image": [3]})
