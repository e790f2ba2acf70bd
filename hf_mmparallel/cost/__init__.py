"""What a layout and its samples cost, estimated from sizes alone: time of each task, memory of each rank."""

from .analytic import AnalyticCost, StageCost, flops_per_token, stage_costs, stage_flops
from .hardware import HARDWARE, Hardware, hardware
from .memory import RankMemory, memory_per_rank
from .workloads import batch_workloads, fitting_tokens

__all__ = [
    "HARDWARE",
    "AnalyticCost",
    "Hardware",
    "RankMemory",
    "StageCost",
    "batch_workloads",
    "fitting_tokens",
    "flops_per_token",
    "hardware",
    "memory_per_rank",
    "stage_costs",
    "stage_flops",
]
