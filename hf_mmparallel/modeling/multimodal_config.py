"""Configuration and callbacks of a model composed of unimodal encoders and a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig

from ..plan.reading import reject_unknown_keys

FEATURE_SELECTIONS = ("full", "default", "pooled")
PROJECTOR_TYPES = ("linear", "mlp", "custom")


@dataclass(frozen=True)
class EncoderSettings:
    """Settings of one encoder: its placeholder token, features, projector and inputs."""

    token_id: int  # placeholder in `input_ids` that a feature token replaces
    model_class: str = ""  # class name of the encoder; empty for the class that `AutoModel` picks
    projector: Literal["linear", "mlp", "custom"] = "mlp"  # `"custom"` is a module of the user
    # index into the encoder's `hidden_states`; by default `last_hidden_state` has the features
    feature_layer: int | None = None
    # `"full"` keeps all tokens, `"default"` drops the first one (CLS), `"pooled"` uses `pooler_output`, which has one
    # token per item for most encoders.
    feature_select: Literal["full", "default", "pooled"] = "full"
    pooling: Literal["mean"] | None = None  # `"mean"` averages the tokens of each item to one
    feature_size: int | None = None  # width of the features; by default taken from the encoder's config
    # Batch entry -> argument of the encoder's forward, where the names differ: `{"image_grid_thw": "grid_thw"}`.
    input_names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        if isinstance(self.token_id, bool) or not isinstance(self.token_id, int) or self.token_id < 0:
            raise ValueError(f"`token_id={self.token_id!r}` is not a token id. Give the id of a placeholder token.")
        for name, allowed in (
            ("projector", PROJECTOR_TYPES),
            ("feature_select", FEATURE_SELECTIONS),
            ("pooling", (None, "mean")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}={getattr(self, name)!r}` is not known. Use one of {list(allowed)}.")
        if self.feature_select == "pooled" and self.feature_layer is not None:
            raise ValueError(
                f"`feature_layer={self.feature_layer}` has no effect with `feature_select='pooled'`, which uses the "
                "encoder's pooled output. Drop one of them."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EncoderSettings:
        """Reads settings from plain data. Raises `ValueError` for an unknown key, with the most similar one."""
        reject_unknown_keys("`encoder_settings`", list(values), [f.name for f in fields(cls)])
        return cls(**values)


@dataclass
class MultimodalCallbacks:
    """
    Functions that run between the modules of a [`MultimodalModel`] (Cornstarch, section 5.1). They are not saved with
    the model; pass them to `from_pretrained` again.

    Args:
        before_encoder (`dict[str, Callable]`, *optional*): Encoder -> `fn(inputs) -> inputs`.
        after_encoder (`dict[str, Callable]`, *optional*): Encoder -> `fn(inputs, output) -> output`.
        after_projector (`dict[str, Callable]`, *optional*):
            Encoder -> `fn(inputs, features) -> features`, a tensor of feature tokens or a list of such tensors.
        before_language_model (`Callable`, *optional*):
            `fn(encoder_outputs, inputs) -> inputs`. `inputs` has `input_ids`, `inputs_embeds`, `attention_mask` and
            `position_ids`. Outputs that it removes from `encoder_outputs` are not merged again.
    """

    before_encoder: dict[str, Callable] = field(default_factory=dict)
    after_encoder: dict[str, Callable] = field(default_factory=dict)
    after_projector: dict[str, Callable] = field(default_factory=dict)
    before_language_model: Callable | None = None

    def check(self, encoders: tuple[str, ...]) -> None:
        """Raises `ValueError` for a callback of an unknown encoder."""
        for moment in ("before_encoder", "after_encoder", "after_projector"):
            for name in getattr(self, moment):
                if name not in encoders:
                    raise ValueError(
                        f"`callbacks.{moment}` has `{name}`, which is not an encoder of this model. "
                        f"Use one of {list(encoders)}."
                    )


class MultimodalConfig(PreTrainedConfig):
    """
    Configuration of a [`MultimodalModel`], with `<name>_config`, `<name>_token_id` and `<name>_feature_layer` of each
    encoder; `<name>_config` is also a key of `attn_implementation={"vision_config": "sdpa"}`.

    Args:
        encoder_configs (`dict[str, PreTrainedConfig | dict]`): Encoder -> its config.
        text_config (`PreTrainedConfig | dict`): Config of the language model.
        encoder_settings (`dict[str, dict]`): Encoder -> values of [`EncoderSettings`].
        projector_hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation of `"mlp"` projectors.
        lm_head_bias (`bool`, *optional*, defaults to `False`): Whether the language model's head has a bias.
        tie_word_embeddings (`bool`, *optional*): Whether head and embeddings are tied; by default as in `text_config`.
        encoder_names (`list[str]`, *optional*): Order of the encoders; by default that of `encoder_configs`.
    """

    model_type = "hf_mmparallel_composed"
    has_no_defaults_at_init = True

    encoder_configs: Any = None
    text_config: Any = None
    encoder_settings: Any = None
    projector_hidden_act: str = "gelu"
    lm_head_bias: bool = False
    tie_word_embeddings: Any = None
    encoder_names: Any = None

    def __post_init__(self, **kwargs):
        configs = self.encoder_configs or {}
        self.encoder_names = list(self.encoder_names or configs)  # JSON sorts the keys of a dict
        check_encoder_names(tuple(self.encoder_names))
        self.encoder_configs = {name: _as_config(configs[name]) for name in self.encoder_names}
        self.text_config = _as_config({"model_type": "llama"} if self.text_config is None else self.text_config)
        settings = self.encoder_settings or {}
        if set(settings) != set(self.encoder_configs):
            raise ValueError(
                f"`encoder_settings` is given for {sorted(settings)} and `encoder_configs` for "
                f"{sorted(self.encoder_configs)}. Give both for the same encoders."
            )
        self.encoder_settings = {
            name: asdict(value if isinstance(value, EncoderSettings) else EncoderSettings.from_dict(value))
            for name, value in ((name, settings[name]) for name in self.encoder_names)
        }
        if self.tie_word_embeddings is None:
            self.tie_word_embeddings = bool(getattr(self.text_config, "tie_word_embeddings", False))
        implementations = self._implementations()
        super().__post_init__(**kwargs)
        for config, attention, experts in implementations:  # `super` resets those of live models' configs
            if kwargs.get("attn_implementation") is None:
                config._attn_implementation_internal = attention
            if kwargs.get("experts_implementation") is None:
                config._experts_implementation_internal = experts

    def _implementations(self) -> list[tuple[PreTrainedConfig, Any, Any]]:
        """Lists all nested configs, with their attention and experts implementations."""
        result, pending = [], [*self.encoder_configs.values(), self.text_config]
        while pending:
            config = pending.pop()
            result.append((config, config._attn_implementation, config._experts_implementation))
            pending += [sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None]
        return result

    @property
    def sub_configs(self) -> dict[str, type]:  # type: ignore[override]
        return {**{f"{name}_config": AutoConfig for name in self.encoder_names or ()}, "text_config": AutoConfig}

    def settings(self, name: str) -> EncoderSettings:
        """Returns the settings of one encoder."""
        return EncoderSettings.from_dict(self.encoder_settings[name])

    def __getattr__(self, name: str):
        """Provides `<name>_config`, `<name>_token_id` and `<name>_feature_layer` of the encoders."""
        configs, settings = (self.__dict__.get(table) or {} for table in ("encoder_configs", "encoder_settings"))
        if name.endswith("_config") and (encoder := name.removesuffix("_config")) in configs:
            return configs[encoder]
        for setting in ("token_id", "feature_layer"):
            if name.endswith(f"_{setting}") and (encoder := name.removesuffix(f"_{setting}")) in settings:
                return settings[encoder][setting]
        raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`")

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        output["encoder_configs"] = {name: config.to_dict() for name, config in self.encoder_configs.items()}
        self.dict_dtype_to_str(output)
        return output


def check_encoder_names(names: tuple[str, ...]) -> None:
    """Raises `ValueError` unless all names are valid submodule names, and none is a prefix of another."""
    if not names:
        raise ValueError("`encoders` is empty: a composed model needs at least one encoder. Give `{'vision': ...}`.")
    for name in names:
        if not name.isidentifier() or name in ("text", "language_model", "encoder"):
            raise ValueError(f"`{name}` cannot name an encoder. Use a word such as `vision` or `audio`.")
        for other in names:
            if other.startswith(name + "_"):
                raise ValueError(
                    f"Inputs of encoder `{other}` can't be told from those of `{name}`, since encoder names are "
                    f"prefixes of inputs. Rename one of them."
                )


def _as_config(value: PreTrainedConfig | Mapping) -> PreTrainedConfig:
    if isinstance(value, PreTrainedConfig):
        return value
    values = dict(value)
    return AutoConfig.for_model(values.pop("model_type"), **values)
