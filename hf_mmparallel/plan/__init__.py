"""
Plans as data: the description of a model, the user's settings, and the assignment of layers and samples to ranks.

The bottom of the package, without torch; may be imported by everything.
"""

from .layout import layout_data, save_layout
from .model_spec import (
    LANGUAGE_MODEL,
    MAX_LOGITS,
    Edge,
    FeatureSpec,
    ModelSpec,
    ModuleSpec,
    ParameterSpec,
    ParameterUse,
)
from .ownership import (
    Cut,
    ParameterShards,
    Shard,
    SyncGroup,
    frozen_groups,
    layer_numbers,
    parameter_shards,
    stage_holds,
    stage_parameters,
    sync_groups,
    sync_groups_of,
)
from .parallel_plan import (
    ContextSettings,
    ModulePlan,
    ParallelPlan,
    ShardingSettings,
    Stage,
    StageKey,
    StorageSettings,
)
from .planned_for import PlannedFor
from .plugin import ModulePlugin, MultimodalParallelPlugin
from .resolve import check_plan, check_trained, check_world_size, plan_for_model, resolve_plan
from .sizes import SampleSizes, Workloads, typical_batches
from .step_plan import StepPlan

__all__ = [
    "LANGUAGE_MODEL",
    "MAX_LOGITS",
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
    "PlannedFor",
    "SampleSizes",
    "Shard",
    "ShardingSettings",
    "Stage",
    "StageKey",
    "StepPlan",
    "StorageSettings",
    "SyncGroup",
    "Workloads",
    "check_plan",
    "check_trained",
    "check_world_size",
    "frozen_groups",
    "layer_numbers",
    "layout_data",
    "parameter_shards",
    "plan_for_model",
    "resolve_plan",
    "save_layout",
    "stage_holds",
    "stage_parameters",
    "sync_groups",
    "sync_groups_of",
    "typical_batches",
]
