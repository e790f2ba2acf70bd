"""
A training loop with `accelerate` and no Trainer, in which the vision encoder and the language model have layouts of
their own.

`hf_mmparallel.prepare` takes the place of `accelerator.prepare`. On four processes the encoder has two data-parallel
copies and the language model two pipeline stages; the losses are those of one process:

```bash
ACCELERATE_USE_CPU=true accelerate launch --config_file examples/accelerate_configs/one_host_4cpu.yaml \
    examples/own_loop.py --output_dir out/loop
python examples/own_loop.py --output_dir out/loop
```

It needs no GPU and no download: a small Llava answers the questions about handwritten digits of `digits.py`. The
output folder gets the model for plain transformers, `LlavaForConditionalGeneration.from_pretrained("out/loop")`, and
`state`, which `--resume out/loop/state` goes on from, also on another number of processes.
"""

from argparse import ArgumentParser
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits import DigitQuestions, build_llava, build_processor
from transformers import get_cosine_schedule_with_warmup

import hf_mmparallel
from hf_mmparallel.data import PretokenizedCollator

PLANS = {
    1: {},
    2: {"vision": {}, "language_model": {}},
    4: {"vision": {"dp_size": 2}, "language_model": {"pp_size": 2}},
}


def train(num_steps: int, plan: dict | str | None, output_dir: str, resume: str | None = None) -> list[float]:
    """The losses of a training on all processes that were launched."""
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    processor = build_processor(patch_size=8)
    dataset = DigitQuestions(processor, "train", 16 * 20)
    set_seed(0)  # the same model on all processes
    model = build_llava(processor, hidden_size=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 5, num_steps)

    model, optimizer, loader = hf_mmparallel.prepare(
        accelerator,
        model,
        optimizer,
        dataset,
        PLANS[accelerator.num_processes] if plan is None else plan,
        data_collator=PretokenizedCollator(processor.tokenizer.pad_token_id),
        processing_class=processor,
        global_batch_size=16,
        per_device_train_batch_size=2,
    )
    if resume is not None:
        model.load_state(resume, scheduler)

    losses = []
    while model.num_steps < num_steps:
        for step in loader:
            loss = model.step(step)  # the gradients of all ranks, too
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            losses.append(float(loss))
            accelerator.print(f"step {model.num_steps:3d}  loss {losses[-1]:.6f}")
            if model.num_steps == num_steps:
                break

    metrics = model.evaluate(DigitQuestions(processor, "test", 64, seed=1))
    accelerator.print(f"held-out loss {metrics['eval_loss']:.4f}")
    model.save_pretrained(output_dir)
    model.save_state(Path(output_dir) / "state", scheduler)
    return losses


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--num_steps", type=int, default=40, help="Steps to train for.")
    parser.add_argument("--plan", help="Layout of each module, as JSON or as the path of a YAML file.")
    parser.add_argument("--output_dir", default="out/loop", help="Gets the model and the state.")
    parser.add_argument("--resume", help="A state to go on from.")
    arguments = parser.parse_args()
    train(arguments.num_steps, arguments.plan, arguments.output_dir, arguments.resume)


if __name__ == "__main__":
    main()
