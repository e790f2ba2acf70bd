"""One process of a training with `save_on_preemption`, which is sent a signal; see `test_preempted.py`."""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.chaos_worker import Samples, collate, make_model
from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments


class Slow(TrainerCallback):
    """Makes steps long, and says which one begins."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            print(f"step {state.global_step + 1} begins", flush=True)
        time.sleep(0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    args = MultimodalTrainingArguments(
        output_dir=str(folder),
        parallel={"vision": {}, "language_model": {}},
        save_on_preemption=True,
        save_strategy="no",
        max_steps=200,
        per_device_train_batch_size=2,
        dataloader_num_workers=1,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = MultimodalParallelTrainer(make_model(), args, collate, Samples(), callbacks=[Slow()])
    trainer.train()
    print(f"rank {trainer.world.rank} stopped after step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()
