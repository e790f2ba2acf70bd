"""Temporary seeds of the host's random generators."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def stable_seed(*parts: object) -> int:
    """A 63-bit seed that is the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds Python, NumPy and torch on the host for a block, and restores their states afterwards."""
    states = _states()
    _seed(seed)
    try:
        yield
    finally:
        _restore(states)


class OwnGenerators:
    """Generators of Python, NumPy and torch on the host that go on where they stopped each time they are used."""

    def __init__(self, seed: int):
        with seeded(seed):
            self._own = _states()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Makes these the global generators for a block."""
        states = _states()
        _restore(self._own)
        try:
            yield
        finally:
            self._own = _states()
            _restore(states)


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
