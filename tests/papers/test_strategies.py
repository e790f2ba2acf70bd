"""Layouts of DistTrain's allocation are those of exhaustive search."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.papers.allocation import allocate
from hf_mmparallel.papers.strategies import ModuleDemand, Role, least_stages
from hf_mmparallel.plan import LANGUAGE_MODEL

GIB = 1024**3


@st.composite
def demands(draw, role: Role = "encoder"):
    whole, overhead = draw(st.integers(5, 60)), draw(st.sampled_from([0.0, 0.7]))
    return ModuleDemand(
        {tp: whole / tp + overhead * (tp - 1) for tp in (1, 2)},
        num_layers=draw(st.integers(1, 4)),
        num_heads=draw(st.sampled_from([3, 4])),
        weight_bytes=draw(st.sampled_from([0.0, 2.0, 5.0])),
        optimizer_bytes=draw(st.sampled_from([0.0, 4.0])),
        activation_bytes=draw(st.sampled_from([0.0, 0.5, 1.5])),
        role=role,
    )


@st.composite
def cases(draw):
    modules = {"vision": draw(demands()), LANGUAGE_MODEL: draw(demands())}
    other = draw(st.sampled_from([None, "encoder", "generator"]))
    if other:
        modules["other"] = draw(demands(other))
    return modules, draw(st.integers(2, 9)), draw(st.sampled_from([2, 4, 6])), draw(st.sampled_from([4.0, 6.0, 1e3]))


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def exhaustive(modules, num_ranks, batch_size, memory_bytes, microbatch_size=1):
    """The best time of a step over all whole layouts, in plain words; infinite without any."""
    best, names = np.inf, list(modules)
    layouts = [
        [(tp, dp, pp) for tp in (1, 2) if module.num_heads % tp == 0 for dp in divisors(batch_size)
         for pp in range(1, module.num_layers + 1) if tp * dp * pp <= num_ranks]
        for module in modules.values()
    ]  # fmt: skip
    for choice in product(*layouts):
        layout = dict(zip(names, choice, strict=True))
        if sum(tp * dp * pp for tp, dp, pp in choice) > num_ranks:
            continue
        samples = microbatch_size * layout[LANGUAGE_MODEL][1]
        if batch_size % samples or any(samples % dp for name, (_, dp, _) in layout.items() if name != LANGUAGE_MODEL):
            continue
        count = batch_size // samples
        per_pass = {
            n: modules[n].sample_ms[tp] * (microbatch_size if n == LANGUAGE_MODEL else samples / dp)
            for n, (tp, dp, _) in layout.items()
        }
        encoders, generators = (
            [n for n in names if n != LANGUAGE_MODEL and modules[n].role == role] for role in ("encoder", "generator")
        )
        after = max((layout[n][2] for n in generators), default=0)
        behind = {**dict.fromkeys(generators, 0), LANGUAGE_MODEL: after}
        behind |= dict.fromkeys(encoders, layout[LANGUAGE_MODEL][2] + after)
        fits = True
        for name, (tp, dp, pp) in layout.items():
            module, taken = modules[name], microbatch_size if name == LANGUAGE_MODEL else samples / dp
            state = module.weight_bytes + module.optimizer_bytes / dp
            kept = module.activation_bytes * taken * min(pp + behind[name], count)
            fits &= (state + kept) / (tp * pp) <= memory_bytes
        if fits:
            warm = sum(
                max((per_pass[n] for n in side), default=0.0) for side in (encoders, generators, [LANGUAGE_MODEL])
            )
            best = min(best, warm + (count - 1) * max(per_pass[n] / layout[n][2] for n in names))
    return best


@settings(max_examples=60)
@given(cases(), st.sampled_from([1, 1, 2]))
def test_no_whole_layout_is_faster(case, microbatch_size):
    modules, num_ranks, batch_size, memory_bytes = case
    best = exhaustive(modules, num_ranks, batch_size, memory_bytes, microbatch_size)
    if not np.isfinite(best):
        with pytest.raises(ValueError, match="GiB"):
            allocate(modules, num_ranks, batch_size, memory_bytes, microbatch_size, (1, 2))
        return
    found = allocate(modules, num_ranks, batch_size, memory_bytes, microbatch_size, (1, 2))
    assert found.iteration_ms == pytest.approx(best, rel=1e-7)
    assert found.relaxed_ms <= found.iteration_ms
    assert found.num_ranks <= num_ranks
    slowest = found.modules[found.bottleneck].stage_ms
    assert found.iteration_ms == pytest.approx(found.warm_up_ms + (found.num_microbatches - 1) * slowest)
    for name, layout in found.modules.items():
        assert layout.memory_bytes <= memory_bytes * (1 + 1e-7)
        assert layout.pp_size <= modules[name].num_layers and modules[name].num_heads % layout.tp_size == 0


@given(st.integers(1, 20), st.integers(1, 12), st.integers(1, 12), st.integers(1, 9), st.integers(0, 9))
def test_the_fewest_stages_are_those_that_fit(state, kept, room, count, behind):
    def fits(stages: float) -> bool:
        return (state + kept * min(stages + behind, count)) / stages <= room * (1 + 1e-12)

    found = float(least_stages(np.array(float(state)), np.array(float(kept)), np.array(float(room)), count, behind))
    whole = max(1, int(np.ceil(found - 1e-9)))
    assert fits(whole) and fits(max(found, 1e-9)) and not any(fits(less) for less in range(1, whole))


def example(language_bytes: float = 4.0 * GIB) -> dict[str, ModuleDemand]:
    return {
        "vision": ModuleDemand(lambda tp: 10.0 / tp, 8, 4),
        LANGUAGE_MODEL: ModuleDemand(lambda tp: 30.0 / tp, 8, 4, language_bytes),
    }


def test_a_model_that_does_not_fit_says_by_how_much_and_what_helps():
    with pytest.raises(ValueError, match=r"`language_model` needs 6.25 GiB .*6.00 GiB"):
        allocate(example(200.0 * GIB), 16, 64, 6.0 * GIB, tp_sizes=(1, 2, 4))
    with pytest.raises(ValueError, match=r"4 ranks with 8.00 GiB .* Use 6\."):
        allocate(example(40.0 * GIB), 4, 64, 8.0 * GIB)
    assert allocate(example(40.0 * GIB), 6, 64, 8.0 * GIB).num_ranks == 6
    kept = {
        "vision": ModuleDemand(lambda tp: 10.0 / tp, 1, 3, 2 * GIB, 4 * GIB, 1.5 * GIB),
        LANGUAGE_MODEL: ModuleDemand(lambda tp: 10.0 / tp, 2, 3, 5 * GIB, 4 * GIB, 0.5 * GIB),
    }
    with pytest.raises(ValueError, match=r"9 ranks with 6.00 GiB .*in flight. Use 12\."):  # fractions of stages fit
        allocate(kept, 9, 4, 6.0 * GIB, 1, (1, 2))


def test_what_is_no_batch_or_no_model_is_refused():
    with pytest.raises(ValueError, match="`microbatch_size=3`"):
        allocate(example(), 16, 64, GIB, microbatch_size=3)
    with pytest.raises(ValueError, match="no `language_model`"):
        allocate({"vision": example()["vision"]}, 16, 64, GIB)
    with pytest.raises(ValueError, match="4 heads of `vision`"):
        allocate(example(), 16, 64, GIB, tp_sizes=(8,))
