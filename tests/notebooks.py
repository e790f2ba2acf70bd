"""
Runs the notebooks of the examples. `python -m tests.notebooks` stores their outputs in them, which the site and forges
show.
"""

import os
import shutil
import sys
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from hf_mmparallel.planning.html_reprs import with_palette

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run_notebook(path: Path, folder: Path, added: Mapping[str, str] | None = None) -> NotebookNode:
    """
    The notebook as it is after a run in a fresh kernel, on a copy of the examples in `folder`. `added` is code that
    runs in cells of its own, each behind the cell that contains its key.
    """
    copy = shutil.copytree(EXAMPLES, folder / "examples")
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    for text, code in (added or {}).items():
        (place,) = (number for number, cell in enumerate(notebook.cells) if text in cell.source)
        notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(code))
    where = {"metadata": {"path": str(copy / path.parent.relative_to(EXAMPLES))}}
    client = NotebookClient(notebook, timeout=250, resources=where, coalesce_streams=True, record_timing=False)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment.pop("MPLBACKEND", None)  # the kernel's own draws in the notebook
    return client.execute(env=environment)


def store(path: Path) -> None:
    """Writes what a run gives into a notebook, but what depends on the environment: warnings and progress bars."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = run_notebook(path, Path(folder))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for data in (output.data for output in cell.outputs if "data" in output):
                data.pop("image/jpeg", None)
                if "image/png" in data:
                    data["image/png"] = b64encode(with_palette(b64decode(data["image/png"]))).decode()
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for chosen in map(Path, sys.argv[1:] or sorted(EXAMPLES.glob("notebooks/*.ipynb"))):
        store(chosen.resolve())
