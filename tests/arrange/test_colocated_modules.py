"""Encoders on the same ranks as one, and their microbatches over their replicas."""

import dataclasses

import numpy as np
import pytest

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.arrange.colocated_modules import ColocatedModules, colocated_encoders
from hf_mmparallel.arrange.greedy import Capacity, CapacityError
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlan, ModulePlugin, Stage, Workloads, resolve_plan
from tests.plan.specs import language_spec, vision_spec

SPEC = ModelSpec({"audio": vision_spec(), "vision": vision_spec(), LANGUAGE_MODEL: language_spec()})


def workloads() -> Workloads:
    """Three samples: images, sound, and both."""
    forward = {"audio": np.array([0.0, 2, 4]), "vision": np.array([1.0, 0, 3]), LANGUAGE_MODEL: np.ones(3)}
    tokens = {name: own.astype(int) for name, own in forward.items()}
    return Workloads(forward, dict.fromkeys(forward, 2.0), tokens, {})


def test_encoders_on_ranks_of_their_own_are_separate():
    plan = resolve_plan(SPEC, {"audio": ModulePlugin(dp_size=4), LANGUAGE_MODEL: ModulePlugin(dp_size=6)})
    audio, vision = colocated_encoders(plan, workloads(), {"audio": 1.0, "vision": 2.0, LANGUAGE_MODEL: 1.0})
    assert (audio.modules, vision.modules) == (("audio",), ("vision",))
    assert audio.work.tolist() == [0, 2, 4] and vision.work.tolist() == [2, 0, 6]
    assert (audio.num_groups, audio.num_copies, audio.num_served) == (2, 2, 3)
    assert (vision.num_groups, vision.num_copies, vision.num_served) == (1, 1, 6)


def test_encoders_on_the_same_ranks_add_up():
    plan = resolve_plan(SPEC, {"audio": ModulePlugin(dp_size=2), "vision": ModulePlugin(colocate_with="audio")})
    (colocated,) = colocated_encoders(plan, workloads(), {"audio": 1.0, "vision": 2.0, LANGUAGE_MODEL: 1.0})
    assert colocated.modules == ("audio", "vision") and colocated.work.tolist() == [2, 2, 10]
    assert (colocated.num_groups, colocated.num_copies, colocated.num_served) == (1, 2, 1)


def test_encoders_on_the_same_ranks_with_other_numbers_of_replicas_are_separate():
    plan = resolve_plan(SPEC, {"audio": ModulePlugin(dp_size=2), "vision": ModulePlugin()})
    vision = ModulePlan(((Stage((0, 3), ((0,),)), Stage((3, 6), ((1,),))),))
    plan = dataclasses.replace(plan, modules={**plan.modules, "vision": vision})
    groups = colocated_encoders(plan, workloads(), dict.fromkeys(plan.modules, 1.0))
    assert [(colocated.modules, colocated.dp_size) for colocated in groups] == [(("audio",), 2), (("vision",), 1)]
    arrange_step(plan, range(3), workloads(), 1).check(plan)


def test_replicas_share_each_microbatch_and_the_step():
    rng = np.random.default_rng(0)
    work = rng.lognormal(0, 0.5, 240) * (rng.random(240) < 0.9)
    colocated = ColocatedModules(("vision",), work, 6, 2, 4)
    replica, microbatch = rng.integers(0, 4, 240), rng.integers(0, 5, 240)
    copy = colocated.copies(replica, microbatch, 5, None)
    assert (copy // 3 == replica // 2).all()
    for group in range(2):
        own = copy // 3 == group
        for index in range(5):
            loads = np.bincount(copy[own & (microbatch == index)], work[own & (microbatch == index)], 6)[3 * group :][
                :3
            ]
            assert loads.max() < 1.15 * loads.mean()
        totals = np.bincount(copy[own], work[own], 6)[3 * group :][:3]
        assert totals.max() < 1.02 * totals.mean()


def test_the_heaviest_part_goes_to_who_has_least_so_far():
    colocated = ColocatedModules(("vision",), np.array([3.0, 1, 3, 1, 3, 1, 3, 1]), 2, 1, 1)
    copy = colocated.copies(np.zeros(8, np.int64), np.arange(8) // 2, 4, None)
    assert np.bincount(copy, colocated.work).tolist() == [8.0, 8.0]


def test_a_replica_for_each_serves_its_own():
    colocated = ColocatedModules(("vision",), np.ones(4), 2, 2, 2)
    assert colocated.copies(np.array([0, 1, 1, 0]), np.zeros(4, np.int64), 1, None).tolist() == [0, 1, 1, 0]


def test_limits_are_those_of_each_replica():
    colocated, capacity = (
        ColocatedModules(("vision",), np.ones(4), 2, 1, 1),
        Capacity(np.ones((4, 1)), np.array([2.0])),
    )
    copy = colocated.copies(np.zeros(4, np.int64), np.zeros(4, np.int64), 1, capacity)
    assert np.bincount(copy).tolist() == [2, 2]
    with pytest.raises(CapacityError):
        colocated.copies(np.zeros(4, np.int64), np.zeros(4, np.int64), 1, Capacity(np.ones((4, 1)), np.array([1.0])))
