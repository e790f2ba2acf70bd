"""
Tokens per second of a step, padded, packed, and packed with samples arranged by their work.

Samples have the image and text sizes that are published of three datasets. Predicted for 8 H100 that each hold a copy
(ZeRO-3) of two models, and measured on two CPU ranks with a tiny model and the same samples at a 32nd of their size,
beside TRL's `SFTTrainer`, which pads images; all variants take turns in the same processes.

```bash
python benchmarks/packing_gain.py
python benchmarks/packing_gain.py --quick --out out/bench  # seconds; the numbers mean nothing
```
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch.distributed as dist
import vlm_configs
from rich.table import Table
from trainer_overhead import WARMUP_STEPS, StepClock
from transformers import PrinterCallback

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.cost import analytic_costs, find_device, usable_bytes
from hf_mmparallel.cost.step_planner import StepPlanner
from hf_mmparallel.data.image_rules import image_rule
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.papers.sample_presets import SAMPLE_PRESETS
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan, sync_groups

DATASETS = ("chartqa", "cocoqa", "llava-150k")
PREDICTED = ("Qwen3.5-9B", "Qwen3-VL-30B-A3B")
TRL, PADDED, PACKED, ARRANGED = "TRL, padded", "padded", "packed", "packed, arranged"
ORDERS = {PADDED: "contiguous", PACKED: "contiguous", ARRANGED: "hierarchical"}
GPUS, GLOBAL_BATCH, MICROBATCH, BATCHES = 8, 128, 4, 4
SCALE = 32
"""Of published sizes, over those of the tiny model's samples."""
RANKS, SMALL_BATCH = 2, 16


# Predicted


def predict(name: str, datasets: Sequence[str], num_batches: int) -> list[dict[str, Any]]:
    """Tokens per second of copies of a model on 8 H100."""
    device = find_device("h100")
    sharded = {"dp_size": GPUS, "zero_stage": 3, "activation_checkpointing": True}
    rows = []
    for variant, order in ORDERS.items():
        model = vlm_configs.model_of(name, "sdpa" if variant == PADDED else "bitfield")
        spec = build_model_spec(model)
        costs = replace(analytic_costs(spec, device), packing=variant != PADDED)
        modules = {LANGUAGE_MODEL: ModulePlugin(**sharded)}
        modules["vision"] = ModulePlugin(**sharded, colocate_with=LANGUAGE_MODEL)
        plan = replace(resolve_plan(spec, modules), num_microbatches=GLOBAL_BATCH // GPUS // MICROBATCH)
        groups, memory_bytes = sync_groups(spec, plan), usable_bytes(device)
        planner = StepPlanner(costs, plan, groups, MICROBATCH, order, memory_bytes=memory_bytes)
        for dataset in datasets:
            drawn = SAMPLE_PRESETS[dataset].draw_images(num_batches * GLOBAL_BATCH, seed=0)
            sizes = drawn.sizes("vision", image_rule(model, spec, "vision"))
            batches = [sizes.take(range(i, i + GLOBAL_BATCH)) for i in range(0, sizes.num_samples, GLOBAL_BATCH)]
            predictions = [planner.predict_batch(batch) for batch in batches]
            step_ms = sum(own.step_ms for own in predictions)
            row = {"model": name, "dataset": dataset, "variant": variant, "step_ms": step_ms / num_batches}
            row["tokens_per_second"] = 1e3 * float(sizes.tokens[LANGUAGE_MODEL].sum()) / step_ms
            row["peak_gib"] = max(own.peak_memory_bytes for own in predictions) / 2**30
            rows.append(row)
    return rows


# Measured


def small_samples(dataset: str, shapes: common.Shapes, count: int) -> list[dict[str, torch.Tensor]]:
    """Samples of the tiny model: images of a fixed size in place of a larger one, and text, at a 32nd of the size."""
    drawn = SAMPLE_PRESETS[dataset].draw_images(count, seed=0)
    features = drawn.heights * drawn.widths / (2 * 14) ** 2
    images = np.maximum(1, np.rint(features / SCALE / shapes.image_tokens)).astype(int).tolist()
    words = np.maximum(2, np.rint(drawn.text_tokens / SCALE)).astype(int).tolist()
    generator = torch.Generator().manual_seed(0)
    samples = []
    for num_images, num_words in zip(images, words, strict=True):
        text = torch.randint(2, shapes.vocab_size, (num_words,), generator=generator)
        ids = torch.cat([torch.full((num_images * shapes.image_tokens,), common.IMAGE_TOKEN), text])
        labels = ids.masked_fill(ids == common.IMAGE_TOKEN, common.IGNORE_INDEX)
        pixels = torch.randn(num_images, 3, shapes.image_size, shapes.image_size, generator=generator)
        mask = torch.ones_like(ids)
        samples.append({"input_ids": ids, "attention_mask": mask, "labels": labels, "pixel_values": pixels})
    return samples


def make_trainer(variant: str, dataset: str, shapes: common.Shapes, num_steps: int) -> Any:
    """A Trainer with a fresh model on this rank."""
    samples = small_samples(dataset, shapes, SMALL_BATCH * (WARMUP_STEPS + num_steps))
    arguments: dict[str, Any] = {
        **{"output_dir": tempfile.gettempdir(), "max_steps": WARMUP_STEPS + num_steps, "logging_steps": 10**6},
        **{"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "ddp_backend": "gloo"},
        **{"per_device_train_batch_size": MICROBATCH, "remove_unused_columns": False},
    }
    given: dict[str, Any] = {"model": common.build_model(shapes), "data_collator": common.collate}
    if variant == TRL:
        from datasets import Dataset
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast
        from trl import SFTConfig, SFTTrainer

        words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
        given["processing_class"] = PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
        )
        given["train_dataset"] = Dataset.from_list([{"place": index} for index in range(len(samples))])
        given["data_collator"] = lambda rows: common.collate([samples[row["place"]] for row in rows])
        arguments |= {"gradient_accumulation_steps": SMALL_BATCH // MICROBATCH // RANKS, "bf16": False}
        arguments |= {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
        return SFTTrainer(args=SFTConfig(**arguments, gradient_checkpointing=False), **given)
    copies = {"dp_size": RANKS}
    args = MultimodalTrainingArguments(
        **arguments,
        global_batch_size=SMALL_BATCH,
        packing=variant != PADDED,
        microbatch_assignment=ORDERS[variant],
        parallel={LANGUAGE_MODEL: copies, "vision": {**copies, "colocate_with": LANGUAGE_MODEL}},
    )
    return MultimodalParallelTrainer(args=args, train_dataset=samples, **given)


def seconds_of(trainer: Any) -> tuple[float, float]:
    """Trains and times the steps after the warm-up: on the clock, and of the processors of all ranks."""
    clock = StepClock()
    trainer.add_callback(clock)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    seconds, processor = (stop - start for start, stop in zip(clock.start, clock.stop, strict=True))
    total = torch.tensor(processor)
    dist.all_reduce(total)
    return seconds, float(total)


def measure(shapes: common.Shapes, datasets: Sequence[str], num_steps: int, repeats: int) -> list[dict[str, Any]]:
    """Seconds of the steps of each variant, in random order in each round; the first round is a warm-up."""
    variants = [TRL] * (find_spec("trl") is not None) + list(ORDERS)
    rng, rows = random.Random(0), []
    for dataset in datasets:
        seconds: dict[str, list[tuple[float, float]]] = {variant: [] for variant in variants}
        for number in range(repeats + 1):
            for variant in rng.sample(variants, len(variants)):
                gc.collect()
                value = seconds_of(make_trainer(variant, dataset, shapes, num_steps))
                if number:
                    seconds[variant].append(value)
        tokens = sum(
            len(sample["input_ids"])
            for sample in small_samples(dataset, shapes, SMALL_BATCH * (WARMUP_STEPS + num_steps))
        )
        tokens_a_step = tokens / (WARMUP_STEPS + num_steps)
        for variant, values in seconds.items():
            clock, processor = (
                common.spread([num_steps * tokens_a_step / own for own in column])
                for column in zip(*values, strict=True)
            )
            row = {"dataset": dataset, "variant": variant, "tokens_per_second": clock}
            rows.append({**row, "tokens_per_processor_second": processor})
    return rows


def tables(result: dict[str, Any]) -> list[Table]:
    """The predicted and the measured speeds."""
    predicted = Table(title="Predicted on 8 H100: tokens per second")
    for column in ("model", "dataset", *ORDERS):
        predicted.add_column(column)
    found = {(row["model"], row["dataset"], row["variant"]): row for row in result["predicted"]}
    for model, dataset in dict.fromkeys(key[:2] for key in found):
        speeds = [f"{found[model, dataset, variant]['tokens_per_second']:,.0f}" for variant in ORDERS]
        predicted.add_row(model, dataset, *speeds)
    measured = Table(title="Measured on two CPU ranks: tokens per second")
    for column in ("dataset", "variant", "median", "min", "max", "a second of the processor"):
        measured.add_column(column)
    for row in result["measured"]:
        speed = [f"{row['tokens_per_second'][key]:,.0f}" for key in ("median", "min", "max")]
        processor = f"{row['tokens_per_processor_second']['median']:,.0f}"
        measured.add_row(row["dataset"], row["variant"], *speed, processor)
    return [predicted, measured]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few, small samples")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = common.QUICK if options.quick else common.Shapes()
    datasets, num_steps, repeats = (DATASETS[:1], 1, 1) if options.quick else (DATASETS, 3, 3)
    if options.ranks is not None:
        rows = measure(shapes, datasets, num_steps, repeats)
        if os.environ.get("RANK") == "0":
            options.ranks.write_text(json.dumps(rows))
        return
    load_before = os.getloadavg()
    models = PREDICTED[:1] if options.quick else PREDICTED
    predicted = [row for name in models for row in predict(name, datasets, 1 if options.quick else BATCHES)]
    arguments = ["--quick"] if options.quick else []
    measured = common.launch(__file__, RANKS, arguments)
    result = {**common.machine(shapes, load_before), "predicted": predicted, "measured": measured}
    result["settings"] = {"gpus": GPUS, "global_batch": GLOBAL_BATCH, "microbatch": MICROBATCH, "scale": SCALE}
    common.report("packing_gain", tables(result), [], result, options.out)


if __name__ == "__main__":
    main()
