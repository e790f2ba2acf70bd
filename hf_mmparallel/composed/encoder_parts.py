"""The parts of a composed model: encoders and language models from models, configs or ids; projectors; the head."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from ..modeling.forward_inputs import forward_arguments
from .encoder_outputs import configured_width
from .multimodal_config import EncoderSettings, MultimodalConfig

# fmt: off
LANGUAGE_MODEL_INPUTS = frozenset({
    "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels", "shift_labels",
    "use_cache", "logits_to_keep", "num_items_in_batch", "cache_position", "mm_encoder_outputs", "token_type_ids",
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


class LanguageModelHead(nn.Linear):
    """The head of a language model with what its config says of logits: a factor (Granite, Cohere), a cap (Gemma)."""

    def __init__(self, config: PreTrainedConfig, bias: bool):
        super().__init__(config.hidden_size, config.vocab_size, bias=bias)
        self.scale = float(getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
        self.cap = getattr(config, "final_logit_softcapping", None)

    @property
    def is_plain(self) -> bool:
        return self.scale == 1.0 and self.cap is None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden_states)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True)
class EncoderInputs:
    """
    Which entries of a batch go to which encoder. An entry is named like the argument of the encoder's forward; if the
    language model or another encoder has an argument of this name, `<encoder>_<argument>`.

    Args:
        entries (`Mapping[str, tuple[str, str]]`): Name in the batch -> (encoder, argument).
        mains (`Mapping[str, str]`): Encoder -> name of the entry without which it does not run.
        shared (`frozenset[str]`): Arguments of several encoders, which need a prefix.
    """

    entries: Mapping[str, tuple[str, str]]
    mains: Mapping[str, str]
    shared: frozenset[str]

    @classmethod
    def of(cls, encoders: Mapping[str, nn.Module], settings: Mapping[str, EncoderSettings]) -> EncoderInputs:
        """Reads the signatures of the encoders."""
        arguments = {name: forward_arguments(encoder) for name, encoder in encoders.items()}
        counts: dict[str, int] = {}
        for name, own in arguments.items():
            for argument in set(own) - set(settings[name].input_names.values()):
                counts[argument] = counts.get(argument, 0) + 1
        entries, mains = {}, {}
        for name, own in arguments.items():
            renamed = {argument: key for key, argument in settings[name].input_names.items()}
            if unknown := sorted(set(renamed) - set(own)):
                raise ValueError(
                    f"`input_names` of encoder `{name}` gives `{unknown[0]}`, which its forward does not take. "
                    f"It takes {own}."
                )
            for argument in own:
                taken = argument in LANGUAGE_MODEL_INPUTS or counts.get(argument, 0) > 1
                key = renamed.get(argument, f"{name}_{argument}" if taken else argument)
                entries[key] = (name, argument)
                mains.setdefault(name, key)
        shared = frozenset(argument for argument, count in counts.items() if count > 1)
        return cls(entries, mains, shared - LANGUAGE_MODEL_INPUTS)

    def names(self, encoder: str) -> tuple[str, ...]:
        """Entries of one encoder, the required one first."""
        return tuple(key for key, (name, _) in self.entries.items() if name == encoder)

    def split(self, batch: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Parts a batch: encoder -> its arguments, for the encoders that have something to encode; and the rest."""
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
        """Arguments of one encoder from entries of a batch or from arguments."""
        return {self.entries[key][1] if key in self.names(encoder) else key: value for key, value in inputs.items()}

    def _check_language_model_input(self, key: str) -> None:
        """Raises for what is meant for an encoder but not named so."""
        for name in self.mains:
            if key in self.shared or key.startswith(name + "_"):
                known = [entry for encoder in self.mains for entry in self.names(encoder)]
                reason = "an input of several encoders" if key in self.shared else f"no input of encoder `{name}`"
                raise ValueError(f"`{key}` is {reason}. The inputs of encoders in this model are called {known}.")


def _num_items(value: Any) -> int:
    """Length of an input, 0 for none."""
    if value is None:
        return 0
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else len(value)


def build_encoder(config: MultimodalConfig, name: str) -> PreTrainedModel:
    """An encoder with fresh weights, of the class that the settings name."""
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
    """A projector with fresh weights from the features' width to the language model's."""
    settings, encoder_config = config.settings(name), config.encoder_configs[name]
    if settings.projector == "custom":
        raise ValueError(
            f"The projector of encoder `{name}` is a module of your own, which the config can't build. "
            f"Pass `projectors={{'{name}': module}}`."
        )
    size = settings.feature_size or configured_width(encoder_config)
    if size is None:
        raise ValueError(
            f"`{type(encoder_config).__name__}` does not say how wide the features of encoder `{name}` are. "
            f"Set `feature_size` in its `encoder_settings`."
        )
    if settings.projector == "linear":
        return nn.Linear(size, config.text_config.hidden_size)
    return MLPProjector(size, config.text_config.hidden_size, config.projector_hidden_act)


def check_width(name: str, projector: nn.Module, features: torch.Tensor) -> None:
    """Raises `ValueError` for features that are not as wide as their projector takes them."""
    first = projector.linear_1 if isinstance(projector, MLPProjector) else projector
    if isinstance(first, nn.Linear) and first.in_features != features.shape[-1]:
        raise ValueError(
            f"The features of encoder `{name}` are {features.shape[-1]} wide, but its projector takes "
            f"{first.in_features}. Set `feature_size={features.shape[-1]}` in its `encoder_settings`, or another "
            "`feature_select`."
        )


def load_encoder(value: PreTrainedModel | PreTrainedConfig | str, dtype: torch.dtype | None) -> PreTrainedModel:
    """The encoder of a model, a config, or an id or folder."""
    options = {} if dtype is None else {"dtype": dtype}
    if isinstance(value, PreTrainedConfig):
        value = AutoModel.from_config(value, **options)
    elif not isinstance(value, nn.Module):
        value = AutoModel.from_pretrained(value, **options)
    if not isinstance(value, PreTrainedModel):
        raise ValueError(f"`{type(value).__name__}` is no transformers model. Wrap it in a `PreTrainedModel`.")
    base = _without_head(value)
    if base.config.is_encoder_decoder:
        found = [base.get_encoder()]
    elif base.config.get_text_config() is not base.config:
        found = [base.get_encoder(modality=modality) for modality in ("image", "audio")]
    else:
        return base
    found = [encoder for encoder in found if encoder is not base]
    if len(found) > 1:
        raise ValueError(
            f"`{type(base).__name__}` has several encoders: {[type(encoder).__name__ for encoder in found]}. "
            "Give the one that you mean."
        )
    encoder = found[0] if found else base
    return encoder if isinstance(encoder, PreTrainedModel) else base


def _without_head(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that `AutoModel` builds from its config, which is what a saved composition is built of."""
    default = AutoModel._model_mapping.get(type(model.config), None)
    classes = default if isinstance(default, (list, tuple)) else [default]
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and type(part) in classes:
            return part
    return model.base_model if isinstance(model.base_model, PreTrainedModel) else model


def load_language_model(value: Any, dtype: torch.dtype | None) -> tuple[PreTrainedModel, nn.Linear | None]:
    """A language model without its head, and the head if it has one, from a model, a config, or an id or folder."""
    options = {} if dtype is None else {"dtype": dtype}
    if isinstance(value, PreTrainedConfig):
        value = AutoModelForCausalLM.from_config(value, **options)
    elif not isinstance(value, nn.Module):
        value = AutoModelForCausalLM.from_pretrained(value, **options)
    model: Any = value
    config = model.config
    if config.is_encoder_decoder or config.get_text_config() is not config:
        raise ValueError(
            f"`language_model` is a `{type(value).__name__}`, which is more than a causal language model. "
            "Give a model such as `LlamaForCausalLM`, or the text model inside it."
        )
    decoder, head = _without_head(model), model.get_output_embeddings()
    if head is not None and not (isinstance(head, nn.Linear) and head.weight.shape[0] == config.vocab_size):
        raise ValueError(
            f"The head of `{type(value).__name__}` is a `{type(head).__name__}`, not one linear layer to "
            f"{config.vocab_size} tokens. Give a model with a plain head."
        )
    return decoder, head


def projector_table(
    projectors: str | nn.Module | Mapping[str, str | nn.Module], names: Sequence[str]
) -> dict[str, str | nn.Module]:
    """Encoder -> its projector."""
    if isinstance(projectors, Mapping):
        check_names("projectors", projectors, names, complete=True)
        return dict(projectors)
    if isinstance(projectors, nn.Module) and len(names) > 1:
        raise ValueError(
            f"One projector module is given for {len(names)} encoders. Give a dict with one for each of {list(names)}."
        )
    return dict.fromkeys(names, projectors)


def check_names(label: str, table: Mapping[str, Any], names: Sequence[str], complete: bool) -> None:
    """Raises unless the keys of an argument are encoders, all of them if `complete`."""
    for name in table:
        if name not in names:
            raise ValueError(f"`{label}` names `{name}`, which is no encoder. The encoders are {list(names)}.")
    for name in names if complete else ():
        if name not in table:
            raise ValueError(f"`{label}` lacks encoder `{name}`. Add it.")


def keep_weights(module: nn.Module) -> None:
    """Marks weights as initialised, so that composing leaves them alone."""
    for part in module.modules():
        setattr(part, "_is_hf_initialized", True)  # noqa: B010
    for tensor in (*module.parameters(), *module.buffers()):
        setattr(tensor, "_is_hf_initialized", True)  # noqa: B010


def cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts what a checkpoint holds; other buffers, such as rotary frequencies, stay as precise as they are."""
    for part in module.modules():
        for tensor in part.parameters(recurse=False):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in part._non_persistent_buffers_set:
                setattr(part, name, buffer.to(dtype))
