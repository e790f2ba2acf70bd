"""Shares of rows on the ranks of a tensor-parallel group, against all rows in one process."""

import copy
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.prepare import enable_checkpointing
from hf_mmparallel.modeling.sequence_parallel import keep_rows_split
from hf_mmparallel.modeling.tensor_parallel import apply_module_tp
from hf_mmparallel.modeling.tp_collectives import gather_rows, join_rows, split_rows, sum_rows
from hf_mmparallel.plan import LANGUAGE_MODEL
from hf_mmparallel.runtime.executor import WeightGradients
from tests import tiny
from tests.deep_cases import in_turn
from tests.distributed import run_distributed
from tests.runtime.test_weight_gradients import Stage

NUM_RANKS = 3


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own(rows: Tensor) -> Tensor:
    """The share of this rank, of rows that are padded with zeros."""
    share = -(-rows.shape[1] // NUM_RANKS)
    padded = torch.cat([rows, rows.new_zeros(len(rows), share * NUM_RANKS - rows.shape[1], rows.shape[2])], 1)
    return padded[:, dist.get_rank() * share : (dist.get_rank() + 1) * share]


def compare(num_samples: int, num_rows: int) -> None:
    """Each function and its gradient, for other values on each rank."""
    group, rank = dist.group.WORLD, dist.get_rank()
    of_ranks = [random(num_samples, num_rows, 2, seed=seed) for seed in range(NUM_RANKS)]
    total = sum(of_ranks)
    alike, mine = of_ranks[0].clone().requires_grad_(), own(of_ranks[0]).clone().requires_grad_()
    different = of_ranks[rank].clone().requires_grad_()

    share = split_rows(alike, group)
    torch.testing.assert_close(share, own(of_ranks[0]))
    share.backward(own(of_ranks[1]))
    torch.testing.assert_close(alike.grad, of_ranks[1])

    joined = join_rows(mine, group, num_rows)
    torch.testing.assert_close(joined, of_ranks[0])
    joined.backward(of_ranks[1])
    torch.testing.assert_close(mine.grad, own(of_ranks[1]))

    mine.grad = None
    gathered = gather_rows(mine, group, num_rows)
    torch.testing.assert_close(gathered, of_ranks[0])
    gathered.backward(of_ranks[rank])
    torch.testing.assert_close(mine.grad, own(total))
    padded = gather_rows(mine, group, None)
    torch.testing.assert_close(padded[:, :num_rows], of_ranks[0])
    assert padded.shape[1] == NUM_RANKS * mine.shape[1] and not padded[:, num_rows:].any()

    summed = sum_rows(different, group)
    torch.testing.assert_close(summed, own(total))
    summed.backward(own(of_ranks[2]))
    torch.testing.assert_close(different.grad, of_ranks[2])


def compare_all() -> None:
    for num_samples, num_rows in ((1, 6), (2, 6), (1, 7), (3, 5), (2, 1), (1, 2)):
        compare(num_samples, num_rows)


@pytest.mark.distributed
def test_rows_are_split_joined_gathered_and_summed():
    run_distributed(compare_all, NUM_RANKS)


# Rows that a block reads, of which each rank keeps its share for the backward

GATHER, REDUCE = "c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default"
NUM_LAYERS = tiny.TEXT["num_hidden_layers"]
ONCE = {GATHER: 2 * NUM_LAYERS + 1, REDUCE: 2 * NUM_LAYERS}  # of gradients: for each block, and behind the layers
# Kind -> gathers of rows in the backward, and in what comes after it
KINDS = {
    "trained": (2 * NUM_LAYERS, 0),
    "cast": (2 * NUM_LAYERS, 0),
    "put off": (0, 2 * NUM_LAYERS),
    "frozen": (0, 0),
    "attention alone": (NUM_LAYERS, 0),
    # beside the gradients of what two adapters sum over the ranks
    "adapters": (NUM_LAYERS + 2 * NUM_LAYERS, 0),
    "wide adapters": (NUM_LAYERS + 2 * NUM_LAYERS, 0),
    "recomputed": (2 * NUM_LAYERS, 0),  # by the forward, which keeps them
}
HALF = ("cast", "wide adapters")  # computed in bfloat16


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def of_kind(kind: str) -> nn.Module:
    """A language model in training, equal on all ranks."""
    torch.manual_seed(0)
    model: Any = llama().train()
    layers = model.model.layers
    if "adapters" in kind:
        model = model.bfloat16() if kind == "wide adapters" else model
        inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]), model)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = random(*parameter.shape, seed=len(name)).float() / 8
        model.model.embed_tokens.requires_grad_(True)
    elif kind == "frozen":
        layers.requires_grad_(False)
    elif kind == "attention alone":
        for layer in layers:
            layer.mlp.requires_grad_(False)
    elif kind == "recomputed":
        enable_checkpointing(model, "model", "model.layers")
    return model


def run(model: Any, kind: str) -> tuple[Tensor, list[dict[str, int]]]:
    """Two forwards and backwards; the output, and collectives of the last backward and after it."""
    owner = WeightGradients([Stage(model, dict(enumerate(model.model.layers)))] if kind == "put off" else [])
    ids = random(3, 7, seed=1).mul(100).abs().long() % 90 + 1
    for seed in range(2):
        with torch.autocast("cpu", torch.bfloat16) if kind == "cast" else nullcontext():
            hidden = model.model(ids, use_cache=False)[0]
        loss = (hidden * random(*hidden.shape, seed=seed)).sum()
        with Collectives() as backward, owner.put_off() if kind == "put off" else nullcontext([]) as gradients:
            loss.backward()
        with Collectives() as afterwards:
            owner.add(owner.by_layer([gradients]), lambda index: None)
    return hidden.detach(), [dict(backward.counts), dict(afterwards.counts)]


def gathered_gradient(parameter: Tensor, is_share: bool) -> Tensor:
    """The gradient of a parameter, from those of both ranks."""
    gradient: Any = parameter.grad
    if is_share:
        dist.all_reduce(gradient)
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def compare_kind(kind: str) -> list[dict[str, int]]:
    """Compares output and gradients of a kind with those of one process; the collectives."""
    reference = of_kind(kind)
    model: Any = copy.deepcopy(reference)
    exact = copy.deepcopy(reference).float()
    module = build_model_spec(model).language_model
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("tp",))
    partial = apply_module_tp(model, module, mesh, {parameter.name for parameter in module.parameters})
    keep_rows_split(dict(enumerate(model.model.layers)), {-1, NUM_LAYERS - 1})
    (expected, _), (found, counts) = run(reference, kind), run(model, kind)
    if kind not in HALF:
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    run(exact, "trained")
    errors = torch.zeros(2)  # of both, relative to float32
    for name, parameter in reference.named_parameters():
        assert (model.get_parameter(name).grad is None) == (parameter.grad is None), (kind, name)
        if parameter.grad is None:
            continue
        own, precise = gathered_gradient(model.get_parameter(name), name in partial), exact.get_parameter(name).grad
        errors += torch.stack([(own - precise).norm(), (parameter.grad - precise).norm()]).float() / precise.norm()
        if kind not in HALF:
            scale = parameter.grad.abs().max()
            close = torch.allclose(own / scale, parameter.grad / scale, rtol=0, atol=2e-5)
            assert close, (kind, name)
    assert kind not in HALF or errors[0] < 1.5 * errors[1], (kind, errors)
    return counts


def compare_kinds(kinds: list[str]) -> list[list[dict[str, int]]]:
    return [compare_kind(kind) for kind in kinds]


@pytest.mark.distributed
def test_rows_are_gathered_again_once_for_the_gradients_of_weights():
    kinds = in_turn(KINDS, "cast", "put off", "adapters", "recomputed")
    for counts in run_distributed(compare_kinds, 2, [*kinds]):
        for (kind, (during, later)), (backward, afterwards) in zip(kinds.items(), counts, strict=True):
            expected = dict(ONCE)
            expected[GATHER] += during
            expected[REDUCE] += NUM_LAYERS * (kind == "recomputed")  # which ends before the last sum of a layer
            assert backward == expected, kind
            assert afterwards == ({GATHER: later} if later else {}), kind


def llama(**changes: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**tiny.TEXT, **changes}))


def shares_rows(model: torch.nn.Module) -> bool:
    return build_model_spec(model).modules[LANGUAGE_MODEL].sequence_parallel


def test_rows_are_shared_where_layers_need_one_at_a_time():
    assert shares_rows(llama()) and shares_rows(tiny.FAMILIES["gemma3"]())
    assert not shares_rows(tiny.FAMILIES["qwen3_vl_moe"]())  # a router beside the experts
    dropping, mixing, scaling = llama(), llama(), llama()
    dropping.model.layers[1].self_attn.drop = torch.nn.Dropout(0.1)
    mixing.model.layers[0].mixer = torch.nn.Conv1d(tiny.TEXT["hidden_size"], 1, 3)
    scaling.model.layers[0].mlp.gate = torch.nn.Linear(tiny.TEXT["hidden_size"], 1)
    assert not any(map(shares_rows, (dropping, mixing, scaling)))
