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


def _reduce(scale: float, offset: float = 0.0) -> tuple[int, float, torch.Tensor]:
    value = torch.full((3,), scale * (dist.get_rank() + 1))
    dist.all_reduce(value)
    return dist.get_rank(), float(value[0]) + offset, torch.zeros(100_000)


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("about to fail")
        raise KeyError("the needle")
    dist.barrier()


def _raise_everywhere() -> None:
    raise ValueError(f"on {dist.get_rank()}")


def _raise_first_only() -> None:
    if dist.get_rank() == 0:
        raise ValueError("only here")


def _hang_on(rank: int) -> None:
    dist.barrier()  # a rank that leaves while others still connect fails them in another way
    while dist.get_rank() == rank:
        time.sleep(0.1)


def _exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def _training_arguments(folder: str) -> tuple[int, int, str]:
    from transformers import TrainingArguments

    args = TrainingArguments(output_dir=folder, use_cpu=True, ddp_backend="gloo")
    return args.world_size, args.process_index, str(args.device)


def _look(folder: str) -> tuple[Any, list[str | None], Any]:
    return _reduce(2.0, offset=0.5), [os.environ.get(name) for name in ENVIRONMENT], _training_arguments(folder)


ENVIRONMENT = ("A_VARIABLE_OF_THIS_TEST", "LOCAL_RANK")


def test_results_come_back_by_rank_and_ranks_see_their_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("A_VARIABLE_OF_THIS_TEST", "yes")
    results, environments, arguments = zip(*run_distributed(_look, 2, str(tmp_path)), strict=True)
    assert [(rank, value) for rank, value, _ in results] == [(0, 6.5), (1, 6.5)]
    assert all(big.shape == (100_000,) for _, _, big in results)
    assert environments == (["yes", "0"], ["yes", "1"])
    assert arguments == ((2, 0, "cpu:0"), (2, 1, "cpu:0"))


def test_an_exception_arrives_with_its_traceback_and_output():
    with pytest.raises(RankFailure) as caught:
        run_distributed(_raise_on, 3, 1)
    assert caught.value.rank == 1
    message = str(caught.value)
    assert message.startswith("rank 1 raised KeyError: 'the needle'")
    assert "in _raise_on" in message
    assert "last output of rank 1:\n  about to fail" in message


def test_a_hang_ends_at_the_time_limit():
    start = time.monotonic()
    with pytest.raises(RankFailure, match="time limit of 2 s") as caught:
        run_distributed(_hang_on, 2, 1, timeout=2)
    assert caught.value.rank == 1
    assert time.monotonic() - start < 20  # includes the start of the server where this is the first test


def test_a_dead_rank_is_named():
    with pytest.raises(RankFailure, match="rank 2 died .exit code 7") as caught:
        run_distributed(_exit_on, 3, 2)
    assert caught.value.rank == 2


def _warn() -> None:
    warnings.warn_explicit("old", DeprecationWarning, "file.py", 1, module="torch.somewhere")
    warnings.warn_explicit("old", DeprecationWarning, "file.py", 1, module="hf_mmparallel.runtime.engine")


def test_a_warning_of_the_package_is_an_error_in_a_rank():
    assert assert_ranks_raise(_warn, 2, match="^old$") == ["old", "old"]


def test_assert_ranks_raise():
    with pytest.raises(RankFailure, match="every rank was to raise"):
        assert_ranks_raise(_raise_everywhere, 2, match="on 0")
    with pytest.raises(RankFailure, match="rank 1 returned"):
        assert_ranks_raise(_raise_first_only, 2, match="only here")
