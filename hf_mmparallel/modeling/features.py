"""What enters an encoder, and the features that it passes to the language model: description, counts and merging."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..kernels.bitfield_attention import decode_words
from ..plan import FeatureSpec
from .expert_parallel import experts_of
from .unowned import Elsewhere

# Arguments of an encoder's forward, derived from its signature and its config.


def meta_inputs(encoder: PreTrainedModel) -> dict[str, Any] | None:
    """Makes inputs of one sample on the meta device; `None` if signature and config do not determine them."""
    arguments = forward_arguments(encoder)
    config, main = encoder.config, arguments[0]
    number = partial(number_in_config, config)
    channels = number("num_channels", "in_channels", "in_chans") or 3
    if "input_ids" in arguments:
        # a forward reads the values of a mask, or of position ids where it has none
        masks = {"attention_mask": torch.ones(1, 4, dtype=torch.int64, device="cpu")}
        given = masks if "attention_mask" in arguments else {}
        return {"input_ids": torch.zeros(1, 4, dtype=torch.int64, device="meta"), "use_cache": False, **given}
    shape: tuple[int, ...] | None = None
    rest: dict[str, Any] = {}
    if "grid_thw" in arguments:
        side, patch = (
            2 * (number("spatial_merge_size") or 1),
            number("patch_size") or 0,
        )
        shape = (side * side, channels * (number("temporal_patch_size") or 1) * patch**2)
        rest["grid_thw"] = torch.tensor([[1, side, side]], device="cpu")  # a forward reads its values
    elif main == "pixel_values" and "spatial_shapes" not in arguments:
        size = getattr(config, "image_size", None) or 224
        sides = (size, size) if isinstance(size, int) else tuple(size)
        shape = (1, channels, *sides)
        if "image_sizes" in arguments:
            rest["image_sizes"] = torch.tensor([sides], device="cpu")
    elif main == "input_features" and number("num_mel_bins") and number("max_source_positions"):
        shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
    elif main == "hidden_states" and number("input_size"):
        shape = (1, 64, config.input_size)
    if shape is None:
        return None
    required = dict.fromkeys(name for name in required_arguments(encoder) if name != main)
    return {**required, main: torch.empty(shape, dtype=encoder.dtype, device="meta"), **rest}


def number_in_config(config: Any, *names: str) -> int | None:
    """Returns the first integer among some entries of a config."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def required_arguments(encoder: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(encoder.forward).parameters.items()
    return [name for name, p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]


def forward_arguments(encoder: nn.Module) -> list[str]:
    """Lists the arguments of an encoder's forward, its main input first."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    skipped = ("output_attentions", "output_hidden_states", "return_dict")
    parameters = inspect.signature(encoder.forward).parameters
    arguments = [name for name, p in parameters.items() if p.kind in kinds and name not in skipped]
    main = getattr(encoder, "main_input_name", None)
    return sorted(arguments, key=lambda argument: argument != main)


# Forward on the meta device, which computes shapes only, of a module on any device.


class _PromoteToMeta(TorchFunctionMode):
    """Moves all tensor arguments of an operation to the meta device if one of them is there."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        arguments = (args, kwargs or {})
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(arguments)):
            # such as position ids that a forward creates on the CPU
            arguments = tree_map_only(Tensor, lambda t: t if t.is_meta else t.to("meta"), arguments)
        return func(*arguments[0], **arguments[1])


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Removes hooks and tensors that a forward adds."""
    # With `output_hidden_states` transformers hooks the layers in the first forward only, so that identity layers
    # which replace them later would not be recorded.
    flag = "_output_capturing_hooks_installed"
    before = [(part, set(part._forward_hooks), flag in part.__dict__) for part in module.modules()]
    kept = [(vars(part), dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for part, hooks, was_hooked in before:
            for added in part._forward_hooks.keys() - hooks:
                del part._forward_hooks[added]
            if not was_hooked:
                part.__dict__.pop(flag, None)
        for own, old in kept:  # such as the last state of a recurrent layer
            for name in [
                name for name, value in own.items() if isinstance(value, Tensor) and value is not old.get(name)
            ]:
                own.pop(name)
                own.update({name: old[name]} if name in old else {})


@contextmanager
def _needing_no_values(module: nn.Module) -> Iterator[None]:
    """A forward whose attention and experts only have shapes: others read values, or need a device or a dtype."""
    changes: list[tuple[dict[str, Any], str, Any]] = [
        (vars(experts), "forward", lambda rows, *_: rows) for experts in experts_of(module).values()
    ]
    if hasattr(module, "config"):
        changes.append((vars(module.config), "_attn_implementation_internal", "eager"))
    before = [{name: owner[name]} if name in owner else {} for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            owner[name] = value
        yield
    finally:
        for (owner, name, _), kept in zip(changes, before, strict=True):
            owner.pop(name)
            owner.update(kept)


def meta_forward(module: nn.Module, tracks_weights: bool = False, /, **inputs: Any) -> Any:
    """
    Returns the output of a module, which is not changed, with its weights on the meta device; `None` if its forward
    needs values of tensors there. Inputs are on the meta device, or on the CPU if the forward reads their values. With
    `tracks_weights` what depends on a weight, trained or not, requires a gradient.
    """
    tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in module.named_buffers()}
    for name, parameter in module.named_parameters():
        own = torch.empty_like(parameter, device="meta", requires_grad=False)
        tensors[name] = own.requires_grad_(tracks_weights and own.is_floating_point())
    with (
        _restored(module),
        _needing_no_values(module),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        _PromoteToMeta(),
        torch.set_grad_enabled(tracks_weights),
    ):
        warnings.simplefilter("ignore")
        try:
            return functional_call(module, tensors, kwargs=inputs)
        except Exception:  # any error is possible with tensors without values
            return None


def feature_specs(modalities: Sequence[str], config: Any) -> tuple[FeatureSpec, ...]:
    """Lists the feature tensors of an encoder with this config: one per modality, and one per DeepStack level."""
    levels = len(getattr(config, "deepstack_visual_indexes", None) or ()) if modalities else 0
    result = []
    for modality in modalities:
        result.append(FeatureSpec(modality))
        result += [FeatureSpec(modality, "deepstack_features", level, level) for level in range(levels)]
    return tuple(result)


def _sample_numbers(inputs: Mapping[str, Any]) -> tuple[Tensor, int]:
    """
    The sample of each token `[rows, length]`, -1 for padding between packed ones, and the number of samples. A sample
    is a row of `input_ids` `[batch, sequence]` or, if the batch has `attention_words` of the same shape, a segment.
    """
    ids, words = inputs["input_ids"], inputs.get("attention_words")
    if not isinstance(words, Tensor):
        rows = ids.reshape(-1, ids.shape[-1])
        return torch.arange(len(rows), device=ids.device)[:, None].expand_as(rows), len(rows)
    segments = decode_words(words).segment
    counts = segments.amax(dim=-1)
    numbers = segments - 1 + (counts.cumsum(0) - counts)[:, None]
    return numbers.masked_fill(segments == 0, -1), int(counts.sum())


def count_feature_tokens(inputs: Mapping[str, Any], placeholders: Mapping[str, int]) -> dict[str, list[int]]:
    """Modality -> placeholder tokens, which features are as many as, of each sample in order."""
    samples, num_samples = _sample_numbers(inputs)
    ids = inputs["input_ids"].reshape(samples.shape)
    return {
        modality: samples[(ids == token) & (samples >= 0)].bincount(minlength=num_samples).tolist()
        for modality, token in placeholders.items()
    }


def feature_runs(inputs: Mapping[str, Any], token: int) -> list[int]:
    """The lengths of the runs of a placeholder token in the samples of a batch, in order."""
    samples, _ = _sample_numbers(inputs)
    wanted = (inputs["input_ids"].reshape(samples.shape) == token) & (samples >= 0)
    places, owners = wanted.flatten().nonzero()[:, 0], samples[wanted]
    starts = torch.ones_like(places, dtype=torch.bool)
    starts[1:] = (places.diff() != 1) | (owners.diff() != 0)
    return starts.cumsum(0).bincount()[1:].tolist()


def flat_features(value: Any) -> Tensor:
    """Concatenates an encoder's features, a tensor or a sequence of them, to `[feature tokens, hidden]`."""
    if isinstance(value, Tensor):
        return value.reshape(-1, value.shape[-1])
    return torch.cat([flat_features(item) for item in value])


class FeatureList(list):
    """A list of a flat tensor of features that has the tensor's attributes, which any model can merge."""

    def __init__(self, features: Tensor):
        # some models concatenate a list with one tensor per image, others expect one tensor
        super().__init__([features])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self[0], name)


class MergedOutput(BaseModelOutputWithPooling):
    """An encoder's output with the features that a plan sends to the language model."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # models hand on what they do not use
        return Elsewhere(
            f"The model reads `{name}` of an encoder's output, but a plan sends only the features of placeholders to "
            "the language model. Train it without `parallel`."
        )


def merge_output(features: Sequence[tuple[FeatureSpec, Tensor]]) -> BaseModelOutputWithPooling:
    """Makes the encoder output that a model's forward merges of the flat features of one modality."""
    output = MergedOutput()
    for feature, tensor in features:
        if feature.index is None:
            for name in ("last_hidden_state", feature.field):  # some models merge the former
                setattr(output, name, FeatureList(tensor))
        else:
            levels = vars(output).get(feature.field) or []
            setattr(output, feature.field, [*levels, FeatureList(tensor)])
    return output
