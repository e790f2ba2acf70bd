"""Docstrings in the form of Hugging Face, in which types and references are in backticks, for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

import hf_mmparallel

_ARGUMENT = re.compile(r"^( +\w+ \()(.*)(\):.*)$", re.MULTILINE)  # name (`type`, *optional*, defaults to `value`):
_TYPE = re.compile(r"^( +)`([^`]+)`:", re.MULTILINE)  # of a result or an error
_REFERENCE = re.compile(r"\[`~?([\w.]+)`\](?![\[(])")


def _link(match: re.Match) -> str:
    """A reference to a public name as a link, any other as code."""
    name = match[1]
    first, _, rest = name.removeprefix("hf_mmparallel.").partition(".")
    if first not in hf_mmparallel.__all__:
        return f"`{name}`"
    return f"[`{name}`][hf_mmparallel.{first}{'.' * bool(rest)}{rest}]"


class References(griffe.Extension):
    """Rewrites all docstrings as the parser of Google's form reads them."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = _ARGUMENT.sub(
                lambda m: m[1] + m[2].partition(", *optional*")[0].replace("`", "") + m[3], obj.docstring.value
            )
            obj.docstring.value = _REFERENCE.sub(_link, _TYPE.sub(r"\1\2:", text))
