"""
Runs single parts of a model within its own forward: one layer, or the computation before or after the layers.
Only that part has weights in memory; other layers are identity layers, other parameters unowned (see `modeling`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._device import Clock, clock_of
from ..kernels.bitfield_attention import encode_words
from ..kernels.bitfield_attention.hf import NAME as BITFIELD
from ..kernels.varlen_attention import use_varlen_attention
from ..modeling.features import flat_features
from ..modeling.loading import build_on_meta, initialize_rest
from ..modeling.loss import token_loss
from ..modeling.spec import ModulePart, build_model_spec, layers_of
from ..modeling.stages import ModuleStage
from ..modeling.tensor_parallel import apply_module_tp
from ..modeling.unowned import drop_unowned_parameters, hidden_of, identity_layer, with_hidden
from ..plan import LANGUAGE_MODEL, ModelSpec

# Synthetic inputs of a given size for the modules of a model, without a processor.

MAX_TILES = 12
_SIZES = ("image_size", "input_size")
_PATCHES = ("patch_size", "spatial_patch_size")
_MERGES = ("spatial_merge_size",)
_CHANNELS = ("num_channels", "in_channels", "in_chans")
_BINS = ("num_mel_bins", "feature_size", "input_feat_per_channel")
_FRAMES = ("max_source_positions", "max_position_embeddings")
_FRAMES_PER_POSITION = 2


def text_inputs(
    spec: ModelSpec, num_sequences: int, length: int, device: torch.device, packed: bool
) -> dict[str, Tensor]:
    """
    Makes random tokens without media: `input_ids` and `labels`, each `[num_sequences, length]`.

    All are `[1, num_sequences * length]` if packed, `attention_words` with a segment for each sequence and
    `position_ids` too.
    """
    uses = spec.uses[LANGUAGE_MODEL, -1]
    vocabulary = max((use.parameter.shape[0] for use in uses if len(use.parameter.shape) == 2), default=2)
    input_ids = torch.randint(vocabulary, (num_sequences, length), device=device)
    for token in spec.placeholders.values():
        input_ids[input_ids == token] = (token + 1) % vocabulary
    batch = {"input_ids": input_ids, "labels": input_ids.clone()}
    if packed:
        sequence = torch.arange(1, num_sequences + 1, device=device)[:, None].expand_as(input_ids)
        positions = torch.arange(length, device=device).expand_as(input_ids)
        batch |= {"attention_words": encode_words(sequence), "position_ids": positions}
        batch = {name: value.reshape(1, -1) for name, value in batch.items()}
    return batch


def encoder_inputs(
    part: ModulePart, spec: ModelSpec, module: str, config: Any, num_items: int, length: int
) -> Iterator[dict[str, Tensor]]:
    """
    Yields candidates for an encoder's inputs, best first: `num_items` equal images or clips of about `length` tokens.

    Which of them the encoder accepts, and the exact number of tokens, is only known from its forward. They are batch
    entries on the CPU: blank float32 media, with grids, sizes or masks. `config` is the encoder's own. A generator has
    blank targets of its items, and their placeholders.
    """
    generator = part.generator
    targets = None if generator is None else generator.blank_targets(num_items)
    if generator is not None and targets is not None:
        settings = generator.settings
        ids = torch.full((num_items, settings.num_tokens), settings.token_id)
        yield {"input_ids": ids, generator.entries[0]: targets}
    for modality in part.modalities:
        names = part.input_names(modality)
        if names[0].endswith("input_features") or names[0].endswith("input_values"):
            yield from _audio(names, config, num_items)
        elif any(name.endswith("grid_thw") for name in names):
            yield from _patches(names, spec, module, config, num_items, length)
        elif names[0].endswith("pixel_values"):
            yield from _images(names, config, num_items, length)


def _images(names: tuple[str, ...], config: Any, num_items: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Square images `[items, channels, side, side]` of the wanted size and of the config's size, and tiled images."""
    channels, patch = _number(config, _CHANNELS, 3), _number(config, _PATCHES, 16)
    merge = _number(config, _MERGES, 1)
    wanted_side = patch * merge * max(1, round(math.sqrt(length) / merge))
    config_side = _number(config, _SIZES, wanted_side)
    for side in dict.fromkeys((wanted_side, config_side)):
        pixels = torch.zeros(num_items, channels, side, side)
        yield {names[0]: pixels}
        yield {names[0]: pixels, **_sizes(names, num_items, side)}
    for tiles in range(1, MAX_TILES + 1):
        pixels = torch.zeros(num_items, tiles, channels, config_side, config_side)
        masks = [name for name in names if name.endswith("pixel_attention_mask")]
        mask = torch.ones(num_items, tiles, config_side, config_side, dtype=torch.bool)
        yield {names[0]: pixels, **_sizes(names, num_items, config_side), **dict.fromkeys(masks, mask)}


def _sizes(names: tuple[str, ...], num_items: int, side: int) -> dict[str, Tensor]:
    """Heights and widths of images, if the encoder has such an input."""
    return {name: torch.full((num_items, 2), side) for name in names if name.endswith("image_sizes")}


def _patches(
    names: tuple[str, ...], spec: ModelSpec, module: str, config: Any, num_items: int, length: int
) -> Iterator[dict[str, Tensor]]:
    """Flat patches `[patches, values per patch]`, with the grid of each item."""
    merge = _number(config, _MERGES, 1)
    side = merge * max(1, round(math.sqrt(length) / merge))
    grid = torch.tensor([[1, side, side]] * num_items)
    matrices = [use.parameter for use in spec.uses[module, -1] if len(use.parameter.shape) > 1]
    for matrix in matrices:
        patches = torch.zeros(num_items * side * side, math.prod(matrix.shape[1:]))
        yield {names[0]: patches, **{name: grid for name in names if name.endswith("grid_thw")}}


def _audio(names: tuple[str, ...], config: Any, num_items: int) -> Iterator[dict[str, Tensor]]:
    """Clips `[items, mel bins, frames]` of the config's length."""
    bins = _number(config, _BINS, 80)
    frames = _FRAMES_PER_POSITION * _number(config, _FRAMES, 1500)
    for shape, axis in (((num_items, bins, frames), 2), ((num_items, frames, bins), 1)):
        masks = {name: torch.ones(num_items, shape[axis], dtype=torch.long) for name in names if name.endswith("mask")}
        yield {names[0]: torch.zeros(*shape), **masks}


def _number(config: Any, names: tuple[str, ...], default: int) -> int:
    """The first of some settings that a config has; the first element of a list."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, int) and value > 0:
            return value
    return default


_WEIGHT_SCALE = 0.02


def profile_clock(device: torch.device) -> Clock:
    """Returns the clock of a profile: the CPU time of the thread on a host with one thread, otherwise wall time."""
    # the time of a thread excludes preemption
    return clock_of(device, time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)


@dataclass
class Forward:
    """One forward of a part: its outputs, start and end."""

    outputs: list[Tensor] = field(default_factory=list)
    start: Any = None
    end: Any = None


class _LayerReached(Exception):
    """Raised to leave a module's forward at a layer, with the arguments of the layer."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        self.args, self.kwargs = args, kwargs


@dataclass
class Skeleton:
    """A model with identity layers and unowned parameters, in which one part at a time gets its weights."""

    model: Any
    spec: ModelSpec
    layers: Mapping[str, list[nn.Module]]  # module -> its original layers
    device: torch.device  # of the weights

    @classmethod
    def of(cls, source: Any, device: torch.device, dtype: torch.dtype | None, attention: str | None) -> Skeleton:
        """Builds the model that `source` describes; see [`build_on_meta`]."""
        model = build_on_meta(source, dtype)
        if attention is not None:
            _set_attention(model, attention)
        spec = build_model_spec(model)
        for module in spec.modules.values():
            if module.is_encoder and attention in (None, BITFIELD):
                use_varlen_attention(model.get_submodule(module.tower))
        drop_unowned_parameters(model, lambda name: False, device)
        initialize_rest(model, set(), device, str(source))
        layers = {}
        for name, module in spec.modules.items():
            stack = layers_of(model, module.stack)
            layers[name] = list(stack)
            for index, layer in enumerate(layers[name]):
                stack[index] = identity_layer(layer)
        return cls(model.eval(), spec, layers, device)

    @property
    def attention(self) -> str:
        """The attention function of the language model."""
        return str(getattr(self.model.config.get_text_config(), "_attn_implementation", None))

    def stage(self, module: str) -> ModuleStage:
        """The whole module as a stage."""
        return ModuleStage(self.model, self.spec, module, (0, self.spec.modules[module].num_layers))

    @contextmanager
    def real(self, module: str, indices: Sequence[int], mesh: Any) -> Iterator[nn.Module | None]:
        """Gives some parts random weights, sharded over `mesh`; yields their last layer, or `None` without one."""
        stack = layers_of(self.model, self.spec.modules[module].stack)
        replaced = {index: stack[index] for index in indices if 0 <= index < len(stack)}
        for index in replaced:
            stack[index] = self.layers[module][index].train()
        names = {use.parameter.name for index in indices for use in self.spec.uses.get((module, index), ())}
        used = {id(p) for name, p in self.model.named_parameters() if name in names}
        uses = [
            (owner, attribute, parameter)
            for owner in self.model.modules()
            for attribute, parameter in owner._parameters.items()
            if parameter is not None and id(parameter) in used
        ]
        random = {id(parameter): _random_parameter(parameter, self.device) for _, _, parameter in uses}
        for owner, attribute, parameter in uses:
            owner._parameters[attribute] = random[id(parameter)]
        try:
            if mesh is not None:
                apply_module_tp(self.model, self.spec.modules[module], mesh, names)
            layer: Any = stack[max(replaced)] if replaced else None
            if hasattr(layer, "split_rows"):
                layer.split_rows.takes_all = layer.split_rows.returns_all = False  # as between layers
            yield layer
        finally:
            for index in replaced:
                if hasattr(stack[index], "split_rows"):
                    stack[index].split_rows.remove()  # type: ignore[operator]
            for owner, attribute, parameter in uses:
                owner._parameters[attribute] = parameter
            for index, layer in replaced.items():
                stack[index] = layer


def _set_attention(model: Any, attention: str) -> None:
    """Sets the attention function: of the language model for `"bitfield"`, otherwise of all modules."""
    text = model.config.get_text_config()
    keys = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
    model.set_attn_implementation({keys[0]: attention} if attention == BITFIELD and keys else attention)


def _random_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter of the same shape and dtype, with values in the range of newly initialised weights."""
    value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    if value.is_floating_point():
        value = value.uniform_(-_WEIGHT_SCALE, _WEIGHT_SCALE) if value.dim() > 1 else value.fill_(1.0)
    else:
        value = value.zero_()
    return nn.Parameter(value, requires_grad=value.is_floating_point())


@dataclass
class Inputs:
    """Inputs of a chunk of one module."""

    batch: dict[str, Tensor]
    tokens: int  # in the layers
    sequences: int


class ModuleRuns:
    """One module of a skeleton: runs its forward, or one of its layers."""

    def __init__(self, skeleton: Skeleton, name: str, clock: Clock, autocast: torch.dtype | None):
        self.skeleton, self.name, self.clock, self.autocast = skeleton, name, clock, autocast
        self.spec = skeleton.spec.modules[name]
        self.stage = skeleton.stage(name)
        self.stack = layers_of(skeleton.model, self.spec.stack)
        self._known: dict[tuple[int, int], Inputs] = {}

    def compute(self, batch: Mapping[str, Any]) -> list[Tensor]:
        """Runs the module's forward; returns its features, or the loss of the language model."""
        with self.casting():
            outputs = self.stage(batch)
            if self.name == LANGUAGE_MODEL:
                outputs = [token_loss(self.skeleton.model, outputs[0], batch["labels"])[0]]
        return [tensor for output in outputs for tensor in [flat_features(output) if output.dim() else output]]

    def casting(self) -> AbstractContextManager:
        """The autocast context."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.skeleton.device.type, self.autocast)

    @contextmanager
    def hook_layer(self, index: int, hook: Callable[..., Any]) -> Iterator[None]:
        """Calls `hook` before a layer runs."""
        handle = self.stack[index].register_forward_pre_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def arguments(self, batch: Mapping[str, Any], index: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with which a layer is called."""
        with torch.no_grad(), self.hook_layer(index, _leave):
            try:
                self.compute(batch)
            except _LayerReached as entered:
                return entered.args, entered.kwargs
        raise ValueError(f"The forward of `{self.name}` never calls its layer {index}.")

    def inputs(self, tokens: int, sequences: int) -> Inputs:
        """Makes inputs of about `tokens` tokens in `sequences` sequences; raises `ValueError` if there are none."""
        key = (tokens, sequences)
        if key not in self._known:
            inputs = self._inputs(sequences, tokens // sequences)
            # of items of fixed size the number that is closest to `tokens`
            num_items = max(1, round(tokens / (inputs.tokens / sequences)))
            self._known[key] = inputs if num_items == sequences else self._inputs(num_items, tokens // sequences)
        return self._known[key]

    def _inputs(self, num_items: int, length: int) -> Inputs:
        skeleton, first_error = self.skeleton, None
        if self.name == LANGUAGE_MODEL:
            packed = skeleton.attention == BITFIELD
            candidates = iter([text_inputs(skeleton.spec, num_items, length, skeleton.device, packed)])
        else:
            config = getattr(skeleton.model.get_submodule(self.spec.tower), "config", skeleton.model.config)
            part = self.stage.parts[self.name]
            candidates = encoder_inputs(part, skeleton.spec, self.name, config, num_items, length)
        for batch in candidates:
            batch = {name: self._to_device(value) for name, value in batch.items()}
            if not self.spec.is_chain:
                return Inputs(batch, batch["input_ids"].numel(), num_items)
            try:
                shape = hidden_of(*self.arguments(batch)).shape
                if self.name != LANGUAGE_MODEL:
                    with torch.no_grad():
                        self.compute(batch)  # code after the layers may fail, too
            except Exception as error:  # a model may raise anything for unsupported inputs
                first_error = first_error or error
                continue
            return Inputs(batch, shape[:-1].numel(), max(num_items, shape[:-2].numel()))
        reason = "its inputs are not known" if first_error is None else f"its forward raises {first_error!r}"
        raise ValueError(f"No inputs of `{self.name}` can be made: {reason}.")

    def _to_device(self, value: Tensor) -> Tensor:
        """Moves a batch entry to the device, in the dtype of the weights."""
        dtype = self.stage.input_dtype if value.is_floating_point() else value.dtype
        return value.to(self.skeleton.device, dtype)

    def run_layer(self, layer: nn.Module, args: Any, kwargs: Any, hidden: Tensor) -> Forward:
        """Runs one forward of a layer."""
        run = Forward()
        args, kwargs = with_hidden(args, kwargs, hidden.detach().requires_grad_())
        with self.casting():
            run.start = self.clock.mark()
            output = layer(*args, **kwargs)
            run.end = self.clock.mark()
        run.outputs = [output if isinstance(output, Tensor) else output[0]]
        return run

    def run_whole(self, batch: Mapping[str, Any]) -> Forward:
        """Runs one forward of a generator."""
        run, width = Forward(), self.skeleton.spec.language_model.hidden_size
        rows = torch.randn(
            batch["input_ids"].numel(), width, dtype=self.stage.input_dtype, device=self.skeleton.device
        )
        with self.casting():
            run.start = self.clock.mark()
            run.outputs = self.stage(batch, None, {LANGUAGE_MODEL: [rows.requires_grad_()]})
            run.end = self.clock.mark()
        return run

    def run_before(self, batch: Mapping[str, Any]) -> Forward:
        """Runs the computation before the layers; its inputs, token ids or media, have no gradient."""
        run = Forward()

        def leave(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            run.end = self.clock.mark()
            raise _LayerReached(args, kwargs)

        with self.hook_layer(0, leave):
            run.start = self.clock.mark()
            try:
                self.compute(batch)
            except _LayerReached as entered:
                run.outputs = [hidden_of(entered.args, entered.kwargs)]
        return run

    def run_after(self, batch: Mapping[str, Any], hidden: Tensor) -> Forward:
        """Runs the computation after and between the layers."""
        run, leaf = Forward(), hidden.detach().requires_grad_()

        def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            run.start = self.clock.mark()
            return with_hidden(args, kwargs, leaf)

        with self.hook_layer(0, enter):
            run.outputs = self.compute(batch)
            run.end = self.clock.mark()
        return run

    def calls(self, batch: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments with which each layer is called."""
        calls = {}

        def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[id(layer)] = args, kwargs

        with torch.no_grad(), ExitStack() as hooks:
            for index in range(len(self.stack)):
                hooks.enter_context(self.hook_layer(index, record))
            self.compute(batch)
        return [calls.get(id(layer), ((), {})) for layer in self.stack]


def _leave(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _LayerReached(args, kwargs)
