"""What a plan was made for: the device, the batch and the samples that its prediction holds for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .reading import read_count, read_flag, read_mapping, read_name

_NAMES = ("gpu_type", "gpu_spec", "dtype")
_REQUIRED = ("gpu_type", "dtype", "seq_len", "image_tokens", "seed", "num_samples")


@dataclass(frozen=True)
class PlannedFor:
    """
    What a plan was made for, stored beside it, so that its prediction can be repeated; raises `ValueError` for wrong
    types.

    Args:
        gpu_type (`str`, *optional*, defaults to `"h100"`): Device of each rank.
        gpu_spec (`str`, *optional*): File that describes the device, instead.
        dtype (`str`, *optional*, defaults to `"bfloat16"`): Compute dtype.
        memory_limit_gib (`float`, *optional*): Memory limit of a rank; 90 % of the device's by default.
        global_batch_size (`int`, *optional*): Samples of a step.
        microbatch_size (`int`, *optional*): Samples of a microbatch of one language-model replica.
        packing (`bool`, *optional*): Whether microbatches of the language model are packed rows without padding.
        seq_len (`int`, *optional*, defaults to 2048): LM tokens per sample, without a dataset.
        image_tokens (`int`, *optional*, defaults to 576): Tokens per sample in each encoder, without a dataset.
        num_samples (`int`, *optional*, defaults to 4096): Maximum number of measured samples of a dataset.
        seed (`int`, *optional*, defaults to 0): Seed of the drawn samples.
    """

    gpu_type: str = "h100"
    gpu_spec: str | None = None
    dtype: str = "bfloat16"
    memory_limit_gib: float | None = None
    global_batch_size: int | None = None
    microbatch_size: int | None = None
    packing: bool | None = None
    seq_len: int = 2048
    image_tokens: int = 576
    num_samples: int = 4096
    seed: int = 0

    def __post_init__(self):
        for field in fields(self):
            value, what = getattr(self, field.name), f"`{field.name}` of `planned_for`"
            if value is None and field.name not in _REQUIRED:
                continue
            if field.name in _NAMES:
                read_name(value, what)
            elif field.name == "packing":
                read_flag(value, what)
            elif field.name != "memory_limit_gib":
                read_count(value, what, int(field.name != "seed"))
            elif not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ValueError(f"{what} is `{value!r}`; it must be a number above 0.")

    def to_dict(self) -> dict[str, Any]:
        """The device, and what differs from its default, as plain data."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if name == "gpu_type" or value != _DEFAULTS[name]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | PlannedFor) -> PlannedFor:
        if isinstance(data, PlannedFor):
            return data
        return cls(**read_mapping(data, "`planned_for`", (), list(_DEFAULTS)))


_DEFAULTS = {field.name: field.default for field in fields(PlannedFor)}
