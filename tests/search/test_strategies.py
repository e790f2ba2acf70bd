"""Layouts of DistTrain's allocation are those of exhaustive search."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from hf_mmparallel.plan import LANGUAGE_MODEL
from hf_mmparallel.search.allocation import allocate
from hf_mmparallel.search.strategies import Strategies
from hf_mmparallel.search.strategy_space import ModuleDemand, Role, StrategySpace

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


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=20, deadline=None)
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


def by_linear_programs(strategies: Strategies, row: int) -> float:
    """The least time with fractions of stages: halving over the slowest stage, a linear program for each."""
    pass_ms, ranks = strategies.pass_ms[row], strategies.stage_ranks[row]
    lines, limits = [ranks], [float(strategies.num_ranks)]
    for line, limit in strategies.memory_lines(row):
        lines.append(line[:-1])
        limits.append(limit)

    def possible(slowest_ms: float) -> bool:
        low = np.maximum(strategies.least[row], pass_ms / slowest_ms)
        if (low > strategies.num_layers).any():
            return False
        bounds = list(zip(low, strategies.num_layers, strict=True))
        return linprog(np.zeros(len(low)), np.array(lines), limits, bounds=bounds).status == 0

    low, high = 0.0, float(pass_ms.max())
    if not possible(high):
        return np.inf
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return float(strategies.warm_up_ms[row] + (strategies.num_microbatches[row] - 1) * high)


@settings(max_examples=25, deadline=None)
@given(cases(), st.integers(0, 10**6))
def test_the_cone_program_has_the_optimum_of_linear_programs_between_its_bounds(case, seed):
    modules, num_ranks, batch_size, memory_bytes = case
    space = StrategySpace(modules, num_ranks, batch_size, memory_bytes, 1, (1, 2))
    strategies = space.strategies(space.options)
    if strategies is None:
        return
    _, whole_ms = strategies.whole_stages(np.inf)
    rows = np.flatnonzero(np.isfinite(strategies.bound_ms))
    if len(rows):
        row = int(np.random.default_rng(seed).choice(rows))
        bound_ms = float(strategies.bound_ms[row])
        found = strategies.solve(row, bound_ms)
        assert found >= bound_ms and found <= whole_ms[row] * (1 + 1e-6)
        assert found == pytest.approx(by_linear_programs(strategies, row), rel=1e-3)


@settings(max_examples=15, deadline=None)
@given(cases())
def test_programs_that_are_not_solved_would_not_be_better(case):
    modules, num_ranks, batch_size, memory_bytes = case
    try:
        found = allocate(modules, num_ranks, batch_size, memory_bytes, tp_sizes=(1, 2))
    except ValueError:
        return
    space = StrategySpace(modules, num_ranks, batch_size, memory_bytes, 1, (1, 2))
    strategies = space.strategies(space.options)
    assert strategies is not None
    every = [
        strategies.solve(row, float(bound))
        for row, bound in enumerate(strategies.bound_ms)
        if bound <= found.relaxed_ms * 1.05
    ]
    assert min(every) == pytest.approx(found.relaxed_ms, rel=1e-5)
    assert found.num_solved <= len(every) <= found.num_strategies == space.num_strategies


def example(language_bytes=4.0 * GIB, activation_bytes=0.0) -> dict[str, ModuleDemand]:
    return {
        "vision": ModuleDemand(lambda tp: 10.0 / tp, 8, 4),
        LANGUAGE_MODEL: ModuleDemand(lambda tp: 30.0 / tp, 8, 4, language_bytes, 0.0, activation_bytes),
    }


def test_work_of_one_to_three_gets_ranks_of_one_to_three():
    found = allocate(example(), 16, 64, 80.0 * GIB)
    ranks = {name: layout.num_ranks for name, layout in found.modules.items()}
    assert ranks == {"vision": 4, LANGUAGE_MODEL: 12}
    assert found.iteration_ms < found.relaxed_ms * 1.1


def test_memory_asks_for_stages_and_frozen_modules_give_ranks_back():
    tight = allocate(example(40.0 * GIB), 16, 64, 8.0 * GIB)
    layout = tight.modules[LANGUAGE_MODEL]
    assert layout.tp_size * layout.pp_size >= 5 and layout.memory_bytes <= 8.0 * GIB
    trained, frozen = example(), example()
    frozen["vision"] = ModuleDemand(lambda tp: 10.0 / 3 / tp, 8, 4)  # a forward alone
    share = [allocate(some, 16, 64, 80.0 * GIB).modules["vision"].num_ranks for some in (trained, frozen)]
    assert share[1] < share[0]


def test_a_model_that_does_not_fit_says_by_how_much_and_what_helps():
    with pytest.raises(ValueError, match=r"`language_model` needs 6.25 GiB .* 8 layers; a rank has 6.00 GiB.*Freeze"):
        allocate(example(200.0 * GIB), 16, 64, 6.0 * GIB, tp_sizes=(1, 2, 4))
    with pytest.raises(ValueError, match=r"4 ranks with 8.00 GiB are not enough .* Use 6\.") as raised:
        allocate(example(40.0 * GIB), 4, 64, 8.0 * GIB)
    assert "GiB" in str(raised.value)
    assert allocate(example(40.0 * GIB), 6, 64, 8.0 * GIB).num_ranks == 6


def test_what_is_no_batch_or_no_model_is_refused():
    with pytest.raises(ValueError, match="no multiple of `microbatch_size=3`"):
        allocate(example(), 16, 64, GIB, microbatch_size=3)
    with pytest.raises(ValueError, match="There is no `language_model` among"):
        allocate({"vision": example()["vision"]}, 16, 64, GIB)
    with pytest.raises(ValueError, match="divides the 4 heads of `vision`"):
        allocate(example(), 16, 64, GIB, tp_sizes=(8,))
