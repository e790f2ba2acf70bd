"""Models composed of unimodal encoders and a language model, as one `PreTrainedModel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling, CausalLMOutputWithPast

from ..modeling.features import flat_rows
from ..modeling.forward_inputs import required_arguments
from ..modeling.spec import ModulePart
from .encoder_outputs import fitted_settings, named_output, select_features
from .encoder_parts import (
    EncoderInputs,
    LanguageModelHead,
    build_encoder,
    build_projector,
    cast_weights,
    check_names,
    check_width,
    keep_weights,
    load_encoder,
    load_language_model,
    projector_table,
)
from .multimodal_config import EncoderSettings, MultimodalCallbacks, MultimodalConfig, check_encoder_names


class MultimodalPreTrainedModel(PreTrainedModel):
    """What [`MultimodalModel`] and its backbone share."""

    config: MultimodalConfig
    config_class = MultimodalConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """
        The encoder of a modality.

        Args:
            modality (`str`, *optional*):
                An encoder's name, or `"image"`, `"video"`, `"audio"` for the first one that takes such input.

        Returns:
            `nn.Module`: The encoder, or the model itself when it has none (as in transformers).
        """
        encoders: Any = self.base_model.encoders
        if modality in encoders:
            return encoders[modality]
        mains = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
        for encoder in encoders.values():
            if getattr(encoder, "main_input_name", None) == mains.get(modality or "", ""):
                return encoder
        return self


class MultimodalBackbone(MultimodalPreTrainedModel):
    """
    The encoders, their projectors and the language model without its head.

    Args:
        config ([`MultimodalConfig`]): What the model consists of.
        modules (`dict[str, Any]`, *optional*): Ready `encoders`, `projectors` and `language_model` to use as they are.
        callbacks ([`MultimodalCallbacks`], *optional*): Functions to run between the modules.
    """

    def __init__(
        self,
        config: MultimodalConfig,
        modules: dict[str, Any] | None = None,
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
        Runs one encoder and its projector, with the callbacks around them.

        Args:
            name (`str`): The encoder.
            inputs: Its inputs, named as arguments of its forward or as in the batch.

        Returns:
            [`BaseModelOutputWithPooling`]: `pooler_output` of shape `(rows, hidden_size)` holds the projected
            features of all items, one after the other.
        """
        encoder, settings = self.encoders[name], self.config.settings(name)
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
            last_hidden_state=getattr(output, "last_hidden_state", None), pooler_output=flat_rows(features)
        )

    def get_placeholder_mask(
        self, name: str, input_ids: torch.Tensor | None, inputs_embeds: Any = None
    ) -> torch.Tensor:
        """The positions `(batch, sequence)` of an encoder's placeholder tokens, found by id or by embedding."""
        token_id = self.config.settings(name).token_id
        if input_ids is not None:
            return input_ids == token_id
        embeddings: Any = self.get_input_embeddings()
        if token_id >= embeddings.weight.shape[0]:
            raise ValueError(
                f"Placeholder {token_id} of encoder `{name}` has no embedding, so it can't be found in "
                "`inputs_embeds`. Give `input_ids`."
            )
        return (inputs_embeds == embeddings(torch.tensor(token_id, device=inputs_embeds.device))).all(-1)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, sequence)`, *optional*): Token ids with placeholders.
            attention_mask (`torch.Tensor`, *optional*): As the language model takes it.
            position_ids (`torch.LongTensor`, *optional*): As the language model takes it.
            past_key_values (`Cache`, *optional*): As the language model takes it.
            inputs_embeds (`torch.FloatTensor` of shape `(batch, sequence, hidden_size)`, *optional*):
                Instead of `input_ids`, or with them, which then only locate the placeholders.
            pixel_values, input_features (`torch.FloatTensor`, *optional*):
                Input of the encoder that takes it. Of several such encoders, each has its own, such as
                `<encoder>_pixel_values`.
            mm_encoder_outputs (`dict[str, ModelOutput]`, *optional*):
                Encoder -> what [`~MultimodalBackbone.get_features`] returned, instead of the encoder's inputs.

        Returns:
            `ModelOutput`: The output of the language model.
        """
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
        is_prefill = past_key_values is None or past_key_values.get_seq_length() == 0
        merged = self._merge(outputs, inputs.pop("input_ids", None), inputs.pop("inputs_embeds"), is_prefill)
        return self.language_model(inputs_embeds=merged, past_key_values=past_key_values, **inputs, **rest)

    def _check_encoder_outputs(self, outputs: Mapping[str, Any], encoder_inputs: Mapping[str, Any]) -> None:
        """Outputs must be those of known encoders that get no inputs besides."""
        for name in outputs:
            if name not in self.encoders:
                raise ValueError(
                    f"`mm_encoder_outputs` names `{name}`, which is no encoder of this model. "
                    f"Its encoders are {list(self.encoders)}."
                )
            if name in encoder_inputs:
                raise ValueError(
                    f"Encoder `{name}` has both inputs and an entry in `mm_encoder_outputs`. Give one of them."
                )

    def _embed(self, input_ids: torch.Tensor | None) -> torch.Tensor:
        """Token embeddings; a placeholder beyond the vocabulary is looked up as token 0, since features replace it."""
        if input_ids is None:
            raise ValueError("Neither `input_ids` nor `inputs_embeds` is given. Give one of them.")
        embeddings: Any = self.get_input_embeddings()
        for name in self.encoders:
            token_id = self.config.settings(name).token_id
            if token_id >= embeddings.weight.shape[0]:
                input_ids = input_ids.masked_fill(input_ids == token_id, 0)
        return embeddings(input_ids)

    def _before_language_model(self, outputs: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
        """The callback before the language model, which may change values but not the length."""
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
        """Puts the feature rows of each encoder in the places of its placeholders."""
        original = inputs_embeds
        for name in self.encoders:
            output = outputs.get(name)
            if output is None and not (is_prefill and input_ids is not None):
                continue
            mask = self.get_placeholder_mask(name, input_ids, original)
            rows = original.new_empty(0, original.shape[-1]) if output is None else flat_rows(output.pooler_output)
            num_tokens = int(mask.sum())
            if num_tokens != rows.shape[0]:
                if output is None and self.callbacks.before_language_model is not None:
                    continue
                raise ValueError(
                    f"Encoder `{name}` gave {rows.shape[0]} feature rows for {num_tokens} placeholder tokens "
                    f"(id {self.config.settings(name).token_id}) in the batch. "
                    "Repeat the placeholder once for each row when you tokenize."
                )
            if output is not None:
                rows = rows.to(inputs_embeds.device, inputs_embeds.dtype)
                inputs_embeds = inputs_embeds.masked_scatter(mask.unsqueeze(-1), rows)
        return inputs_embeds


class MultimodalModel(MultimodalPreTrainedModel, GenerationMixin):
    """
    Encoders with projectors and a language model with its head, trained and saved as one model.

    Args:
        config ([`MultimodalConfig`]): What the model consists of.
        modules (`dict[str, Any]`, *optional*):
            Ready `encoders`, `projectors`, `language_model` and `lm_head` to use as they are.
        projectors (`dict[str, nn.Module]`, *optional*): The modules of encoders with a `"custom"` projector.
        callbacks ([`MultimodalCallbacks`], *optional*): Functions to run between the modules.
    """

    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(
        self,
        config: MultimodalConfig,
        modules: dict[str, Any] | None = None,
        projectors: dict[str, nn.Module] | None = None,
        callbacks: MultimodalCallbacks | None = None,
    ):
        super().__init__(config)
        ready = dict(modules or {})
        ready["projectors"] = {**(ready.get("projectors") or {}), **(projectors or {})}
        self.model = MultimodalBackbone(config, ready, callbacks)
        self.lm_head = LanguageModelHead(config.text_config, bias=config.lm_head_bias)
        if ready.get("lm_head") is not None:
            self.lm_head.weight, self.lm_head.bias = ready["lm_head"].weight, ready["lm_head"].bias
            keep_weights(self.lm_head)
        embeddings = self.model.get_input_embeddings()
        embeddings_name = next(name for name, module in self.model.named_modules() if module is embeddings)
        self._tied_weights_keys = {"lm_head.weight": f"model.{embeddings_name}.weight"}
        self.loss_type = "ForConditionalGeneration"
        self.input_modalities: Any = ("text", *config.encoder_names)
        self.post_init()

    @classmethod
    def from_unimodal(
        cls,
        encoders: Mapping[str, PreTrainedModel | PreTrainedConfig | str],
        language_model: PreTrainedModel | PreTrainedConfig | str,
        token_ids: Mapping[str, int],
        projectors: str | nn.Module | Mapping[str, str | nn.Module] = "mlp",
        encoder_settings: Mapping[str, Mapping[str, Any]] | None = None,
        callbacks: MultimodalCallbacks | None = None,
        dtype: torch.dtype | None = None,
    ) -> MultimodalModel:
        """
        Composes a model of unimodal ones. Live models are used as they are, not copied.

        Args:
            encoders (`dict[str, PreTrainedModel | PreTrainedConfig | str]`):
                Encoder -> a model, a config (for random weights), or a model id or folder. From a model with more
                than an encoder (CLIP, Whisper) its encoder is taken.
            language_model (`PreTrainedModel | PreTrainedConfig | str`): A causal language model, given likewise.
            token_ids (`dict[str, int]`): Encoder -> id of its placeholder token.
            projectors (`str | nn.Module | dict`, *optional*, defaults to `"mlp"`):
                `"linear"`, `"mlp"` or a module; one for all encoders or encoder -> projector.
            encoder_settings (`dict[str, dict]`, *optional*):
                Encoder -> further values of [`EncoderSettings`], such as `{"feature_layer": -2}`.
            callbacks ([`MultimodalCallbacks`], *optional*): Functions to run between the modules.
            dtype (`torch.dtype`, *optional*): Type of all weights; by default each module keeps its own.

        Returns:
            [`MultimodalModel`]: The model, in training mode if the language model is.
        """
        names = tuple(encoders)
        check_encoder_names(names)
        for label, table in (("token_ids", token_ids), ("encoder_settings", encoder_settings or {})):
            check_names(label, table, names, complete=label == "token_ids")
        projectors = projector_table(projectors, names)
        live = {name: load_encoder(value, dtype) for name, value in encoders.items()}
        decoder, head = load_language_model(language_model, dtype)
        settings = {}
        for name in names:
            projector = projectors[name] if isinstance(projectors[name], str) else "custom"
            extra = (encoder_settings or {}).get(name, {})
            settings[name] = replace(
                EncoderSettings.from_dict({"token_id": token_ids[name], **extra}),
                projector=projector,
                model_class=type(live[name]).__name__,
            )
            if name not in (callbacks or MultimodalCallbacks()).after_encoder:
                settings[name] = fitted_settings(name, live[name], settings[name], extra)
        tied = head is None or head.weight is decoder.get_input_embeddings().weight
        config = MultimodalConfig(
            encoder_configs={name: encoder.config for name, encoder in live.items()},
            text_config=decoder.config,
            encoder_settings=settings,
            lm_head_bias=head is not None and head.bias is not None,
            tie_word_embeddings=tied and bool(getattr(decoder.config, "tie_word_embeddings", False)),
            dtype=dtype or decoder.dtype,
        )
        custom = {name: module for name, module in projectors.items() if not isinstance(module, str)}
        for module in (*live.values(), *custom.values(), decoder):
            keep_weights(module)
        modules = {"encoders": live, "projectors": custom, "language_model": decoder, "lm_head": head}
        model = cls(config, modules, callbacks=callbacks)
        if model.generation_config is not None and getattr(decoder, "generation_config", None) is not None:
            model.generation_config = decoder.generation_config
        model.train(decoder.training)
        cast_weights(model if dtype is not None else model.model.projectors, dtype or decoder.dtype)
        cast_weights(model.lm_head, dtype or decoder.dtype)
        return model

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def get_features(self, name: str, **inputs) -> BaseModelOutputWithPooling:
        """See [`~MultimodalBackbone.get_features`]."""
        return self.model.get_features(name, **inputs)

    def multimodal_parts(self) -> dict[str, ModulePart]:
        """The encoders as modules of a plan, each with its projector; the encoder's name is also its modality."""
        return {
            name: ModulePart(
                tower=f"model.encoders.{name}",
                prefixes=(f"model.projectors.{name}",),
                features={name: partial(self.model.get_features, name)},
                inputs={name: self.model.encoder_inputs.names(name)},
                placeholders={name: self.config.settings(name).token_id},
            )
            for name in self.model.encoders
        }

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast | tuple:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, sequence)`, *optional*): Token ids with placeholders.
            attention_mask (`torch.Tensor`, *optional*): As the language model takes it.
            position_ids (`torch.LongTensor`, *optional*): As the language model takes it.
            past_key_values (`Cache`, *optional*): As the language model takes it.
            inputs_embeds (`torch.FloatTensor` of shape `(batch, sequence, hidden_size)`, *optional*):
                Instead of `input_ids`, or with them, which then only locate the placeholders.
            labels (`torch.LongTensor` of shape `(batch, sequence)`, *optional*):
                Targets; -100 is ignored. `shift_labels` and `num_items_in_batch` are taken as in transformers.
            pixel_values, input_features (`torch.FloatTensor`, *optional*):
                Input of the encoder that takes it. Of several such encoders, each has its own, such as
                `<encoder>_pixel_values`.
            mm_encoder_outputs (`dict[str, ModelOutput]`, *optional*):
                Encoder -> what `get_features` returned, instead of the encoder's inputs.
            use_cache (`bool`, *optional*): As the language model takes it.
            logits_to_keep (`int | torch.Tensor`, *optional*, defaults to 0): Number of last positions, 0 for all.

        Returns:
            [`CausalLMOutputWithPast`]: The loss with `labels`, and the logits.
        """
        return_dict = kwargs.pop("return_dict", None)
        loss_kwargs = {key: kwargs.pop(key) for key in ("num_items_in_batch", "shift_labels") if key in kwargs}
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            pixel_values=pixel_values,
            input_features=input_features,
            mm_encoder_outputs=mm_encoder_outputs,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden_states[:, keep])
        loss = None
        if labels is not None or loss_kwargs.get("shift_labels") is not None:
            vocab_size = self.config.text_config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **loss_kwargs)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return output if return_dict is not False else output.to_tuple()

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """Lets `generate` take the inputs of all encoders."""
        known = self.model.encoder_inputs.entries
        super()._validate_model_kwargs(  # pyright: ignore[reportAttributeAccessIssue]
            {key: value for key, value in model_kwargs.items() if key not in known}
        )

    def _maybe_prepare_encoder_kwargs_for_generation(
        self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any], model_input_name: str | None, *args, **kwargs
    ) -> dict[str, Any]:
        """Encodes once before the prefill; `generate` drops the outputs after it."""
        known = self.model.encoder_inputs
        encoder_inputs, _ = known.split({key: value for key, value in model_kwargs.items() if key in known.entries})
        outputs = {name: self.get_features(name, **inputs) for name, inputs in encoder_inputs.items()}
        given = model_kwargs.get("mm_encoder_outputs") or {}
        self.model._check_encoder_outputs(given, encoder_inputs)
        rest = {key: value for key, value in model_kwargs.items() if key not in known.entries}
        return {**rest, "mm_encoder_outputs": {**given, **outputs}}

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids=None, **model_kwargs
    ):
        """Repeats the features of each sample, which may have any number of items, for beams and several answers."""
        outputs = model_kwargs.pop("mm_encoder_outputs", None)
        if outputs and expand_size > 1:
            outputs = {
                name: self._expand_features(name, output, input_ids, model_kwargs.get("inputs_embeds"), expand_size)
                for name, output in outputs.items()
            }
        input_ids, model_kwargs = super()._expand_inputs_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            expand_size, is_encoder_decoder, input_ids, **model_kwargs
        )
        return input_ids, model_kwargs if outputs is None else {**model_kwargs, "mm_encoder_outputs": outputs}

    def _expand_features(self, name: str, output: Any, input_ids, inputs_embeds, expand_size: int) -> Any:
        """One encoder's rows with those of each sample repeated."""
        ids = None if input_ids is None or input_ids.numel() == 0 else input_ids
        counts = self.model.get_placeholder_mask(name, ids, inputs_embeds).sum(-1).tolist()
        rows = flat_rows(output.pooler_output)
        if sum(counts) != rows.shape[0]:
            raise ValueError(
                f"Encoder `{name}` gave {rows.shape[0]} feature rows for {sum(counts)} placeholder tokens. "
                "Repeat the placeholder once for each row when you tokenize."
            )
        repeated = [part for part in rows.split(counts) for _ in range(expand_size)]
        return BaseModelOutputWithPooling(pooler_output=torch.cat(repeated))


def _run(callback: Callable | None, *values: Any) -> Any:
    """The callback's result, or the last value if there is none."""
    return values[-1] if callback is None else callback(*values)


def _to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor in the encoder's type; anything else as it is."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


AutoConfig.register(MultimodalConfig.model_type, MultimodalConfig)
AutoModel.register(MultimodalConfig, MultimodalBackbone)
for _auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
    _auto_class.register(MultimodalConfig, MultimodalModel)
