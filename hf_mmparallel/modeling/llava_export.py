"""Conversion of composed models with Llava's architecture to Llava."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

from .multimodal_backbone import LogitScale
from .multimodal_model import MultimodalModel

LLAVA_ENCODERS = ("CLIPVisionModel", "SiglipVisionModel")


def to_llava(model: MultimodalModel) -> LlavaForConditionalGeneration:
    """
    Converts a composed model to [`LlavaForConditionalGeneration`], which transformers loads without this package.

    Args:
        model ([`MultimodalModel`]): A CLIP or SigLIP encoder, an `"mlp"` projector and a language model, no callbacks.

    Returns:
        [`LlavaForConditionalGeneration`]: A copy with the same weights and predictions.

    Raises:
        `ValueError`: If Llava can't express the composition.
    """
    name = _check(model)
    settings = model.config.settings(name)
    vision_config = copy.deepcopy(model.config.encoder_configs[name])
    if settings.feature_layer is None:
        vision_config.tie_last_hidden_states = True  # makes hidden_states[-1] equal to last_hidden_state
    num_patches = (vision_config.image_size // vision_config.patch_size) ** 2
    has_class_token = hasattr(model.model.encoders[name].embeddings, "class_embedding")
    dropped = settings.feature_select == "default"
    config = LlavaConfig(
        vision_config=vision_config,
        text_config=copy.deepcopy(model.config.text_config),
        image_token_index=settings.token_id,
        image_seq_length=num_patches + has_class_token - dropped,
        projector_hidden_act=model.config.projector_hidden_act,
        vision_feature_select_strategy="default" if dropped else "full",
        vision_feature_layer=-1 if settings.feature_layer is None else settings.feature_layer,
        tie_word_embeddings=model.config.tie_word_embeddings,
        dtype=model.dtype,
    )
    llava: Any = LlavaForConditionalGeneration(config)
    llava = llava.to(device=model.device, dtype=model.dtype)
    names = {
        f"model.encoders.{name}.": "model.vision_tower.",
        f"model.projectors.{name}.": "model.multi_modal_projector.",
    }
    state = {}
    for key, tensor in model.state_dict().items():
        prefix = next((prefix for prefix in names if key.startswith(prefix)), "")
        state[names.get(prefix, "") + key.removeprefix(prefix)] = tensor
    with torch.no_grad():
        llava.load_state_dict(state)
    llava.generation_config = copy.deepcopy(model.generation_config)
    return llava.train(model.training)


def _check(model: MultimodalModel) -> str:
    """Returns the name of the only encoder. Raises `ValueError` if Llava can't express the model."""
    names = model.config.encoder_names
    if len(names) != 1:
        raise ValueError(
            f"Llava has one vision encoder; this model has {len(names)} encoders: {names}. Save it as is."
        )
    name = names[0]
    settings, encoder = model.config.settings(name), type(model.model.encoders[name]).__name__
    callbacks, scale = model.model.callbacks, LogitScale.of(model.config.text_config)
    reasons = [
        (encoder not in LLAVA_ENCODERS, f"its encoder is a `{encoder}`, not one of {list(LLAVA_ENCODERS)}"),
        (settings.projector != "mlp", f"its projector is `{settings.projector}`, not `mlp`"),
        (settings.pooling is not None, f"it has `pooling='{settings.pooling}'`"),
        (settings.feature_select == "pooled", "it has `feature_select='pooled'`"),
        (model.config.lm_head_bias or scale != LogitScale(), "its head has a bias, a factor or a cap"),
        (
            any((callbacks.before_encoder, callbacks.after_encoder, callbacks.after_projector))
            or callbacks.before_language_model is not None,
            "it has callbacks",
        ),
    ]
    for applies, reason in reasons:
        if applies:
            raise ValueError(f"Llava can't express this model: {reason}. Save it as it is.")
    return name
