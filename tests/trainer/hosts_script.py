"""A training script for `accelerate launch`: trains a tiny Llava under a plan; rank 0 saves logs and final weights."""

import argparse
import dataclasses

import torch
from transformers import TrainingArguments

from tests.trainer import runs

FOUR_RANKS = {"vision": {"dp_size": 2}, "language_model": {"pp_size": 2}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="file of the logs and the weights")
    parser.add_argument("--output_dir", required=True)
    options = parser.parse_args()
    args = TrainingArguments(options.output_dir)  # has its ranks and its device from the launcher alone
    place = f"rank {args.process_index} of {args.world_size}, local {args.local_process_index}, on {args.device.type}"
    run = runs.parallel_run("llava", FOUR_RANKS, evaluate=True, output_dir=options.output_dir)
    print(f"{place}: trained\n", end="", flush=True)  # one write: the ranks share the stream
    if run.weights is not None:
        torch.save(dataclasses.asdict(run), options.out)


if __name__ == "__main__":
    main()  # ends without leaving the process group, as most scripts do
