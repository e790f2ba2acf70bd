"""
Time to measure the sizes of the samples of a large dataset.

Token ids: a dataset of tokenised samples on disk, whose tokens and placeholders are counted in its Arrow columns; the
same again, from the cache; and a sample by itself, as each was counted before.

Conversations: charts with questions, of which the sizes follow from the chat template, the tokenizer and the headers
of the images. A Trainer on two gloo ranks with `parallel="auto"` and with a layout: from its constructor to the end of
the first optimizer step, and the same again in new processes, which find the sizes that the first run has kept. What
one conversation takes says what measuring all of them on one process would take. The conversations of a large set are
those of a small one over and over, since each is measured for itself.

```bash
python benchmarks/sizes_at_scale.py
python benchmarks/sizes_at_scale.py --quick --out out/bench  # seconds; the numbers mean little
```
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from datasets import Dataset, concatenate_datasets, load_from_disk
from rich.table import Table
from transformers import TrainerCallback

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.data import ChatCollator
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.data.size_measures import ChatMeasure, TokenMeasure
from hf_mmparallel.modeling import build_model_spec

sys.path.append(str(common.ROOT / "examples"))
from charts import build_processor, chart_dataset  # pyright: ignore[reportMissingImports]
from train_chart_vlm import ScriptArguments, build_model  # pyright: ignore[reportMissingImports]

RANKS = 2
LAYOUTS: dict[str, Any] = {"auto": "auto", "a layout": {"vision": {}, "language_model": {}}}


@dataclass(frozen=True)
class Sizes:
    """
    Problem sizes.

    Args:
        samples (`int`): Of both datasets.
        parts (`int`): Copies of one file that the token ids are read from.
        tokens (`tuple[int, int]`): The fewest and the most of a tokenised sample.
        charts (`int`): Conversations that the large set repeats.
        one_by_one (`int`): Samples that are counted one by one, and conversations that are measured.
        batch (`int`): Samples of a global batch.
    """

    samples: int = 1_000_000
    parts: int = 10
    tokens: tuple[int, int] = (200, 1800)
    charts: int = 512
    one_by_one: int = 1000
    batch: int = 32


QUICK = Sizes(samples=6000, parts=2, charts=32, one_by_one=16, batch=4)


def token_rows(sizes: Sizes, placeholder: int, folder: Path) -> Dataset:
    """Tokenised samples with an image of 100 tokens each, on disk."""
    import pyarrow as pa

    rng = np.random.default_rng(0)
    count = sizes.samples // sizes.parts
    lengths = rng.integers(*sizes.tokens, count)
    ends = np.cumsum(lengths)
    ids = rng.integers(0, 1000, int(ends[-1]), dtype=np.int32)
    ids[((ends - lengths)[:, None] + np.arange(5, 105)).ravel()] = placeholder
    rows = pa.LargeListArray.from_arrays(pa.array(np.concatenate([[0], ends])), pa.array(ids))
    Dataset(pa.table({"input_ids": rows})).save_to_disk(str(folder))
    return concatenate_datasets([load_from_disk(str(folder)) for _ in range(sizes.parts)])  # pyright: ignore


def token_ids(sizes: Sizes, spec: Any) -> dict[str, Any]:
    """Seconds to count the tokens of all samples, again, and microseconds of one by itself."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        dataset = token_rows(sizes, next(iter(spec.placeholders.values())), Path(folder))
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            source = size_source(dataset, None, spec)
            seconds.append(time.perf_counter() - start)
        measure = TokenMeasure.of(spec)
        view: Any = dataset.with_format("arrow")
        start = time.perf_counter()
        found = [measure(view[index].to_pylist()[0]) for index in range(sizes.one_by_one)]
        single = (time.perf_counter() - start) / sizes.one_by_one
        assert source is not None
        counted = source(range(sizes.one_by_one)).tokens["language_model"].tolist()
        assert counted == [own["language_model"][0] for own in found]
    return {
        "samples": len(dataset),
        "seconds": round(seconds[0], 2),
        "cached_seconds": round(seconds[1], 2),
        "microseconds_a_sample": round(1e6 * seconds[0] / len(dataset), 2),
        "microseconds_one_by_one": round(1e6 * single, 1),
    }


class FirstStep(TrainerCallback):
    """When the first step ends."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter())


def conversations(sizes: Sizes, folder: Path) -> tuple[Dataset, Any]:
    """A large set of conversations whose files are in a folder, and its processor."""
    charts = chart_dataset(sizes.charts)
    if not folder.exists():
        charts.save_to_disk(str(folder))  # beside the files that all runs share others may have kept sizes
    own: Dataset = load_from_disk(str(folder))  # pyright: ignore[reportAssignmentType]
    return own.select(np.arange(sizes.samples) % sizes.charts), build_processor(charts)


def first_steps(sizes: Sizes, parallel: str, folder: Path) -> dict[str, float]:
    """Seconds from the constructor of a Trainer to the end of its first steps, on this rank."""
    dataset, processor = conversations(sizes, folder)
    torch.manual_seed(0)  # the same model on all ranks
    model, times = build_model(ScriptArguments(), processor), FirstStep()
    with tempfile.TemporaryDirectory(prefix="bench-") as output:
        args = MultimodalTrainingArguments(
            output_dir=output,
            parallel=LAYOUTS[parallel],  # pyright: ignore[reportArgumentType]
            global_batch_size=sizes.batch,
            per_device_train_batch_size=4,
            dataloader_num_workers=1,
            dataloader_multiprocessing_context="fork",
            max_steps=3,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            ddp_backend="gloo",
            remove_unused_columns=False,
        )
        start = time.perf_counter()
        trainer = MultimodalParallelTrainer(
            model, args, train_dataset=dataset, processing_class=processor, callbacks=[times]
        )
        built = time.perf_counter()
        trainer.train()
    at = [round(end - start, 2) for end in times.seconds]
    return {
        "constructor_seconds": round(built - start, 2),
        "first_step_seconds": at[0],
        "third_step_seconds": at[2],
    }


def runs(sizes: Sizes, quick: list[str]) -> Iterator[dict[str, Any]]:
    """Times of ranks with a dataset for the first time, and with the same dataset again."""
    for parallel in LAYOUTS:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            files = Path(folder) / "charts"
            conversations(sizes, files)  # the ranks only read it
            arguments = [*quick, "--parallel", parallel, "--folder", str(files)]
            for again in (False, True):
                found = common.launch(__file__, RANKS, arguments)
                yield {"parallel": parallel, "again": again, "samples": sizes.samples, **found}


def one_conversation(sizes: Sizes, spec: Any, folder: Path) -> dict[str, Any]:
    """Milliseconds of processor time to measure a conversation, many at once and one by one."""
    dataset, processor = conversations(sizes, folder)
    count = min(sizes.one_by_one, sizes.charts)
    source = size_source(dataset, ChatCollator(processor), spec)
    assert source is not None
    start = time.process_time()
    together = source(range(count)).tokens["language_model"].tolist()
    each = (time.process_time() - start) / count
    view: Any = dataset.with_format("arrow")
    measure = ChatMeasure(ChatCollator(processor), TokenMeasure.of(spec))
    start = time.process_time()
    alone = [measure(view[index].to_pylist()[0])["language_model"][0] for index in range(count)]
    single = (time.process_time() - start) / count
    assert together == alone
    return {
        "milliseconds": round(1e3 * each, 3),
        "milliseconds_one_by_one": round(1e3 * single, 3),
        "hours_of_all": round(each * sizes.samples / 3600, 2),
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The printed table and notes."""
    ids = result["token_ids"]
    counted = Table("samples", "seconds", "again", "us a sample", "us one by one", title="Token ids in Arrow columns")
    keys = ("seconds", "cached_seconds", "microseconds_a_sample", "microseconds_one_by_one")
    counted.add_row(f"{ids['samples']:,}", *(str(ids[key]) for key in keys))
    columns = ("parallel", "run", "conversations", "constructor s", "first step s", "third step s")
    started = Table(*columns, title="Two ranks")
    for row in result["first_steps"]:
        times = [str(row[key]) for key in ("constructor_seconds", "first_step_seconds", "third_step_seconds")]
        started.add_row(row["parallel"], "again" if row["again"] else "first", f"{row['samples']:,}", *times)
    return [counted, started]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few samples")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parallel", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    torch.set_num_threads(1)
    if options.ranks:
        found = first_steps(sizes, options.parallel, options.folder)
        if os.environ["RANK"] == "0":
            options.ranks.write_text(json.dumps(found))
        return
    load = os.getloadavg()
    spec = build_model_spec(build_model(ScriptArguments(), build_processor(chart_dataset(sizes.charts))))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        conversation = one_conversation(sizes, spec, Path(folder) / "charts")
    result = {
        "token_ids": token_ids(sizes, spec),
        "one_conversation": conversation,
        "first_steps": list(runs(sizes, ["--quick"] if options.quick else [])),
        **common.machine(common.QUICK, load),
        "shapes": asdict(sizes),
    }
    each = result["one_conversation"]
    notes = [
        f"A conversation takes {each['milliseconds']} ms ({each['milliseconds_one_by_one']} by itself); all on one "
        f"process would take {each['hours_of_all']} h.",
    ]
    common.report("sizes_at_scale", tables(result), notes, result, options.out)


if __name__ == "__main__":
    main()
