"""Plans as data: what a model is, what a user asks for, who holds what."""

from .model_spec import LANGUAGE_MODEL, FeatureSpec, ModelSpec, ModuleSpec, ParameterSpec, ParameterUse
from .ownership import Holding, SyncGroup, holdings, stage_holds, stage_parameters, sync_groups
from .parallel_plan import ContextSettings, Edge, ModulePlan, ParallelPlan, Stage
from .plugin import ModulePlugin, MultimodalParallelPlugin
from .resolve import check_plan, check_world_size, plan_for_model, resolve_plan
from .sides import encoders_of, generators_of
from .sizes import SampleSizes, Workloads
from .step_plan import StepPlan

__all__ = [
    "LANGUAGE_MODEL",
    "ContextSettings",
    "Edge",
    "FeatureSpec",
    "Holding",
    "ModelSpec",
    "ModulePlan",
    "ModulePlugin",
    "ModuleSpec",
    "MultimodalParallelPlugin",
    "ParallelPlan",
    "ParameterSpec",
    "ParameterUse",
    "SampleSizes",
    "Stage",
    "StepPlan",
    "SyncGroup",
    "Workloads",
    "check_plan",
    "check_world_size",
    "encoders_of",
    "generators_of",
    "holdings",
    "plan_for_model",
    "resolve_plan",
    "stage_holds",
    "stage_parameters",
    "sync_groups",
]
