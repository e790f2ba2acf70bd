"""
Pipeline stages, which run the model's own forward: masks, position ids and rotary embeddings come from its code.

Layers of other stages are identity layers. The received hidden state replaces the input of the stage's first layer,
and an exception leaves the forward at the entry of the layer after the last one, so that computations between two
layers belong to the stage of the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..plan import LANGUAGE_MODEL, FeatureSpec, ModelSpec, ModuleSpec, stage_holds
from .dtypes import hidden_dtype
from .feature_injection import inject_features
from .features import count_feature_tokens, flat_features, merge_output
from .layer_interceptor import LayerInterceptor, StageExit, StageRun
from .loss import IGNORE_INDEX, token_loss
from .spec import ModulePart, layers_of, module_parts
from .unowned import is_unowned


@dataclass(frozen=True)
class OwnLoss:
    """The loss of a model's own forward, and the loss that a plan sums for the same labels and logits; scalars."""

    mean: Tensor
    total: Tensor  # next-token loss summed over target tokens
    num_targets: Tensor  # target tokens
    of_batch: bool  # labels are the `labels` of the batch rather than its `shift_labels`


@dataclass(frozen=True)
class _Encoded:
    """The result of an encoder's layers for one modality."""

    output: Any = None  # if its last layer was run
    hidden: Tensor | None = None  # otherwise what leaves the layers


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
        self._checked = False
        # the next forward with logits and targets records the model's own loss
        self.asks_own_loss = False
        self.own_loss: OwnLoss | None = None
        # an encoder encodes one modality after the other: the present one, and whether it is the first
        self.modality: str | None = None
        self.is_first_run = True
        self._own_loss_labels: tuple[Tensor, bool] | None = None  # labels, and `OwnLoss.of_batch`

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
        """Maps the index in the module of each layer of this stage to the layer."""
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

    def input_shapes(self, inputs: Mapping[str, Any]) -> list[torch.Size]:
        """Computes the shapes of the hidden states that the stage receives, without communication."""
        if self.is_first:
            return []
        if self.module_name == LANGUAGE_MODEL:
            batch, length = (inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]).shape[:2]
            return [torch.Size((batch, length, self.module_spec.hidden_size))]
        shapes = []
        with torch.no_grad():
            for modality in self.present(inputs):  # one each for an encoder
                encoded = self._encode(modality, inputs, StageRun(*self.layers, probe=True))
                assert encoded.hidden is not None
                shapes.append(encoded.hidden.shape)
        return shapes

    def __call__(
        self,
        inputs: Mapping[str, Any],
        hidden: Sequence[Tensor] | None = None,  # of the previous stage, in `input_shapes`
        # For the language model: encoder -> features in the order of its spec, each `[feature tokens, hidden]` in the
        # order of the placeholder tokens of the batch; `None` for those that enter at other stages.
        features: Mapping[str, Sequence[Tensor | None]] | None = None,
    ) -> list[Tensor]:
        """
        Runs the stage on the batch entries of its module, which every stage needs. The last stage returns the logits
        `[batch, sequence, vocabulary]` or the encoder's features `[feature tokens, hidden]`, others the hidden states.
        Raises `ValueError` if features that enter at this stage are missing.
        """
        if self.module_name == LANGUAGE_MODEL:
            return self._run_language_model(inputs, hidden, features or {})
        return self._run_encoder(inputs, hidden or [])

    def present(self, inputs: Mapping[str, Any]) -> list[str]:
        """Lists the modalities of this encoder for which a batch has inputs."""
        part = self.parts[self.module_name]
        result = []
        for modality in part.modalities:
            value = inputs.get(part.input_names(modality)[0])
            if value is not None and len(value):
                result.append(modality)
        return result

    def _encode(self, modality: str, inputs: Mapping[str, Any], run: StageRun) -> _Encoded:
        """Runs the layers of a range on one modality of a batch."""
        part = self.parts[self.module_name]
        names = part.input_names(modality)
        kwargs = {name: inputs[name] for name in names if inputs.get(name) is not None}
        if self._interceptor is None:
            return _Encoded(output=part.features[modality](**kwargs))
        with self._interceptor.running(run):
            try:
                output = part.features[modality](**kwargs)
            except StageExit as exit_:
                return _Encoded(hidden=exit_.hidden)
        assert run.entered or self.is_first, f"{self.module_name} never reached layer {run.first}"
        return _Encoded(output=output)

    def _run_encoder(self, inputs: Mapping[str, Any], hidden: Sequence[Tensor]) -> list[Tensor]:
        outputs: dict[str, Any] = {}
        sent: list[Tensor] = []
        for number, modality in enumerate(self.present(inputs)):
            self.modality, self.is_first_run = modality, not number
            received = None if self.is_first else hidden[number]
            run = StageRun(*self.layers, hidden=received)
            encoded = self._encode(modality, inputs, run)
            if encoded.hidden is None:
                outputs[modality] = encoded.output
            else:
                sent.append(self._to_wire_dtype(encoded.hidden, run.dtype))
        if not self.is_last:
            return self._checked_once(sent, hidden)
        features = [self._feature(spec, outputs, inputs) for spec in self.module_spec.features]
        return self._checked_once(features, hidden) if outputs else features

    def _checked_once(self, outputs: list[Tensor], hidden: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs; in the first call it refuses NaN, the value of unowned parameters."""
        if self._interceptor is None or self._checked:
            return outputs
        self._checked = True
        if hidden:
            wrong = any(t.isnan().any() for t in outputs) and not any(t.isnan().any() for t in hidden)
        else:
            # the model itself may produce NaN at single positions, such as padding
            wrong = any(t.isnan().all() for t in outputs if t.numel())
        if wrong:
            raise ValueError(
                f"The output of layers {self.layers} of `{self.module_name}` depends on parameters of other stages, "
                f"for example a hidden state selected by index or a norm registered before the layers. Use "
                f"`pp_size=1` or, for a hidden state, `layers_per_stage` with a longer last stage."
            )
        return outputs

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
            value = getattr(outputs[spec.modality], spec.field)
            return flat_features(value if spec.index is None else value[spec.index])
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
        run = StageRun(*self.layers, hidden=None if self.is_first or not hidden else hidden[0])
        with inject_features(self.model, self.parts, outputs) as feature_kwargs:
            if self._interceptor is None:
                return [self._logits(self.model(**kwargs, **feature_kwargs))]
            with self._interceptor.running(run):
                try:
                    output = self.model(**kwargs, **feature_kwargs)
                except StageExit as exit_:
                    return self._checked_once([self._to_wire_dtype(exit_.hidden, run.dtype)], hidden or [])
        assert run.entered and self.is_last, f"the forward never reached layer {run.stop}"
        return self._checked_once([self._logits(output)], hidden or [])

    def _logits(self, output: Any) -> Tensor:
        """Returns the logits of a forward; records the model's own loss if it was computed."""
        if self._own_loss_labels is not None:
            labels, of_batch = self._own_loss_labels
            self.asks_own_loss, self._own_loss_labels = False, None
            loss = getattr(output, "loss", None)
            if loss is not None:
                with torch.no_grad():
                    self.own_loss = OwnLoss(loss.detach(), *token_loss(self.model, output.logits, labels), of_batch)
        return output.logits

    def _text_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Drops what only encoders read (pixels, audio), and labels unless the model's own loss is wanted."""
        encoder_inputs = {
            name for part in self.parts.values() for modality in part.modalities for name in part.input_names(modality)
        }
        kwargs = {}
        for name, value in inputs.items():
            is_media = name in encoder_inputs and isinstance(value, Tensor) and value.is_floating_point()
            if name not in ("labels", "shift_labels") and not is_media:
                kwargs[name] = value
        labels = inputs.get("labels", inputs.get("shift_labels"))  # either works for comparing two losses
        if self.asks_own_loss and labels is not None and (labels[..., 1:] != IGNORE_INDEX).any():
            kwargs["labels"] = labels
            self._own_loss_labels = labels, "shift_labels" not in inputs
        return {**kwargs, "use_cache": False, "return_dict": True}

    def _merge_outputs(
        self, inputs: Mapping[str, Any], features: Mapping[str, Sequence[Tensor | None]]
    ) -> dict[str, Any]:
        """Maps modalities to encoder outputs with the received features, NaN for those that enter at other stages."""
        if not self.spec.placeholders:
            return {}
        num_tokens = {modality: sum(counts) for modality, counts in count_feature_tokens(inputs, self.spec).items()}
        device, width = inputs["input_ids"].device, self.module_spec.hidden_size
        missing = torch.full((), torch.nan, dtype=self.input_dtype, device=device)
        gathered: dict[str, list[tuple[FeatureSpec, Tensor]]] = {}
        for name in self.spec.encoders:
            specs = self.spec.modules[name].features
            for spec, value in zip(specs, features.get(name) or [None] * len(specs), strict=True):
                if not num_tokens[spec.modality]:
                    continue
                if value is None:
                    if self.layers[0] <= spec.layer < self.layers[1]:
                        raise ValueError(
                            f"The batch has {num_tokens[spec.modality]} `{spec.modality}` tokens, but no "
                            f"`{spec.field}` of `{name}` for layer {spec.layer}, which is in this stage "
                            f"{self.layers}. Pass it in `features`."
                        )
                    value = missing.expand(num_tokens[spec.modality], width)
                gathered.setdefault(spec.modality, []).append((spec, value))
        return {modality: merge_output(pairs) for modality, pairs in gathered.items()}
