"""Callbacks that see the engine: efficiency in the log, measured timelines as pictures."""

from .base import EngineCallback
from .metrics import ParallelMetricsCallback
from .prediction import PredictionCallback
from .progress import LossProgressCallback
from .timeline import TimelineCallback

__all__ = [
    "EngineCallback",
    "LossProgressCallback",
    "ParallelMetricsCallback",
    "PredictionCallback",
    "TimelineCallback",
]
