"""Configuration and callbacks of a model composed of unimodal encoders and a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, Self

from transformers import AutoConfig, PreTrainedConfig

from ..plan.reading import reject_unknown_keys

FEATURE_SELECTIONS = ("full", "default", "pooled")
PROJECTOR_TYPES = ("linear", "mlp", "custom")


@dataclass(frozen=True)
class _Settings:
    table: ClassVar[str]  # the argument that has them, by module

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads settings from plain data. Raises `ValueError` for an unknown key, with the most similar one."""
        reject_unknown_keys(f"`{cls.table}`", list(values), [f.name for f in fields(cls)])
        return cls(**values)


@dataclass(frozen=True)
class EncoderSettings(_Settings):
    """Settings of one encoder: its placeholder token, features, projector and inputs."""

    table = "encoder_settings"
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


@dataclass(frozen=True)
class GeneratorSettings(_Settings):
    """Settings of one generator: its placeholder token, the hidden states that it reads, and its loss."""

    table = "generator_settings"
    token_id: int  # placeholder in `input_ids` whose hidden state it reads
    num_tokens: int = 1  # placeholders of one item, such as an image
    model_class: str = ""  # class name of a diffusion model
    projector: Literal["linear", "mlp"] = "linear"  # from the language model's width to its own
    # index into the language model's `hidden_states`; by default the output of its last norm
    layer: int | None = None
    loss_weight: float = 1.0  # in the sum of all losses
    num_codes: int | None = None  # size of the codebook, of a transformer that predicts codes
    num_codebooks: int = 1  # codes of each row
    # configuration of the noise scheduler of a diffusion model, DDPM's by default
    scheduler: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.projector not in ("linear", "mlp"):
            raise ValueError(f"`projector={self.projector!r}` is not known. Use 'linear' or 'mlp'.")
        if self.num_tokens < 1 or self.num_codebooks < 1:
            raise ValueError(
                f"`num_tokens={self.num_tokens}` and `num_codebooks={self.num_codebooks}` of a generator count what "
                "each item has. Use 1 or more."
            )


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
        generator_configs (`dict[str, PreTrainedConfig | dict]`, *optional*):
            Generator -> its config, of transformers or of diffusers.
        generator_settings (`dict[str, dict]`, *optional*): Generator -> values of [`GeneratorSettings`].
        generator_names (`list[str]`, *optional*): Order of the generators; by default that of `generator_configs`.
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
    generator_configs: Any = None
    generator_settings: Any = None
    generator_names: Any = None
    # what the stock Trainer does not collect as predictions
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "losses", "rows"]

    def __post_init__(self, **kwargs):
        self.encoder_names = list(self.encoder_names or self.encoder_configs or ())  # JSON sorts the keys of a dict
        self.generator_names = list(self.generator_names or self.generator_configs or ())
        check_module_names(tuple(self.encoder_names), tuple(self.generator_names))
        self.text_config = _as_config({"model_type": "llama"} if self.text_config is None else self.text_config)
        self._complete("encoder", EncoderSettings)
        self._complete("generator", GeneratorSettings)
        if self.tie_word_embeddings is None:
            self.tie_word_embeddings = bool(getattr(self.text_config, "tie_word_embeddings", False))
        implementations = self._implementations()
        super().__post_init__(**kwargs)
        for config, attention, experts in implementations:  # `super` resets those of live models' configs
            if kwargs.get("attn_implementation") is None:
                config._attn_implementation_internal = attention
            if kwargs.get("experts_implementation") is None:
                config._experts_implementation_internal = experts

    def _complete(self, kind: str, settings_class: type[_Settings]) -> None:
        """Makes configs, and settings as plain data, of what is given for the encoders or the generators."""
        names, configs, given = (getattr(self, f"{kind}_{what}") or {} for what in ("names", "configs", "settings"))
        if set(given) != set(names):
            raise ValueError(
                f"`{kind}_settings` is given for {sorted(given)} and `{kind}_configs` for {sorted(names)}. Give both "
                f"for the same {kind}s."
            )
        settings = {
            name: value if isinstance(value, settings_class) else settings_class.from_dict(value)
            for name, value in ((name, given[name]) for name in names)
        }
        setattr(self, f"{kind}_configs", {name: _as_config(configs[name]) for name in names})
        setattr(self, f"{kind}_settings", {name: asdict(own) for name, own in settings.items()})

    def _implementations(self) -> list[tuple[PreTrainedConfig, Any, Any]]:
        """Lists all nested configs, with their attention and experts implementations."""
        result, pending = [], [*self._nested.values()]
        while pending:
            config = pending.pop()
            result.append((config, config._attn_implementation, config._experts_implementation))
            pending += [sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None]
        return result

    @property
    def _nested(self) -> dict[str, PreTrainedConfig]:
        """The configs of transformers in this one, by name."""
        tables = (self.__dict__.get(table) or {} for table in ("encoder_configs", "generator_configs"))
        named = {f"{name}_config": config for table in tables for name, config in table.items()}
        return {
            **{name: config for name, config in named.items() if isinstance(config, PreTrainedConfig)},
            "text_config": self.text_config,
        }

    @property
    def sub_configs(self) -> dict[str, type]:  # type: ignore[override]
        return dict.fromkeys(self._nested, AutoConfig)

    def settings(self, name: str) -> EncoderSettings:
        return EncoderSettings.from_dict(self.encoder_settings[name])

    def generator_setting(self, name: str) -> GeneratorSettings:
        return GeneratorSettings.from_dict(self.generator_settings[name])

    def __getattr__(self, name: str):
        """
        Provides `<name>_config` and `<name>_token_id` of encoders and generators, and `<name>_feature_layer` of
        encoders.
        """
        configs, settings = (
            {**(self.__dict__.get(f"generator_{kind}") or {}), **(self.__dict__.get(f"encoder_{kind}") or {})}
            for kind in ("configs", "settings")
        )
        if name.endswith("_config") and (encoder := name.removesuffix("_config")) in configs:
            return configs[encoder]
        for setting in ("token_id", "feature_layer"):
            if name.endswith(f"_{setting}") and setting in settings.get(name.removesuffix(f"_{setting}"), {}):
                return settings[name.removesuffix(f"_{setting}")][setting]
        raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`")

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        output["encoder_configs"] = {name: config.to_dict() for name, config in self.encoder_configs.items()}
        if self.generator_names:
            output["generator_configs"] = {
                name: config.to_dict() if isinstance(config, PreTrainedConfig) else dict(config)
                for name, config in self.generator_configs.items()
            }
        self.dict_dtype_to_str(output)
        return output


def check_module_names(encoders: tuple[str, ...], generators: tuple[str, ...] = ()) -> None:
    """Raises `ValueError` for names that are no submodule's, begin each other, or name two modules."""
    if not encoders and not generators:
        raise ValueError("`encoders` is empty: a composed model needs at least one encoder. Give `{'vision': ...}`.")
    names = [*((name, "an encoder") for name in encoders), *((name, "a generator") for name in generators)]
    for number, (name, kind) in enumerate(names):
        if not name.isidentifier() or name in ("text", "language_model", "encoder"):
            raise ValueError(f"`{name}` cannot name {kind}. Use a word such as `vision` or `audio`.")
        for place, (other, _) in enumerate(names):
            if other.startswith(name + "_") or (other == name and place != number):
                raise ValueError(
                    f"Inputs of `{other}`, {names[place][1]}, can't be told from those of `{name}`, since names "
                    "of modules are prefixes of inputs. Rename one of them."
                )


def _as_config(value: PreTrainedConfig | Mapping) -> Any:
    if isinstance(value, PreTrainedConfig) or "_class_name" in value:  # diffusers' configs are plain data
        return value
    values = dict(value)
    return AutoConfig.for_model(values.pop("model_type"), **values)
