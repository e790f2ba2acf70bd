"""
A custom training loop in which several ranks share the tokens of each packed row (context parallelism).

Every rank holds the whole model and a part of the tokens of each row; `"bitfield"` attention sees the keys and values
of all of them. The losses are those of one process, whatever the number of ranks:

```bash
torchrun --nproc-per-node 4 examples/context_parallel_loop.py
python examples/context_parallel_loop.py
```

It needs no GPU and no download: a small Llama learns to count in steps.
"""

from argparse import ArgumentParser

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import hf_mmparallel  # noqa: F401  (registers "bitfield")
from hf_mmparallel.data import cut_row, shard_row
from hf_mmparallel.kernels.bitfield_attention import encode_words
from hf_mmparallel.kernels.bitfield_attention.context_parallel import SequenceShard

VOCABULARY = 64


def packed_row(generator: torch.Generator, num_samples: int) -> dict[str, Tensor]:
    """One row `[1, T]` of samples of many lengths, each of which counts with its own increment."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    samples = [(draw(0, 64) + draw(1, 5) * torch.arange(draw(40, 400))) % VOCABULARY for _ in range(num_samples)]
    targets = [torch.cat([sample[1:], torch.tensor([-100])]) for sample in samples]  # what comes next
    return {
        "input_ids": torch.cat(samples)[None],
        "position_ids": torch.cat([torch.arange(len(sample)) for sample in samples])[None],
        "targets": torch.cat(targets)[None],
        "words": encode_words(torch.cat([torch.full((len(s),), i + 1) for i, s in enumerate(samples)]))[None],
    }


def cut(words: Tensor, num_ranks: int, rank: int, group: dist.ProcessGroup | None, mode: str) -> SequenceShard:
    """This rank's part of a row: equal tokens for every rank and, as far as possible, equal work."""
    return shard_row(words, cut_row(words, num_ranks, block=32, mode=mode), rank, group)


def train(num_steps: int, mode: str = "row", num_samples: int = 8) -> list[float]:
    """The losses of a short training; the ranks are those of the default process group, if there is one."""
    group = dist.group.WORLD if dist.is_initialized() else None
    rank, num_ranks = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="bitfield",
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)  # all ranks see the same rows
    losses = []
    for _ in range(num_steps):
        row = packed_row(generator, num_samples)
        shard = cut(row["words"], num_ranks, rank, group, mode)
        logits = model(
            input_ids=shard.take(row["input_ids"]),
            position_ids=shard.take(row["position_ids"]),
            attention_words=shard,
            use_cache=False,
        ).logits
        # Each rank sums over its own targets, and all divide by the number of all targets of the row.
        targets = shard.take(row["targets"], padding=-100)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (row["targets"] >= 0).sum()
        loss.backward()
        total = loss.detach()
        if group:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
            dist.all_reduce(total, group=group)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def main() -> None:
    """Trains on as many ranks as were launched and prints the losses."""
    parser = ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--num_steps", type=int, default=20, help="Rows to train on.")
    parser.add_argument(
        "--mode",
        choices=("row", "segments"),
        default="row",
        help="Gather the whole row, or only samples that are cut.",
    )
    arguments = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    losses = train(arguments.num_steps, arguments.mode)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("\n".join(f"step {step:3d}  loss {loss:.6f}" for step, loss in enumerate(losses)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
