"""
Models composed of unimodal ones: encoders with projectors and a language model, as one HF model.

Uses `modeling`; no package that trains a model imports it.
"""

from .multimodal_config import MultimodalConfig
from .multimodal_model import MultimodalModel

__all__ = ["MultimodalConfig", "MultimodalModel"]
