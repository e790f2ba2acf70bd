"""
Cost models, analytic or measured: the time of each task and the memory of each rank; a step planned and predicted.

Uses plans, arrangements and schedules, and no torch; imported by what plans, predicts, runs or measures steps.
"""

from .analytic import AnalyticLayers, analytic_costs, layer_flops, module_flops, predicts_times
from .device_table import device_from, device_table, find_device, recognize_device
from .devices import Hardware
from .layer_table import LayerTable, layer_table
from .layers import CostModel, LayerCost, LayerCosts, Polynomial, data_gradients
from .limits import MEMORY_SHARE, batch_workloads, fitting_in_flight, fitting_tokens, usable_bytes
from .memory import activation_peaks, memory_per_rank, memory_timeline
from .stage_memory import GRADIENT_BUCKET_BYTES, OFFLOAD_BUCKET_BYTES, RankMemory
from .stage_times import (
    StageCost,
    model_flops,
    module_model_flops,
    stage_costs,
    training_flops,
)
from .step import StepCost

__all__ = [
    "GRADIENT_BUCKET_BYTES",
    "MEMORY_SHARE",
    "OFFLOAD_BUCKET_BYTES",
    "AnalyticLayers",
    "CostModel",
    "Hardware",
    "LayerCost",
    "LayerCosts",
    "LayerTable",
    "Polynomial",
    "RankMemory",
    "StageCost",
    "StepCost",
    "activation_peaks",
    "analytic_costs",
    "batch_workloads",
    "data_gradients",
    "device_from",
    "device_table",
    "find_device",
    "fitting_in_flight",
    "fitting_tokens",
    "layer_flops",
    "layer_table",
    "memory_per_rank",
    "memory_timeline",
    "model_flops",
    "module_flops",
    "module_model_flops",
    "predicts_times",
    "recognize_device",
    "stage_costs",
    "training_flops",
    "usable_bytes",
]
