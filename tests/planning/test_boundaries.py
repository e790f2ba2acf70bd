"""What is printed of the boundaries between modules."""

import re
from dataclasses import replace

from hf_mmparallel.cost.step_planner import StepPlanner
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.planning.text import boundaries_text
from tests.cost.models import HIDDEN, h100, model


def text_of(tokens: int, frozen: bool = False) -> str:
    """The text of a step of four samples with so many tokens in each module."""
    spec = model()
    vision = spec.modules["vision"].with_frozen(frozen)
    spec = replace(spec, modules={**spec.modules, "vision": vision})
    plan = resolve_plan(spec, {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(pp_size=2)})
    planner = StepPlanner(h100(spec), plan, sync_groups(spec, plan), 2)
    sizes = SampleSizes.uniform({"vision": tokens, LANGUAGE_MODEL: tokens}, 4)
    return boundaries_text(h100(spec), planner.predict(planner.arrange(range(4), sizes)))


def test_features_messages_and_replicas_of_a_boundary():
    few, many = text_of(1024), text_of(8192)
    assert (
        few.startswith(f"vision to language_model: {4 * 1024 * HIDDEN * 2 / 2**20:.3g} MiB")
        and "2 replicas to 1" in few
    )
    assert all(f"{HIDDEN * 2 / 2**10:.3g} KiB for each token" in text for text in (few, many))
    times = [re.findall(r"([\d.]+) ms", text) for text in (few, many)]  # shortest, longest, all, the step
    for short, long in zip(*(map(float, own) for own in times), strict=True):
        assert 0 < short < long
    assert all(float(own[0]) <= float(own[1]) < float(own[2]) for own in times)
    assert "gradients back" in few and "gradients back" not in text_of(1024, frozen=True)
