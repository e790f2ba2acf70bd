"""What all arrangements have in common."""

import re

import numpy as np
import pytest

from hf_mmparallel.arrange import ARRANGEMENTS, arrange_step
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin
from tests.arrange.builders import odd_workloads, plan_of
from tests.arrange.test_hierarchical import check

PLANS = {
    "no encoder": plan_of(language_model=ModulePlugin(3, 2)),
    "3 and 2": plan_of(vision=3, language_model=2),
    "3 encoders": plan_of(
        vision=2, audio=1, video=ModulePlugin(colocate_with="vision"), language_model=ModulePlugin(2, 2)
    ),
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("kind", ["none", "one", "few", "text", "nothing to do", "giant", "little text"])
@pytest.mark.parametrize("name", PLANS)
def test_odd_batches(name, kind, arrangement):
    plan = PLANS[name]
    work = odd_workloads(plan, kind)
    step = arrange_step(plan, range(work.num_samples), work, 2, arrangement)
    if arrangement in ("hierarchical", "tapered"):
        check(plan, work, step)
    assert step == arrange_step(plan, range(work.num_samples), work, 2, arrangement)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("module", ["vision", LANGUAGE_MODEL])
def test_workloads_that_are_none_are_refused_with_sample_and_module(module, value, arrangement):
    plan = PLANS["3 and 2"]
    work = odd_workloads(plan, "any")
    work.forward_ms[module][3] = value
    with pytest.raises(ValueError, match=re.escape(f"Sample 103 has a workload of {value} ms in `{module}`")):
        arrange_step(plan, range(100, 124), work, 2, arrangement)
