"""
Writes tables of stored results into the pages, and checks the figures in sentences.

A table of figures stands between two comments, `<!-- results: NAME -->` and `<!-- end of results -->`. The function
NAME in one of the modules `*_figures.py` makes it from `benchmarks/results`, or from the package's tables of devices
and of arguments. Sentences are written by hand; the fragment with the figures is made from the same files, and has to
be on the page word for word (line breaks do not matter). `tests/test_pages.py` fails when pages and results differ.

```bash
python benchmarks/pages.py          # writes the tables anew and lists sentences that are not on their page
python benchmarks/pages.py --check  # writes nothing
```
"""

from __future__ import annotations

import argparse
import re
import sys

import argument_figures
import balance_figures
import calibration_figures
import context_figures
import device_figures
import failure_figures
import mode_figures
import model_figures
import paper_figures
import planner_figures
import published_figures
import sampler_figures
import scale_figures
import schedule_figures
import search_figures
import sharding_figures
import template_figures
import trainer_figures
import vlm_figures
from figures import ROOT

QUOTING = (
    balance_figures,
    calibration_figures,
    context_figures,
    failure_figures,
    mode_figures,
    model_figures,
    paper_figures,
    planner_figures,
    published_figures,
    sampler_figures,
    search_figures,
    template_figures,
    trainer_figures,
)
QUOTED = {page for source in QUOTING for page in source.QUOTES}
SOURCES = (*QUOTING, argument_figures, device_figures, scale_figures, schedule_figures, sharding_figures, vlm_figures)
BLOCKS = {name: block for source in SOURCES for name, block in source.BLOCKS.items()}

MARKED = re.compile(r"<!-- results: (\w+) -->\n(.*?)<!-- end of results -->", re.DOTALL)


def rendered(text: str) -> str:
    """A page with its marked tables made anew."""

    def replaced(found: re.Match[str]) -> str:
        if found[1] not in BLOCKS:
            raise ValueError(f"`{found[1]}` is no table of results; there are {sorted(BLOCKS)}. Correct the marker.")
        return f"<!-- results: {found[1]} -->\n{BLOCKS[found[1]]()}\n<!-- end of results -->"

    return MARKED.sub(replaced, text)


def quotes_of(page: str) -> list[str]:
    """The sentences with figures that should be on a page."""
    return [quote for source in QUOTING if page in source.QUOTES for quote in source.QUOTES[page]()]


def missing_quotes(page: str, text: str) -> list[str]:
    """Sentences that should be on a page and are not."""
    words = " ".join(text.split())
    return [quote for quote in quotes_of(page) if quote not in words]


def pages() -> list[str]:
    """The pages with figures, as paths in the repository."""
    marked = [
        path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if MARKED.search(path.read_text())
    ]
    return sorted({str(path.relative_to(ROOT)) for path in marked} | QUOTED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    wrong = 0
    for page in pages():
        path = ROOT / page
        text = path.read_text()
        new = rendered(text)
        if new != text:
            wrong += options.check
            print(f"{page}: tables differ from the results" if options.check else f"{page}: tables written")
            if not options.check:
                path.write_text(new)
        for quote in missing_quotes(page, new):
            wrong += 1
            print(f"{page}: does not say `{quote}`")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
