"""Composition of unimodal models: encoders and a language model from live models, configs or model ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .encoder_parts import complete_settings, keep_weights
from .generators import load_tower
from .multimodal_config import EncoderSettings, GeneratorSettings, MultimodalConfig, check_module_names


@dataclass(frozen=True)
class UnimodalParts:
    """The modules of which a model is composed."""

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


def _load_encoder(value: PreTrainedModel | PreTrainedConfig | str, dtype: torch.dtype | None) -> PreTrainedModel:
    """Loads an encoder from a model, a config, or a model id or folder."""
    options = {} if dtype is None else {"dtype": dtype}
    if isinstance(value, PreTrainedConfig):
        value = AutoModel.from_config(value, **options)
    elif not isinstance(value, nn.Module):
        value = AutoModel.from_pretrained(value, **options)
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
    options = {} if dtype is None else {"dtype": dtype}
    if isinstance(value, PreTrainedConfig):
        value = AutoModelForCausalLM.from_config(value, **options)
    elif not isinstance(value, nn.Module):
        value = AutoModelForCausalLM.from_pretrained(value, **options)
    model: Any = value
    config = model.config
    if config.is_encoder_decoder or config.get_text_config() is not config:
        raise ValueError(
            f"`language_model` is a `{type(value).__name__}`, which is not a plain causal language model. "
            "Give a model such as `LlamaForCausalLM`, or the text model inside it."
        )
    decoder, head = _without_head(model), model.get_output_embeddings()
    if head is not None and not (isinstance(head, nn.Linear) and head.weight.shape[0] == config.vocab_size):
        raise ValueError(
            f"The head of `{type(value).__name__}` is a `{type(head).__name__}`, not one linear layer to "
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
    """Checks that the keys of an argument are encoders (or modules of another kind), and all of them if `complete`."""
    for name in table:
        if name not in names:
            raise ValueError(f"`{label}` has `{name}`, which is no {kind}. Use one of {list(names)}.")
    for name in names if complete else ():
        if name not in table:
            raise ValueError(f"`{label}` has no entry for {kind} `{name}`. Add it.")
