"""Batches with the program of their step, for engines without a loader."""

from __future__ import annotations

from dataclasses import replace

from hf_mmparallel.data.fingerprint import fingerprint
from hf_mmparallel.data.step_dataset import StepBatch
from hf_mmparallel.runtime.engine import ParallelEngine
from hf_mmparallel.schedule import build_program


def with_program(engine: ParallelEngine, batch: StepBatch) -> StepBatch:
    """The batch with this rank's program of a training step."""
    program = build_program(engine.plan, batch.step, engine.sync_groups)
    mark = fingerprint(batch.step, program, batch.shardings)
    return replace(batch, program=program.of_rank(engine.rank), fingerprint=mark)
