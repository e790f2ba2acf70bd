"""Figures on the pages are those of the kept results: both are changed together or this fails."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import figures  # noqa: E402
import pages  # noqa: E402

# Tables of `docs/benchmarks.md` without a figure of a result: what columns mean.
EXPLAINED = ("/ even", "/ best", "/ busiest", "std vision, std LM")


@pytest.mark.parametrize("page", pages.pages())
def test_tables_are_those_of_the_results(page):
    text = (ROOT / page).read_text()
    assert pages.rendered(text) == text, f"run `make pages`, {page} differs from benchmarks/results"


@pytest.mark.parametrize("page", sorted(pages.QUOTED))
def test_sentences_have_the_figures_of_the_results(page):
    assert pages.missing_quotes(page, (ROOT / page).read_text()) == []


def test_every_table_is_on_a_page():
    used = {name for page in pages.pages() for name, _ in pages.MARKED.findall((ROOT / page).read_text())}
    assert used == set(pages.BLOCKS)


def test_every_table_of_figures_comes_from_a_result():
    """What is typed by hand instead would not be compared with anything."""
    quoted = {" ".join(quote.split()) for quote in pages.quotes_of("docs/benchmarks.md")}
    for page in ("README.md", "docs/benchmarks.md"):
        typed = pages.MARKED.sub("", (ROOT / page).read_text())
        rows = [line for line in typed.splitlines() if line.startswith("|") and re.search(r"\d", line)]
        rows = [row for row in rows if row not in quoted and not row.startswith(tuple(f"| {e}" for e in EXPLAINED))]
        assert rows == [], page


def test_a_changed_result_is_noticed(tmp_path, monkeypatch):
    shutil.copytree(figures.RESULTS, tmp_path / "results")
    file = tmp_path / "results" / "attention.json"
    result = json.loads(file.read_text())
    row = next(r for r in result["rows"] if (r["length"], r["pass"]) == (16384, "forward"))
    row["times_faster"] += 1.0
    file.write_text(json.dumps(result))
    readme, papers = (ROOT / "README.md").read_text(), (ROOT / "docs/papers.md").read_text()
    figures.result.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(figures, "RESULTS", tmp_path / "results")
            assert pages.rendered(readme) != readme
            missing = pages.missing_quotes("docs/papers.md", papers)
    finally:
        figures.result.cache_clear()
    assert any("times faster than a dense mask" in quote for quote in missing)


def test_the_chosen_arrangement_is_at_least_as_good_as_every_baseline_in_the_kept_cases():
    modes = figures.result("microbatch_balance_modes")["modes"]
    assert len({(row["dataset"], row["model"], row["mode"], row["microbatch_size"]) for row in modes}) == 32
    for row in modes:
        for name in ("contiguous", "batch_rebalance", "disttrain"):
            assert row["step_ms"][row["chosen"]] <= row["step_ms"][name], row


def test_every_result_says_where_and_when_it_was_measured():
    for path in figures.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        for key in ("commit", "date", "processor", "cores", "torch", "transformers"):
            assert result.get(key), f"{path.name} lacks `{key}`"
