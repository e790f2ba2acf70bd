"""Position ids of a padded batch as the model itself computes them."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto import modeling_auto

from .mask_rules import config_and_class, real_tokens

# argument of `get_rope_index` that no batch has by that name -> how the model makes it of the batch
DERIVED_INPUTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    # The omni models compute these from other entries of the batch before they call `get_rope_index`.
    "audio_seqlens": lambda batch: batch["feature_attention_mask"].sum(-1),
    "second_per_grids": lambda batch: batch["video_second_per_grid"],
}


class PositionRule:
    """
    Makes the position ids of the batches of one model.

    A model with a `get_rope_index` (multimodal rotary embeddings) makes its own, on a copy of it without weights;
    every other model counts the tokens of a sample from 0. Can be pickled: it holds a config and a class.
    """

    def __init__(self, config_or_model: Any):
        config, model_class = config_and_class(config_or_model)
        base = modeling_auto.MODEL_MAPPING.get(type(config), None)
        bases = base if isinstance(base, tuple) else (base,)
        self.owner = next((cls for cls in (model_class, *bases) if hasattr(cls, "get_rope_index")), None)
        self.config = None
        if self.owner is not None:
            self.config = copy.deepcopy(config)
            self.config._attn_implementation = "eager"
        self._skeleton: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_skeleton": None}

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """
        int64 position ids `(batch, length)` of a padded batch, or `(axes, batch, length)` of a model with multimodal
        rotary embeddings; 0 or more for padding. Raises `ValueError` if the batch lacks what they depend on, such as
        grids.
        """
        real = real_tokens(batch)
        if self.owner is None:
            return (real.to(torch.int64).cumsum(-1) - 1).clamp(min=0)
        if self._skeleton is None:
            with torch.device("meta"):
                self._skeleton = self.owner(self.config)
        index = self._skeleton.get_rope_index
        has_media = any(name.endswith("_grid_thw") for name in batch)
        arguments = {}
        for name, parameter in inspect.signature(index).parameters.items():
            if name in batch:
                arguments[name] = batch[name]
            elif name in DERIVED_INPUTS:
                with contextlib.suppress(KeyError):
                    arguments[name] = DERIVED_INPUTS[name](batch)
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                if has_media:
                    raise ValueError(
                        f"The batch has images but no `{name}`, on which the position ids of `{self.owner.__name__}` "
                        "depend. Keep what the processor returns beside `input_ids`."
                    )
                arguments[name] = torch.zeros_like(batch["input_ids"])  # text everywhere
        return index(**arguments)[0]
