"""
Plans as data: what a model is, what a user asks for, which rank holds what.

The bottom of the package, without torch; may be imported by everything.
"""

from .model_spec import LANGUAGE_MODEL, FeatureSpec, ModelSpec, ModuleSpec, ParameterSpec, ParameterUse
from .ownership import (
    Cut,
    ParameterShards,
    Shard,
    SyncGroup,
    parameter_shards,
    stage_holds,
    stage_parameters,
    sync_groups,
    sync_groups_of,
)
from .parallel_plan import ContextSettings, Edge, ModulePlan, ParallelPlan, Stage
from .plugin import ModulePlugin, MultimodalParallelPlugin, layout_data, save_layout
from .resolve import check_plan, check_trained, check_world_size, frozen_as_planned, plan_for_model, resolve_plan
from .sides import encoders_of, generators_of
from .sizes import SampleSizes, Workloads
from .step_plan import StepPlan

__all__ = [
    "LANGUAGE_MODEL",
    "ContextSettings",
    "Cut",
    "Edge",
    "FeatureSpec",
    "ModelSpec",
    "ModulePlan",
    "ModulePlugin",
    "ModuleSpec",
    "MultimodalParallelPlugin",
    "ParallelPlan",
    "ParameterShards",
    "ParameterSpec",
    "ParameterUse",
    "SampleSizes",
    "Shard",
    "Stage",
    "StepPlan",
    "SyncGroup",
    "Workloads",
    "check_plan",
    "check_trained",
    "check_world_size",
    "encoders_of",
    "frozen_as_planned",
    "generators_of",
    "layout_data",
    "parameter_shards",
    "plan_for_model",
    "resolve_plan",
    "save_layout",
    "stage_holds",
    "stage_parameters",
    "sync_groups",
    "sync_groups_of",
]
