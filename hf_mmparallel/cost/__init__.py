"""What a layout and its samples cost, estimated from sizes alone: time of each task, memory of each rank."""

from .analytic import AnalyticCost, StageCost, flops_per_token, stage_costs, stage_flops
from .hardware import HARDWARE, Hardware, hardware
from .limits import eager_caps, fitting_tokens
from .memory import RankMemory, memory_per_rank
from .peaks import activation_peaks
from .workloads import batch_workloads

__all__ = [
    "HARDWARE",
    "AnalyticCost",
    "Hardware",
    "RankMemory",
    "StageCost",
    "activation_peaks",
    "batch_workloads",
    "eager_caps",
    "fitting_tokens",
    "flops_per_token",
    "hardware",
    "memory_per_rank",
    "stage_costs",
    "stage_flops",
]
