"""Arrangements of a global batch over replicas and microbatches, as pure functions of numbers."""

from .contiguous import contiguous_step, num_microbatches

__all__ = ["contiguous_step", "num_microbatches"]
