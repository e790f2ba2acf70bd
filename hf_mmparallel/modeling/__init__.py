"""
The description of a model, its division into modules and stages, and loading of the parameters that a rank owns;
composed models, and adapters.

Uses `plan`, `kernels` and the world; imported by `data`, `runtime` and above.
"""

from .features import count_feature_tokens
from .lazy_logits import whole_logits
from .loss import accuracy_and_entropy, check_given_loss, given_loss, token_loss
from .prepare import prepare_stages
from .router_loss import check_router_loss
from .spec import ModulePart, build_model_spec, module_parts
from .stages import ModuleStage
from .supported import check_causal, check_supported, unknown_layers_text
from .unowned import is_unowned

__all__ = [
    "ModulePart",
    "ModuleStage",
    "accuracy_and_entropy",
    "build_model_spec",
    "check_causal",
    "check_given_loss",
    "check_router_loss",
    "check_supported",
    "count_feature_tokens",
    "given_loss",
    "is_unowned",
    "module_parts",
    "prepare_stages",
    "token_loss",
    "unknown_layers_text",
    "whole_logits",
]
