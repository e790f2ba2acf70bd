"""The table of models in `docs/models.md`, and its counts, see `pages.py`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from figures import result, table

CHECKS = {
    "one process": "one",
    "own ranks": "own",
    "pp 2": "pp",
    "encoder pp 2": "e pp",
    "tp 2": "tp",
    "encoder tp 2": "e tp",
    "dp 2": "dp",
    "cp 2": "cp",
    "bitfield": "bitfield",
    "packed": "packed",
    "LoRA, pp 2": "LoRA",
    "frozen tower": "frozen",
    "released files": "files",
}
"""Check -> the head of its column."""
SIGNS = {"equal": "=", "crash": "crash", "wrong": "wrong", "not built": "-", "no such part": ""}
Row = Mapping[str, Mapping[str, Any]]


def _families() -> dict[str, Row]:
    return result("model_support")["families"]


def _is_built(row: Row) -> bool:
    return any(found["status"] != "not built" for found in row.values())


def _refusals() -> dict[str, int]:
    """Sentence of a refusal, with the names of a family left out -> its number."""
    sentences = (
        _general(f.get("text", "")) for row in _families().values() for f in row.values() if f["status"] == "refused"
    )
    counts = Counter(sentences)
    return {sentence: number for number, (sentence, _) in enumerate(counts.most_common(), 1)}


def _general(sentence: str) -> str:
    """A refusal without what differs between families."""
    sentence = re.sub(r"`[^`]*`", "`…`", sentence.split(". ")[0])
    return re.sub(r"\(\d[^)]*\)|\d+(\.\d+)?(e[-+]\d+)?", "…", sentence)


def model_counts() -> str:
    rows = []
    families = {name: row for name, row in _families().items() if _is_built(row)}
    for check, head in CHECKS.items():
        counts = Counter(row[check]["status"] for row in families.values())
        cells = [counts[status] for status in ("equal", "refused", "crash", "wrong", "not built", "no such part")]
        rows.append(f"| {check} | `{head}` | {' | '.join(map(str, cells))} |")
    return table("| check | column | equal | refused | crash | wrong | not possible | no such part |", rows)


def model_families() -> str:
    numbers = _refusals()

    def cell(found: Mapping[str, Any]) -> str:
        return (
            SIGNS.get(found["status"])
            if found["status"] != "refused"
            else f"{numbers[_general(found.get('text', ''))]}"
        )  # type: ignore

    rows = [
        f"| {name} | " + " | ".join(cell(row[check]) for check in CHECKS) + " |"
        for name, row in _families().items()
        if _is_built(row)
    ]
    return table(f"| model type | {' | '.join(CHECKS.values())} |", rows)


def model_refusals() -> str:
    rows = [f"| {number} | {sentence} |" for sentence, number in _refusals().items()]
    return table("| number | what is said |", rows)


def model_absent() -> str:
    rows = []
    for name, row in _families().items():
        if not _is_built(row):
            text = next(iter(row.values())).get("text", "").split(". ")[0].replace("|", " ")[:160]
            rows.append(f"| {name} | {text} |")
    return table("| model type | why not |", rows)


def _sentence() -> str:
    built = [row for row in _families().values() if _is_built(row)]
    counts = Counter(row[check]["status"] for row in built for check in CHECKS)
    return (
        f"Of the {len(_families())} model types that transformers {result('model_support')['transformers']} lists as "
        f"multimodal or causal, {len(built)} were laid out in {len(CHECKS)} ways: {counts['equal']:,} cells equal "
        f"one process, {counts['refused']} are refused with a sentence, {counts['crash']} crash, "
        f"{counts['wrong']} are wrong"
    )


BLOCKS = {
    "model_counts": model_counts,
    "model_families": model_families,
    "model_refusals": model_refusals,
    "model_absent": model_absent,
}
QUOTES = {"docs/models.md": lambda: [_sentence()], "README.md": lambda: [_sentence()]}
