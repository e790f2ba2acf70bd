"""Traces of failures: what is read, what is refused, and what is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_mmparallel.resilience.traces import SpotMarket, Trace, read_trace, regular_losses

ROWS = "0,add,a\n0,add,b\n\n1500,remove,a\n1500,add,c\n1500,remove,c\n3000,add,a\n"


@pytest.mark.parametrize("header", ["", "timestamp,event,node\n"])
def test_a_trace_is_read(tmp_path: Path, header: str) -> None:
    (tmp_path / "trace.csv").write_text(header + ROWS)
    trace = read_trace(tmp_path / "trace.csv")
    assert [(event.time_s, set(event.lost), set(event.joined)) for event in trace.events] == [
        (0.0, set(), {0, 1}),
        (1.5, {0}, set()),  # `c` came and went at one time
        (3.0, set(), {0}),
    ]
    assert (trace.end_s, trace.most_nodes, trace.num_losses) == (3.0, 2, 1)
    assert trace.mean_nodes() == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,add,a\n5,drop,a\n", r"line 2: `drop` is no action. Write `add` or `remove`"),
        ("0,add,a\n\n5,remove,b\n", r"line 3: node `b` is removed and was never added. Add it in an earlier row"),
        ("0,add,a\n5,remove,a\n6,remove,a\n", r"line 3: node `a` is removed and has been removed before"),
        ("0,add,a\n5,add,a\n", r"line 2: node `a` is added and is there already"),
        ("t,e,n\n0,add,a\n9,add,b\n5,remove,a\n", r"line 4: 5 ms comes after 9 ms. Sort the rows by time"),
        ("0,add,a\nsoon,remove,a\n", r"line 2: `soon` is no time. Write milliseconds"),
        ("-1,add,a\n", r"line 1: `-1` is no time"),
        ("0,add\n", r"line 1: `0,add` has 2 values instead of 3"),
        ("x,add,a\n", r"line 1: `x` is no time"),
        ("", "there are no rows"),
    ],
)
def test_wrong_rows_are_refused_with_their_line(tmp_path: Path, rows: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(rows)
    with pytest.raises(ValueError, match=message) as error:
        read_trace(path)
    assert str(error.value).startswith(f"`{path}`, ")


def test_regular_losses() -> None:
    trace = regular_losses(30, 600.0, 15)
    sizes = [(time_s, len(nodes)) for time_s, nodes in trace.present()]
    assert sizes == [(600.0 * index, 30 - index) for index in range(16)]
    assert trace.end_s == 9000.0
    assert trace != regular_losses(30, 600.0, 15, seed=1)
    with pytest.raises(ValueError, match="4 nodes can't be lost: there are 3"):
        regular_losses(3, 1.0, 4)


def test_a_spot_market_loses_nodes_as_often_as_it_should() -> None:
    market = SpotMarket(num_nodes=30, loss_every_s=460.0, most_at_once=3, replaced_after_s=900.0)
    trace = market.trace(2e6, seed=3)
    assert trace == market.trace(2e6, seed=3) != market.trace(2e6, seed=4)
    losses = [event for event in trace.events if event.lost]
    assert len(losses) == pytest.approx(2e6 / 460, rel=0.05)
    assert trace.num_losses / len(losses) == pytest.approx(2.0, rel=0.05)
    assert trace.most_nodes == 30
    # Little's law: as many nodes are away as are lost in the time until one is replaced.
    assert 30 - trace.mean_nodes() == pytest.approx(900 * 2 / 460, rel=0.1)


def test_rows_of_a_trace_can_be_given() -> None:
    with pytest.raises(ValueError, match="row 1: `stop` is no action"):
        Trace.of([(0.0, "stop", "a")])
