"""The chart of a run in which ranks were lost."""

import pytest
from matplotlib.figure import Figure

from hf_mmparallel.planning.recovery_chart import RecoveryMark, recovery_png, throughput


def test_throughput_is_that_of_each_step() -> None:
    edges, rates = throughput([1.0, 1.5, 3.5], 8)
    assert edges == [0.0, 1.0, 1.5, 3.5] and rates == [8.0, 16.0, 4.0]
    assert throughput([], 8) == ([0.0], [])


@pytest.mark.parametrize("count", [299, 300, 301, 2999])
def test_a_long_run_has_few_pieces_with_all_samples(count: int) -> None:
    edges, rates = throughput([0.5 * step for step in range(1, count + 1)], 4)
    assert len(rates) == len(edges) - 1 <= 300 and edges[-1] == 0.5 * count
    samples = sum(rate * (stop - start) for rate, start, stop in zip(rates, edges, edges[1:], strict=False))
    assert samples == pytest.approx(4 * count)


def test_each_recovery_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    saved, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path: (saved.append(self), save(self, path)))
    marks = ((2.1, 0.25, 3, "lost 1"), (2.5, 1.0, 1, "lost 0, 3"), (9, 0.5, 1, "x"))
    recovery_png([1.0, 2.0, 5.0, 8.0], 8, 4, [RecoveryMark(*mark) for mark in marks], tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    rates, ranks = saved[0].axes
    assert ranks.patches[0].get_data().values.tolist() == [4, 3, 1, 1]
    labels = sorted((text.xy[0], text.get_text()) for text in rates.texts)
    assert [text for _, text in labels] == ["lost 1: 0.25 s", "lost 0, 3: 1.00 s", "x: 0.50 s"]
    assert all(right - left >= 0.02 for (left, _), (right, _) in zip(labels, labels[1:], strict=False))
    assert "3 changes, 1.75 s" in saved[0].texts[1].get_text()
