"""Pruning of a model to the stages of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from ..kernels.varlen_attention import attends_as_here
from ..plan import LANGUAGE_MODEL, ModelSpec, ParallelPlan, parameter_shards
from ..plan.checkpointing import SELECTIVE, Checkpointing
from .float8 import use_float8
from .spec import inside, layers_of, module_parts
from .stages import ModuleStage
from .state_heads import share_state_heads
from .streamed_layers import OffloadedActivations
from .unowned import drop_unowned_parameters, identity_layer, is_unowned

# Activation checkpointing, per tower.

# Operations, by their names in torch, whose outputs are kept where layers are recomputed selectively: products of
# linear layers and of experts, summed over ranks, and attention that has no scores; no products of eager attention.
KEPT_OPERATIONS = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::_grouped_mm", "hf_mmparallel::summed_product"),
        *("hf_mmparallel::bitfield_attention", "torch_attn::_varlen_attn", "flex_attention"),
        *(f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        *(f"flash_attn::_flash_attn_{kind}forward" for kind in ("", "varlen_")),
    }
)


def _keeps(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether the output of an operation is kept."""
    is_kept = operation.name() in KEPT_OPERATIONS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class Recomputation:
    every_n_layers: int = 1  # only layers whose index is divisible by it are recomputed
    offload: bool = False  # of modules that do not say it: keeps the saved inputs of layers in host memory
    # further arguments of `torch.utils.checkpoint.checkpoint`
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_arguments(cls, values: Mapping[str, Any]) -> Recomputation:
        """Reads the Trainer's `activation_checkpointing_kwargs`."""
        options = dict(values)
        return cls(options.pop("every_n_layers", 1), options.pop("offload", False), options)

    @property
    def is_selective(self) -> bool:
        return "context_fn" in self.options

    def of(self, checkpointing: Checkpointing) -> Recomputation:
        if checkpointing != SELECTIVE:
            return self
        contexts = partial(create_selective_checkpoint_contexts, _keeps)
        return replace(self, options={**self.options, "context_fn": contexts})

    @property
    def as_arguments(self) -> dict[str, Any]:
        options = {"use_reentrant": False, **self.options}
        return {
            "activation_checkpointing_kwargs": options,
            "every_n_layers": self.every_n_layers,
            "offload": self.offload,
        }

    @property
    def function(self) -> Callable:
        options = {"use_reentrant": False, **self.options}
        return lambda run, *args, **kwargs: checkpoint(attends_as_here(run), *args, **options, **kwargs)


def inputs_require_gradients(model: nn.Module) -> bool:
    """Returns whether gradients flow through frozen layers too, see `PreTrainedModel.enable_input_require_grads`."""
    return any(getattr(module, "_require_grads_hook", None) is not None for module in model.modules())


def enable_checkpointing(model: nn.Module, tower: str, stack: str, recomputation: Recomputation | None = None) -> None:
    """Enables activation checkpointing of the layers `stack` of one tower, but for identity layers."""
    recomputation = recomputation or Recomputation()
    is_supported = False
    for name, module in model.named_modules():
        if not inside(name, tower) or not hasattr(module, "gradient_checkpointing"):
            continue
        if getattr(module, "is_identity_layer", False):
            continue
        is_supported = is_supported or inside(name, stack)
        index = name.removeprefix(f"{stack}.")
        enabled = not index.isdigit() or int(index) % recomputation.every_n_layers == 0
        module.__dict__.update(gradient_checkpointing=enabled, _gradient_checkpointing_func=recomputation.function)
        if enabled and recomputation.is_selective and inside(name, stack):
            for part in (part for part in module.modules() if isinstance(part, nn.Linear)):
                part.__dict__["keeps_output"] = True
    if not is_supported:
        raise ValueError(
            f"`activation_checkpointing=True`: the layers of `{stack}` do not support `gradient_checkpointing`. "
            f"Leave it out for this module."
        )


def prepare_stages(
    model: PreTrainedModel,
    spec: ModelSpec,
    plan: ParallelPlan,
    rank: int,
    device: torch.device | str | None = None,  # of unowned parameters; by default as each was, `"cpu"` for `meta`
    recomputation: Recomputation | None = None,  # of modules with activation checkpointing
) -> dict[tuple[str, int, int], ModuleStage]:
    """
    Prunes the whole model in place to the parameters that one rank owns, and returns its stages by (module, replica,
    stage). Layers of other ranks become identity layers; other unowned parameters keep name and shape without memory
    (see [`is_unowned`]). Raises `ValueError` if a module can't be split as planned.
    """
    parts = module_parts(model)
    _check_read_layers(spec, plan)
    owned = {
        (name, replica, index): stage
        for name, module in plan.modules.items()
        for replica, index, stage in module.stages()
        if rank in stage.all_ranks
    }
    shards = parameter_shards(spec, plan)
    drop_unowned_parameters(model, lambda name: name in shards and bool(shards[name].on_rank(rank)), device)
    for name, module in spec.modules.items():
        keep = {layer for (owner, _, _), stage in owned.items() if owner == name for layer in range(*stage.layers)}
        layers = layers_of(model, module.stack)
        shared = {id(parameter) for index in keep for parameter in layers[index].parameters()}
        for index in range(len(layers)):
            if index not in keep:
                layers[index] = identity_layer(layers[index], shared)
        if keep and any(feature.index is not None for feature in module.features):
            _pass_unowned_parts(model.get_submodule(module.tower), layers)
        recipe = plan.modules[name].storage.float8
        if keep and recipe is not None:
            use_float8(layers, recipe)
        if keep and plan.modules[name].activation_checkpointing:
            own = (recomputation or Recomputation()).of(plan.modules[name].activation_checkpointing)
            enable_checkpointing(model, module.tower, module.stack, own)
    if plan.modules[LANGUAGE_MODEL].cp_size > 1:
        share_state_heads(model, layers_of(model, spec.language_model.stack), spec.language_model.state_widths)
    for (name, _, _), stage in owned.items():
        if plan.modules[name].storage.offload_activations:
            layers = layers_of(model, spec.modules[name].stack)
            OffloadedActivations({index: layers[index] for index in range(*stage.layers)})
    return {key: ModuleStage(model, spec, key[0], stage.layers, parts) for key, stage in owned.items()}


def _pass_unowned_parts(tower: nn.Module, layers: nn.ModuleList) -> None:
    """Lets what a tower computes of the outputs of inner layers do nothing on ranks that don't have its parameters."""
    for parts in tower.modules():
        if isinstance(parts, nn.ModuleList) and parts is not layers:
            for index, part in enumerate(parts):
                parameters = list(part.parameters())  # an activation function has none, and is every rank's
                if parameters and all(map(is_unowned, parameters)):
                    parts[index] = identity_layer(part)


def _check_read_layers(spec: ModelSpec, plan: ParallelPlan) -> None:
    for module, planned in plan.modules.items():
        last = spec.modules[module].num_layers - spec.modules[module].num_unread
        for first, end in (replica[-1].layers for replica in planned.replicas):
            if first > last:
                raise ValueError(
                    f"`{module}_feature_layer` selects hidden state {last} and none behind it, so that layers {first} "
                    f"to {end - 1} of `{module}` get no gradient and can't be a stage. Use `pp_size=1` or "
                    f"`layers_per_stage` that put layer {last} in the last stage."
                )
