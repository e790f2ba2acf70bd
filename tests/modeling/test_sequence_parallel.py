"""Shares of rows on the ranks of a tensor-parallel group, against all rows in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.tp_collectives import gather_rows, join_rows, split_rows, sum_rows
from hf_mmparallel.plan import LANGUAGE_MODEL
from tests import tiny
from tests.distributed import run_distributed

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
