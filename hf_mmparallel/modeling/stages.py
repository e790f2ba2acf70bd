"""
Pipeline stages that are the model's own forward.

Layers that a stage does not own are placeholders. The received hidden state replaces what reaches the stage's first
layer, and an exception carries the hidden state out at the entry of the layer after the last one, so that what the
model does between layers stays with the layer before. Masks, position ids and rotary embeddings come from the model's
own code.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..adapters.adapter_files import adapter_names
from ..plan import (
    LANGUAGE_MODEL,
    FeatureSpec,
    ModelSpec,
    ModuleSpec,
    ParallelPlan,
    ParameterSpec,
    parameter_shards,
    stage_holds,
)
from .checkpointing import enable_checkpointing
from .features import count_rows, flat_rows, merge_output
from .given_features import features_given
from .hollow import hidden_of, hollow_parameters, is_hollow, replace_layers, with_hidden
from .loss import IGNORE_INDEX, token_loss
from .spec import ModulePart, layers_of, module_parts

__all__ = ["ModuleStage", "is_hollow", "prepare_stages"]


def is_activation_dtype(dtype: torch.dtype) -> bool:
    """Whether layers compute in this dtype; weights of 8 bits and less are widened where they are used."""
    return dtype.is_floating_point and dtype.itemsize > 1


def activation_dtype(spec: ModelSpec, parameters: Iterable[ParameterSpec]) -> torch.dtype:
    """
    The widest dtype that layers with these parameters can give a hidden state. Adapters give it the dtype of the layer
    that they wrap, whatever their own is.
    """
    adapters = adapter_names(spec)
    dtypes = {getattr(torch, p.dtype) for p in parameters if p.name not in adapters}
    found = [dtype for dtype in dtypes if is_activation_dtype(dtype)]
    return functools.reduce(torch.promote_types, found) if found else torch.bfloat16


def hidden_dtype(spec: ModelSpec, module: str) -> torch.dtype:
    """The widest dtype of the hidden states between the layers of a module."""
    own = spec.modules[module]
    return activation_dtype(spec, [p for p in own.parameters if p.layer < own.num_layers])


class _Leave(Exception):
    """Carries the hidden state out of a forward."""

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden


@dataclass
class _Run:
    """One forward of a stage: where it enters (with which hidden state) and where it leaves."""

    first: int
    stop: int
    hidden: Tensor | None = None
    probe: bool = False
    entered: bool = False
    dtype: torch.dtype | None = None  # of what reaches the first layer


class _Gate:
    """Hooks on every layer of a stack that let a forward enter and leave it at any layer."""

    def __init__(self, layers: nn.ModuleList):
        self.run: _Run | None = None
        self.checked = False
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._before(index), with_kwargs=True)
            layer.register_forward_hook(self._after(index))

    def _before(self, index: int):
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
            run = self.run
            if run is None:
                return None
            if index == run.stop:
                raise _Leave(hidden_of(args, kwargs))
            if index == run.first:
                run.dtype = hidden_of(args, kwargs).dtype
            if index != run.first or index == 0:
                return None
            arrived = hidden_of(args, kwargs)
            if run.probe:
                raise _Leave(arrived)
            assert run.hidden is not None
            args, kwargs = with_hidden(args, kwargs, run.hidden.to(arrived.dtype))
            if not self.checked:
                _check_arguments(module, args[1:], kwargs, run.hidden)
                self.checked = True
            run.entered = True
            return args, kwargs

        return hook

    def _after(self, index: int):
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any):
            run = self.run
            if run is None or run.hidden is None or index != run.first - 1:
                return None
            if isinstance(output, tuple):
                return (run.hidden.to(output[0].dtype), *output[1:])
            return run.hidden.to(output.dtype)

        return hook

    @contextmanager
    def running(self, run: _Run) -> Iterator[None]:
        """Makes forwards follow `run`."""
        outer, self.run = self.run, run
        try:
            yield
        finally:
            self.run = outer


def _gate_of(layers: nn.ModuleList) -> _Gate:
    """The gate of a stack, made when there is none yet."""
    if "gate" not in layers.__dict__:
        layers.__dict__["gate"] = _Gate(layers)
    return layers.__dict__["gate"]


def _check_arguments(module: nn.Module, args: Any, kwargs: Any, hidden: Tensor) -> None:
    """Raises `ValueError` when a layer reads values of parameters that other stages hold (they are NaN here)."""
    pending = [args, *((value,) for value in kwargs.values() if value is not hidden)]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, (tuple, list)):
            pending += value
        elif isinstance(value, Tensor) and value.is_floating_point() and value is not hidden and value.isnan().any():
            raise ValueError(
                f"The layers of `{type(module).__name__}` take an argument of shape {tuple(value.shape)} that depends "
                f"on weights of an earlier stage, so that the module can't be cut. Use `pp_size=1` for it."
            )


@dataclass(frozen=True)
class OwnLoss:
    """
    The loss that a model's forward has for some labels, and what a plan sums for the same labels and logits.

    Args:
        mean (`torch.Tensor`): Of the forward, a scalar.
        total (`torch.Tensor`): The loss of the next token, summed over target tokens, a scalar.
        num_targets (`torch.Tensor`): Number of target tokens, a scalar.
        of_batch (`bool`): Whether the labels are the batch's, not its `shift_labels` in their place.
    """

    mean: Tensor
    total: Tensor
    num_targets: Tensor
    of_batch: bool


class ModuleStage:
    """
    Consecutive layers of one module, computed by the model's own forward; made by [`prepare_stages`].

    Args:
        model ([`~transformers.PreTrainedModel`]): The pruned model of this rank.
        spec ([`ModelSpec`]): The whole model.
        module (`str`): The module's name.
        layers (`tuple[int, int]`): First layer, and the one after the last.
        parts (`dict[str, ModulePart]`, *optional*): What [`module_parts`] says of the model.

    Attributes:
        asks_own_loss (`bool`): Whether the next forward to the logits with targets leaves the model's own loss.
        own_loss ([`OwnLoss`], *optional*): What it left.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        module: str,
        layers: tuple[int, int],
        parts: dict[str, ModulePart] | None = None,
    ):
        self.model = model
        self.spec = spec
        self.module = module
        self.layers = layers
        self.parts = module_parts(model) if parts is None else parts
        cut = not (self.is_first and self.is_last)
        self._gate = _gate_of(layers_of(model, self.module_spec.stack)) if cut else None
        self._checked = False
        self.asks_own_loss = False
        self.own_loss: OwnLoss | None = None
        self._asked_with: tuple[Tensor, bool] | None = None  # labels, and whether they are the batch's

    @property
    def module_spec(self) -> ModuleSpec:
        return self.spec.modules[self.module]

    @property
    def is_first(self) -> bool:
        return self.layers[0] == 0

    @property
    def is_last(self) -> bool:
        return self.layers[1] == self.module_spec.num_layers

    @cached_property
    def input_dtype(self) -> torch.dtype:
        """Dtype in which hidden states travel between the stages of this module."""
        return hidden_dtype(self.spec, self.module)

    @property
    def own_layers(self) -> dict[int, nn.Module]:
        """The layers of this stage by their index in the module."""
        stack = layers_of(self.model, self.module_spec.stack)
        return {index: stack[index] for index in range(*self.layers)}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields name and tensor of each parameter that this stage uses, under their names in the whole model."""
        real = {name: p for name, p in self.model.named_parameters() if not is_hollow(p)}
        num_layers = self.module_spec.num_layers
        for name, used_at in self.spec.used_at.items():
            if name in real and any(
                module == self.module and stage_holds(self.layers, num_layers, layer) for module, layer in used_at
            ):
                yield name, real[name]

    def input_shapes(self, inputs: Mapping[str, Any]) -> list[torch.Size]:
        """
        Shapes of the hidden states that the stage receives, known without communication.

        Args:
            inputs (`Mapping[str, Any]`): The batch's entries of this module.

        Returns:
            `list[torch.Size]`: One shape for the language model, one per modality in the batch for an encoder; none
            for a first stage.
        """
        if self.is_first:
            return []
        if self.module == LANGUAGE_MODEL:
            batch, length = (inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]).shape[:2]
            return [torch.Size((batch, length, self.module_spec.hidden_size))]
        shapes = []
        with torch.no_grad():
            for modality in self.present(inputs):
                arrived = self._encode(modality, inputs, _Run(*self.layers, probe=True))
                assert isinstance(arrived, _Leave)
                shapes.append(arrived.hidden.shape)
        return shapes

    def __call__(
        self,
        inputs: Mapping[str, Any],
        hidden: Sequence[Tensor] | None = None,
        features: Mapping[str, Sequence[Tensor | None]] | None = None,
    ) -> list[Tensor]:
        """
        Runs the stage.

        Args:
            inputs (`Mapping[str, Any]`): The batch's entries of this module; every stage needs them.
            hidden (`list[torch.Tensor]`, *optional*):
                What the stage before returned, with the shapes of `input_shapes`; not for a first stage.
            features (`dict[str, list[torch.Tensor | None]]`, *optional*):
                For the language model: encoder -> features in the order of its spec, each `[rows, hidden]` with rows
                in the order of the placeholder tokens of the batch. `None` for features that enter at other stages.

        Returns:
            `list[torch.Tensor]`: Hidden states from a stage that is not the last one; the logits
            `[batch, sequence, vocabulary]` or the encoder's features `[rows, hidden]` from the last one.

        Raises:
            `ValueError`: If features that enter at this stage are missing.
        """
        if self.module == LANGUAGE_MODEL:
            return self._run_language_model(inputs, hidden, features or {})
        return self._run_encoder(inputs, hidden or [])

    def present(self, inputs: Mapping[str, Any]) -> list[str]:
        """Modalities of this encoder that a batch has inputs for."""
        part = self.parts[self.module]
        found = []
        for modality in part.modalities:
            value = inputs.get(part.input_names(modality)[0])
            if value is not None and len(value):
                found.append(modality)
        return found

    def _encode(self, modality: str, inputs: Mapping[str, Any], run: _Run) -> Any:
        """The encoder's output for one modality, or the exception that left its stack."""
        part = self.parts[self.module]
        names = part.input_names(modality)
        kwargs = {name: inputs[name] for name in names if inputs.get(name) is not None}
        if self._gate is None:
            return part.features[modality](**kwargs)
        with self._gate.running(run):
            try:
                output = part.features[modality](**kwargs)
            except _Leave as leave:
                return leave
        assert run.entered or self.is_first, f"{self.module} never reached layer {run.first}"
        return output

    def _run_encoder(self, inputs: Mapping[str, Any], hidden: Sequence[Tensor]) -> list[Tensor]:
        outputs: dict[str, Any] = {}
        for number, modality in enumerate(self.present(inputs)):
            received = None if self.is_first else hidden[number]
            run = _Run(*self.layers, hidden=received)
            outputs[modality] = self._encode(modality, inputs, run)
            if not self.is_last:
                outputs[modality] = self._wire(outputs[modality].hidden, run.dtype)
        if not self.is_last:
            return self._checked_once(list(outputs.values()), hidden)
        features = [self._feature(spec, outputs, inputs) for spec in self.module_spec.features]
        return self._checked_once(features, hidden) if outputs else features

    def _checked_once(self, outputs: list[Tensor], hidden: Sequence[Tensor]) -> list[Tensor]:
        """
        The outputs; raises `ValueError` at the first call when they are NaN, the value of what other stages hold.

        NaN of single positions, such as padding, is the model's own in a first stage.
        """
        if self._gate is None or self._checked:
            return outputs
        self._checked = True
        if hidden:
            wrong = any(t.isnan().any() for t in outputs) and not any(t.isnan().any() for t in hidden)
        else:
            wrong = any(t.isnan().all() for t in outputs if t.numel())
        if wrong:
            raise ValueError(
                f"The output of layers {self.layers} of `{self.module}` depends on what other stages hold, such as a "
                f"hidden state selected by index or a norm registered before the layers. Use `pp_size=1` or, for a "
                f"hidden state, `layers_per_stage` with a longer last stage."
            )
        return outputs

    def _wire(self, hidden: Tensor, entered: torch.dtype | None) -> Tensor:
        """
        The hidden state in the dtype in which it travels, which must hold it exactly. The next stage takes it in the
        dtype that `entered` the first layer of all, on every rank the same.
        """
        if torch.promote_types(hidden.dtype, self.input_dtype) != self.input_dtype:
            raise ValueError(
                f"The hidden states between the layers of `{self.module}` are {hidden.dtype}, which does not fit in "
                f"the {self.input_dtype} of its weights. Use `pp_size=1` for it."
            )
        if hidden.dtype != entered:
            raise ValueError(
                f"The hidden states of `{self.module}` are {entered} before its layers and {hidden.dtype} between "
                f"them, where its next stage would narrow or widen them. Give its embeddings and norms one dtype, or "
                f"use `pp_size=1` for it."
            )
        return hidden.to(self.input_dtype)

    def _feature(self, spec: FeatureSpec, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> Tensor:
        """One flat feature, without rows when its modality is absent."""
        if spec.modality in outputs:
            value = getattr(outputs[spec.modality], spec.field)
            return flat_rows(value if spec.index is None else value[spec.index])
        device = next((v.device for v in inputs.values() if isinstance(v, Tensor)), self.model.device)
        return torch.zeros(0, self.spec.language_model.hidden_size, dtype=self.input_dtype, device=device)

    def _run_language_model(
        self,
        inputs: Mapping[str, Any],
        hidden: Sequence[Tensor] | None,
        features: Mapping[str, Sequence[Tensor | None]],
    ) -> list[Tensor]:
        kwargs = self._text_inputs(inputs)
        outputs = self._merge_outputs(inputs, features)
        run = _Run(*self.layers, hidden=None if self.is_first or not hidden else hidden[0])
        with features_given(self.model, self.parts, outputs) as given:
            if self._gate is None:
                return [self._logits(self.model(**kwargs, **given))]
            with self._gate.running(run):
                try:
                    output = self.model(**kwargs, **given)
                except _Leave as leave:
                    return self._checked_once([self._wire(leave.hidden, run.dtype)], hidden or [])
        assert run.entered and self.is_last, f"the forward never reached layer {run.stop}"
        return self._checked_once([self._logits(output)], hidden or [])

    def _logits(self, output: Any) -> Tensor:
        """The logits of a forward; keeps its loss if it made one."""
        loss = getattr(output, "loss", None)
        if loss is not None and self._asked_with is not None:
            labels, of_batch = self._asked_with
            with torch.no_grad():
                self.own_loss = OwnLoss(loss.detach(), *token_loss(self.model, output.logits, labels), of_batch)
            self.asks_own_loss, self._asked_with = False, None
        return output.logits

    def _text_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The batch without what only encoders read (pixels, audio); labels only if the model's own loss is wanted."""
        encoder_inputs = {
            name for part in self.parts.values() for modality in part.modalities for name in part.input_names(modality)
        }
        kwargs = {}
        for name, value in inputs.items():
            pixels = name in encoder_inputs and isinstance(value, Tensor) and value.is_floating_point()
            if name not in ("labels", "shift_labels") and not pixels:
                kwargs[name] = value
        labels = inputs.get("labels", inputs.get("shift_labels"))  # any will do to compare two losses
        if self.asks_own_loss and labels is not None and (labels[..., 1:] != IGNORE_INDEX).any():
            kwargs["labels"] = labels
            self._asked_with = labels, "shift_labels" not in inputs
        return {**kwargs, "use_cache": False, "return_dict": True}

    def _merge_outputs(
        self, inputs: Mapping[str, Any], features: Mapping[str, Sequence[Tensor | None]]
    ) -> dict[str, Any]:
        """Modality -> encoder output with the delivered features, and NaN for those that enter at other stages."""
        if not self.spec.placeholders:
            return {}
        rows = {modality: sum(counts) for modality, counts in count_rows(inputs, self.spec).items()}
        device, width = inputs["input_ids"].device, self.module_spec.hidden_size
        missing = torch.full((), torch.nan, dtype=self.input_dtype, device=device)
        gathered: dict[str, list[tuple[FeatureSpec, Tensor]]] = {}
        for name in self.spec.encoders:
            specs = self.spec.modules[name].features
            for spec, value in zip(specs, features.get(name) or [None] * len(specs), strict=True):
                if not rows[spec.modality]:
                    continue
                if value is None:
                    if self.layers[0] <= spec.layer < self.layers[1]:
                        raise ValueError(
                            f"The batch has {rows[spec.modality]} `{spec.modality}` tokens, but no `{spec.field}` of "
                            f"`{name}` for layer {spec.layer}, which is in this stage {self.layers}. Pass it in "
                            f"`features`."
                        )
                    value = missing.expand(rows[spec.modality], width)
                gathered.setdefault(spec.modality, []).append((spec, value))
        return {modality: merge_output(pairs) for modality, pairs in gathered.items()}


def prepare_stages(
    model: PreTrainedModel,
    spec: ModelSpec,
    plan: ParallelPlan,
    rank: int,
    device: torch.device | str | None = None,
) -> dict[tuple[str, int, int], ModuleStage]:
    """
    Prunes a model in place to what one rank owns.

    Layers of other ranks become placeholders and their other parameters hollow (see [`is_hollow`]): they keep name and
    shape but no memory. Owned parameters are left as they are, on the `meta` device too; buffers stay.

    Args:
        model ([`~transformers.PreTrainedModel`]): The whole model, as `spec` describes it.
        spec ([`ModelSpec`]): What [`build_model_spec`] said of it.
        plan ([`ParallelPlan`]): Who owns what.
        rank (`int`): This process's global rank.
        device (`torch.device` or `str`, *optional*):
            Where hollow parameters say they are; defaults to where each was (`"cpu"` for `meta`).

    Returns:
        `dict[tuple[str, int, int], ModuleStage]`: (module, replica, stage) -> the stage, for those of this rank.

    Raises:
        `ValueError`: If a module can't be cut as planned.
    """
    parts = module_parts(model)
    for name in spec.encoders:
        _check_selected_layers(model, spec.modules[name], plan)
    owned = {
        (name, replica, index): stage
        for name, module in plan.modules.items()
        for replica, index, stage in module.stages()
        if rank in stage.all_ranks
    }
    shards = parameter_shards(spec, plan)
    hollow_parameters(model, lambda name: name in shards and bool(shards[name].on_rank(rank)), device)
    for name, module in spec.modules.items():
        keep = {layer for (owner, _, _), stage in owned.items() if owner == name for layer in range(*stage.layers)}
        replace_layers(model, module.stack, keep)
        if keep and plan.modules[name].activation_checkpointing:
            enable_checkpointing(model, module.tower, module.stack)
    return {key: ModuleStage(model, spec, key[0], stage.layers, parts) for key, stage in owned.items()}


def earliest_selected_layer(model: PreTrainedModel, module: ModuleSpec) -> int | None:
    """
    The first hidden state of an encoder that the model's config selects, `None` where it selects none.

    Args:
        model (`PreTrainedModel`): The model.
        module (`ModuleSpec`): The encoder.
    """
    selected = getattr(model.config, "vision_feature_layer", None)
    if selected is None or getattr(model.get_submodule(module.tower), "config", None) is not getattr(
        model.config, "vision_config", None
    ):
        return None
    return min(index % (module.num_layers + 1) for index in ([selected] if isinstance(selected, int) else selected))


def _check_selected_layers(model: PreTrainedModel, module: ModuleSpec, plan: ParallelPlan) -> None:
    """Raises `ValueError` if the config selects a hidden state that the encoder's last stage does not see."""
    earliest = earliest_selected_layer(model, module)
    if earliest is None:
        return
    for replica in plan.modules[module.name].replicas:
        if earliest < replica[-1].layers[0]:
            raise ValueError(
                f"`vision_feature_layer={model.config.vision_feature_layer}` selects hidden state {earliest}, which "
                f"the last stage of `{module.name}` (layers {replica[-1].layers}) does not see. Use `pp_size=1` or "
                f"`layers_per_stage` that put layer {earliest} in the last stage."
            )
