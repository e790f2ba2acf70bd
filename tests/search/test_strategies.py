"""Layouts of DistTrain's allocation are those of exhaustive search."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.plan import LANGUAGE_MODEL
from hf_mmparallel.search.allocation import allocate
from hf_mmparallel.search.strategy_space import ModuleDemand, Role

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
        sides = {
            role: [n for n in names if n != LANGUAGE_MODEL and modules[n].role == role]
            for role in ("encoder", "generator")
        }
        after = max((layout[n][2] for n in sides["generator"]), default=0)
        fits = True
        for name, (tp, dp, pp) in layout.items():
            behind = (
                after
                if name == LANGUAGE_MODEL
                else 0
                if name in sides["generator"]
                else layout[LANGUAGE_MODEL][2] + after
            )
            module, taken = modules[name], microbatch_size if name == LANGUAGE_MODEL else samples / dp
            state = module.weight_bytes + module.optimizer_bytes / dp
            kept = module.activation_bytes * taken * min(pp + behind, count)
            fits &= (state + kept) / (tp * pp) <= memory_bytes
        if fits:
            warm = sum(max((per_pass[n] for n in side), default=0.0) for side in (*sides.values(), [LANGUAGE_MODEL]))
            best = min(best, warm + (count - 1) * max(per_pass[n] / layout[n][2] for n in names))
    return best


@settings(max_examples=60)
@given(cases())
def test_no_whole_layout_is_faster(case):
    modules, num_ranks, batch_size, memory_bytes = case
    best = exhaustive(modules, num_ranks, batch_size, memory_bytes)
    if not np.isfinite(best):
        with pytest.raises(ValueError, match="GiB"):
            allocate(modules, num_ranks, batch_size, memory_bytes, tp_sizes=(1, 2))
        return
    found = allocate(modules, num_ranks, batch_size, memory_bytes, tp_sizes=(1, 2))
    assert found.iteration_ms == pytest.approx(best, rel=1e-7)
    assert found.relaxed_ms <= found.iteration_ms <= found.rounded_ms * (1 + 1e-7)
    assert found.num_ranks <= num_ranks
    slowest = found.modules[found.bottleneck].stage_ms
    assert found.iteration_ms == pytest.approx(found.warm_up_ms + (found.num_microbatches - 1) * slowest)
    for name, layout in found.modules.items():
        assert layout.memory_bytes <= memory_bytes * (1 + 1e-7)
        assert layout.pp_size <= modules[name].num_layers and modules[name].num_heads % layout.tp_size == 0


@settings(max_examples=20)
@given(cases(), st.sampled_from([0.25, 8.0]))
def test_neither_unit_nor_order_matters(case, scale):
    modules, num_ranks, batch_size, memory_bytes = case

    def time_ms(some, unit=1.0):
        scaled = {
            name: ModuleDemand(
                lambda tp, m=m: unit * m.sample_ms[tp], m.num_layers, m.num_heads, m.weight_bytes, m.optimizer_bytes,
                m.activation_bytes, m.role,
            )
            for name, m in some.items()
        }  # fmt: skip
        try:
            return allocate(scaled, num_ranks, batch_size, memory_bytes, tp_sizes=(1, 2)).iteration_ms
        except ValueError:
            return np.inf

    plain = time_ms(modules)
    assert time_ms(modules, scale) == pytest.approx(scale * plain, rel=1e-7)
    assert time_ms(dict(reversed(modules.items()))) == pytest.approx(plain, rel=1e-7)
