"""The site is built without a warning: links, anchors and the public names of the reference hold."""

import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import hf_mmparallel

ROOT = Path(__file__).parent.parent


@pytest.mark.deep
def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    build(config)
    pages = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("index.html")}
    assert {
        "trl",
        "own_loop",
        "readme",
        "changelog",
        "examples/sft_digits",
        "examples/finetune_small_vlm",
        "examples/accelerate_configs",
    } <= pages
    named = set(re.findall(r'id="hf_mmparallel\.(\w+)"', (tmp_path / "api" / "index.html").read_text()))
    assert named == set(hf_mmparallel.__all__) - {"__version__"}
    for page in tmp_path.rglob("*.html"):  # a link to a file that has no page would lead nowhere
        assert not re.search(r'href="[^"]*\.(?:md|py)["#]', page.read_text()), page
