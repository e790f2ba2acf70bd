"""The size of a mean microbatch is what batches compute in their arrangement, padding included."""

from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.cost.row_sizes import chunk_sizes
from hf_mmparallel.plan import LANGUAGE_MODEL, SampleSizes
from hf_mmparallel.plan.layout import ModuleLayout
from hf_mmparallel.planning.bounds import StepBounds
from hf_mmparallel.planning.candidates import CandidateSpace
from hf_mmparallel.planning.options import MeanMicrobatches, ModuleOptions, ParallelConfig
from hf_mmparallel.planning.problem import Candidate, PlanningProblem
from hf_mmparallel.planning.simulations import step_planner
from tests.planning.test_search import CANDIDATES, problem_of

BATCH, DP, COUNT = 64, 2, 8


def question(arrangement: str, attention: str = "sdpa", packing: bool = False) -> PlanningProblem:
    problem = problem_of(DP, BATCH, arrangement=arrangement)
    language = replace(problem.spec.language_model, attention=attention)
    spec = replace(problem.spec, modules={**problem.spec.modules, LANGUAGE_MODEL: language})
    problem = replace(problem, costs=replace(problem.costs.with_spec(spec), packing=packing))
    return replace(problem, sizes=problem.batches[0])  # all batches are these samples


def arranged(problem: PlanningProblem, cp_size: int = 1) -> np.ndarray:
    """Tokens, squared tokens and stored pairs of a mean microbatch of the batch as it is arranged."""
    layouts = {"vision": ModuleLayout((4,), DP), LANGUAGE_MODEL: ModuleLayout((4,), DP, cp_size)}
    candidate = Candidate(layouts, {}, COUNT, "1f1b", problem.first_arrangement)
    planner, batch = step_planner(problem, candidate), problem.batches[0]
    step = planner.predict_batch(batch).planned.step
    sizes = chunk_sizes(problem.costs, planner.plan, step, batch)
    return np.sum([own for key, own in sizes.items() if key[0] == LANGUAGE_MODEL], axis=0) / (DP * COUNT)


def mean(problem: PlanningProblem, cp_size: int = 1, **settings: bool) -> np.ndarray:
    return MeanMicrobatches(problem, LANGUAGE_MODEL).sizes(cp_size, BATCH / DP / COUNT, **settings)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize(
    "arrangement, packing, near",
    [("contiguous", False, 1e-9), ("hierarchical", False, 0.1), ("tapered", False, 0.1), ("hierarchical", True, 1e-9)],
)
def test_a_mean_microbatch_computes_what_arranged_ones_do(arrangement, packing, near, attention):
    problem = question(arrangement, attention, packing)
    found, wanted = mean(problem), arranged(problem)
    assert found == pytest.approx(wanted, rel=near)
    real = problem.sizes.tokens[LANGUAGE_MODEL].sum() / (DP * COUNT)
    assert (found[0] > 1.01 * real) == (not packing)
    assert (mean(problem, padded=False) <= wanted * (1 + 1e-9)).all()


def test_under_context_parallelism_rows_are_packed_and_rounded_up():
    problem = question("contiguous")
    assert mean(problem, 2) == pytest.approx(arranged(problem, 2), rel=1e-9)
    assert (mean(problem, 2, padded=False) <= arranged(problem, 2) * (1 + 1e-9)).all()


def test_encoders_and_single_samples_have_no_padding():
    problem = question("contiguous")
    for name, count in (("vision", 4.0), ("vision", 0.5), (LANGUAGE_MODEL, 1.0)):
        tokens, squares, _ = MeanMicrobatches(problem, name).sizes(1, count)
        assert tokens == pytest.approx(count * problem.sizes.tokens[name].mean())
        assert squares == pytest.approx(count * problem.sizes.squares[name].mean())


def test_padding_is_in_the_closed_form_and_in_the_memory_that_a_microbatch_keeps():
    kind = ParallelConfig(1, 1, False)
    padded, packed = (ModuleOptions(question("contiguous", packing=own), LANGUAGE_MODEL) for own in (False, True))
    assert padded.layer_ms(kind, 4.0).sum() > 1.1 * packed.layer_ms(kind, 4.0).sum()
    assert padded.saved_bytes(kind, 4.0) > 1.1 * packed.saved_bytes(kind, 4.0)
    bounds = [StepBounds(question("contiguous", packing=own)).least_ms(CANDIDATES[0]) for own in (False, True)]
    assert bounds[0] == pytest.approx(bounds[1])


@pytest.mark.parametrize("arrangement", ["contiguous", "hierarchical"])
def test_the_closed_form_ranks_as_steps_do(arrangement):
    """Samples of very different lengths: with padding, few large microbatches are slower than the closed form said."""
    rng = np.random.default_rng(0)
    lengths = np.rint(300 * np.exp(1.2 * rng.standard_normal(64))).astype(int) + 1
    tokens = {"vision": [[20]] * 64, LANGUAGE_MODEL: [[int(n)] for n in lengths]}
    problem = replace(problem_of(2, 32, arrangement=arrangement), sizes=SampleSizes.of_sequences(tokens))
    space = CandidateSpace(problem)
    closed, simulated = [], []
    for own in space:
        sizes = {name: (c.dp_size, c.pp_size, c.kind.tp_size) for name, c in own.estimates.items()}
        if set(sizes.values()) == {(2, 1, 1)} and not any(
            c.kind.activation_checkpointing for c in own.estimates.values()
        ):
            planner = step_planner(problem, space.candidate(own))
            simulated.append(planner.predict_batch(problem.batches[0]).step_ms)
            closed.append(own.step_ms)
    assert len(closed) == 5  # 1 to 16 microbatches
    assert np.array(closed) == pytest.approx(np.array(simulated), rel=0.15)
    assert simulated[int(np.argmin(closed))] <= 1.03 * min(simulated)


def test_cp_ranks_of_an_encoder_are_tried_up_to_the_images_of_a_sample():
    problem = problem_of(8, 16)
    images = SampleSizes.of_sequences({"vision": [[64] * 4] * 16, LANGUAGE_MODEL: [[512]] * 16})

    def tried(sizes: SampleSizes, **fixed: int) -> set[int]:
        asked = replace(problem, sizes=sizes, fixed={"vision": fixed} if fixed else {})
        return {kind.cp_size for kind in ModuleOptions(asked, "vision").kinds}

    assert tried(images) == {1, 2, 4}
    assert tried(images, cp_size=3) == {3}
    # squares that are those of windows don't tell how many images there are, but items do
    windows = replace(images, squares={**images.squares, "vision": images.squares["vision"] / 4})
    assert tried(replace(windows, items={"vision": np.full(16, 2)})) == {1, 2}
    assert tried(SampleSizes.uniform({"vision": 256, LANGUAGE_MODEL: 512}, 16)) == {1}
