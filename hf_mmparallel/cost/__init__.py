"""What a layout costs, estimated from sizes alone: time of each task, memory of each rank."""

from .analytic import AnalyticCost, Tokens, flops_per_token
from .hardware import HARDWARE, Hardware, hardware
from .memory import RankMemory, memory_per_rank

__all__ = [
    "HARDWARE",
    "AnalyticCost",
    "Hardware",
    "RankMemory",
    "Tokens",
    "flops_per_token",
    "hardware",
    "memory_per_rank",
]
