"""
Multimodal parallel training for `transformers.Trainer`.
Importing it imports neither torch nor transformers; each public name loads its module on first use. Once transformers
is imported too, `attn_implementation="bitfield"` is known to it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._registration import register

if TYPE_CHECKING:
    from .data import ArrangedBatchSampler, ChatCollator, PackingCollator
    from .kernels.recurrent_layers import start_anew_at_samples
    from .modeling.multimodal_config import MultimodalConfig
    from .modeling.multimodal_model import MultimodalModel
    from .plan import ModulePlugin, MultimodalParallelPlugin, ParallelPlan
    from .trainer import MultimodalParallelTrainer, MultimodalTrainingArguments, ParallelModel, parallelize, prepare
    from .trainer.engine_callback import EngineCallback
    from .trainer.metrics_callback import ParallelMetricsCallback, TimelineCallback
    from .trainer.sft import MultimodalSFTConfig, MultimodalSFTTrainer

__version__ = "0.1.0"

__all__ = [
    "ArrangedBatchSampler",
    "ChatCollator",
    "EngineCallback",
    "ModulePlugin",
    "MultimodalConfig",
    "MultimodalModel",
    "MultimodalParallelPlugin",
    "MultimodalParallelTrainer",
    "MultimodalSFTConfig",
    "MultimodalSFTTrainer",
    "MultimodalTrainingArguments",
    "PackingCollator",
    "ParallelMetricsCallback",
    "ParallelModel",
    "ParallelPlan",
    "TimelineCallback",
    "__version__",
    "parallelize",
    "prepare",
    "start_anew_at_samples",
]

_MODULE_OF = {
    "ArrangedBatchSampler": ".data",
    "ChatCollator": ".data",
    "EngineCallback": ".trainer.engine_callback",
    "ModulePlugin": ".plan",
    "MultimodalConfig": ".modeling.multimodal_config",
    "MultimodalModel": ".modeling.multimodal_model",
    "MultimodalParallelPlugin": ".plan",
    "MultimodalParallelTrainer": ".trainer",
    "MultimodalSFTConfig": ".trainer.sft",
    "MultimodalSFTTrainer": ".trainer.sft",
    "MultimodalTrainingArguments": ".trainer",
    "PackingCollator": ".data",
    "ParallelMetricsCallback": ".trainer.metrics_callback",
    "ParallelModel": ".trainer",
    "ParallelPlan": ".plan",
    "TimelineCallback": ".trainer.metrics_callback",
    "parallelize": ".trainer",
    "prepare": ".trainer",
    "start_anew_at_samples": ".kernels.recurrent_layers",
}


def __getattr__(name: str) -> Any:
    """Loads the module of a public name."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`. Public names: {', '.join(__all__)}.")
    value = getattr(import_module(_MODULE_OF[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


register()
