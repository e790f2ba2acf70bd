"""What a plan needs to know of a model, as plain data: modules, layers, parameters, features."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

LANGUAGE_MODEL = "language_model"


@dataclass(frozen=True)
class ParameterSpec:
    """
    One parameter of the whole model.

    Args:
        name (`str`): Its name in the state dict of the whole HF model.
        shape (`tuple[int, ...]`): Its shape before any sharding.
        layer (`int`):
            Where it is used: `-1` before the first layer of its module's stack, `i` in layer `i`, `num_layers` after
            the last one.
        dtype (`str`, *optional*, defaults to `"float32"`): The torch dtype's name.
        trainable (`bool`, *optional*, defaults to `True`): Whether it gets a gradient.
    """

    name: str
    shape: tuple[int, ...]
    layer: int
    dtype: str = "float32"
    trainable: bool = True

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class FeatureSpec:
    """
    One tensor that an encoder hands to the language model; its rows are the placeholder tokens of its modality.

    Args:
        modality (`str`): `"image"`, `"video"`, `"audio"`, or the encoder's name in a composed model.
        field (`str`): The attribute of the encoder's output that holds it.
        layer (`int`): The language model's layer at which it enters: 0 for embeddings, `i` for DeepStack features.
        index (`int`, *optional*): Its place when the attribute is a list of several features.
    """

    modality: str
    field: str = "pooler_output"
    layer: int = 0
    index: int | None = None


@dataclass(frozen=True)
class ModuleSpec:
    """
    A part of the model that is laid out as one: an encoder with its projector, or the language model.

    Args:
        name (`str`): The module's name, such as `vision` or `language_model`.
        stack (`str`): Name of the list of layers that pipeline stages cut, in the whole model.
        num_layers (`int`): Its length.
        hidden_size (`int`): Width of the tensors between its layers.
        num_heads (`int`): Attention heads of a layer.
        num_kv_heads (`int`): Heads of keys and values.
        intermediate_size (`int`): Width of the feed-forward layers.
        parameters (`tuple[ParameterSpec, ...]`): In state-dict order, one entry for tied names.
        features (`tuple[FeatureSpec, ...]`): What it hands to the language model; empty for the language model.
        tower (`str`): Name of the submodule without the projector.
        inner_features (`bool`): Whether features leave from inside its stack, so that the stack can't be cut.
    """

    name: str
    stack: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    parameters: tuple[ParameterSpec, ...]
    features: tuple[FeatureSpec, ...] = ()
    tower: str = ""
    inner_features: bool = False

    @property
    def is_encoder(self) -> bool:
        return bool(self.features)

    def with_frozen(self, freeze: bool | Literal["tower"] | str | Sequence[str]) -> ModuleSpec:
        """The same module with the parameters that `freeze` names (see [`ModulePlugin`]) not trainable."""
        if freeze is False:
            return self
        if freeze is True:
            patterns = [""]
        elif freeze == "tower":
            patterns = [re.escape(self.tower + ".")]
        else:
            patterns = [freeze] if isinstance(freeze, str) else list(freeze)
        matchers = [re.compile(pattern) for pattern in patterns]
        hits = [any(matcher.search(p.name) for matcher in matchers) for p in self.parameters]
        if not any(hits):
            raise ValueError(
                f"`freeze={freeze!r}` of module `{self.name}` matches none of its {len(self.parameters)} parameters, "
                f"the first of which is `{self.parameters[0].name}`. Use `True`, `'tower'` or a regular expression."
            )
        parameters = [
            replace(p, trainable=p.trainable and not hit) for p, hit in zip(self.parameters, hits, strict=True)
        ]
        return replace(self, parameters=tuple(parameters))


@dataclass(frozen=True)
class ModelSpec:
    """
    A multimodal model as a graph of modules.

    Args:
        modules (`Mapping[str, ModuleSpec]`): Encoders first, the language model last.
        tied (`Mapping[str, tuple[str, int]]`, *optional*):
            For each parameter used at a second place (`lm_head.weight` for tied embeddings): its name in
            `parameters` -> (module, layer) of the second use.
        placeholders (`Mapping[str, int]`, *optional*): Modality -> id of its placeholder token in `input_ids`.
    """

    modules: Mapping[str, ModuleSpec]
    tied: Mapping[str, tuple[str, int]] = None  # type: ignore[assignment]
    placeholders: Mapping[str, int] = None  # type: ignore[assignment]

    def __post_init__(self):
        object.__setattr__(self, "tied", dict(self.tied or {}))
        object.__setattr__(self, "placeholders", dict(self.placeholders or {}))

    @property
    def encoders(self) -> tuple[str, ...]:
        return tuple(name for name, module in self.modules.items() if module.is_encoder)

    @property
    def language_model(self) -> ModuleSpec:
        return self.modules[LANGUAGE_MODEL]

    @property
    def num_parameters(self) -> int:
        return sum(p.num_elements for module in self.modules.values() for p in module.parameters)
