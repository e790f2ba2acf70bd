"""Order of the tiers, what a tier needs, and which of the deep tests run."""

import gc
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from tests import folders
from tests.deep_cases import CHOSEN, PARTS, is_in_part

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported; 0 to test kernels on a GPU
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the few cores of the machine

settings.register_profile("no times", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no times")

TIERS = ("distributed", "slow", "deep", "gpu", "multi_gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that leaves out deep tests."""
    choices = ("all", "none", *map(str, range(PARTS)))
    text = f"deep tests and all examples of property tests: all (default), none, or one of {PARTS} parts, for CI"
    parser.addoption("--deep", choices=choices, default="all", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Tells the cases of launches which part runs."""
    os.environ[CHOSEN] = config.getoption("--deep")


def pytest_sessionstart() -> None:
    """Gives the runs of this session a folder."""
    folders.start()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs the longest tier first, leaves out deep tests of other parts, and skips what has no device here."""
    _leave_out_deep(config, items)
    _leave_out_examples(config.getoption("--deep"), items)
    items.sort(key=_tier, reverse=True)  # short tests are left for the worker that has nothing to do at the end
    if any(_tier(item) >= TIERS.index("gpu") + 1 for item in items):
        _skip_without_devices(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """
    Lets the server of ranks import its packages while cheaper tests run, and leaves those that are imported here out
    of garbage collections, of which the Trainer asks for one in each run.
    """
    if not session.config.option.collectonly and any(item.get_closest_marker("distributed") for item in session.items):
        from tests.distributed import start_server

        start_server()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Gives what is imported back to the collector, which takes it apart when Python ends, and removes the folders."""
    gc.unfreeze()
    folders.finish()


def _leave_out_deep(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the deep tests that `--deep` does not ask for."""
    part = config.getoption("--deep")
    left_out = {item for item in items if item.get_closest_marker("deep") and not is_in_part(item.nodeid, part)}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def _leave_out_examples(part: str, items: list[pytest.Item]) -> None:
    """
    Leaves a fifth of the examples of property tests, but at least 5. A tenth of the files, by the checksums of their
    paths, is a part, in which all examples run.
    """
    tests: dict[Any, str] = {}
    for item in items:
        test = getattr(item, "obj", None)
        if is_hypothesis_test(test):
            tests[getattr(test, "__func__", test)] = item.nodeid.partition("::")[0]
    for test, path in tests.items():
        if not is_in_part(path, part):
            own = test._hypothesis_internal_use_settings  # `settings` itself can decorate a test only once
            fewer = min(own.max_examples, max(5, own.max_examples // 5))
            test._hypothesis_internal_use_settings = settings(own, max_examples=fewer)


def _tier(item: pytest.Item) -> int:
    """0 for a plain test, else one more than the place of its last marker in `TIERS`."""
    return max((place for place, name in enumerate(TIERS, 1) if item.get_closest_marker(name)), default=0)


def _skip_without_devices(items: list[pytest.Item]) -> None:
    """Marks the tests that need more CUDA devices than there are."""
    import torch

    found = torch.cuda.device_count()
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if needed > found:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {found}"))
