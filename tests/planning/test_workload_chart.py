"""Pictures of workloads: every bar is there, at any size."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hf_mmparallel.arrange.balance import Balance
from hf_mmparallel.plan import LANGUAGE_MODEL as LM
from hf_mmparallel.planning import workload_chart as draw
from hf_mmparallel.planning.recovery_chart import RecoveryMark, recovery_png, throughput


def balance(num_replicas: int, num_microbatches: int, deferred: float = 0.0, scale: float = 1.0) -> Balance:
    """Random bars."""
    rng = np.random.default_rng(num_replicas)
    times = {name: tuple(scale * rng.lognormal(1, 1, (num_replicas, num_microbatches))) for name in ("vision", LM)}
    return Balance(times, {LM: tuple(0.3 * own for own in times[LM])}, deferred)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list:
    """The figures that are saved."""
    saved, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path: (saved.append(self), save(self, path)))
    return saved


def heights(axes) -> list[list[float]]:
    return [[patch.get_height() for patch in axis.patches if isinstance(patch, Rectangle)] for axis in axes]


@pytest.mark.parametrize(("num_replicas", "num_microbatches"), [(1, 32), (9, 2)])
def test_each_replica_has_a_strip_with_a_bar_for_each_microbatch(figures, tmp_path, num_replicas, num_microbatches):
    before, after = balance(num_replicas, num_microbatches), balance(num_replicas, num_microbatches, deferred=0.25)
    draw.balance_png({"before": before, "after": after}, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    strips = min(num_replicas, draw.MAX_REPLICAS)
    assert len(figure.axes) == 2 * 2 * strips
    np.testing.assert_allclose(heights(figure.axes[:strips]), before.forward_ms["vision"][:strips])
    language = np.array(heights(figure.axes[strips : 2 * strips]))
    np.testing.assert_allclose(language[:, :num_microbatches], before.forward_ms[LM][:strips])
    np.testing.assert_allclose(language[:, num_microbatches:], before.deferred_ms[LM][:strips])
    texts = [axis.get_title(loc="left") for axis in figure.axes] + [t.get_text() for a in figure.axes for t in a.texts]
    assert f"after: {num_microbatches} microbatches, 25% deferred" in texts
    assert any(f"std {draw.number_text(after.std_ms(LM))} ms" in text for text in texts)


def test_columns_share_a_scale_unless_they_have_their_own(figures, tmp_path):
    panels: dict[str, Balance] = {name: balance(1, 4, scale=s) for name, s in (("a", 1), ("b", 3), ("c", 50))}
    draw.balance_png(panels, tmp_path / "out.png", own_scale=["c"])
    tops = [axis.get_ylim()[1] for axis in figures[0].axes]
    assert tops[:2] == tops[2:4] and tops[4] > 10 * tops[2]


def test_numbers_have_three_digits():
    assert [draw.number_text(value) for value in (1093.4, 123.45, 2.534, 0.0)] == ["1,093", "123", "2.53", "0"]


def test_nothing_to_do_can_be_drawn(tmp_path):
    empty = Balance({LM: (np.zeros(2),)}, {LM: (np.zeros(2),)})
    draw.balance_png({"before": empty}, tmp_path / "out.png")


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
