"""The fenced blocks of Markdown pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_FENCED = re.compile(r"(?:^<!-- (?P<comment>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """A fenced block."""

    language: str  # python, bash, yaml, ...
    text: str
    line: int  # of its first line of text, from 1
    comment: str  # what an HTML comment on the line before it says


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page in order: all, or those in some languages."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(match["language"], match["text"], text.count("\n", 0, match.start("text")) + 1, match["comment"] or "")
        for match in _FENCED.finditer(text)
    ]
    return [block for block in found if not languages or block.language in languages]
