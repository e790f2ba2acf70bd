"""Each message that a page quotes is one of the code, here or where it comes from."""

import importlib
import inspect
import math
import re
from functools import cache

import pytest

from tests.markdown import PAGES, ROOT, blocks
from tests.sentences import SNAPSHOT, sentences

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# Messages of others -> the module whose source has these words, if any does.
OTHERS = {
    "The hostname of the client socket cannot be retrieved": None,
    "terminate called without an active exception": None,
    "The version of PEFT you are using is not compatible": "transformers.utils.peft_utils",
    "Unsupported types (<class 'NoneType'>) passed to `_pad_across_processes`": None,  # both are values
    "requires the Torchvision library": "transformers.utils.import_utils",
    "loaded state dict has a different number of parameter groups": "torch.optim.optimizer",
}
VALUE = "\0"


def quotes() -> list[str]:
    """The messages at the heads of the entries."""
    heads = re.findall(r"^\*\*(.+?)\*\*", PAGE, re.MULTILINE)
    return [quote for head in heads for quote in re.findall(r'"(.+?)"(?=,|$| in )', head)]


@cache
def templates() -> list[list[str]]:
    """The words of each text of the package, with a mark in each word that has a value."""
    found = []
    for line in sentences().splitlines():
        text = line.partition(": ")[2]
        while (shorter := re.sub(r"\{[^{}]*\}", VALUE, text)) != text:
            text = shorter
        found.append(text.split())
    return found


def _matching_words(quote: list[str], template: list[str]) -> int:
    """
    How many words of a quote are in a part of a template, where all others are values, for whose further words points
    are taken off, or left out of the quote (`...`).
    """
    best = [0] * (len(template) + 1)  # by the number of words of the template before
    for word in quote:
        found = [-math.inf] * len(best)
        for end in range(len(best)):
            if "..." in word:
                found[end] = max(best[: end + 1])
            elif end and VALUE in template[end - 1]:
                found[end] = max(best[end - 1], best[end] - 0.3, found[end - 1])
            elif end and template[end - 1].strip(".,;:") == word.strip(".,;:"):
                found[end] = best[end - 1] + 1
        best = found
    return max(best)


def is_of_the_package(quote: str) -> bool:
    """Whether a text of the package begins with, contains or ends with the quote."""
    words = quote.split()
    literal = sum(not re.search(r"\d|`|\.\.\.", word) for word in words)
    return any(_matching_words(words, template) >= 0.4 * literal for template in templates())


@pytest.mark.parametrize("quote", quotes())
def test_messages_are_those_of_the_code(quote):
    for words, module in OTHERS.items():
        if words in quote:
            assert module is None or words in inspect.getsource(importlib.import_module(module))
            return
    assert is_of_the_package(quote)


def test_what_runs_print_is_in_words_of_the_code():
    """Clauses that are little but values, such as names of processes, are not found."""
    shown = [block.text for page in PAGES for block in blocks(page, "text") if block.comment == "printed: by a run"]
    assert len(shown) == 3
    for text in shown:
        clauses = re.split(r"[.;:]\s|\n(?=\W)", re.sub(r"\n(?=[a-z])", " ", text))
        found = [is_of_the_package(clause) for clause in clauses if len(clause.split()) >= 4]
        assert 2 * sum(found) >= len(found) > 0, text


def test_sentences_are_those_of_the_snapshot():
    found, kept = sentences().splitlines(), SNAPSHOT.read_text(encoding="utf-8").splitlines()
    changed = [f"- {line}" for line in kept if line not in found] + [f"+ {line}" for line in found if line not in kept]
    assert found == kept, "\n".join(["`python -m tests.sentences` writes the snapshot:", *changed])
