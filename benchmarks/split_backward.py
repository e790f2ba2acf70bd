"""
The two parts of a split backward beside a whole one, and forwards of virtual stages beside the forward of all layers.

`I + W` is the time of the gradients of inputs and of those of weights of two decoder layers, in turns with `B`, the
backward of the same layers as transformers computes it, without our function. `W` is its share of both, `kept` what
stays between them beside what a forward has saved, both read off storages. Goal: `I + W` at most 1.05 of `B` for plain
layers. `recomputed` has activation checkpointing, `LoRA` adapters of rank 16, `autocast` float32 weights.

A virtual stage runs the model's own forward, with identity layers in place of all others; `share` is the time of the
forwards of all stages of a rank, over the share of its layers in the forward of the whole model.

```bash
python benchmarks/split_backward.py  # on a CUDA device if there is one
python benchmarks/split_backward.py --quick --out out/bench  # seconds; the numbers mean little
```
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from peft import LoraConfig, inject_adapter_in_model
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from hf_mmparallel.modeling import build_model_spec, prepare_stages
from hf_mmparallel.modeling.products import WeightGradient
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan
from hf_mmparallel.runtime.executor import WeightGradients

CASES = ("plain", "recomputed", "LoRA", "autocast")
GOAL = 1.05
LAYERS_PER_STAGE = (2, 4, 8)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement."""

    width: int = 512
    tokens: int = 1024
    layers: int = 16  # of the model that is cut into virtual stages
    repeats: int = 15
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @classmethod
    def of_device(cls, quick: bool) -> Sizes:
        """Those for the device at hand."""
        if torch.cuda.is_available():
            return cls(4096, 8192, 16, 5 if quick else 31, "cuda", torch.bfloat16)
        return cls(64, 64, 16, 3) if quick else cls()


class Clock:
    """Milliseconds of work on a device."""

    def __init__(self, device: str):
        self.wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def ms(self, work: Callable[[], Any]) -> float:
        """Runs some work to its end."""
        self.wait()
        start = time.perf_counter()
        work()
        self.wait()
        return 1e3 * (time.perf_counter() - start)


def model_of(sizes: Sizes, num_layers: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama with random weights and few words."""
    heads = max(sizes.width // 128, 2)
    config = LlamaConfig(
        hidden_size=sizes.width,
        intermediate_size=int(3.5 * sizes.width),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        vocab_size=512,
        max_position_embeddings=sizes.tokens,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    return model.to(sizes.device, dtype).train()


def adapted(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with adapters, of which alone something is trained."""
    model.requires_grad_(False)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return inject_adapter_in_model(LoraConfig(r=16, target_modules=names), model)  # type: ignore[return-value]


@contextmanager
def counting_storages() -> Iterator[dict[int, int]]:
    """A block in which what autograd saves is noted: storage -> bytes."""
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def measure_backward(case: str, sizes: Sizes) -> dict[str, Any]:
    """A whole backward of two layers, and the two parts of a split one, in turns."""
    stock = model_of(sizes, 2, torch.float32 if case == "autocast" else sizes.dtype)
    if case == "LoRA":
        stock = adapted(stock)
    split = copy.deepcopy(stock)
    for model in (stock, split):
        if case == "recomputed":
            model.activation_checkpointing_enable({"use_reentrant": False})
    spec = build_model_spec(split)
    (stage,) = prepare_stages(split, spec, resolve_plan(spec, {}), 0, sizes.device).values()
    owner, clock = WeightGradients([stage]), Clock(sizes.device)
    hidden = torch.randn(1, sizes.tokens, sizes.width, device=sizes.device, dtype=next(stock.parameters()).dtype)

    def loss_of(model: LlamaForCausalLM) -> torch.Tensor:
        is_cast: AbstractContextManager = nullcontext()
        if case == "autocast":
            is_cast = torch.autocast(sizes.device, torch.bfloat16)
        with is_cast:
            inputs = hidden.clone().requires_grad_()
            return model.model(inputs_embeds=inputs, use_cache=False)[0].float().square().mean()

    times: dict[str, list[float]] = {"B": [], "I": [], "W": []}
    last: list[WeightGradient] = []
    for _ in range(sizes.repeats + 2):  # the first two allocate
        loss = loss_of(stock)
        times["B"].append(clock.ms(loss.backward))
        loss = loss_of(split)
        with owner.put_off() as gradients:
            times["I"].append(clock.ms(loss.backward))
        last = gradients
        times["W"].append(clock.ms(lambda last=last: owner.add(owner.by_layer([last]), lambda layer: None)))
    # of weights, which are saved too, nothing is kept
    weights = {p.untyped_storage().data_ptr() for p in split.parameters()}
    with counting_storages() as saved:
        loss_of(split)
    tensors = [tensor.untyped_storage() for one in last for tensor in (one.input, one.output_gradient)]
    kept = {storage.data_ptr(): storage.nbytes() for storage in tensors}
    ratios = [(i + w) / b for b, i, w in zip(*times.values(), strict=True)][2:]
    middle = {name: statistics.median(values[2:]) for name, values in times.items()}
    return {
        "case": case,
        **{f"{name.lower()}_ms": round(value, 3) for name, value in middle.items()},
        "ratio": common.spread(ratios),
        "weight_share": round(middle["W"] / (middle["I"] + middle["W"]), 3),
        "saved_mib": round(sum(size for place, size in saved.items() if place not in weights) / 2**20, 2),
        "kept_mib": round(sum(kept.values()) / 2**20, 2),
    }


@torch.no_grad()
def measure_stages(num_layers: int, sizes: Sizes) -> dict[str, Any]:
    """Forwards of the virtual stages of a rank, each of some layers, and of the whole model, in turns."""
    whole = model_of(sizes, sizes.layers, sizes.dtype)
    cut, clock = copy.deepcopy(whole), Clock(sizes.device)
    rounds = sizes.layers // (2 * num_layers)
    spec = build_model_spec(whole)
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2, vp_size=rounds if rounds > 1 else None)})
    stages = prepare_stages(cut, spec, plan, 1, sizes.device)  # those that get a hidden state
    words = torch.randint(0, 512, (1, sizes.tokens), device=sizes.device)
    hidden = torch.randn(1, sizes.tokens, sizes.width, device=sizes.device, dtype=sizes.dtype)
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    of_rank, of_all = [], []
    for _ in range(sizes.repeats + 2):
        runs = (partial(stage, dict(batch), [hidden], {}, {}) for stage in stages.values())
        of_rank.append(sum(map(clock.ms, runs)))
        of_all.append(clock.ms(partial(whole.model, **batch, use_cache=False)))
    ratios = [2 * own / every for own, every in zip(of_rank, of_all, strict=True)][2:]
    return {
        "layers": num_layers,
        "stages": len(stages),
        "stages_ms": round(statistics.median(of_rank[2:]), 3),
        "whole_ms": round(statistics.median(of_all[2:]), 3),
        "share": common.spread(ratios),
    }


def tables_of(backwards: list[dict[str, Any]], stages: list[dict[str, Any]]) -> list[Table]:
    """The printed tables."""
    columns = ("layers", "B ms", "I ms", "W ms", "I + W over B (min, max)", "W", "saved MiB", "kept MiB")
    first = Table(*columns, title="Backward of two layers")
    for row in backwards:
        ratio = row["ratio"]
        goal = f", goal {GOAL}" if row["case"] == "plain" else ""
        first.add_row(
            row["case"],
            *(f"{row[name]:.2f}" for name in ("b_ms", "i_ms", "w_ms")),
            f"{ratio['median']:.3f} ({ratio['min']:.3f}, {ratio['max']:.3f}){goal}",
            f"{row['weight_share']:.0%}",
            *(f"{row[name]:.2f}" for name in ("saved_mib", "kept_mib")),
        )
    second = Table("layers a stage", "stages", "ms", "whole ms", "over their share", title="Forwards of a rank")
    for row in stages:
        cells = (row["layers"], row["stages"], f"{row['stages_ms']:.2f}", f"{row['whole_ms']:.2f}")
        second.add_row(*map(str, cells), f"{row['share']['median']:.3f}")
    return [first, second]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small layers, few repeats")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    load, sizes = os.getloadavg(), Sizes.of_device(options.quick)
    backwards = [measure_backward(case, sizes) for case in CASES]
    stages = [measure_stages(num_layers, sizes) for num_layers in LAYERS_PER_STAGE]
    described = {"width": sizes.width, "tokens": sizes.tokens, "dtype": str(sizes.dtype), "device": sizes.device}
    result = {"goal": GOAL, "backwards": backwards, "stages": stages, **described}
    result |= common.machine(common.Shapes(), load)
    notes = [f"{sizes.tokens} tokens, width {sizes.width}, {sizes.dtype} on {sizes.device}; medians."]
    common.report("split_backward", tables_of(backwards, stages), notes, result, options.out)


if __name__ == "__main__":
    main()
