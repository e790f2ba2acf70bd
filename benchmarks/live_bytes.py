"""Bytes of live tensors and bytes that collectives send, counted below torch's operators, whoever calls them."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SHARED_BY_ALL = {  # collective -> the argument whose bytes each rank but one sends of
    "_allgather_base_": 0,
    "_reduce_scatter_base_": 1,
    "allgather_": 0,
    "allgather_into_tensor_coalesced_": 0,
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "alltoall_": 1,
    "alltoall_base_": 1,
    "broadcast_": 0,
    "gather_": 1,
    "reduce_": 0,
    "reduce_scatter_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "scatter_": 0,
}
_WITHOUT_BYTES = {"barrier", "monitored_barrier_", "recv_", "recv_any_source_"}


class LiveBytes(TorchDispatchMode):
    """
    Counts, while it is entered, the bytes of live storages and those that this rank sends.

    A storage counts from the first operator that takes or returns it until it is freed, at its current size, which
    FSDP2 sets to 0 between the uses of a gathered weight. What an operator allocates for itself does not count.
    Collectives count as on a ring of n ranks: (n - 1) / n of the whole tensor for each all-gather, reduce-scatter,
    broadcast and reduction to one rank, twice that for an all-reduce, what is for others in an exchange.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[Any, int]] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self.sent_bytes: Counter[str] = Counter()
        self.num_calls: Counter[str] = Counter()
        self._patches = contextlib.ExitStack()

    def reset(self) -> None:
        """Starts anew with what is live now."""
        self.peak_bytes = self.live_bytes
        self.sent_bytes.clear()
        self.num_calls.clear()

    def __enter__(self) -> LiveBytes:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._count(storage)
            return result

        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back with the local tensors
        if func.namespace == "c10d":
            self._count_sent(func._schema.name.removeprefix("c10d::"), args)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Takes note of a storage's size now, and of its end."""
        if storage.device.type == "meta":
            return
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None or known[0]() is None:
            self._free(key)
            known = (weakref.ref(storage, lambda _, key=key: self._free(key)), 0)
        if size != known[1]:
            self._sizes[key] = (known[0], size)
            self.live_bytes += size - known[1]
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, key: int) -> None:
        known = self._sizes.pop(key, None)
        if known is not None:
            self.live_bytes -= known[1]

    def _count_sent(self, name: str, args: Any) -> None:
        """Adds what this rank sends in a collective."""
        self.num_calls[name] += 1
        if name in _WITHOUT_BYTES:
            return
        group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        if name == "send":
            self.sent_bytes[name] += _num_bytes(args[0])
            return
        assert group is not None, name
        size = dist.ProcessGroup.unbox(group).size()
        others = 2 * (size - 1) / size if name.startswith("allreduce") else (size - 1) / size
        splits = args[4] if name == "alltoall_base_" else ()
        if splits:  # the size of what each rank gets
            others = 1 - splits[dist.ProcessGroup.unbox(group).rank()] / max(sum(splits), 1)
        self.sent_bytes[name] += others * _num_bytes(args[_SHARED_BY_ALL[name]])


def _num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tree_leaves(tensors) if isinstance(tensor, torch.Tensor))
