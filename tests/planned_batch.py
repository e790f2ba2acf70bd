"""Batches with the program of their step, for engines without a loader."""

from hf_mmparallel.data.step_batch import StepBatch, StepData
from hf_mmparallel.runtime.engine import ParallelEngine
from hf_mmparallel.schedule import build_program


def with_program(engine: ParallelEngine, data: StepData) -> StepBatch:
    """The data with this rank's program of a training step."""
    return StepBatch.of(data, build_program(engine.plan, data.step, engine.sync_groups), engine.rank)
