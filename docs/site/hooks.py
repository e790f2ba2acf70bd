"""Brings pages from outside of `docs` onto the site, and turns links to files into links to their pages."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
# file or folder of the repository -> its page; a script is a page with its text, a notebook one with its outputs
PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples/index.md",
    **{f"examples/{name}": f"examples/{name}.md" for name in ("accelerate_configs", "clusters")},
    **{f"examples/clusters/{name}.yaml": "examples/clusters.md" for name in ("skypilot", "pytorchjob")},
    **{f"docs/{path.name}": path.name for path in ROOT.glob("docs/*.md")},
    **{f"examples/{path.name}": f"examples/{path.stem}.md" for path in ROOT.glob("examples/*.py")},
    **{f"examples/notebooks/{path.name}": f"examples/{path.stem}.md" for path in ROOT.glob("examples/notebooks/*")},
}
_SOURCE_OF = {page: path for path, page in reversed(PAGES.items())}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are not in `docs`."""
    for page, path in _SOURCE_OF.items():
        if not path.startswith("docs/"):
            files.append(File.generated(config, page, content=_text(ROOT / path)))
    return files


def _text(path: Path) -> str:
    """A page as Markdown; scripts and launch files as code."""
    if path.suffix == ".md":
        return path.read_text()
    if path.suffix == ".ipynb":
        return "\n\n".join(_parts(json.loads(path.read_text())["cells"]))
    if path.is_dir():
        blocks = [f"## {file.name}\n\n```yaml\n{file.read_text()}```\n" for file in sorted(path.iterdir())]
        return "# Launch files\n\n" + "\n".join(blocks)
    return f"# {path.name}\n\n~~~~python\n{path.read_text()}~~~~\n"  # whose docstring has blocks of its own


def _parts(cells: list[dict[str, Any]]) -> Iterator[str]:
    """The cells of a notebook with their outputs, as Markdown."""
    for cell in cells:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"~~~~python\n{source}\n~~~~"
        for output in cell.get("outputs", ()):
            shown = {kind: "".join(lines) for kind, lines in output.get("data", output).items() if "/" in kind}
            if "text/html" in shown:
                yield shown["text/html"]
            elif "image/png" in shown:
                yield f'<img alt="output" src="data:image/png;base64,{shown["image/png"].strip()}">'
            else:
                yield f"~~~~text\n{''.join(output['text'])}\n~~~~"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between files of the repository into links between pages; files without a page lose theirs."""
    here = page.file.src_uri
    folder = posixpath.dirname(_SOURCE_OF.get(here, f"docs/{here}"))

    def rewritten(match: re.Match) -> str:
        image, text, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        if image:
            found = path.removeprefix("docs/")
        elif path in PAGES:
            found = PAGES[path]
        else:
            return f"`{path}`" if text.strip("`") == path else text
        text = _LINK.sub(rewritten, text)
        return f"{image}[{text}]({posixpath.relpath(found, posixpath.dirname(here) or '.')}{hash_}{anchor})"

    parts = re.split(r"(^~~~~.*?^~~~~|^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith(("~~~~", "```")) else _LINK.sub(rewritten, part) for part in parts)
