"""The minimum stable batch of a plan: only where ranks are split, and a sentence for batches below it."""

import numpy as np

from benchmarks.paper_samples import PUBLISHED, PUBLISHED_MODELS
from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan
from hf_mmparallel.search.split import module_work, split_stability, too_small

SPEC = PUBLISHED_MODELS["llama3-1b"].spec
COSTS = analytic_costs(SPEC, find_device("a40"))
SIZES = PUBLISHED["synthchartnet"].draw(512, 0)


def stability(vision: ModulePlugin, language: ModulePlugin, sizes: SampleSizes = SIZES):
    return split_stability(COSTS, resolve_plan(SPEC, {"vision": vision, LANGUAGE_MODEL: language}), sizes)


def test_a_split_has_a_minimum_stable_batch_and_smaller_ones_are_told_of():
    report = stability(ModulePlugin(dp_size=2, pp_size=5), ModulePlugin(dp_size=2, pp_size=3))
    assert report is not None and report.batch_size is not None and sum(report.split) == 8
    below = too_small(report, report.batch_size - 1, "global_batch_size=")
    assert below is not None
    assert f"batch of {report.batch_size - 1} samples is smaller than {report.batch_size}," in below
    assert f"`global_batch_size={report.batch_size}` or more" in below
    assert too_small(report, report.batch_size, "global_batch_size=") is None
    assert too_small(None, 1, "global_batch_size=") is None


def test_without_a_split_there_is_none():
    shared = stability(ModulePlugin(dp_size=2, pp_size=4), ModulePlugin(colocate_with="vision"))
    assert shared is None
    assert stability(ModulePlugin(dp_size=2), ModulePlugin(dp_size=2)) is None  # one rank each: no other split
    nothing = SampleSizes.uniform(dict.fromkeys(SPEC.modules, 0), 4)
    assert stability(ModulePlugin(pp_size=2), ModulePlugin(pp_size=2), nothing) is None


def test_the_work_of_a_module_grows_with_its_samples():
    work = module_work(COSTS, SIZES)
    for name in SPEC.modules:
        order = np.argsort(SIZES.tokens[name], kind="stable")
        assert (np.diff(work[name][order]) >= 0).mean() > 0.99
