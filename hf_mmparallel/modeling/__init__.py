"""Models cut into modules and stages."""

from .features import count_rows
from .loss import token_loss
from .spec import ModulePart, build_model_spec, check_decoder_only, module_parts
from .stages import ModuleStage, is_hollow, prepare_stages

__all__ = [
    "ModulePart",
    "ModuleStage",
    "build_model_spec",
    "check_decoder_only",
    "count_rows",
    "is_hollow",
    "module_parts",
    "prepare_stages",
    "token_loss",
]
