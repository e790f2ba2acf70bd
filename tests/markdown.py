"""The fenced blocks of Markdown pages, and the commands of those in bash."""

import re
import shlex
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
_FENCED = re.compile(r"(?:^<!-- (?P<comment>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """A fenced block."""

    language: str  # python, diff, bash, yaml or text
    text: str
    line: int  # of its first line of text, from 1
    comment: str  # what an HTML comment on the line before it says

    @property
    def code(self) -> str:
        """The Python of a block; of a diff, what it makes."""
        lines = self.text.splitlines()
        return "\n".join(line[1:] for line in lines if line[:1] != "-") if self.language == "diff" else self.text


def blocks(page: Path | str, *languages: str) -> list[Block]:
    """The blocks of a page, or of a text, in order: all, or those in some languages."""
    text = page if isinstance(page, str) else page.read_text(encoding="utf-8")
    found = [
        Block(match["language"], match["text"], text.count("\n", 0, match.start("text")) + 1, match["comment"] or "")
        for match in _FENCED.finditer(text)
    ]
    return [block for block in found if not languages or block.language in languages]


def commands(text: str) -> dict[str, list[str]]:
    """The lines of a block in bash -> their words, without the variables that are set before the program."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line]
    return {line: list(dropwhile(re.compile(r"[A-Z_]+=").match, shlex.split(line, comments=True))) for line in lines}
