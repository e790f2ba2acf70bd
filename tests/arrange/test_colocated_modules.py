"""Encoders on the same ranks as one, and their microbatches over their replicas."""

import dataclasses

import numpy as np
import pytest

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.arrange.colocated_modules import ColocatedModules, colocated_encoders
from hf_mmparallel.arrange.greedy import Capacity, CapacityError
from hf_mmparallel.plan import ModulePlan, ModulePlugin, ParallelPlan, Stage
from tests.arrange.builders import plan_of, workloads_of

# Three samples: images, sound, and both.
WORK = workloads_of(audio=[0, 2, 4], vision=[1, 0, 3], language_model=[1, 1, 1])


def rows(plan: ParallelPlan) -> list[tuple]:
    """Modules, work, groups, copies and replicas served of each set of encoders; vision is on stages of twice."""
    found = colocated_encoders(plan, WORK, {"audio": 1.0, "vision": 2.0, "language_model": 1.0})
    return [(one.modules, one.work.tolist(), one.num_groups, one.num_copies, one.num_served) for one in found]


def test_encoders_on_ranks_of_their_own_are_separate_and_on_the_same_ranks_add_up():
    apart = rows(plan_of(audio=4, vision=1, language_model=6))
    assert apart == [(("audio",), [0, 2, 4], 2, 2, 3), (("vision",), [2, 0, 6], 1, 1, 6)]
    together = rows(plan_of(audio=2, vision=ModulePlugin(colocate_with="audio"), language_model=1))
    assert together == [(("audio", "vision"), [2, 2, 10], 1, 2, 1)]


def test_encoders_on_the_same_ranks_with_other_numbers_of_replicas_are_separate():
    plan = plan_of(audio=2, vision=1, language_model=1)
    vision = ModulePlan(((Stage((0, 4), ((0,),)), Stage((4, 8), ((1,),))),))
    plan = dataclasses.replace(plan, modules={**plan.modules, "vision": vision})
    assert [(modules, copies) for modules, _, _, copies, _ in rows(plan)] == [(("audio",), 2), (("vision",), 1)]
    arrange_step(plan, range(3), WORK, 1).check(plan)


def test_replicas_share_each_microbatch_and_the_step():
    rng = np.random.default_rng(0)
    work = rng.lognormal(0, 0.5, 240) * (rng.random(240) < 0.9)
    replica, microbatch = rng.integers(0, 4, 240), rng.integers(0, 5, 240)
    copy = ColocatedModules(("vision",), work, 6, 2, 4).copies(replica, microbatch, 5, None)
    assert (copy // 3 == replica // 2).all()
    loads = np.zeros((2, 3, 5))
    np.add.at(loads, (copy // 3, copy % 3, microbatch), work)
    assert (loads.max(axis=1) < 1.15 * loads.mean(axis=1)).all()
    totals = loads.sum(axis=2)
    assert (totals.max(axis=1) < 1.02 * totals.mean(axis=1)).all()


def test_the_heaviest_part_goes_to_who_has_least_so_far():
    colocated = ColocatedModules(("vision",), np.array([3.0, 1, 3, 1, 3, 1, 3, 1]), 2, 1, 1)
    copy = colocated.copies(np.zeros(8, np.int64), np.arange(8) // 2, 4, None)
    assert np.bincount(copy, colocated.work).tolist() == [8.0, 8.0]


def test_a_replica_for_each_serves_its_own():
    colocated = ColocatedModules(("vision",), np.ones(4), 2, 2, 2)
    assert colocated.copies(np.array([0, 1, 1, 0]), np.zeros(4, np.int64), 1, None).tolist() == [0, 1, 1, 0]


def test_limits_are_those_of_each_replica():
    colocated, none = ColocatedModules(("vision",), np.ones(4), 2, 1, 1), np.zeros(4, np.int64)
    copy = colocated.copies(none, none, 1, Capacity(np.ones((4, 1)), np.array([2.0])))
    assert np.bincount(copy).tolist() == [2, 2]
    with pytest.raises(CapacityError):
        colocated.copies(none, none, 1, Capacity(np.ones((4, 1)), np.array([1.0])))
