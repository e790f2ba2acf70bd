"""All sentences of the package that a user can read; `python -m tests.sentences` writes them to `sentences.txt`."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hf_mmparallel"
SNAPSHOT = Path(__file__).with_name("sentences.txt")
FEWEST_WORDS = 4


@cache
def sentences() -> str:
    """A line for each text in the code, file by file; expressions in it are written as `{their source}`."""
    lines = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines += [f"{path.relative_to(PACKAGE)}: {text}" for text in _texts(tree) if len(text.split()) >= FEWEST_WORDS]
    return "\n".join(lines) + "\n"


def _texts(node: ast.AST) -> Iterator[str]:
    """The strings of a tree in the order of the source, docstrings left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.JoinedStr):
            yield _escaped("".join(map(_part, child.values)))
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield _escaped(child.value)
        else:
            yield from _texts(child)


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    return f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else ast.unparse(part)


def _escaped(text: str) -> str:
    return text.replace("\n", "\\n")


if __name__ == "__main__":
    SNAPSHOT.write_text(sentences(), encoding="utf-8")
