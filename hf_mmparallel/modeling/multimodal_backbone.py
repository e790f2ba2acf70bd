"""The backbone of a composed model: encoders, projectors and the language model without its head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling

from .._versions import CACHE, takes_cache
from .encoder_parts import EncoderInputs, build_encoder, build_projector, check_width, named_output, select_features
from .features import flat_features
from .forward_inputs import required_arguments
from .multimodal_config import MultimodalCallbacks, MultimodalConfig


class MultimodalPreTrainedModel(PreTrainedModel):
    """Base class of [`MultimodalModel`] and its backbone."""

    config: MultimodalConfig
    config_class = MultimodalConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _skip_keys_device_placement = [CACHE]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """Returns an encoder by its name, or the first with input of `"image"`, `"video"` or `"audio"`."""
        encoders: Any = self.base_model.encoders
        if modality in encoders:
            return encoders[modality]
        mains = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
        for encoder in encoders.values():
            if getattr(encoder, "main_input_name", None) == mains.get(modality or "", ""):
                return encoder
        # as in transformers, for a model without such an encoder
        return self


class MultimodalBackbone(MultimodalPreTrainedModel):
    """The encoders, their projectors and the language model without its head."""

    def __init__(
        self,
        config: MultimodalConfig,
        modules: dict[str, Any] | None = None,  # ready `encoders`, `projectors` and `language_model`
        callbacks: MultimodalCallbacks | None = None,
    ):
        super().__init__(config)
        ready = modules or {}
        encoders, projectors = ready.get("encoders") or {}, ready.get("projectors") or {}
        self.encoders: Any = nn.ModuleDict()
        self.projectors: Any = nn.ModuleDict()
        for name in config.encoder_names:
            self.encoders[name] = encoders[name] if name in encoders else build_encoder(config, name)
            self.projectors[name] = projectors[name] if name in projectors else build_projector(config, name)
        self.language_model = ready.get("language_model") or AutoModel.from_config(config.text_config)
        self.callbacks = callbacks or MultimodalCallbacks()
        self.callbacks.check(tuple(config.encoder_names))
        self.encoder_inputs = EncoderInputs.of(self.encoders, {name: config.settings(name) for name in self.encoders})
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    def get_decoder(self) -> nn.Module:
        return self.language_model

    def get_features(self, name: str, **inputs) -> BaseModelOutputWithPooling:
        """
        Runs one encoder and its projector with their callbacks; `pooler_output` of the result has the projected
        features of all items, concatenated: `(feature tokens, hidden_size)`.
        """
        encoder, settings = self.encoders[name], self.config.settings(name)
        # they are named by argument of the encoder's forward or by batch entry
        inputs = self.encoder_inputs.arguments(name, inputs)
        inputs = _run(self.callbacks.before_encoder.get(name), inputs)
        inputs = {key: _to_dtype(value, encoder.dtype) for key, value in inputs.items()}
        if settings.feature_layer is not None:
            inputs = {**inputs, "output_hidden_states": True}
        absent = dict.fromkeys(argument for argument in required_arguments(encoder) if argument not in inputs)
        output = named_output(encoder(**absent, **inputs, return_dict=True))
        output = _run(self.callbacks.after_encoder.get(name), inputs, output)
        features = select_features(name, output, settings)
        projector = self.projectors[name]
        check_width(name, projector, features)
        parameter = next(projector.parameters(), features)
        features = projector(features.to(parameter.dtype))
        features = _run(self.callbacks.after_projector.get(name), inputs, features)
        return BaseModelOutputWithPooling(
            last_hidden_state=getattr(output, "last_hidden_state", None), pooler_output=flat_features(features)
        )

    def get_placeholder_mask(
        self, name: str, input_ids: torch.Tensor | None, inputs_embeds: Any = None
    ) -> torch.Tensor:
        """Returns the mask `(batch, sequence)` of an encoder's placeholder tokens, by id or by embedding."""
        token_id = self.config.settings(name).token_id
        if input_ids is not None:
            return input_ids == token_id
        embeddings: Any = self.get_input_embeddings()
        if token_id >= embeddings.weight.shape[0]:
            raise ValueError(
                f"Placeholder {token_id} of encoder `{name}` has no embedding, so it can't be located in "
                "`inputs_embeds`. Give `input_ids`."
            )
        return (inputs_embeds == embeddings(torch.tensor(token_id, device=inputs_embeds.device))).all(-1)

    @takes_cache
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Returns the language model's output; for the arguments see [`MultimodalModel.forward`]."""
        batch = {**kwargs, "pixel_values": pixel_values, "input_features": input_features}
        encoder_inputs, rest = self.encoder_inputs.split(batch)
        outputs = {name: output for name, output in (mm_encoder_outputs or {}).items() if output is not None}
        self._check_encoder_outputs(outputs, encoder_inputs)
        outputs.update({name: self.get_features(name, **inputs) for name, inputs in encoder_inputs.items()})
        inputs = {
            "input_ids": input_ids,
            "inputs_embeds": self._embed(input_ids) if inputs_embeds is None else inputs_embeds,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        inputs = self._before_language_model(outputs, inputs)
        is_prefill = cache is None or cache.get_seq_length() == 0
        merged = self._merge(outputs, inputs.pop("input_ids", None), inputs.pop("inputs_embeds"), is_prefill)
        return self.language_model(inputs_embeds=merged, **{CACHE: cache}, **inputs, **rest)

    def _check_encoder_outputs(self, outputs: Mapping[str, Any], encoder_inputs: Mapping[str, Any]) -> None:
        """Refuses outputs of unknown encoders, and of encoders that also have inputs."""
        for name in outputs:
            if name not in self.encoders:
                raise ValueError(
                    f"`mm_encoder_outputs` has `{name}`, which is not an encoder of this model. "
                    f"Use one of {list(self.encoders)}."
                )
            if name in encoder_inputs:
                raise ValueError(
                    f"Encoder `{name}` has both inputs and an entry in `mm_encoder_outputs`. Give one of them."
                )

    def _embed(self, input_ids: torch.Tensor | None) -> torch.Tensor:
        """Embeds tokens."""
        if input_ids is None:
            raise ValueError("Neither `input_ids` nor `inputs_embeds` is given. Give one of them.")
        embeddings: Any = self.get_input_embeddings()
        for name in self.encoders:
            token_id = self.config.settings(name).token_id
            if token_id >= embeddings.weight.shape[0]:
                # a placeholder outside of the vocabulary; features replace the embedding anyway
                input_ids = input_ids.masked_fill(input_ids == token_id, 0)
        return embeddings(input_ids)

    def _before_language_model(self, outputs: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
        """Runs the callback before the language model, which must not change the shape of `inputs_embeds`."""
        if self.callbacks.before_language_model is None:
            return inputs
        shape = inputs["inputs_embeds"].shape
        inputs = dict(self.callbacks.before_language_model(outputs, inputs))
        if inputs["inputs_embeds"].shape != shape:
            raise ValueError(
                f"`before_language_model` changed the shape of `inputs_embeds` from {tuple(shape)} to "
                f"{tuple(inputs['inputs_embeds'].shape)}, which labels and layouts don't follow. "
                "Reserve the tokens as placeholders in `input_ids`."
            )
        return inputs

    def _merge(
        self,
        outputs: Mapping[str, Any],
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor,
        is_prefill: bool,
    ) -> torch.Tensor:
        """Replaces the embeddings of each encoder's placeholder tokens by its features."""
        original = inputs_embeds
        for name in self.encoders:
            output = outputs.get(name)
            if output is None and not (is_prefill and input_ids is not None):
                continue
            mask = self.get_placeholder_mask(name, input_ids, original)
            if output is None:
                features = original.new_empty(0, original.shape[-1])
            else:
                features = flat_features(output.pooler_output)
            num_tokens = int(mask.sum())
            if num_tokens != features.shape[0]:
                if output is None and self.callbacks.before_language_model is not None:
                    continue
                raise ValueError(
                    f"Encoder `{name}` returned {features.shape[0]} feature tokens for {num_tokens} placeholder "
                    f"tokens (id {self.config.settings(name).token_id}) in the batch. "
                    "Tokenize with one placeholder per feature token."
                )
            if output is not None:
                features = features.to(inputs_embeds.device, inputs_embeds.dtype)
                inputs_embeds = inputs_embeds.masked_scatter(mask.unsqueeze(-1), features)
        return inputs_embeds


def _run(callback: Callable | None, *values: Any) -> Any:
    return values[-1] if callback is None else callback(*values)


def _to_dtype(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
