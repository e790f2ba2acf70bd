"""
Models composed of unimodal ones: encoders with projectors before a language model, as one HF model.

Below the trainer, above `modeling`; nothing that trains a model knows of this package.
"""

from .multimodal_config import MultimodalConfig
from .multimodal_model import MultimodalModel

__all__ = ["MultimodalConfig", "MultimodalModel"]
