"""Steps of the engine whose tasks sleep for the time that a table says, on more ranks than there are cores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import common
import torch
import torch.distributed as dist
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    WhisperConfig,
    WhisperModel,
)

from hf_mmparallel import MultimodalModel
from hf_mmparallel.data.step_batch import StepBatch
from hf_mmparallel.runtime import executor
from hf_mmparallel.runtime.engine import ParallelEngine
from hf_mmparallel.runtime.groups import expert_groups
from hf_mmparallel.runtime.message_queues import DistributedTransport
from hf_mmparallel.schedule import Task
from hf_mmparallel.world import World

TOKENS = {"vision": 100, "audio": 101, "image": 102}
NUM_CODES = 4  # of an image that is drawn


def message_ms(num_values: int, repeats: int = 100) -> float:
    """The time of one message of float32 from rank 0 to rank 1, half a round trip; equal on all ranks."""
    transport = DistributedTransport(World())
    tensor, buffer = torch.zeros(num_values), torch.empty(num_values)
    times = []
    dist.barrier()
    if transport.rank < 2:
        other = 1 - transport.rank
        for _ in range(2 * repeats):
            start = time.perf_counter()
            for sends in (transport.rank == 0, transport.rank == 1):
                (transport.send(tensor, other) if sends else transport.recv(buffer, other)).wait()
            times.append(1e3 * (time.perf_counter() - start) / 2)
    shared = [statistics.median(times[repeats:]) if times else 0.0]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def timed_step(engine: ParallelEngine, batch: StepBatch, index: int) -> float:
    """Milliseconds from the common start to the end of the last rank; all ranks read one clock."""
    dist.barrier()
    start = time.perf_counter()
    engine.train_step(batch, index)
    ends = [(start, time.perf_counter())] * dist.get_world_size()
    dist.all_gather_object(ends, (start, time.perf_counter()))
    engine.model.zero_grad()
    return 1e3 * (max(end for _, end in ends) - min(begin for begin, _ in ends))


def gathered(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """The entries of all ranks."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, dict(values))
    return {key: value for part in parts for key, value in part.items()}


class _Sleep(torch.autograd.Function):
    """Sleeps, and gives zeros; its backward sleeps too. Ranks that share experts do both together."""

    @staticmethod
    def forward(
        ctx: Any, times_ms: tuple[float, float], group: Any, shapes: Sequence[Any], *inputs: torch.Tensor
    ) -> Any:
        ctx.backward_ms, ctx.group = times_ms[1], group
        ctx.save_for_backward(*inputs)
        _sleep(times_ms[0], group)
        return tuple(torch.zeros(shape) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _sleep(ctx.backward_ms, ctx.group)
        return (None, None, None, *(torch.zeros_like(value) for value in ctx.saved_tensors))


def _sleep(time_ms: float, group: Any) -> None:
    """Sleeps; the ranks of a group wait for each other, before and after."""
    if group is not None:
        dist.barrier(group)
    time.sleep(time_ms / 1e3)
    if group is not None:
        dist.barrier(group)


class SleepingStage:
    """
    A stage in the place of another: it computes once for each task, to learn the shapes of the outputs, and then
    sleeps as long as the table says.

    Args:
        stage (`ModuleStage`): The stage.
        engine (`ParallelEngine`): Where it is.
        costs (`Mapping[Task, float]`): Task -> milliseconds.
        current (`list[Task]`): Its only item is the task that runs.
        group (`ProcessGroup`, *optional*): The ranks with which it shares experts.
    """

    def __init__(
        self, stage: Any, engine: ParallelEngine, costs: Mapping[Task, float], current: list[Task], group: Any = None
    ):
        self.stage, self.group = stage, group
        self.costs = costs
        self.current = current
        self.anchor = next(p for p in engine.trained if p.requires_grad)
        self.shapes: dict[Task, list[torch.Size]] = {}

    @property
    def own_layers(self) -> Any:
        return self.stage.own_layers

    @property
    def shared_tokens(self) -> Any:
        return self.stage.shared_tokens

    def input_shapes(self, batch: Any) -> Any:
        return self.stage.input_shapes(batch)

    def num_targets(self, batch: Any) -> int:
        return self.stage.num_targets(batch)

    def __call__(
        self, batch: Any, hidden: Any, features: Mapping[str, Sequence[Any]], num_tokens: int
    ) -> list[torch.Tensor]:
        (task,) = self.current
        if task not in self.shapes:
            outputs = self.stage(batch, hidden, features, num_tokens)
            self.shapes[task] = [output.shape for output in outputs]
            return outputs
        inputs = [*(hidden or []), *(value for values in features.values() for value in values if value is not None)]
        backward = next((own for own in ("bwd", "bwd_input") if Task(own, *task.key) in self.costs), "")
        times = (self.costs[task], self.costs.get(Task(backward, *task.key), 0.0))
        return list(_Sleep.apply(times, self.group, self.shapes[task], self.anchor, *inputs))  # type: ignore[arg-type]


def sleep_instead(engine: ParallelEngine, costs: Mapping[Task, float]) -> None:
    """
    Lets the tasks of an engine sleep.

    Args:
        engine (`ParallelEngine`): The engine; its stages are replaced.
        costs (`Mapping[Task, float]`): Task -> milliseconds.
    """
    current: list[Task] = []
    engine._first_step = None  # what sleeping stages give is no loss of the model
    engine.executor.functions = replace(
        engine.executor.functions,
        loss=lambda logits, *_: (logits.sum(), torch.tensor(1)),
        before_forward=lambda task: current.__setitem__(slice(None), [task]),
    )
    executor._RUN["bwd_weight"] = lambda run, task: time.sleep(costs[task] / 1e3)
    sharing = [tuple(chain(*group)) for group in expert_groups(engine.plan)]
    groups = {
        key: engine.process_groups.by_ranks[next(ranks for ranks in sharing if engine.rank in ranks)]
        for key in engine.stages
        if engine.plan.modules[key[0]].ep_size > 1
    }
    engine.executor.stages = {
        key: SleepingStage(
            stage.stage if isinstance(stage, SleepingStage) else stage, engine, costs, current, groups.get(key)
        )
        for key, stage in engine.executor.stages.items()
    }


def tiny_model(modules: Sequence[str] = ("vision", "audio"), num_experts: int = 0) -> MultimodalModel:
    """
    A tiny model that sees, hears, draws, or several of these; the language model has four layers, with or without
    experts, the others two.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=16, patch_size=8))
    drawing = LlamaModel(LlamaConfig(**sizes, vocab_size=8, pad_token_id=0))
    sizes = {"d_model": 16, "encoder_layers": 2, "encoder_ffn_dim": 32, "encoder_attention_heads": 2}
    sizes |= {"decoder_layers": 1, "decoder_ffn_dim": 32, "decoder_attention_heads": 2, "vocab_size": 50}
    hearing = WhisperModel(WhisperConfig(**sizes, num_mel_bins=8, max_source_positions=6, pad_token_id=0))
    language = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    language |= {"vocab_size": 120, "pad_token_id": 0}
    decoder = LlamaForCausalLM(LlamaConfig(**language))
    if num_experts:
        decoder = MixtralForCausalLM(
            MixtralConfig(**language, num_key_value_heads=2, num_local_experts=num_experts, num_experts_per_tok=2)
        )
    towers = {"vision": vision, "audio": hearing}
    return MultimodalModel.from_unimodal(
        {name: tower for name, tower in towers.items() if name in modules},
        decoder,
        token_ids={name: TOKENS[name] for name in modules},
        generators={"image": drawing} if "image" in modules else None,
        generator_settings={"image": {"num_tokens": NUM_CODES, "num_codes": 8}} if "image" in modules else None,
    )


def tiny_samples(size: int, modules: Sequence[str] = ("vision", "audio")) -> list[dict[str, torch.Tensor]]:
    """Samples with an image to see, a clip, an image to draw, or several of these."""
    media = {
        "vision": ("pixel_values", torch.randn(1, 3, 16, 16), 5),
        "audio": ("input_features", torch.randn(1, 8, 12), 6),
        "image": ("image_codes", torch.zeros(1, NUM_CODES, dtype=torch.int64), NUM_CODES),
    }
    ids = [5]
    for name in modules:
        ids += [TOKENS[name]] * media[name][2] + [6]
    tokens = torch.tensor([*ids, 7, 8])
    sample = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(tokens >= min(TOKENS.values()), common.IGNORE_INDEX),
        **{media[name][0]: media[name][1] for name in modules},
    }
    return [sample] * size


def collate(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Samples of one length."""
    joined = ("pixel_values", "input_features", "image_codes")
    return {
        name: (torch.cat if name in joined else torch.stack)([sample[name] for sample in samples])
        for name in samples[0]
    }
