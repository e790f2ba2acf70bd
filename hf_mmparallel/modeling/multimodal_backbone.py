"""The backbone of a composed model: encoders, their inputs, projectors and the language model without its head."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast, BaseModelOutputWithPooling

from .._versions import CACHE, takes_cache
from .features import flat_features, forward_arguments, meta_forward, meta_inputs, number_in_config, required_arguments
from .multimodal_config import EncoderSettings, MultimodalCallbacks, MultimodalConfig

# The parts of a composed model: inputs of its encoders, projectors and the language model's head.

# Selection of the features in an encoder's output, and detection of their kind and width.


def named_output(output: Any) -> Any:
    """Returns an encoder's output as a `ModelOutput`; a bare tensor becomes its `last_hidden_state`."""
    return BaseModelOutput(last_hidden_state=output) if isinstance(output, torch.Tensor) else output


def select_features(name: str, output: Any, settings: EncoderSettings) -> torch.Tensor:
    """Selects features from an encoder's output by its settings: `(items, tokens, width)` or `(tokens, width)`."""
    if settings.feature_select == "pooled":
        features = getattr(output, "pooler_output", None)
        if features is None:
            raise ValueError(
                f"Encoder `{name}` has no pooled output. Use `feature_select='full'`, with `pooling='mean'` for one "
                "token per item."
            )
        return features if isinstance(features, torch.Tensor) else torch.cat(tuple(features))
    if settings.feature_layer is None:
        features = getattr(output, "last_hidden_state", None)
        if not isinstance(features, torch.Tensor):
            raise ValueError(
                f"Encoder `{name}` returns a `{type(output).__name__}` without `last_hidden_state`. Use "
                "`feature_select='pooled'`, or a callback `after_encoder` that returns an output with it."
            )
    else:
        num_states = len(output.hidden_states)
        if not -num_states <= settings.feature_layer < num_states:
            raise ValueError(
                f"`feature_layer={settings.feature_layer}` of encoder `{name}` is out of range: it has {num_states} "
                f"hidden states. Use {-num_states} to {num_states - 1}."
            )
        features = output.hidden_states[settings.feature_layer]
    if features.dim() != 3 and (settings.feature_select == "default" or settings.pooling):
        raise ValueError(
            f"Features of encoder `{name}` have the shape {tuple(features.shape)}, not (items, tokens, width), so no "
            "token can be dropped or averaged. Use `feature_select='full'` without `pooling`."
        )
    if settings.feature_select == "default":
        features = features[:, 1:]
    return features.mean(dim=1, keepdim=True) if settings.pooling == "mean" else features


def complete_settings(
    name: str, encoder: PreTrainedModel, settings: EncoderSettings, given: Mapping[str, Any]
) -> EncoderSettings:
    """Completes settings by a meta-device forward, which shows the output that has the features, and their width."""
    inputs = meta_inputs(encoder)
    # the signature and the config say too little
    if inputs is None:
        return settings
    states = {} if settings.feature_layer is None else {"output_hidden_states": True}
    output = named_output(meta_forward(encoder, **inputs, **states, return_dict=True))
    if output is None:
        return settings
    # what the user gave is not changed
    if not {"feature_select", "feature_layer", "pooling"} & set(given) and _merges(output):
        settings = replace(settings, feature_select="pooled")
    width = select_features(name, output, settings).shape[-1]
    if settings.feature_size is None and width != configured_width(encoder.config):
        settings = replace(settings, feature_size=width)
    return settings


def configured_width(config: Any) -> int | None:
    """Returns the width of features in a config, which may be the width of the encoder's layers instead."""
    return number_in_config(config, "out_hidden_size", "hidden_size", "d_model", "embed_dim")


def _merges(output: Any) -> bool:
    """Returns whether `pooler_output` has one token for several patches, rather than one per item."""
    hidden, pooled = getattr(output, "last_hidden_state", None), getattr(output, "pooler_output", None)
    if not isinstance(hidden, torch.Tensor) or not isinstance(pooled, torch.Tensor):
        return False
    # only encoders that pack their items have outputs without an item dimension
    return hidden.dim() == pooled.dim() == 2 and pooled.shape[0] < hidden.shape[0]


# fmt: off
LANGUAGE_MODEL_INPUTS = frozenset({
    "input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "inputs_embeds", "labels",
    "shift_labels", "use_cache", "logits_to_keep", "num_items_in_batch", "cache_position", "mm_encoder_outputs",
    "token_type_ids",
})
# fmt: on


class MLPProjector(nn.Module):
    """Two linear layers with an activation between them, as in Llava."""

    def __init__(self, in_features: int, out_features: int, hidden_act: str):
        super().__init__()
        self.linear_1 = nn.Linear(in_features, out_features)
        self.act = ACT2FN[hidden_act]
        self.linear_2 = nn.Linear(out_features, out_features)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.linear_2(self.act(self.linear_1(hidden_states)))


@dataclass(frozen=True)
class LogitScale:
    """What a language model's config does to the product of its head: a factor (Granite, Cohere), or a cap (Gemma)."""

    factor: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> LogitScale:
        factor = float(getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
        return cls(factor, getattr(config, "final_logit_softcapping", None))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True)
class EncoderInputs:
    """The batch entries of each encoder, which have the names of its forward's arguments."""

    entries: Mapping[str, tuple[str, str]]  # batch entry -> (encoder, argument)
    mains: Mapping[str, str]  # encoder -> its main batch entry, without which it does not run
    shared: frozenset[str]  # arguments of several encoders, whose entries need a prefix

    @classmethod
    def of(cls, encoders: Mapping[str, nn.Module], settings: Mapping[str, EncoderSettings]) -> EncoderInputs:
        """Derives the entries from the signatures of the encoders."""
        arguments = {name: forward_arguments(encoder) for name, encoder in encoders.items()}
        counts: dict[str, int] = {}
        for name, own_arguments in arguments.items():
            for argument in set(own_arguments) - set(settings[name].input_names.values()):
                counts[argument] = counts.get(argument, 0) + 1
        entries, mains = {}, {}
        for name, own_arguments in arguments.items():
            renamed = {argument: key for key, argument in settings[name].input_names.items()}
            if unknown := sorted(set(renamed) - set(own_arguments)):
                raise ValueError(
                    f"`input_names` of encoder `{name}` has `{unknown[0]}`, which is no argument of its forward. "
                    f"Use one of {own_arguments}."
                )
            for argument in own_arguments:
                # `<encoder>_<argument>` where the language model or another encoder has an argument of that name
                needs_prefix = argument in LANGUAGE_MODEL_INPUTS or counts.get(argument, 0) > 1
                key = renamed.get(argument, f"{name}_{argument}" if needs_prefix else argument)
                entries[key] = (name, argument)
                mains.setdefault(name, key)
        shared = frozenset(argument for argument, count in counts.items() if count > 1)
        return cls(entries, mains, shared - LANGUAGE_MODEL_INPUTS)

    def names(self, encoder: str) -> tuple[str, ...]:
        """Batch entries of one encoder, the main one first."""
        return tuple(key for key, (name, _) in self.entries.items() if name == encoder)

    def split(self, batch: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Splits a batch into (encoder -> its arguments, for encoders with inputs) and the remaining entries."""
        inputs: dict[str, dict[str, Any]] = {}
        rest: dict[str, Any] = {}
        present = {name for name, key in self.mains.items() if _num_items(batch.get(key)) > 0}
        for key, value in batch.items():
            if key in self.entries:
                name, argument = self.entries[key]
                if name in present and value is not None:
                    inputs.setdefault(name, {})[argument] = value
            elif value is not None:
                self._check_language_model_input(key)
                rest[key] = value
        return {name: inputs[name] for name in self.mains if name in inputs}, rest

    def arguments(self, encoder: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Renames batch entries to arguments of one encoder; arguments are left unchanged."""
        return {self.entries[key][1] if key in self.names(encoder) else key: value for key, value in inputs.items()}

    def _check_language_model_input(self, key: str) -> None:
        for name in self.mains:
            if key in self.shared or key.startswith(name + "_"):
                known = [entry for encoder in self.mains for entry in self.names(encoder)]
                reason = "an input of several encoders" if key in self.shared else f"no input of encoder `{name}`"
                raise ValueError(f"`{key}` is {reason}. Use one of the encoders' inputs: {known}.")


def _num_items(value: Any) -> int:
    if value is None:
        return 0
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else len(value)


def build_encoder(config: MultimodalConfig, name: str) -> PreTrainedModel:
    encoder_config, model_class = config.encoder_configs[name], config.settings(name).model_class
    default = AutoModel._model_mapping.get(type(encoder_config), None)
    candidates = default if isinstance(default, (list, tuple)) else [default]
    match = next((c for c in candidates if c is not None and (not model_class or c.__name__ == model_class)), None)
    if match is None:
        module_name = type(encoder_config).__module__.replace("configuration_", "modeling_")
        match = getattr(importlib.import_module(module_name), model_class, None)
    if match is None:
        raise ValueError(
            f"Encoder `{name}` is a `{model_class}`, which neither `AutoModel` nor `{module_name}` has. "
            "Register it with `AutoModel.register`."
        )
    return match._from_config(encoder_config)


def build_projector(config: MultimodalConfig, name: str) -> nn.Module:
    """Builds a projector with new weights, from the width of the features to that of the language model."""
    settings, encoder_config = config.settings(name), config.encoder_configs[name]
    if settings.projector == "custom":
        raise ValueError(
            f"The projector of encoder `{name}` is a custom module, which can't be built from the config. "
            f"Pass `projectors={{'{name}': module}}`."
        )
    size = settings.feature_size or configured_width(encoder_config)
    if size is None:
        raise ValueError(
            f"`{type(encoder_config).__name__}` has no width of the features of encoder `{name}`. "
            f"Set `feature_size` in its `encoder_settings`."
        )
    if settings.projector == "linear":
        return nn.Linear(size, config.text_config.hidden_size)
    return MLPProjector(size, config.text_config.hidden_size, config.projector_hidden_act)


def check_width(name: str, projector: nn.Module, features: torch.Tensor) -> None:
    """Raises `ValueError` if features do not have the input width of their projector."""
    first = projector.linear_1 if isinstance(projector, MLPProjector) else projector
    if isinstance(first, nn.Linear) and first.in_features != features.shape[-1]:
        raise ValueError(
            f"The features of encoder `{name}` are {features.shape[-1]} wide, but its projector expects "
            f"{first.in_features}. Set `feature_size={features.shape[-1]}` in its `encoder_settings`, or another "
            "`feature_select`."
        )


def keep_weights(module: nn.Module) -> None:
    """Marks weights as initialised, so that `post_init` does not change them."""
    for part in module.modules():
        setattr(part, "_is_hf_initialized", True)  # noqa: B010
    for tensor in (*module.parameters(), *module.buffers()):
        setattr(tensor, "_is_hf_initialized", True)  # noqa: B010


def cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts parameters and persistent buffers; other buffers, such as rotary frequencies, keep their precision."""
    for part in module.modules():
        for tensor in part.parameters(recurse=False):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in part._non_persistent_buffers_set:
                setattr(part, name, buffer.to(dtype))


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
