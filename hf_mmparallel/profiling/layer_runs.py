"""
A model's own forward with one part of it real: a layer, or what comes before or after the layers.

All else takes no memory: layers are stand-ins, parameters hollow. A layer gets its arguments from the model's forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._clock import Clock, clock_of
from ..kernels.bitfield_attention.hf import NAME as BITFIELD
from ..modeling.features import flat_rows
from ..modeling.hollow import hidden_of, hollow_parameters, placeholder, with_hidden
from ..modeling.loading import build_on_meta, initialize_rest
from ..modeling.loss import token_loss
from ..modeling.spec import build_model_spec, layers_of
from ..modeling.stages import ModuleStage
from ..modeling.tensor_parallel import apply_module_tp
from ..plan import LANGUAGE_MODEL, ModelSpec
from .layer_inputs import encoder_inputs, text_inputs

_WEIGHT_SCALE = 0.02


def profile_clock(device: torch.device) -> Clock:
    """
    The clock of a profile. On a host with one thread it counts the CPU time of the thread, which excludes preemption,
    otherwise wall time.
    """
    return clock_of(device, time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)


@dataclass
class Forward:
    """One forward of a part: what came out, and when."""

    outputs: list[Tensor] = field(default_factory=list)
    start: Any = None
    end: Any = None


class _Entered(Exception):
    """Leaves a module's forward at a layer, with the arguments of the layer."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        self.args, self.kwargs = args, kwargs


@dataclass
class Skeleton:
    """
    A model without weights: hollow parameters, stand-ins for layers. One part at a time is made real.

    Args:
        model (`PreTrainedModel`): The model.
        spec ([`ModelSpec`]): What it consists of.
        layers (`Mapping[str, list[nn.Module]]`): Module -> its layers, which are not in the model.
        device (`torch.device`): Where parts become real.
    """

    model: Any
    spec: ModelSpec
    layers: Mapping[str, list[nn.Module]]
    device: torch.device

    @classmethod
    def of(cls, source: Any, device: torch.device, dtype: torch.dtype | None, attention: str | None) -> Skeleton:
        """Builds the model that `source` describes; see [`build_on_meta`]."""
        model = build_on_meta(source, dtype)
        if attention is not None:
            _set_attention(model, attention)
        spec = build_model_spec(model)
        hollow_parameters(model, lambda name: False, device)
        initialize_rest(model, set(), device, str(source))
        layers = {}
        for name, module in spec.modules.items():
            stack = layers_of(model, module.stack)
            layers[name] = list(stack)
            for index, layer in enumerate(layers[name]):
                stack[index] = placeholder(layer)
        return cls(model.eval(), spec, layers, device)

    @property
    def attention(self) -> str:
        """The attention function of the language model."""
        return str(getattr(self.model.config.get_text_config(), "_attn_implementation", None))

    def stage(self, module: str) -> ModuleStage:
        """The whole module as a stage."""
        return ModuleStage(self.model, self.spec, module, (0, self.spec.modules[module].num_layers))

    @contextmanager
    def real(self, module: str, index: int, mesh: Any) -> Iterator[nn.Module | None]:
        """Gives what a layer uses random weights, sharded over `mesh`; yields the layer, if it is one."""
        stack = layers_of(self.model, self.spec.modules[module].stack)
        inside = 0 <= index < len(stack)
        stand_in = stack[index] if inside else None
        if inside:
            stack[index] = self.layers[module][index].train()
        names = {use.parameter.name for use in self.spec.uses.get((module, index), ())}
        hollow = {id(p) for name, p in self.model.named_parameters() if name in names}
        places = [
            (owner, attribute, parameter)
            for owner in self.model.modules()
            for attribute, parameter in owner._parameters.items()
            if parameter is not None and id(parameter) in hollow
        ]
        made = {id(parameter): _random_parameter(parameter, self.device) for _, _, parameter in places}
        for owner, attribute, parameter in places:
            owner._parameters[attribute] = made[id(parameter)]
        try:
            if mesh is not None:
                apply_module_tp(self.model, self.spec.modules[module], mesh, names)
            yield stack[index] if inside else None
        finally:
            for owner, attribute, parameter in places:
                owner._parameters[attribute] = parameter
            if stand_in is not None:
                stack[index] = stand_in


def _set_attention(model: Any, attention: str) -> None:
    """Sets the attention function: `"bitfield"` of the language model, others of all modules."""
    text = model.config.get_text_config()
    keys = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
    model.set_attn_implementation({keys[0]: attention} if attention == BITFIELD and keys else attention)


def _random_parameter(hollow: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter of the same shape, with values of the size of fresh weights."""
    value = torch.empty(hollow.shape, dtype=hollow.dtype, device=device)
    if value.is_floating_point():
        value = value.uniform_(-_WEIGHT_SCALE, _WEIGHT_SCALE) if value.dim() > 1 else value.fill_(1.0)
    else:
        value = value.zero_()
    return nn.Parameter(value, requires_grad=value.is_floating_point())


@dataclass
class Inputs:
    """
    Inputs of a chunk of one module.

    Args:
        batch: Entries of a batch.
        tokens: Tokens that the layers see.
        sequences: Sequences among them.
    """

    batch: dict[str, Tensor]
    tokens: int
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
        """The module's own forward: its features, or the loss."""
        with self.casting():
            outputs = self.stage(batch)
            if self.name == LANGUAGE_MODEL:
                outputs = [token_loss(self.skeleton.model, outputs[0], batch["labels"])[0]]
        return [tensor for output in outputs for tensor in [flat_rows(output) if output.dim() else output]]

    def casting(self) -> AbstractContextManager:
        """Autocast as it is set."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.skeleton.device.type, self.autocast)

    @contextmanager
    def hooked(self, index: int, hook: Callable[..., Any]) -> Iterator[None]:
        """Calls `hook` before a layer runs."""
        handle = self.stack[index].register_forward_pre_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def arguments(self, batch: Mapping[str, Any], index: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a layer is called with."""
        with torch.no_grad(), self.hooked(index, _leave):
            try:
                self.compute(batch)
            except _Entered as entered:
                return entered.args, entered.kwargs
        raise ValueError(f"The forward of `{self.name}` never calls its layer {index}.")

    def inputs(self, tokens: int, sequences: int) -> Inputs:
        """
        Inputs of about so many tokens; an encoder with items of one size gets as many of them as come nearest.

        Raises:
            `ValueError`: If no inputs can be made.
        """
        key = (tokens, sequences)
        if key not in self._known:
            found = self._inputs(sequences, tokens // sequences)
            num_items = max(1, round(tokens / (found.tokens / sequences)))
            self._known[key] = found if num_items == sequences else self._inputs(num_items, tokens // sequences)
        return self._known[key]

    def _inputs(self, num_items: int, length: int) -> Inputs:
        skeleton, refused = self.skeleton, None
        if self.name == LANGUAGE_MODEL:
            packed = skeleton.attention == BITFIELD
            candidates = iter([text_inputs(skeleton.spec, num_items, length, skeleton.device, packed)])
        else:
            config = getattr(skeleton.model.get_submodule(self.spec.tower), "config", skeleton.model.config)
            part = self.stage.parts[self.name]
            candidates = encoder_inputs(part, skeleton.spec, self.name, config, num_items, length)
        for batch in candidates:
            batch = {name: self._placed(value) for name, value in batch.items()}
            try:
                shape = hidden_of(*self.arguments(batch)).shape
                if self.name != LANGUAGE_MODEL:
                    with torch.no_grad():
                        self.compute(batch)  # what is behind the layers may refuse what they take
            except Exception as error:  # whatever a model's code raises for inputs that are not its own
                refused = refused or error
                continue
            return Inputs(batch, shape[:-1].numel(), max(num_items, shape[:-2].numel()))
        reason = f"its forward raises {refused!r}" if refused is not None else "nothing is known of its inputs"
        raise ValueError(f"No inputs of `{self.name}` can be made: {reason}.")

    def _placed(self, value: Tensor) -> Tensor:
        """An entry on the device, in the dtype of the weights."""
        dtype = self.stage.input_dtype if value.is_floating_point() else value.dtype
        return value.to(self.skeleton.device, dtype)

    def run_layer(self, layer: nn.Module, args: Any, kwargs: Any, hidden: Tensor) -> Forward:
        """One forward of a layer."""
        run = Forward()
        args, kwargs = with_hidden(args, kwargs, hidden.detach().requires_grad_())
        with self.casting():
            run.start = self.clock.mark()
            output = layer(*args, **kwargs)
            run.end = self.clock.mark()
        run.outputs = [output if isinstance(output, Tensor) else output[0]]
        return run

    def run_before(self, batch: Mapping[str, Any]) -> Forward:
        """What comes before the layers; it reads token ids or media, which have no gradient."""
        run = Forward()

        def leave(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            run.end = self.clock.mark()
            raise _Entered(args, kwargs)

        with self.hooked(0, leave):
            run.start = self.clock.mark()
            try:
                self.compute(batch)
            except _Entered as entered:
                run.outputs = [hidden_of(entered.args, entered.kwargs)]
        return run

    def run_after(self, batch: Mapping[str, Any], hidden: Tensor) -> Forward:
        """What comes after the layers, and what the model does between them."""
        run, leaf = Forward(), hidden.detach().requires_grad_()

        def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            run.start = self.clock.mark()
            return with_hidden(args, kwargs, leaf)

        with self.hooked(0, enter):
            run.outputs = self.compute(batch)
            run.end = self.clock.mark()
        return run

    def calls(self, batch: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """What each of the layers is called with."""
        found = {}

        def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[id(layer)] = args, kwargs

        with torch.no_grad(), ExitStack() as hooks:
            for index in range(len(self.stack)):
                hooks.enter_context(self.hooked(index, note))
            self.compute(batch)
        return [found.get(id(layer), ((), {})) for layer in self.stack]


def _leave(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Entered(args, kwargs)
