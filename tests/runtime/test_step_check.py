"""Ranks that are about to run different steps say so before they exchange tensors."""

import re

import pytest
import torch.distributed as dist

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.data.fingerprint import MEDIA_ROUNDING, StepFingerprint, fingerprint
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan, sync_groups
from hf_mmparallel.runtime.step_check import StepCheck
from hf_mmparallel.schedule import Program, Task, build_program
from hf_mmparallel.world import World
from tests.distributed import run_distributed
from tests.plan.specs import model_spec

LM = LANGUAGE_MODEL


def checks() -> dict[str, str | None]:
    """Case -> what a rank says."""
    rank = dist.get_rank()
    one = {0: 6}
    cases = {
        "equal": StepFingerprint(5, one),
        "equal parts": StepFingerprint(5, {rank: 8 + rank, (rank + 1) % 3: 8 + (rank + 1) % 3}),
        "equal shardings": StepFingerprint(5, one, {(LM, index): 8 + index for index in (rank, (rank + 1) % 3)}),
        "other step": StepFingerprint(5 + rank // 2, {0: 6 + rank}),
        "other sums": StepFingerprint(5, one),
        "other program": StepFingerprint(5, {0: 6 + rank // 2}),
        "other part": StepFingerprint(5, {} if rank == 1 else {1: 3, 2: 7 + rank}),
        "other cut": StepFingerprint(5, one, {} if rank == 1 else {(LM, 1): 3, ("vision", 2): 7 + rank}),
        "equal contents": StepFingerprint(
            5, one, {}, {rank: {8 + rank}, 3: {2}}, {(LM, 0, 1): 3}, {(LM, 0, 2): rank * MEDIA_ROUNDING // 2}
        ),
        "other sample": StepFingerprint(5, one, {}, {} if rank == 1 else {2: {3}, 3: {7 + rank}}),
        "sample read twice": StepFingerprint(5, one, {}, {3: {7, 8}} if rank == 1 else {}),
        "other inputs": StepFingerprint(5, one, {}, {3: {2}}, {} if rank == 1 else {(LM, 0, 1): rank}),
        "other media": StepFingerprint(5, one, media={} if rank == 1 else {(LM, 0, 2): rank * MEDIA_ROUNDING}),
    }
    plan = resolve_plan(model_spec(), {"vision": ModulePlugin(), LM: ModulePlugin(dp_size=2)})
    step = contiguous_step(plan, range(20, 28), 1)
    found = {}
    for name, mark in cases.items():
        sums = 4 + rank // 2 if name == "other sums" else 4
        try:
            StepCheck(World(), 3, sums)(mark, step)
            found[name] = None
        except RuntimeError as error:
            found[name] = str(error)
    return found


@pytest.mark.distributed
def test_ranks_compare_steps_programs_and_cuts():
    first, *others = run_distributed(checks, 3)
    assert all(found == first for found in others)
    assert all((sentence is None) == name.startswith("equal") for name, sentence in first.items())
    assert re.match(r".* drew .*checksums: rank 0: 5, rank 1: 5, rank 2: 6\)", first["other step"])
    assert re.match(r".* ordered .*checksums: rank 0: 6, rank 1: 6, rank 2: 7\)", first["other program"])
    assert re.match(r".* ordered .*checksums: rank 0: 7, rank 2: 9\)", first["other part"])
    assert re.match(r".* sum .*checksums: rank 0: 4, rank 1: 4, rank 2: 5\)", first["other sums"])
    assert re.match(r".* cut .*`vision` with sample 22 .*\(checksums: rank 0: 7, rank 2: 9\)", first["other cut"])
    assert re.match(r"Sample 23 .*checksums: rank 0: 7, rank 2: 9\)", first["other sample"])
    assert re.match(r"Sample 23 .*checksums: rank 1: 8\)", first["sample read twice"])
    for name, index in (("other inputs", 1), ("other media", 2)):
        assert re.match(rf".* microbatch {index} of `{LM}`, replica 0", first[name])


def test_the_checksum_of_a_program_is_of_its_actions():
    plan = resolve_plan(model_spec(), {"vision": ModulePlugin(pp_size=2), LM: ModulePlugin(colocate_with="vision")})
    step, groups = contiguous_step(plan, range(8), 2), sync_groups(model_spec(), plan)

    def program_of(slow: str) -> Program:
        def cost(task: Task) -> float:
            return 10.0 if task.module == slow else 1.0

        return build_program(plan, step, groups, cost)

    program = program_of("vision")
    assert Program.parse(program.dump()).checksum == program.checksum
    assert Program(dict(program.actions)).checksum == program.checksum  # without times
    swapped = Program({0: program.actions[1], 1: program.actions[0]})
    assert program.checksum not in (program_of(LM).checksum, swapped.checksum)
    assert fingerprint(step, program, {}, {}, {}) == fingerprint(step, Program.parse(program.dump()), {}, {}, {})
