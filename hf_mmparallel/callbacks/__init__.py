"""Callbacks that see the engine: efficiency in the log, measured timelines as pictures."""

from .base import EngineCallback
from .metrics import ParallelMetricsCallback
from .prediction import PredictionCallback
from .progress_bar import LossProgressCallback
from .step_timelines import TimelineCallback

__all__ = [
    "EngineCallback",
    "LossProgressCallback",
    "ParallelMetricsCallback",
    "PredictionCallback",
    "TimelineCallback",
]
