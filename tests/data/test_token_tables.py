"""Tokens of many rows at once are those of each row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.data.sample_sizes import token_lengths
from hf_mmparallel.data.size_measures import TokenMeasure
from hf_mmparallel.plan import LANGUAGE_MODEL

IMAGE, VIDEO, SOUND = 7, 8, 9
MEASURE = TokenMeasure(
    {"vision": (("image", IMAGE), ("video", VIDEO)), "audio": (("audio", SOUND),), LANGUAGE_MODEL: ()}
)

IDS = st.lists(st.sampled_from([1, 2, IMAGE, IMAGE, VIDEO, SOUND]), max_size=16)
EXTENTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=3)


def one_by_one(table: pa.Table, measure: TokenMeasure = MEASURE) -> dict[str, list[list[int]]]:
    found = [measure(row) for row in table.to_pylist()]
    return {name: [lengths[name] for lengths in found] for name in measure.placeholders}


def together(table: pa.Table, measure: TokenMeasure = MEASURE) -> dict[str, list[list[int]]] | None:
    found = token_lengths(table, measure)
    if found is None:
        return None
    return {name: [own.tolist() for own in np.split(r.lengths, np.cumsum(r.counts)[:-1])] for name, r in found.items()}


@settings(max_examples=300)
@given(st.lists(st.tuples(IDS, EXTENTS, EXTENTS, st.integers(0, 2**16)), min_size=1, max_size=6), st.booleans())
def test_rows_together_are_rows_one_by_one(rows, masked):
    columns: dict[str, Any] = {
        "input_ids": pa.array([ids for ids, *_ in rows], pa.list_(pa.int32())),
        "image_sizes_hw": pa.array([first for _, first, _, _ in rows], pa.list_(pa.list_(pa.int64()))),
        "image_grid_thw": pa.array([second for _, _, second, _ in rows], pa.list_(pa.list_(pa.int64()))),
        "image_words": pa.array(["no extents"] * len(rows)),
    }
    if masked:
        masks = [[bits >> place & 1 for place in range(len(ids))] for ids, _, _, bits in rows]
        columns["attention_mask"] = pa.array(masks, pa.list_(pa.int8()))
    table = pa.table(columns)
    assert together(table) == one_by_one(table)
    assert together(table.slice(1)) == one_by_one(table.slice(1)) or table.num_rows == 1


def test_extents_share_out_the_rows():
    grids = [[[1, 2, 4], [1, 4, 4]], [[2, 2, 2]], [[1, 3, 3], [1, 1, 2]], []]
    ids = [[1, *[IMAGE] * 6], [IMAGE] * 4, [IMAGE, 1, IMAGE], [1]]
    table = pa.table({"input_ids": ids, "image_grid_thw": grids})
    assert together(table) == one_by_one(table)
    assert together(table)["vision"] == [[2, 4], [2, 2], [1, 1], []]  # type: ignore[index]


@pytest.mark.parametrize(
    "ids", [[[[1, IMAGE]]], ["a string"], [None, [1]], [[1, None]]], ids=["nested", "text", "no row", "no number"]
)
def test_what_is_no_list_of_numbers_is_left_to_the_rows(ids):
    assert token_lengths(pa.table({"input_ids": pa.array(ids)}), MEASURE) is None


def test_lists_of_a_fixed_size():
    ids = pa.FixedSizeListArray.from_arrays(pa.array([1, IMAGE, IMAGE, 1, 1, SOUND]), 3)
    table = pa.table({"input_ids": ids})
    assert (
        together(table) == one_by_one(table) == {"vision": [[2], []], "audio": [[], [1]], LANGUAGE_MODEL: [[3], [3]]}
    )
