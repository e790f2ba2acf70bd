"""The harness itself: results, errors, hangs and deaths of ranks."""

import os
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankFailure, assert_ranks_raise, run_distributed

pytestmark = pytest.mark.distributed
ENVIRONMENT = ("A_VARIABLE_OF_THIS_TEST", "LOCAL_RANK")


def _look(folder: str) -> tuple[Any, ...]:
    from transformers import TrainingArguments

    value = torch.full((3,), 2.0 * (dist.get_rank() + 1))
    dist.all_reduce(value)
    args = TrainingArguments(output_dir=folder, use_cpu=True, ddp_backend="gloo")
    trainer = args.world_size, args.process_index, str(args.device)
    return float(value[0]), torch.zeros(100_000), [os.environ.get(name) for name in ENVIRONMENT], trainer


def test_results_come_back_by_rank_and_ranks_see_their_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("A_VARIABLE_OF_THIS_TEST", "yes")
    sums, large, environments, arguments = zip(*run_distributed(_look, 2, str(tmp_path)), strict=True)
    assert sums == (6.0, 6.0) and all(own.shape == (100_000,) for own in large)
    assert environments == (["yes", "0"], ["yes", "1"])
    assert arguments == ((2, 0, "cpu:0"), (2, 1, "cpu:0"))


def _fail_on(rank: int, how: str) -> None:
    dist.barrier()  # a rank that leaves while others still connect fails them in another way
    if dist.get_rank() == rank:
        print("about to fail")
        if how == "raise":
            raise KeyError("the needle")
        if how == "exit":
            os._exit(7)
        while True:
            time.sleep(0.1)
    if how != "hang":
        dist.barrier()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", ["rank 1 raised KeyError: 'the needle'", "in _fail_on", "last output of rank 1:\n  about to fail"]),
        ("exit", ["rank 1 died (exit code 7"]),
        ("hang", ["time limit of 2 s"]),
    ],
)
def test_the_rank_that_fails_is_named_with_what_it_did(how, said):
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_distributed(_fail_on, 2, 1, how, timeout=2 if how == "hang" else 60)
    assert caught.value.rank == 1 and all(text in str(caught.value) for text in said)
    assert how != "hang" or time.monotonic() - start < 20  # includes the start of the server if this is the first test


def _warn() -> None:
    for module in ("torch.somewhere", "hf_mmparallel.runtime.engine"):
        warnings.warn_explicit("old", DeprecationWarning, "file.py", 1, module=module)


def test_a_warning_of_the_package_is_an_error_in_a_rank():
    assert assert_ranks_raise(_warn, 2, match="^old$") == ["old", "old"]


def _raise(ranks: int) -> None:
    if dist.get_rank() < ranks:
        raise ValueError(f"on {dist.get_rank()}")


def test_assert_ranks_raise():
    for ranks, said in ((2, "every rank was to raise"), (1, "rank 1 returned")):
        with pytest.raises(RankFailure, match=said):
            assert_ranks_raise(_raise, 2, ranks, match="on 0")
