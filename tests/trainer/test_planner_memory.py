"""Which memory the steps of a run are planned for."""

from types import SimpleNamespace

import pytest

from hf_mmparallel.cost import find_device
from hf_mmparallel.trainer.loaders import training_planner


@pytest.mark.parametrize(
    ("device", "limit_gib", "expected_gib"), [("a100", None, 71.19), ("a100", 10.0, 10.0), ("cpu", None, None)]
)
def test_memory_is_the_users_or_that_of_the_device_that_all_ranks_know(device, limit_gib, expected_gib):
    args = SimpleNamespace(
        memory_limit_gib=limit_gib,
        per_device_train_batch_size=4,
        microbatch_assignment="hierarchical",
        max_tokens_per_microbatch=None,
    )
    engine = SimpleNamespace(costs=SimpleNamespace(device=find_device(device)), plan=None, sync_groups=())
    planner = training_planner(SimpleNamespace(args=args, _engine=engine), None)
    assert planner.memory_bytes == (None if expected_gib is None else expected_gib * 2**30)
