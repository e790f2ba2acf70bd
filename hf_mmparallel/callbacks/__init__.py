"""
Callbacks that see the engine: efficiency in the log, predictions beside it, measured timelines as pictures, the end of
a training by a signal, lost ranks.

Use the engine and the costs; imported by the Trainer and by users.
"""

from .base import EngineCallback
from .metrics import ParallelMetricsCallback
from .prediction import PredictionCallback
from .preemption import PreemptionCallback
from .progress_bar import LossProgressCallback
from .recoveries import RecoveryCallback
from .step_timelines import TimelineCallback

__all__ = [
    "EngineCallback",
    "LossProgressCallback",
    "ParallelMetricsCallback",
    "PredictionCallback",
    "PreemptionCallback",
    "RecoveryCallback",
    "TimelineCallback",
]
