"""Shared code of the benchmarks: a small model and its data, ranks, a description of the machine, results."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import platform
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from transformers import LlavaForConditionalGeneration

ROOT = Path(__file__).resolve().parent.parent
IMAGE_TOKEN = 1
PATCH_SIZE = 8
IGNORE_INDEX = -100
PRELOADED = [
    "matplotlib.figure",
    "rich.console",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llava.modeling_llava",
    "transformers.models.siglip.modeling_siglip",
    "transformers.trainer",
    "hf_mmparallel.cost",
    "hf_mmparallel.runtime.engine",
    "hf_mmparallel.planning.search",
    "hf_mmparallel.trainer",
]
"""What ranks import before they are forked."""


@dataclass(frozen=True)
class Shapes:
    """
    A SigLIP encoder with a Llama, and samples of widely different lengths.

    Args:
        vision_width (`int`): Hidden size of the encoder.
        vision_layers (`int`): Its layers.
        width (`int`): Hidden size of the language model.
        layers (`int`): Its layers.
        vocab_size (`int`): Tokens.
        image_size (`int`): Side of an image in pixels.
        max_images (`int`): A sample has 0 to this many images.
        text_tokens (`tuple[int, int]`): The fewest and the most text tokens of a sample.
    """

    vision_width: int = 192
    vision_layers: int = 6
    width: int = 192
    layers: int = 4
    vocab_size: int = 1000
    image_size: int = 32
    max_images: int = 4
    text_tokens: tuple[int, int] = (8, 48)

    @property
    def image_tokens(self) -> int:
        return (self.image_size // PATCH_SIZE) ** 2


QUICK = Shapes(vision_width=32, vision_layers=2, width=32, layers=2, vocab_size=50, image_size=16, max_images=2)


def build_model(shapes: Shapes) -> LlavaForConditionalGeneration:
    """The model, always with the same weights."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration  # processes without a model start without it

    config = LlavaConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": shapes.vision_width,
            "intermediate_size": 4 * shapes.vision_width,
            "num_hidden_layers": shapes.vision_layers,
            "num_attention_heads": 4,
            "image_size": shapes.image_size,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": shapes.width,
            "intermediate_size": 3 * shapes.width,
            "num_hidden_layers": shapes.layers,
            "num_attention_heads": 4,
            "vocab_size": shapes.vocab_size,
            "pad_token_id": 0,
        },
        image_token_id=IMAGE_TOKEN,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlavaForConditionalGeneration(config)


def make_dataset(shapes: Shapes, size: int) -> list[dict[str, torch.Tensor]]:
    """Random samples: images, then text, whose tokens are the targets."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    samples = []
    for _ in range(size):
        num_images = draw(0, shapes.max_images)
        text = torch.randint(2, shapes.vocab_size, (draw(*shapes.text_tokens),), generator=generator)
        ids = torch.cat([torch.full((num_images * shapes.image_tokens,), IMAGE_TOKEN), text])
        sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        sample["labels"] = ids.masked_fill(ids == IMAGE_TOKEN, IGNORE_INDEX)
        if num_images:
            size_2d = (shapes.image_size, shapes.image_size)
            sample["pixel_values"] = torch.randn(num_images, 3, *size_2d, generator=generator)
        samples.append(sample)
    return samples


def collate(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tokens padded to the right, the images of all samples in a row."""
    length = max(len(sample["input_ids"]) for sample in samples)
    batch = {}
    for name, fill in (("input_ids", 0), ("attention_mask", 0), ("labels", IGNORE_INDEX)):
        batch[name] = torch.stack([pad(s[name], (0, length - len(s[name])), value=fill) for s in samples])
    images = [sample["pixel_values"] for sample in samples if "pixel_values" in sample]
    return {**batch, "pixel_values": torch.cat(images)} if images else batch


def launch(script: str, world_size: int, arguments: Sequence[str] = (), timeout_s: int = 900) -> Any:
    """
    Runs `script --ranks FILE` on several gloo ranks of this host; returns the JSON that rank 0 writes to FILE.

    Ranks are started as by torchrun, but forked from a server that has imported the heavy packages once.
    """
    environment = {
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, _environment(environment):
        file = Path(folder) / "result.json"
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            start_method="forkserver",
            monitor_interval=0.1,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
        )
        try:
            elastic_launch(config, _run_script)(script, ["--ranks", str(file), *arguments], timeout_s)
        except ChildFailedError as error:
            logs = sorted(Path(folder).rglob("std*.log"))
            tails = "\n".join(f"{log.parent.name} {log.name}:\n{log.read_text()[-6000:]}" for log in logs)
            raise RuntimeError(f"The ranks of {Path(script).name} failed:\n{tails}") from error
        return json.loads(file.read_text())


def in_processes(function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
    """
    Results of the calls with the n-th of all `arguments`, each in a process of its own, one for each core at a time.

    Processes are forked from the server of the ranks.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    workers = min(len(arguments[0]), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        return list(pool.map(function, *arguments))


def _run_script(script: str, arguments: Sequence[str], timeout_s: int) -> None:
    """Body of a rank: runs a benchmark as a command does, for `timeout_s` seconds at most."""
    signal.alarm(timeout_s)
    gc.freeze()  # else each collection walks, and so copies, all that the server has imported
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.chdir(folder):
        runpy.run_path(script, run_name="__main__")


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets variables of the environment, which ranks inherit, for a while."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def machine(shapes: Shapes, load_before: Sequence[float]) -> dict[str, Any]:
    """Conditions of a measurement: the machine, its load, versions, the commit, the shapes."""
    commit = _git("rev-parse", "--short", "HEAD")
    others = (":(exclude)benchmarks/results", ":(exclude)docs", ":(exclude)README.md")  # written by benchmarks
    changed = bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", *others))
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "load_before": [round(value, 2) for value in load_before],
        "load_after": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "accelerate": version("accelerate"),
        "commit": commit + (" with changes" if changed else ""),
        "shapes": asdict(shapes),
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    """The processor's name, as Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of repeated measurements."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def measured(function: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Milliseconds of repeated calls, and the median of their processor time; the first is left out."""
    function()
    times, processor = [], []
    for _ in range(repeats):
        begin = time.perf_counter(), time.process_time()
        function()
        times.append((time.perf_counter() - begin[0]) * 1e3)
        processor.append((time.process_time() - begin[1]) * 1e3)
    return {**spread(times), "processor": round(statistics.median(processor), 4)}


def report(name: str, tables: Sequence[Table], notes: Sequence[str], result: dict[str, Any], folder: Path) -> None:
    """Prints the tables, the notes and one JSON line, and writes the JSON to `folder`."""
    console = Console(width=118)
    for table in tables:
        console.print(table)
    for note in notes:
        console.print(note)
    result = {"benchmark": name, **result}
    print(json.dumps(result))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
