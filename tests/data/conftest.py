"""Collators of all families of processors, and what is decoded in a test."""

import pytest
from PIL import ImageFile

from hf_mmparallel.data import ChatCollator

from .processors import PROCESSORS


@pytest.fixture(scope="module", params=PROCESSORS)
def family(request: pytest.FixtureRequest) -> tuple[str, ChatCollator]:
    """A family and its collator."""
    return request.param, ChatCollator(PROCESSORS[request.param]())


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The kinds of the files whose pixels are read."""
    kinds: list[str | None] = []
    load = ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: kinds.append(self.format) or load(self))
    return kinds
