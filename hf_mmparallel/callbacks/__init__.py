"""Callbacks that see the engine. They use the engine and the costs, and are imported by the Trainer and by users."""

from .base import EngineCallback
from .log_lines import LogLineCallback, LossProgressCallback
from .metrics import ParallelMetricsCallback
from .prediction import PredictionCallback
from .preemption import PreemptionCallback
from .recoveries import RecoveryCallback
from .step_timelines import TimelineCallback

__all__ = [
    "EngineCallback",
    "LogLineCallback",
    "LossProgressCallback",
    "ParallelMetricsCallback",
    "PredictionCallback",
    "PreemptionCallback",
    "RecoveryCallback",
    "TimelineCallback",
]
