"""Models composed of unimodal encoders and a language model, as one `PreTrainedModel`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast

from .._versions import CACHE, takes_cache
from .features import flat_features
from .generators import TARGETS, DiffusionGenerator, build_generator, load_tower
from .loading import without_weights
from .loss import num_target_tokens
from .multimodal_backbone import (
    LogitScale,
    MultimodalBackbone,
    MultimodalPreTrainedModel,
    cast_weights,
    complete_settings,
    keep_weights,
)
from .multimodal_config import (
    EncoderSettings,
    GeneratorSettings,
    MultimodalCallbacks,
    MultimodalConfig,
    check_module_names,
)
from .spec import ModulePart


@dataclass
class MultimodalOutput(CausalLMOutputWithPast):
    """The output of a [`MultimodalModel`] with generators."""

    losses: dict[str, torch.Tensor] | None = None  # module -> its mean loss, whose weighted sum is `loss`
    rows: dict[str, torch.Tensor] | None = None  # generator -> hidden states at its placeholders, if asked for


class MultimodalModel(MultimodalPreTrainedModel, GenerationMixin):
    """
    Encoders with projectors, a language model with its head, and generators behind it, trained and saved as one model.

    Args:
        modules (`dict[str, Any]`, *optional*):
            Ready `encoders`, `projectors`, `language_model`, `lm_head` and towers of `generators`.
        projectors (`dict[str, nn.Module]`, *optional*): The modules of encoders with a `"custom"` projector.
        callbacks ([`MultimodalCallbacks`], *optional*): Functions to run between the modules.

    Example:

    ```python
    >>> model = MultimodalModel.from_unimodal({"vision": encoder}, language_model, token_ids={"vision": 100})
    >>> list(model.model.projectors)
    ['vision']
    ```
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
        text = config.text_config
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=config.lm_head_bias)
        if ready.get("lm_head") is not None:
            self.lm_head.weight, self.lm_head.bias = ready["lm_head"].weight, ready["lm_head"].bias
            keep_weights(self.lm_head)
        towers = ready.get("generators") or {}
        self.generators: Any = nn.ModuleDict(
            {name: build_generator(config, name, towers.get(name)) for name in config.generator_names}
        )
        embeddings = self.model.get_input_embeddings()
        embeddings_name = next(name for name, module in self.model.named_modules() if module is embeddings)
        self._tied_weights_keys = {"lm_head.weight": f"model.{embeddings_name}.weight"}
        self.loss_type = "ForConditionalGeneration"
        self.input_modalities: Any = ("text", *config.encoder_names)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        for generator in self._modules.get("generators", {}).values():  # type: ignore[union-attr]
            if isinstance(generator, DiffusionGenerator):
                generator.compute_buffers(module)

    def without_weights(self) -> MultimodalModel:
        """Returns a model of the same configuration, projectors and callbacks, with weights of its own."""
        # the configuration does not say how to build a projector of the user's own class
        custom = {
            name: without_weights(projector)
            for name, projector in self.model.projectors.items()
            if self.config.settings(name).projector == "custom"
        }
        return type(self)(copy.deepcopy(self.config), projectors=custom, callbacks=self.model.callbacks)

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
        generators: Mapping[str, nn.Module | PreTrainedConfig | str] | None = None,
        generator_settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> MultimodalModel:
        """
        Composes a model from unimodal models. Live models are used directly, not copied.

        Args:
            encoders (`dict[str, PreTrainedModel | PreTrainedConfig | str]`):
                Encoder -> model, config (random weights), id or folder. Of CLIP, Whisper etc. only the encoder is
                used.
            language_model (`PreTrainedModel | PreTrainedConfig | str`): A causal language model, in the same forms.
            token_ids (`dict[str, int]`): Encoder or generator -> id of its placeholder token.
            projectors (`str | nn.Module | dict`, *optional*):
                `"linear"`, `"mlp"` or a module; or encoder -> projector.
            encoder_settings (`dict[str, dict]`, *optional*): Encoder -> further fields of [`EncoderSettings`].
            callbacks ([`MultimodalCallbacks`], *optional*): Functions to run between the modules.
            dtype (`torch.dtype`, *optional*): Dtype of all weights; by default each module keeps its own.
            generators (`dict[str, nn.Module | PreTrainedConfig | str]`, *optional*):
                Generator -> a diffusion model of diffusers, or a transformer that predicts codes: a model, a config
                of transformers, an id or folder.
            generator_settings (`dict[str, dict]`, *optional*): Generator -> further fields of [`GeneratorSettings`].

        Returns:
            [`MultimodalModel`]: The model, in training mode if the language model is.
        """
        parts = UnimodalParts.load(encoders, language_model, projectors, dtype, generators or {})
        without_output = tuple((callbacks or MultimodalCallbacks()).after_encoder)
        config = parts.config(token_ids, encoder_settings or {}, without_output, dtype, generator_settings or {})
        model = cls(config, parts.modules, callbacks=callbacks)
        decoder = parts.decoder
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
        """
        Returns the encoders, each with its projector, and the generators as modules of a plan; their names are also
        modalities.
        """
        encoders = {
            name: ModulePart(
                tower=f"model.encoders.{name}",
                prefixes=(f"model.projectors.{name}",),
                features={name: partial(self.model.get_features, name)},
                inputs={name: self.model.encoder_inputs.names(name)},
                placeholders={name: self.config.settings(name).token_id},
            )
            for name in self.model.encoders
        }
        generators = {
            name: ModulePart(
                tower=f"generators.{name}.tower",
                first=(f"generators.{name}.projector",),
                prefixes=(f"generators.{name}",),
                inputs={name: generator.entries},
                placeholders={name: generator.settings.token_id},
                generator=generator,
            )
            for name, generator in self.generators.items()
        }
        return {**encoders, **generators}

    @takes_cache
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_rows: bool = False,
        num_generator_targets: Mapping[str, int] | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast | tuple:
        """
        Computes the logits, and the loss if there are `labels` or targets of a generator; other arguments,
        `shift_labels` and `num_items_in_batch` are as in transformers.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, sequence)`, *optional*): Token ids with placeholders.
            cache (`Cache`, *optional*): Called `past_key_values` before transformers 5.24.
            inputs_embeds (`torch.FloatTensor` of shape `(batch, sequence, hidden_size)`, *optional*):
                Replaces the embeddings of `input_ids`, which are then optional and only locate the placeholders.
            labels (`torch.LongTensor` of shape `(batch, sequence)`, *optional*): Targets; -100 is ignored.
            pixel_values, input_features (`torch.FloatTensor`, *optional*):
                Main input of an encoder; `<encoder>_pixel_values` etc. if several encoders have the same input.
            mm_encoder_outputs (`dict[str, ModelOutput]`, *optional*):
                Encoder -> `get_features`, in place of its inputs.
            logits_to_keep (`int | torch.Tensor`, *optional*, defaults to 0): Last positions with logits, 0 for all.
            output_rows (`bool`, *optional*, defaults to `False`):
                Whether to return the hidden states that generators start from.
            num_generator_targets (`dict[str, int]`, *optional*):
                Generator -> targets of all batches whose losses are added, by default of this one.
        """
        targets = {
            name: {key: kwargs.pop(key) for key in generator.entries if key in kwargs}
            for name, generator in self.generators.items()
        }
        self._check_targets(kwargs)
        generated = {name for name, own in targets.items() if any(value is not None for value in own.values())}
        wanted = self.generators if output_rows else generated
        if any(self.generators[name].settings.layer is not None for name in wanted):
            kwargs["output_hidden_states"] = True
        return_dict = kwargs.pop("return_dict", None)
        loss_kwargs = {key: kwargs.pop(key) for key in ("num_items_in_batch", "shift_labels") if key in kwargs}
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            pixel_values=pixel_values,
            input_features=input_features,
            mm_encoder_outputs=mm_encoder_outputs,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = LogitScale.of(self.config.text_config).apply(self.lm_head(hidden_states[:, keep]))
        rows = {name: self._rows(name, input_ids, outputs) for name in wanted}
        losses = {}
        if labels is not None or loss_kwargs.get("shift_labels") is not None:
            vocab_size = self.config.text_config.vocab_size
            losses["language_model"] = self.loss_function(
                logits=logits, labels=labels, vocab_size=vocab_size, **loss_kwargs
            )
        if generated and num_generator_targets is None:
            _check_no_accumulation(labels, loss_kwargs)
        for name in generated:
            losses[name] = self._generator_loss(name, rows[name], targets[name], num_generator_targets)
        output = MultimodalOutput(
            loss=self._weighted_sum(losses),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            losses={name: value.detach() for name, value in losses.items()} if self.generators else None,
            rows=rows if output_rows else None,
            **{CACHE: outputs.get(CACHE)},
        )
        return output if return_dict is not False else output.to_tuple()

    def _check_targets(self, entries: Mapping[str, Any]) -> None:
        for entry in entries:
            if entry.rpartition("_")[2] in TARGETS and entry not in self.model.encoder_inputs.entries:
                raise ValueError(
                    f"The batch has `{entry}`, targets of a generator that the model does not have. Its own are "
                    f"{list(self.generators)}. Name the entry after one of them, or compose the model with it."
                )

    def _rows(self, name: str, input_ids: torch.Tensor | None, outputs: Any) -> torch.Tensor:
        settings = self.generators[name].settings
        if input_ids is None:
            raise ValueError(f"Generator `{name}` reads hidden states at its placeholders in `input_ids`. Give them.")
        states = outputs.last_hidden_state if settings.layer is None else outputs.hidden_states[settings.layer]
        return states[input_ids == settings.token_id]

    def _generator_loss(
        self, name: str, rows: torch.Tensor, targets: Mapping[str, Any], counts: Mapping[str, int] | None
    ) -> torch.Tensor:
        generator = self.generators[name]
        count = generator.num_targets(targets) if counts is None else counts[name]
        return generator.loss(rows, **targets) / max(count, 1)

    def _weighted_sum(self, losses: Mapping[str, torch.Tensor]) -> Any:
        """Returns the sum of the losses of modules by the weights of generators; `None` of no losses."""
        weights = {name: generator.settings.loss_weight for name, generator in self.generators.items()}
        return sum(weights.get(name, 1.0) * value for name, value in losses.items()) if losses else None

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """Allows the inputs of all encoders in `generate`."""
        known = self.model.encoder_inputs.entries
        super()._validate_model_kwargs(  # pyright: ignore[reportAttributeAccessIssue]
            {key: value for key, value in model_kwargs.items() if key not in known}
        )

    def _maybe_prepare_encoder_kwargs_for_generation(
        self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any], model_input_name: str | None, *args, **kwargs
    ) -> dict[str, Any]:
        """Runs the encoders once before the prefill; `generate` drops their outputs afterwards."""
        entries = self.model.encoder_inputs.entries
        batch = {key: value for key, value in model_kwargs.items() if key in entries}
        encoder_inputs, _ = self.model.encoder_inputs.split(batch)
        outputs = {name: self.get_features(name, **inputs) for name, inputs in encoder_inputs.items()}
        given = model_kwargs.get("mm_encoder_outputs") or {}
        self.model._check_encoder_outputs(given, encoder_inputs)
        rest = {key: value for key, value in model_kwargs.items() if key not in entries}
        return {**rest, "mm_encoder_outputs": {**given, **outputs}}

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids=None, **model_kwargs
    ):
        """Repeats the features of each sample, with any number of items, for beams and multiple return sequences."""
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
        ids = None if input_ids is None or input_ids.numel() == 0 else input_ids
        counts = self.model.get_placeholder_mask(name, ids, inputs_embeds).sum(-1).tolist()
        features = flat_features(output.pooler_output)
        if sum(counts) != features.shape[0]:
            raise ValueError(
                f"Encoder `{name}` returned {features.shape[0]} feature tokens for {sum(counts)} placeholder tokens. "
                "Tokenize with one placeholder per feature token."
            )
        repeated = [part for part in features.split(counts) for _ in range(expand_size)]
        return BaseModelOutputWithPooling(pooler_output=torch.cat(repeated))


def _check_no_accumulation(labels: Any, loss_kwargs: Mapping[str, Any]) -> None:
    total = loss_kwargs.get("num_items_in_batch")
    own = None if total is None else num_target_tokens({"labels": labels, **loss_kwargs})
    if total is not None and int(total) != own:
        raise ValueError(
            f"`num_items_in_batch` says that batches with {int(total)} target tokens are added, of which this one has "
            f"{own}, but not how many targets generators have there. Give `num_generator_targets`, as "
            "`MultimodalParallelTrainer` does, or train without gradient accumulation."
        )


AutoConfig.register(MultimodalConfig.model_type, MultimodalConfig)
AutoModel.register(MultimodalConfig, MultimodalBackbone)
for _auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
    _auto_class.register(MultimodalConfig, MultimodalModel)


# Composition of unimodal models: encoders and a language model from live models, configs or model ids.


@dataclass(frozen=True)
class UnimodalParts:
    encoders: dict[str, PreTrainedModel]
    projectors: dict[str, str | nn.Module]  # encoder -> `"linear"` or `"mlp"`, or the module
    decoder: PreTrainedModel  # the language model without its head
    head: nn.Linear | None
    generators: dict[str, nn.Module]  # the towers

    @classmethod
    def load(
        cls,
        encoders: Mapping[str, PreTrainedModel | PreTrainedConfig | str],
        language_model: PreTrainedModel | PreTrainedConfig | str,
        projectors: str | nn.Module | Mapping[str, str | nn.Module],
        dtype: torch.dtype | None,
        generators: Mapping[str, nn.Module | PreTrainedConfig | str],
    ) -> UnimodalParts:
        """Loads the modules; for the arguments see [`~MultimodalModel.from_unimodal`]."""
        check_module_names(tuple(encoders), tuple(generators))
        table = _projector_table(projectors, tuple(encoders))
        live = {name: _load_encoder(value, dtype) for name, value in encoders.items()}
        towers = {name: load_tower(name, value, dtype) for name, value in generators.items()}
        return cls(live, table, *_load_language_model(language_model, dtype), towers)

    @property
    def modules(self) -> dict[str, Any]:
        """Returns the modules as [`MultimodalModel`] expects them, marked as initialised."""
        custom = {name: module for name, module in self.projectors.items() if not isinstance(module, str)}
        for module in (*self.encoders.values(), *custom.values(), *self.generators.values(), self.decoder):
            keep_weights(module)
        modules = {"encoders": self.encoders, "projectors": custom, "generators": self.generators}
        return {**modules, "language_model": self.decoder, "lm_head": self.head}

    def config(
        self,
        token_ids: Mapping[str, int],
        encoder_settings: Mapping[str, Mapping[str, Any]],
        unknown_outputs: Sequence[str],  # encoders whose output a callback changes
        dtype: torch.dtype | None,
        generator_settings: Mapping[str, Mapping[str, Any]],
    ) -> MultimodalConfig:
        """Builds the config, with settings that the user gave or that a forward of each encoder shows."""
        kind = "encoder or generator" if self.generators else "encoder"
        _check_names("token_ids", token_ids, (*self.encoders, *self.generators), True, kind)
        _check_names("encoder_settings", encoder_settings, tuple(self.encoders), complete=False)
        _check_names("generator_settings", generator_settings, tuple(self.generators), False, "generator")
        settings = {}
        for name, encoder in self.encoders.items():
            projector = self.projectors[name]
            extra = encoder_settings.get(name, {})
            settings[name] = replace(
                EncoderSettings.from_dict({"token_id": token_ids[name], **extra}),
                projector=projector if isinstance(projector, str) else "custom",
                model_class=type(encoder).__name__,
            )
            if name not in unknown_outputs:
                settings[name] = complete_settings(name, encoder, settings[name], extra)
        generators = {
            name: replace(
                GeneratorSettings.from_dict({"token_id": token_ids[name], **generator_settings.get(name, {})}),
                model_class=type(tower).__name__,
            )
            for name, tower in self.generators.items()
        }
        decoder, head = self.decoder, self.head
        tied = head is None or head.weight is decoder.get_input_embeddings().weight
        return MultimodalConfig(
            encoder_configs={name: encoder.config for name, encoder in self.encoders.items()},
            text_config=decoder.config,
            encoder_settings=settings,
            generator_configs={
                name: tower.config
                if isinstance(tower, PreTrainedModel)
                else {"_class_name": type(tower).__name__, **tower.config}  # type: ignore[dict-item]
                for name, tower in self.generators.items()
            },
            generator_settings=generators,
            lm_head_bias=head is not None and head.bias is not None,
            tie_word_embeddings=tied and bool(getattr(decoder.config, "tie_word_embeddings", False)),
            dtype=dtype or decoder.dtype,
        )


def _load(auto: Any, value: Any, dtype: torch.dtype | None) -> Any:
    """Loads a model by an auto class from a config, or a model id or folder; a model is returned as it is."""
    options = {} if dtype is None else {"dtype": dtype}
    if isinstance(value, PreTrainedConfig):
        return auto.from_config(value, **options)
    return value if isinstance(value, nn.Module) else auto.from_pretrained(value, **options)


def _load_encoder(value: PreTrainedModel | PreTrainedConfig | str, dtype: torch.dtype | None) -> PreTrainedModel:
    """Loads an encoder from a model, a config, or a model id or folder."""
    value = _load(AutoModel, value, dtype)
    if not isinstance(value, PreTrainedModel):
        raise ValueError(f"`{type(value).__name__}` is not a transformers model. Wrap it in a `PreTrainedModel`.")
    base = _without_head(value)
    if base.config.is_encoder_decoder:
        encoders = [base.get_encoder()]
    elif base.config.get_text_config() is not base.config:
        encoders = [base.get_encoder(modality=modality) for modality in ("image", "audio")]
    else:
        return base
    encoders = [encoder for encoder in encoders if encoder is not base]
    if len(encoders) > 1:
        raise ValueError(
            f"`{type(base).__name__}` has several encoders: {[type(encoder).__name__ for encoder in encoders]}. "
            "Pass one of them."
        )
    encoder = encoders[0] if encoders else base
    return encoder if isinstance(encoder, PreTrainedModel) else base


def _without_head(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the submodel that `AutoModel` builds from its config, as when a saved composed model is loaded."""
    default = AutoModel._model_mapping.get(type(model.config), None)
    classes = default if isinstance(default, (list, tuple)) else [default]
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and type(part) in classes:
            return part
    return model.base_model if isinstance(model.base_model, PreTrainedModel) else model


def _load_language_model(value: Any, dtype: torch.dtype | None) -> tuple[PreTrainedModel, nn.Linear | None]:
    """Loads a language model from a model, a config, or a model id or folder; returns its decoder and its head."""
    model = _load(AutoModelForCausalLM, value, dtype)
    config = model.config
    if config.is_encoder_decoder or config.get_text_config() is not config:
        raise ValueError(
            f"`language_model` is a `{type(model).__name__}`, which is not a plain causal language model. "
            "Give a model such as `LlamaForCausalLM`, or the text model inside it."
        )
    decoder, head = _without_head(model), model.get_output_embeddings()
    if head is not None and not (isinstance(head, nn.Linear) and head.weight.shape[0] == config.vocab_size):
        raise ValueError(
            f"The head of `{type(model).__name__}` is a `{type(head).__name__}`, not one linear layer to "
            f"{config.vocab_size} tokens. Give a model with a plain head."
        )
    return decoder, head


def _projector_table(
    projectors: str | nn.Module | Mapping[str, str | nn.Module], names: Sequence[str]
) -> dict[str, str | nn.Module]:
    if isinstance(projectors, Mapping):
        _check_names("projectors", projectors, names, complete=True)
        return dict(projectors)
    if isinstance(projectors, nn.Module) and len(names) > 1:
        raise ValueError(
            f"One projector module is given for {len(names)} encoders. Give a dict with one for each of {list(names)}."
        )
    return dict.fromkeys(names, projectors)


def _check_names(
    label: str, table: Mapping[str, Any], names: Sequence[str], complete: bool, kind: str = "encoder"
) -> None:
    for name in table:
        if name not in names:
            raise ValueError(f"`{label}` has `{name}`, which is no {kind}. Use one of {list(names)}.")
    for name in names if complete else ():
        if name not in table:
            raise ValueError(f"`{label}` has no entry for {kind} `{name}`. Add it.")
