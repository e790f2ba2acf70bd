"""
Pipeline stages, which run the model's own forward: masks, position ids and rotary embeddings come from its code.

Layers of other stages are identity layers. The received hidden state replaces the input of the stage's first layer,
and an exception leaves the forward at the entry of the layer after the last one, so that computations between two
layers belong to the stage of the first of them.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..kernels.bitfield_attention.hf import needing_words
from ..plan import LANGUAGE_MODEL, FeatureSpec, ModelSpec, ModuleSpec, ParameterSpec, stage_holds
from .adapter import adapter_names
from .carried_values import pack, place, unpack
from .expert_parallel import without_tokens
from .features import count_feature_tokens, flat_features, merge_output, required_arguments
from .lazy_logits import return_lazy_logits, source_of
from .loss import IGNORE_INDEX, num_target_tokens, token_loss
from .parallel_linear import hiding_weight
from .shared_tokens import TOKEN_GROUP, SharedTokens, own_part
from .spec import ModulePart, layers_of, module_parts
from .unowned import LayerInterceptor, StageExit, StageRun, is_unowned

# Forward of the language model with features that were computed elsewhere.


def _merges_outputs(model: PreTrainedModel, modality: str) -> bool:
    """
    Returns whether the model's forward merges the entry of `mm_encoder_outputs` for a modality.

    The argument does not say for which modalities it is read: Qwen2.5-Omni reads images and videos from it, and calls
    `get_audio_features` nevertheless. A forward that reads an entry has the modality as a string constant.
    `tests/modeling/test_stages.py` compares every family.
    """
    if "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
        return False
    forward = inspect.unwrap(type(model.base_model).forward)
    return hasattr(model, "multimodal_parts") or modality in forward.__code__.co_consts


@contextmanager
def inject_features(
    model: PreTrainedModel, parts: Mapping[str, ModulePart], outputs: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields keyword arguments with which the model's forward merges these encoder outputs."""
    direct = {modality: output for modality, output in outputs.items() if _merges_outputs(model, modality)}
    kwargs: dict[str, Any] = {"mm_encoder_outputs": direct} if direct else {}
    with ExitStack() as stack:
        # A forward that does not read a modality from `mm_encoder_outputs` (Voxtral, audio of Qwen2.5-Omni) calls the
        # model's feature method. That returns the output here, and an empty input tensor makes the forward call it.
        for part in parts.values():
            for modality in (outputs.keys() - direct.keys()) & part.features.keys():
                method = part.features[modality]
                stack.enter_context(_returning(method.__self__, method.__name__, outputs[modality]))
                kwargs[part.input_names(modality)[0]] = torch.empty(0, device=model.device)
        yield kwargs


@contextmanager
def _returning(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces a method of one object by one that returns `value`."""
    # hides the method in this object only, so that other models of the class keep theirs
    owner.__dict__[name] = lambda *args, **kwargs: value
    try:
        yield
    finally:
        del owner.__dict__[name]


# Dtypes of weights and of the hidden states between layers.


def activation_dtype(spec: ModelSpec, parameters: Iterable[ParameterSpec]) -> torch.dtype:
    """Returns the widest dtype of hidden states that layers with these parameters can output."""
    adapters = adapter_names(spec.parameters)
    # adapters output the dtype of the layer that they wrap
    dtypes = {getattr(torch, p.dtype) for p in parameters if p.name not in adapters}
    # weights of 8 bits and less are dequantized for computation
    candidates = [dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1]
    return functools.reduce(torch.promote_types, candidates) if candidates else torch.bfloat16


def hidden_dtype(spec: ModelSpec, module: str) -> torch.dtype:
    """Returns the widest dtype of the hidden states between the layers of a module."""
    layers = spec.modules[module]
    return activation_dtype(spec, [p for p in layers.parameters if p.layer < layers.num_layers])


def cast_values(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point parameters and buffers in place; unowned ones still use no memory."""

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if is_unowned(tensor):
            return torch.full((), torch.nan, dtype=dtype, device=tensor.device).expand(tensor.shape)
        return tensor.to(dtype)

    model._apply(cast)


def _nan_tokens(values: Tensor, attention_mask: Any) -> Tensor:
    """Returns which tokens of `[batch, sequence, ...]` have a NaN, padding apart if a mask tells it."""
    tokens = values.isnan().flatten(2).any(-1) if values.dim() > 2 else values.isnan()
    if isinstance(attention_mask, Tensor) and attention_mask.shape == tokens.shape:
        return tokens & (attention_mask != 0).to(tokens.device)
    return tokens


@dataclass(frozen=True)
class OwnLoss:
    """The loss of a model's own forward, and the loss that a plan sums for the same labels and logits; scalars."""

    mean: Tensor
    total: Tensor  # next-token loss summed over target tokens
    num_targets: Tensor  # target tokens
    of_batch: bool  # labels are the `labels` of the batch rather than its `shift_labels`


class ModuleStage:
    """Consecutive layers of one module, run by the model's own forward. Created by [`prepare_stages`]."""

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        module_name: str,
        layers: tuple[int, int],  # first layer, and one past the last layer
        parts: dict[str, ModulePart] | None = None,
    ):
        self.model = model
        self.spec = spec
        self.module_name = module_name
        self.layers = layers
        self.parts = module_parts(model) if parts is None else parts
        is_whole = self.is_first and self.is_last
        self._interceptor = None if is_whole else LayerInterceptor.of(layers_of(model, self.module_spec.stack))
        self._checked: set[frozenset[str]] = set()  # the names of the inputs of calls whose outputs were looked at
        self.row_shares = 1  # ranks among which the rows that it receives are divided
        self.shared_tokens = SharedTokens()
        # the next forward with logits and targets records the model's own loss
        self.asks_own_loss = False
        self.own_loss: OwnLoss | None = None
        # an encoder encodes one modality after the other: the present one, and whether it is the first
        self.modality: str | None = None
        self.is_first_run = True
        self._own_loss_labels: tuple[Tensor, bool] | None = None  # labels, and `OwnLoss.of_batch`
        head = model.get_output_embeddings()
        if module_name == LANGUAGE_MODEL and type(head) is nn.Linear and self.is_last:
            return_lazy_logits(head)

    @cached_property
    def _required_inputs(self) -> frozenset[str]:
        """Inputs of encoders that the model's forward has to be given, also if it is given their outputs."""
        names = {name for part in self.parts.values() for m in part.modalities for name in part.input_names(m)}
        return frozenset(names.intersection(required_arguments(self.model)))

    @property
    def module_spec(self) -> ModuleSpec:
        return self.spec.modules[self.module_name]

    @property
    def is_first(self) -> bool:
        return self.layers[0] == 0

    @property
    def is_last(self) -> bool:
        return self.layers[1] == self.module_spec.num_layers

    @cached_property
    def input_dtype(self) -> torch.dtype:
        """Dtype of the hidden states that are sent between the stages of this module."""
        return hidden_dtype(self.spec, self.module_name)

    def widen(self, dtype: torch.dtype) -> None:
        """Makes `input_dtype` also represent the values of `dtype`, to which the model was cast."""
        self.input_dtype = torch.promote_types(self.input_dtype, dtype)

    @property
    def own_layers(self) -> dict[int, nn.Module]:
        stack = layers_of(self.model, self.module_spec.stack)
        return {index: stack[index] for index in range(*self.layers)}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the name in the whole model and the tensor of each parameter that this stage uses."""
        owned = {name: p for name, p in self.model.named_parameters() if not is_unowned(p)}
        num_layers = self.module_spec.num_layers
        for name, used_at in self.spec.used_at.items():
            if name in owned and any(
                module == self.module_name and stage_holds(self.layers, num_layers, layer) for module, layer in used_at
            ):
                yield name, owned[name]

    def share_tokens(self) -> None:
        """Lets cp ranks share the tokens of batches with a `TOKEN_GROUP`. The forwards of layers are as they stay."""
        read = {-1, *self.module_spec.taps, self.module_spec.num_layers - 1}
        self.shared_tokens = SharedTokens(self.own_layers, read)

    def input_shapes(self, inputs: Mapping[str, Any]) -> list[torch.Size]:
        """Computes the shapes of the hidden states that the stage receives, without communication."""
        if self.is_first:
            return []
        if self.module_name == LANGUAGE_MODEL:
            batch, length = self._num_tokens(inputs)
            shares = [self.row_shares, *[1] * (self._num_received - 1)]  # ranks have all rows of taps
            return [torch.Size((batch, -(-length // own), *self.module_spec.token_shape)) for own in shares]
        first, group, shapes = self.layers[0], inputs.get(TOKEN_GROUP), []
        with torch.no_grad():
            for _, forward in self._runs(inputs):
                _, (arrived,) = self._intercepted(forward, StageRun(*self.layers, probe=True))
                layers = (first - 1, *self._taps_before(first))
                shapes += [self.shared_tokens.shape_behind(layer, arrived.shape, group) for layer in layers]
        return shapes

    def __call__(
        self,
        inputs: Mapping[str, Any],
        hidden: Sequence[Tensor] | None = None,  # of the previous stage, in `input_shapes`
        # For the language model: encoder -> features in the order of its spec, each `[feature tokens, hidden]` in the
        # order of the placeholder tokens of the batch; `None` for those that enter at other stages.
        features: Mapping[str, Sequence[Tensor | None]] | None = None,
        num_tokens: Mapping[str, int] | None = None,  # feature tokens by modality; counted in the batch if left out
    ) -> list[Tensor]:
        """
        Runs the stage on the batch entries of its module, which every stage needs. The last stage returns the logits
        `[batch, sequence, vocabulary]`, lazy ones if they are large, and the rows of each generator, the encoder's
        features `[feature tokens, hidden]`, or the generator's loss summed over targets; others the hidden states.
        Raises `ValueError` if features that enter at this stage are missing.
        """
        with self._sharing():
            if self.module_name == LANGUAGE_MODEL:
                return self._run_language_model(inputs, hidden or [], features or {}, num_tokens)
            rows = next((value for value in (features or {}).get(LANGUAGE_MODEL, ()) if value is not None), None)
            return self._run_encoder(inputs, hidden or [], rows)

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        """A forward, in which a model's code may fail for matrices of which this rank has a share."""
        try:
            with ExitStack() as stack:
                for layer in self._embeddings:
                    stack.enter_context(hiding_weight(layer, layer.forward.words))
                yield
        except (RuntimeError, TypeError) as error:
            is_shared = any(isinstance(parameter, DTensor) for _, parameter in self.parameters())
            if not is_shared or not re.search("shape|size of tensor|DTensor|broadcast", str(error)):
                raise
            raise ValueError(
                f"The code of `{type(self.model).__name__}` fails where ranks share the matrices of "
                f"`{self.module_name}` ({type(error).__name__}: {error}). Use `tp_size=1` for it."
            ) from error

    @cached_property
    def _embeddings(self) -> list[Any]:
        """Embeddings whose words ranks share, of which a model's code may read rows by itself."""
        return [layer for layer in self.model.modules() if hasattr(vars(layer).get("forward"), "words")]

    def num_targets(self, inputs: Mapping[str, Any]) -> int:
        """Counts what the loss of this generator, or of the language model, is summed over in a batch."""
        generator = self.parts[self.module_name].generator
        return num_target_tokens(inputs) if generator is None else generator.num_targets(inputs)

    def run_without_tokens(self, device: torch.device) -> Tensor:
        """Runs the layers without tokens of this rank, see [`without_tokens`], and returns their output `[0, D]`."""
        hidden = torch.zeros(0, self.module_spec.hidden_size, dtype=self.input_dtype, device=device)
        with self.without_tokens():
            for layer in self.own_layers.values():
                hidden = layer(hidden)
        return hidden

    def without_tokens(self) -> AbstractContextManager:
        """A block in which the layers of this stage have no tokens of this rank."""
        return without_tokens(self.own_layers.values())

    def present(self, inputs: Mapping[str, Any]) -> list[str]:
        """Lists the modalities of this encoder for which a batch has inputs."""
        part = self.parts[self.module_name]
        result = []
        for modality in part.modalities:
            value = inputs.get(part.input_names(modality)[0])
            if value is not None and len(value):
                result.append(modality)
        return result

    def _runs(
        self, inputs: Mapping[str, Any], rows: Tensor | None = None
    ) -> list[tuple[str | None, Callable[[], Any]]]:
        """
        Lists the runs through the layers of an encoder, each with its modality, or the one of a generator, which
        starts from the rows of the language model.
        """
        part = self.parts[self.module_name]
        if part.generator is None:
            runs: list[Any] = [(m, part.features[m], part.input_names(m)) for m in self.present(inputs)]
        else:
            loss = partial(part.generator.loss, self._blank_rows(inputs) if rows is None else rows)
            runs = [(None, loss, part.generator.entries)]
        return [
            (modality, partial(function, **{name: inputs[name] for name in names if inputs.get(name) is not None}))
            for modality, function, names in runs
        ]

    def _intercepted(self, forward: Callable[[], Any], run: StageRun) -> tuple[Any, list[Tensor]]:
        """
        Runs the layers of a range in a forward of the module. Returns its output if its last layer was run, else what
        leaves the layers: a hidden state, and those of taps.
        """
        if self._interceptor is None:
            return forward(), []
        with self._interceptor.running(run):
            try:
                output = forward()
            except StageExit as exit_:
                run.left = exit_.arguments
                return None, [exit_.hidden, *run.kept.values()]
        assert self.is_last and run.entered, f"{self.module_name} never reached layer {run.first} or {run.stop}"
        return output, []

    def _run_encoder(self, inputs: Mapping[str, Any], hidden: Sequence[Tensor], rows: Tensor | None) -> list[Tensor]:
        outputs: dict[Any, Any] = {}
        sent: list[Tensor] = []
        group = inputs.get(TOKEN_GROUP)
        for number, (modality, forward) in enumerate(self._runs(inputs, rows)):
            self.modality, self.is_first_run = modality, not number
            run = self._stage_run(hidden[number * self._num_received :])
            with self.shared_tokens.running(group, run):
                outputs[modality], states = self._intercepted(forward, run)
            sent += [self._to_wire_dtype(state, run.dtype) for state in states]
        if not self.is_last:
            return self._checked_once(sent, hidden, inputs)
        if self.parts[self.module_name].generator is not None:
            return [outputs[None]]
        features = [self._feature(spec, outputs, inputs) for spec in self.module_spec.features]
        if group is not None:
            features = [own_part(feature, group) for feature in features]
        return self._checked_once(features, hidden, inputs) if outputs else features

    def _blank_rows(self, inputs: Mapping[str, Any]) -> Tensor:
        """Rows that a later stage of a generator, which starts from hidden states, does not read."""
        count = sum(count_feature_tokens(inputs, self.spec.placeholders)[self.module_name])
        width, device = self.spec.language_model.hidden_size, inputs["input_ids"].device
        return torch.zeros(count, width, dtype=self.input_dtype, device=device)

    def _stage_run(self, states: Sequence[Tensor]) -> StageRun:
        """A forward of this stage with the first of some hidden states, which it receives for a modality."""
        first, stop = self.layers
        # of the layer before, and those of taps in the order of their layers
        layers = [first - 1, *self._taps_before(first)][: self._num_received]
        received = dict(zip(layers, states, strict=False))
        received = {layer: state.movedim(self._wire_axes, self._model_axes) for layer, state in received.items()}
        values = unpack(self.module_spec.carried_before(first), states[len(layers) : self._num_received])
        taps = () if self.is_last else self._taps_before(stop)
        return StageRun(first, stop, received, partial(place, values), taps)

    def _taps_before(self, layer: int) -> tuple[int, ...]:
        """The taps whose states pass the border before a layer beside that of the layer before."""
        return tuple(tap for tap in self.module_spec.taps if tap < layer - 1)

    @property
    def _num_received(self) -> int:
        return 0 if self.is_first else self.module_spec.states_before(self.layers[0])

    def _checked_once(
        self, outputs: list[Tensor], hidden: Sequence[Tensor], inputs: Mapping[str, Any]
    ) -> list[Tensor]:
        """Returns the outputs; in the first call with each kind of inputs it refuses NaN, as of unowned parameters."""
        kind = frozenset(inputs)
        if self._interceptor is None or kind in self._checked:
            return outputs
        self._checked.add(kind)
        values = [source_of(output) for output in outputs]
        if self.module_name == LANGUAGE_MODEL:
            mask = inputs.get("attention_mask")
            wrong = any(bool(rows.any()) for rows in map(_nan_tokens, values, [mask] * len(values)))
            wrong = wrong and not any(bool(_nan_tokens(t, mask).any()) for t in hidden)
        elif hidden:
            wrong = any(t.isnan().any() for t in values) and not any(t.isnan().any() for t in hidden)
        else:
            # an encoder itself may output NaN for padding
            wrong = any(t.isnan().all() for t in values if t.numel())
        if wrong:
            raise ValueError(
                f"The output of layers {self.layers} of `{self.module_name}` depends on parameters of other stages, "
                f"for example a hidden state selected by index or a norm registered before the layers. Use "
                f"`pp_size=1` or, for a hidden state, `layers_per_stage` with a longer last stage."
            )
        return outputs

    @property
    def _model_axes(self) -> tuple[int, ...]:
        """Axes that the model's hidden states have before those of samples and tokens."""
        return tuple(range(self.module_spec.leading_axes))

    @property
    def _wire_axes(self) -> tuple[int, ...]:
        return tuple(2 + axis for axis in self._model_axes)

    def _num_tokens(self, inputs: Mapping[str, Any]) -> tuple[int, int]:
        """Rows of a batch of the language model, and tokens in each."""
        batch, length = (inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]).shape[:2]
        return batch, length

    def _check_shape(self, hidden: Tensor, inputs: Mapping[str, Any]) -> None:
        tokens = self._num_tokens(inputs)
        found, expected = tuple(hidden.shape), (*tokens, *self.module_spec.token_shape)
        shares_rows = self.module_spec.sequence_parallel and found[1] <= expected[1]
        if found != expected and not (shares_rows and found[::2] == expected[::2]):
            raise ValueError(
                f"The hidden states between the layers of `{self.module_name}` have the shape {found} for "
                f"{tokens} tokens, but the next stage expects {expected}. Use `pp_size=1` for it, with "
                "`dp_size` or `tp_size` above 1 for more ranks."
            )

    def _to_wire_dtype(self, hidden: Tensor, entry_dtype: torch.dtype | None) -> Tensor:
        """Casts a hidden state to the dtype in which it is sent, which must represent it exactly."""
        if torch.promote_types(hidden.dtype, self.input_dtype) != self.input_dtype:
            raise ValueError(
                f"The hidden states between the layers of `{self.module_name}` are {hidden.dtype}, which does not fit "
                f"in the {self.input_dtype} of its weights. Use `pp_size=1` for it."
            )
        # the next stage casts it to the dtype before the first layer, which is the same on every rank
        if hidden.dtype != entry_dtype:
            raise ValueError(
                f"The hidden states of `{self.module_name}` are {entry_dtype} before its layers and {hidden.dtype} "
                f"between them, so that the next stage would cast them. Give its embeddings and norms one dtype, or "
                f"use `pp_size=1` for it."
            )
        return hidden.to(self.input_dtype)

    def _feature(self, spec: FeatureSpec, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> Tensor:
        """Returns one feature tensor, empty if its modality is absent."""
        if spec.modality in outputs:
            value = getattr(outputs[spec.modality], spec.field, None)
            features = None if value is None else flat_features(value if spec.index is None else value[spec.index])
            width = self.spec.language_model.hidden_size
            if features is None or features.shape[-1] != width:
                found = "has none" if features is None else f"has some of width {features.shape[-1]}"
                raise ValueError(
                    f"The output of `get_{spec.modality}_features` has to have features `{spec.field}` of width "
                    f"{width}, that of the hidden states of the language model, but that of "
                    f"`{type(self.model).__name__}` {found}. Train it without `parallel`."
                )
            return features
        device = next((v.device for v in inputs.values() if isinstance(v, Tensor)), self.model.device)
        return torch.zeros(0, self.spec.language_model.hidden_size, dtype=self.input_dtype, device=device)

    def _run_language_model(
        self,
        inputs: Mapping[str, Any],
        hidden: Sequence[Tensor],
        features: Mapping[str, Sequence[Tensor | None]],
        num_tokens: Mapping[str, int] | None,
    ) -> list[Tensor]:
        kwargs = self._text_inputs(inputs)
        outputs = self._merge_outputs(inputs, features, num_tokens)
        run = self._stage_run(hidden)
        words = needing_words(kwargs.get("attention_words"))
        with words, self._merging(outputs, run), inject_features(self.model, self.parts, outputs) as feature_kwargs:
            output, states = self._intercepted(partial(self.model, **kwargs | feature_kwargs), run)
        states = [state.movedim(self._model_axes, self._wire_axes) for state in states]
        for state in states:
            self._check_shape(state, inputs)
        sent = [self._to_wire_dtype(state, run.dtype) for state in states]
        if not self.is_last:
            sent += pack(self.module_spec, run.stop, run.left, self._num_tokens(inputs), self.input_dtype)
        return self._checked_once(sent or self._last_outputs(output), hidden, inputs)

    def _last_outputs(self, output: Any) -> list[Tensor]:
        rows = [output.rows[feature.modality] for feature in self.module_spec.features]
        return [self._logits(output), *rows]

    @contextmanager
    def _merging(self, outputs: Mapping[str, Any], run: StageRun) -> Iterator[None]:
        """A forward, whose errors before the layers are those of a model that expects features of another form."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            if isinstance(error, ValueError) or not outputs or run.dtype is not None:
                raise
            raise ValueError(
                f"`{type(self.model).__name__}` can't merge the features of {', '.join(outputs)}, which a plan passes "
                f"to it as `[feature tokens, hidden]` without their encoder's other outputs ({type(error).__name__}: "
                f"{error}). Train it without `parallel`."
            ) from error

    def _logits(self, output: Any) -> Tensor:
        if self._own_loss_labels is not None:
            labels, of_batch = self._own_loss_labels
            self.asks_own_loss, self._own_loss_labels = False, None
            loss = getattr(output, "loss", None)
            if loss is not None:
                with torch.no_grad():
                    self.own_loss = OwnLoss(loss.detach(), *token_loss(self.model, output.logits, labels), of_batch)
        return output.logits

    def _text_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """
        Drops what only encoders and generators read (pixels, audio, codes), and labels unless the model's own loss is
        wanted.
        """
        generators = {name for part in self.parts.values() if part.generator is not None for name in part.entries}
        encoders = {name for part in self.parts.values() for name in part.entries} - generators
        kwargs: dict[str, Any] = dict.fromkeys(self._required_inputs)
        if self.module_spec.features and self.is_last:
            kwargs["output_rows"] = True
        for name, value in inputs.items():
            is_media = name in encoders and isinstance(value, Tensor) and value.is_floating_point()
            if name not in ("labels", "shift_labels", *generators) and not is_media:
                kwargs[name] = value
        labels = inputs.get("labels", inputs.get("shift_labels"))  # either works for comparing two losses
        if self.asks_own_loss and labels is not None and (labels[..., 1:] != IGNORE_INDEX).any():
            kwargs["labels"] = labels
            self._own_loss_labels = labels, "shift_labels" not in inputs
        if "output_router_logits" in inspect.signature(self.model.forward).parameters:
            kwargs["output_router_logits"] = False  # of this stage alone, see `RouterLoss`
        return {**kwargs, "use_cache": False, "return_dict": True}

    def _merge_outputs(
        self,
        inputs: Mapping[str, Any],
        features: Mapping[str, Sequence[Tensor | None]],
        num_tokens: Mapping[str, int] | None,
    ) -> dict[str, Any]:
        """Maps modalities to encoder outputs with the received features, NaN for those that enter at other stages."""
        if not self.spec.placeholders:
            return {}
        if num_tokens is None:
            counts = count_feature_tokens(inputs, self.spec.placeholders)
            num_tokens = {modality: sum(of_samples) for modality, of_samples in counts.items()}
        device, width = inputs["input_ids"].device, self.module_spec.hidden_size
        missing = torch.full((), torch.nan, dtype=self.input_dtype, device=device)
        gathered: dict[str, list[tuple[FeatureSpec, Tensor]]] = {}
        for name in self.spec.encoders:
            specs = self.spec.modules[name].features
            for spec, value in zip(specs, features.get(name) or [None] * len(specs), strict=True):
                is_required = self.parts[name].input_names(spec.modality)[0] in self._required_inputs
                if not num_tokens[spec.modality] and not is_required:
                    continue
                if value is None:
                    if num_tokens[spec.modality] and self.layers[0] <= spec.layer < self.layers[1]:
                        raise ValueError(
                            f"The batch has {num_tokens[spec.modality]} `{spec.modality}` tokens, but no "
                            f"`{spec.field}` of `{name}` for layer {spec.layer}, which is in this stage "
                            f"{self.layers}. Pass it in `features`."
                        )
                    value = missing.expand(num_tokens[spec.modality], width)
                gathered.setdefault(spec.modality, []).append((spec, value))
        return {modality: merge_output(pairs) for modality, pairs in gathered.items()}
