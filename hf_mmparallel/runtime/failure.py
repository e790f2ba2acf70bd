"""One rank's failure becomes the same sentence on all ranks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch.distributed as dist

_KEY = "hf_mmparallel/failure"
# What gloo and NCCL say when a peer has gone.
_LOST_PEER = re.compile(r"connection|timed out|timeout|gloo|nccl|socket|broken pipe", re.IGNORECASE)


class RemoteRankError(RuntimeError):
    """Another rank failed; the message says which and why."""


@contextlib.contextmanager
def shared_failure() -> Iterator[None]:
    """
    Publishes the first exception inside the block in the store of the process group, so that ranks that stop because
    their peer is gone say why it is gone.

    Raises:
        [`RemoteRankError`]: In place of a lost connection, when another rank has published its failure.
    """
    try:
        yield
    except Exception as error:
        store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
        if store is None:
            raise
        sentence = f"{type(error).__name__}: {error}"
        first = store.compare_set(_KEY, "", f"rank {dist.get_rank()}: {sentence}").decode()
        if first.partition(": ")[2] != sentence and _LOST_PEER.search(sentence):
            raise RemoteRankError(f"Another rank failed first: {first}") from error
        raise
