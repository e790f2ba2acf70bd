"""The whole model of a run without a plan whose ranks hold shares of the weights: FSDP, or DeepSpeed's stage 3."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_utils import set_zero3_state

from ..adapters.peft_models import base_model_of, with_adapters_of
from ..modeling.whole import blank_model, check_gatherable, fill

# what FSDP and accelerate's activation checkpointing add to names, and leave out of a state dict
_WRAPPERS = re.compile(r"\b(_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def has_divided_weights(model: nn.Module) -> bool:
    """Whether this rank holds shares of weights."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return True
    return _is_stage_3(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def gather_divided(model: Any, wrapped: nn.Module, is_first: bool) -> Any:
    """
    Gathers a model of which ranks hold shares, one parameter at a time: in evaluation mode in host memory on the first
    rank, `None` on others. Collective; raises `ValueError` for a model that can't be built from its config.
    """
    base = base_model_of(model)  # `wrapped` is the model with what accelerate adds
    check_gatherable(base)
    if not isinstance(base, PreTrainedModel):
        raise ValueError(
            f"Ranks hold shares of this `{type(base).__name__}`, which no config describes, so that "
            "it can't be built again. Save it with `trainer.save_model(folder)`, and load the weights into a new one."
        )
    state = _gathered_by_deepspeed(model, is_first) if _is_stage_3(model) else _gathered_by_torch(wrapped)
    if not is_first:
        return None
    buffers = {_WRAPPERS.sub("", name): buffer.detach().cpu() for name, buffer in model.named_buffers()}
    with set_zero3_state():  # so that transformers builds it as a model that nothing divides
        whole = with_adapters_of(model, blank_model(base))
        return fill(whole, base, {**buffers, **state}).eval()


def _is_stage_3(model: nn.Module) -> bool:
    """Whether DeepSpeed divides the weights."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def _gathered_by_torch(wrapped: nn.Module) -> dict[str, Any]:
    """The whole state dict in host memory on the first rank; empty on others."""
    return get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _gathered_by_deepspeed(model: nn.Module, is_first: bool) -> dict[str, torch.Tensor]:
    """The whole parameters in host memory on the first rank; empty on others."""
    from deepspeed.runtime.zero import GatheredParameters

    state = {}
    for name, parameter in model.named_parameters():
        with GatheredParameters([parameter]):
            if is_first:
                state[name] = parameter.detach().to("cpu", copy=True)
    return state
