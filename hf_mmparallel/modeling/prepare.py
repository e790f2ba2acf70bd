"""Pruning of a model to the stages of one rank."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..plan import ModelSpec, ModuleSpec, ParallelPlan, parameter_shards
from .checkpointing import Recomputation, enable_checkpointing
from .spec import module_parts
from .stages import ModuleStage
from .unowned import drop_unowned_parameters, replace_layers


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
    for name in spec.encoders:
        _check_selected_layers(model, spec.modules[name], plan)
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
        replace_layers(model, module.stack, keep)
        if keep and plan.modules[name].activation_checkpointing:
            enable_checkpointing(model, module.tower, module.stack, recomputation)
    return {key: ModuleStage(model, spec, key[0], stage.layers, parts) for key, stage in owned.items()}


def earliest_selected_layer(model: PreTrainedModel, module: ModuleSpec) -> int | None:
    """Returns the first hidden state of an encoder that the model's config selects; `None` if it selects none."""
    selected = getattr(model.config, "vision_feature_layer", None)
    if selected is None or getattr(model.get_submodule(module.tower), "config", None) is not getattr(
        model.config, "vision_config", None
    ):
        return None
    return min(index % (module.num_layers + 1) for index in ([selected] if isinstance(selected, int) else selected))


def _check_selected_layers(model: PreTrainedModel, module: ModuleSpec, plan: ParallelPlan) -> None:
    """Refuses a config that selects a hidden state which the encoder's last stage does not compute."""
    earliest = earliest_selected_layer(model, module)
    if earliest is None:
        return
    for replica in plan.modules[module.name].replicas:
        if earliest < replica[-1].layers[0]:
            raise ValueError(
                f"`vision_feature_layer={model.config.vision_feature_layer}` selects hidden state {earliest}, which "
                f"the last stage of `{module.name}` (layers {replica[-1].layers}) does not have. Use `pp_size=1` or "
                f"`layers_per_stage` that put layer {earliest} in the last stage."
            )
