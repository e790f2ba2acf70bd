"""
A model described as numbers, cut into modules and stages, loaded in parts.

Uses `plan`, `kernels`, `adapters` and the world; imported by `composed`, `profiling`, `data`, `runtime` and above.
"""

from .features import count_rows
from .loss import token_loss
from .spec import ModulePart, build_model_spec, module_parts
from .stages import ModuleStage, is_hollow, prepare_stages
from .supported import check_causal, check_supported, unknown_layers_text

__all__ = [
    "ModulePart",
    "ModuleStage",
    "build_model_spec",
    "check_causal",
    "check_supported",
    "count_rows",
    "is_hollow",
    "module_parts",
    "prepare_stages",
    "token_loss",
    "unknown_layers_text",
]
