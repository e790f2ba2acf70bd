"""Compiled layers in stages, tensor parallelism, recomputation and ZeRO-3 give the stock Trainer's run."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.distributed import run_distributed

from . import runs

VISION, LM = "vision", "language_model"
AGAIN = {"activation_checkpointing": True}
TP_AND_STAGES = {"tp_size": 2, "pp_size": 2, **AGAIN}
SHARDED = {"dp_size": 2, "zero_stage": 3, **AGAIN}
# Ranks, layout, further arguments
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp 2 and stages, recomputed, packed": (
        4,
        {VISION: TP_AND_STAGES, LM: {**TP_AND_STAGES, "colocate_with": VISION}},
        {"packing": True},
    ),
    "tp 2": (2, {VISION: {"tp_size": 2}, LM: {"tp_size": 2, "colocate_with": VISION}}, {}),
    "ZeRO-3, recomputed": (2, {VISION: SHARDED, LM: {**SHARDED, "colocate_with": VISION}}, {}),
}


def compiled_run(parallel: dict[str, Any], arguments: dict[str, Any]) -> tuple[runs.Run, int, list[str]]:
    """A run whose layers are compiled, the graphs of this rank and where one was broken."""
    # The others wait while a rank compiles. What waits for a message has the limit that its group was made with.
    rank, size, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    store = dist.distributed_c10d.PrefixStore("patient", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=3))
    run = runs.parallel_run("llava", parallel, evaluate=True, torch_compile_backend="aot_eager", **arguments)
    return run, counters["stats"]["unique_graphs"], list(counters["graph_break"])


@pytest.mark.distributed
@pytest.mark.deep
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_compiled_layout_equals_the_stock_trainer(name: str):
    world_size, parallel, arguments = LAYOUTS[name]
    sizes: dict[str, Any] = {"max_steps": 2, "warmup_steps": 0, "per_device_eval_batch_size": 2}
    reference = runs.stock("llava", evaluate=True, **sizes)
    ranks = run_distributed(compiled_run, world_size, parallel, {**sizes, **arguments}, timeout=280)
    runs.assert_same_run(ranks[0][0], reference)
    for run, num_graphs, breaks in ranks:
        assert run.metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)
        # of each of two structures at most: with gradients, of trained inputs and of others, and without; each for
        # one row, or image, and for several
        assert 4 <= num_graphs <= 12 and not breaks
