"""Buckets of gradient sums, in the order in which the last backward of a stage completes them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Parameter = TypeVar("Parameter")
NO_LAYER = -1  # of parameters that are in no layer, or in several


@dataclass(frozen=True)
class SumBucket(Generic[Parameter]):
    """Parameters of one dtype whose gradients are summed by one collective."""

    index: int  # of the sum in the plan
    parameters: list[Parameter]
    layer: int  # the first of their layers; `NO_LAYER` if there are some in no layer


def in_buckets(
    parameters: Iterable[Parameter],
    dtype_of: Callable[[Parameter], Hashable],  # of what is sent of a parameter
    bytes_of: Callable[[Parameter], float],  # of what is sent of a parameter
    bucket_bytes: float,
) -> Iterator[list[Parameter]]:
    """Yields consecutive parameters whose tensors have one dtype and fit into a bucket; a larger one has its own."""
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
    sums: Mapping[int, Sequence[Parameter]],  # index of each sum in the plan -> its parameters
    layer_of: Callable[[Parameter], int],
    divide: Callable[[list[Parameter]], Iterable[list[Parameter]]],  # ordered parameters -> buckets, see `in_buckets`
) -> list[SumBucket[Parameter]]:
    """
    Returns the buckets of all sums of the same stages in the order in which a backward completes them.

    That is from the last layer to the first, then those with parameters of no layer. The sum of a bucket starts in the
    last backward of a stage when all of its layers are done.
    """
    result = []
    for index, parameters in sums.items():
        ordered = sorted(parameters, key=lambda parameter: -layer_of(parameter))
        for bucket in divide(ordered):
            result.append(SumBucket(index, bucket, min(map(layer_of, bucket))))
    return sorted(result, key=lambda bucket: -bucket.layer)
