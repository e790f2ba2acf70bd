"""
A training step of a Qwen2.5-VL of 3B random weights on one CUDA device: packed rows against the stock Trainer.

The stock Trainer pads its batches and uses SDPA; ours packs the samples of a microbatch into a row, with bitfield
attention: in the loop of the stock Trainer, which a single process gets, and by the engine of several ranks on one,
over NCCL, with cross entropy in chunks. All train on the same samples with AdamW, in bfloat16, each in a process of
its own. The table has tokens a second without padding, the largest memory that was allocated, the waits of the host
for the device in a step that is not logged (`torch.cuda.set_sync_debug_mode`), and the largest relative difference of
a loss; the stock Trainer takes the mean of the means of microbatches for this model, the engine that of all tokens.

```bash
python benchmarks/gpu_step.py
python benchmarks/gpu_step.py --cpu  # a tiny model on the CPU, not compiled, to try the script itself
```
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import common  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rich.table import Table  # noqa: E402
from torch.nn.functional import pad  # noqa: E402
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, TrainerCallback  # noqa: E402

VARIANTS: dict[str, dict[str, Any]] = {
    "stock, padded": {},
    "packed": {"packing": True},
    "packed, engine": {"packing": True},
    "packed, engine, compiled layers": {"packing": True, "torch_compile": True},
}
STOCK = next(iter(VARIANTS))
IMAGE, VIDEO, START, END = 8, 9, 10, 11
GLOBAL_BATCH, MICROBATCH = 16, 2
FIRST, LAST, COUNTED = 2, 5, 7  # steps between the first two are timed, waits are counted after them
ALLOWED = 0.02  # relative difference of a loss in bfloat16


def config_of(tiny: bool) -> Qwen2_5_VLConfig:
    """The published sizes of Qwen2.5-VL-3B, or a tiny model of the family."""
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 300}
    text: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision: dict[str, Any] = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
    if tiny:
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
        text |= {**small, "num_attention_heads": 4, "rope_parameters": rope}
        vision |= {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4}
    vision |= {"out_hidden_size": text["hidden_size"], "fullatt_block_indexes": [1] if tiny else [7, 15, 23, 31]}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    return Qwen2_5_VLConfig(
        text_config={**text, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**vision, "window_size": 112},
        vision_end_token_id=END,
        tie_word_embeddings=not tiny,
        **tokens,
    )


def build_model(tiny: bool) -> Qwen2_5_VLForConditionalGeneration:
    """Random weights in bfloat16, in host memory; drawn on the device, where it takes seconds."""
    torch.manual_seed(0)
    with torch.device("cpu" if tiny else "cuda"):
        model = Qwen2_5_VLForConditionalGeneration._from_config(config_of(tiny), dtype=torch.bfloat16)
    return model.to("cpu")


def make_dataset(tiny: bool, size: int) -> list[dict[str, torch.Tensor]]:
    """Samples of none to three images of 64 to 400 tokens, then 64 to 1,024 tokens of text, which are the targets."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = config_of(tiny).text_config.vocab_size
    sides, longest = ((4, 9), 40) if tiny else ((16, 41), 1025)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    samples = []
    for _ in range(size):
        grids = [(1, draw(*sides) // 2 * 2, draw(*sides) // 2 * 2) for _ in range(draw(0, 4))]
        text = torch.randint(20, vocab_size, (draw(longest // 16, longest),), generator=generator)
        images = [torch.tensor([START, *[IMAGE] * (height * width // 4), END]) for _, height, width in grids]
        ids = torch.cat([*images, text])
        sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        sample["labels"] = torch.cat([torch.full((len(ids) - len(text),), common.IGNORE_INDEX), text])
        sample["mm_token_type_ids"] = (ids == IMAGE).int()
        if grids:
            patches = sum(height * width for _, height, width in grids)
            sample["pixel_values"] = torch.randn(patches, 3 * 2 * 14 * 14, generator=generator)
            sample["image_grid_thw"] = torch.tensor(grids)
        samples.append(sample)
    return samples


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tokens padded to the right, the images of all samples in a row."""
    length = max(len(sample["input_ids"]) for sample in samples)
    batch = {}
    for name in ("input_ids", "attention_mask", "labels", "mm_token_type_ids"):
        fill = common.IGNORE_INDEX if name == "labels" else 0
        batch[name] = torch.stack([pad(s[name], (0, length - len(s[name])), value=fill) for s in samples])
    for name in ("pixel_values", "image_grid_thw"):
        found = [sample[name] for sample in samples if name in sample]
        if found:
            batch[name] = torch.cat(found)
    return batch


class StepTimes(TrainerCallback):
    """Times a range of steps with the device's work in them, then counts the waits of those that follow."""

    def __init__(self, on_device: bool) -> None:
        self.on_device = on_device
        self.start = self.stop = 0.0
        self.waits: Counter[str] = Counter()
        self._show = warnings.showwarning

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (FIRST, LAST):
            if self.on_device:
                torch.cuda.synchronize()
            self.start, self.stop = self.stop, time.perf_counter()
        if state.global_step == LAST and self.on_device:
            warnings.simplefilter("always")
            warnings.showwarning = self._count
            torch.cuda.set_sync_debug_mode("warn")
        if state.global_step == COUNTED - 1 and self.on_device:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = self._show

    def _count(self, message: Any, *args: Any, **kwargs: Any) -> None:
        """Counts a wait by the innermost lines of Python that asked for it, torch's own left out."""
        if "synchroniz" not in str(message):
            return
        lines = [
            f"{Path(frame.filename).name}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if "/torch/" not in frame.filename and frame.filename not in (__file__, warnings.__file__)
        ]
        self.waits[" < ".join(reversed(lines[-3:]))] += 1


def run_variant(name: str, tiny: bool) -> dict[str, Any]:
    """Trains in this process; what was measured."""
    from transformers import Trainer, TrainingArguments

    from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments

    on_device = not tiny
    arguments: dict[str, Any] = {
        "output_dir": tempfile.gettempdir(),
        "max_steps": COUNTED,
        "per_device_train_batch_size": MICROBATCH,
        "learning_rate": 1e-5,
        "bf16": True,
        "optim": "adamw_torch_fused" if on_device else "adamw_torch",
        "logging_steps": COUNTED - 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": tiny,
        "remove_unused_columns": False,
        "dataloader_num_workers": 2,
        "dataloader_persistent_workers": True,
    }
    if "engine" in name:
        dist.init_process_group("gloo" if tiny else "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    samples = make_dataset(tiny, GLOBAL_BATCH * COUNTED)
    given: dict[str, Any] = {"model": build_model(tiny), "train_dataset": samples, "data_collator": collate}
    if name == STOCK:
        args = TrainingArguments(**arguments, gradient_accumulation_steps=GLOBAL_BATCH // MICROBATCH)
        trainer = Trainer(args=args, **given)
    else:
        modules = {  # the stock Trainer has no float32 copies of bfloat16 weights
            "vision": {"master_weights": False},
            "language_model": {"colocate_with": "vision", "master_weights": False},
        }
        ours = MultimodalTrainingArguments(
            **arguments, **VARIANTS[name], global_batch_size=GLOBAL_BATCH, parallel={"modules": modules}
        )
        with patch("hf_mmparallel.trainer.build.is_single_process", return_value="engine" not in name):
            trainer = MultimodalParallelTrainer(args=ours, **given)
        assert (trainer.engine is not None) == ("engine" in name)
    times = StepTimes(on_device)
    trainer.add_callback(times)
    if on_device:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    seconds = (times.stop - times.start) / (LAST - FIRST)
    tokens = sum(len(sample["input_ids"]) for sample in samples) / COUNTED
    return {
        "variant": name,
        "seconds_per_step": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_device else None,
        "waits_per_step": sum(times.waits.values()) / (COUNTED - 1 - LAST) if on_device else None,
        "waits": dict(times.waits.most_common(12)),
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="A tiny model on the CPU, not compiled.")
    parser.add_argument("--variant", choices=VARIANTS, help="Run one in this process and print its JSON.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="Folder of the JSON.")
    options = parser.parse_args()
    if options.variant:
        print("ROW " + json.dumps(run_variant(options.variant, options.cpu)), flush=True)
        return 0
    if not options.cpu and not torch.cuda.is_available():
        print("gpu_step needs a CUDA device; `--cpu` tries the script itself.")
        return 2
    load, rows, failed = os.getloadavg(), [], []
    for name, arguments in VARIANTS.items():
        if options.cpu and "torch_compile" in arguments:
            continue
        command = [sys.executable, __file__, "--variant", name, *(["--cpu"] if options.cpu else [])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
        if found:
            rows.append(json.loads(found[0].removeprefix("ROW ")))
            print(found[0], flush=True)
        else:
            failed.append(name)
            print(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}", flush=True)
    table = Table("variant", "s a step", "tokens/s", "of stock", "GiB", "waits a step", "largest difference of a loss")
    stock = next((row for row in rows if row["variant"] == STOCK), None)
    if stock is None:
        return 1
    for row in rows:
        row["of_stock"] = round(row["tokens_per_second"] / stock["tokens_per_second"], 3)
        pairs = zip(row["losses"], stock["losses"], strict=True)
        row["difference"] = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
        names = ("seconds_per_step", "tokens_per_second", "of_stock", "peak_gib", "waits_per_step", "difference")
        table.add_row(row["variant"], *(str(row[key]) for key in names))
    machine = common.machine(common.QUICK, load)
    machine.pop("shapes")
    device = "cpu" if options.cpu else torch.cuda.get_device_name()
    common.report("gpu_step", [table], [], {"device": device, "rows": rows, "failed": failed, **machine}, options.out)
    return 1 if failed or any(row["difference"] > ALLOWED for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
