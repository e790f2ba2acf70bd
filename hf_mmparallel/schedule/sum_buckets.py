"""Buckets of gradient sums, in the order in which the last backward of a stage completes them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Parameter = TypeVar("Parameter")
NO_LAYER = -1
"""Layer of parameters that are in no layer, or in several."""


@dataclass(frozen=True)
class SumBucket(Generic[Parameter]):
    """
    Parameters whose gradients are summed by one collective.

    Args:
        index (`int`): Index of the sum in the plan.
        parameters (`list`): Of one dtype.
        layer (`int`): The first of their layers; [`NO_LAYER`] if there are some in no layer.
    """

    index: int
    parameters: list[Parameter]
    layer: int


def in_buckets(
    parameters: Iterable[Parameter],
    dtype_of: Callable[[Parameter], Hashable],
    bytes_of: Callable[[Parameter], float],
    bucket_bytes: float,
) -> Iterator[list[Parameter]]:
    """
    Consecutive parameters whose tensors have one dtype and fit into a bucket; a larger one has its own.

    Args:
        parameters (`Iterable`): The parameters.
        dtype_of (`Callable`): Parameter -> dtype of what is sent of it.
        bytes_of (`Callable`): Parameter -> bytes of what is sent of it.
        bucket_bytes (`float`): Size of a bucket.
    """
    by_dtype: dict[Hashable, list[Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(dtype_of(parameter), []).append(parameter)
    for members in by_dtype.values():
        bucket: list[Parameter] = []
        size = 0.0
        for parameter in members:
            num_bytes = bytes_of(parameter)
            if bucket and size + num_bytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0.0
            bucket.append(parameter)
            size += num_bytes
        yield bucket


def sum_buckets(
    sums: Mapping[int, Sequence[Parameter]],
    layer_of: Callable[[Parameter], int],
    divide: Callable[[list[Parameter]], Iterable[list[Parameter]]],
) -> list[SumBucket[Parameter]]:
    """
    The buckets of all sums of the same stages, in the order in which a backward completes them: from the last layer to
    the first, then those with parameters of no layer. The sum of a bucket starts in the last backward of a stage when
    all of its layers are done.

    Args:
        sums (`Mapping[int, Sequence]`): Index of each sum in the plan -> its parameters.
        layer_of (`Callable`): Parameter -> its layer, or [`NO_LAYER`].
        divide (`Callable`): Divides ordered parameters into buckets, see [`in_buckets`].
    """
    result = []
    for index, parameters in sums.items():
        ordered = sorted(parameters, key=lambda parameter: -layer_of(parameter))
        for bucket in divide(ordered):
            result.append(SumBucket(index, bucket, min(map(layer_of, bucket))))
    return sorted(result, key=lambda bucket: -bucket.layer)
