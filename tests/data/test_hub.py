"""The Hub is asked once whether it has a name, and not at all where the answer is here already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from hf_mmparallel.data.dataset_sizes import check_hub
from hf_mmparallel.planner.inputs import read_model


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Hub that may be asked, with nothing in the cache."""
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    return monkeypatch


def raising(error: Exception) -> Any:
    def ask(self: Any, name: str, timeout: float) -> None:
        raise error

    return ask


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_hub_that_can_not_be_reached_is_not_asked_again(online: pytest.MonkeyPatch, kind: str):
    online.setattr(huggingface_hub.HfApi, f"{kind}_info", raising(ConnectionError("no route")))
    with pytest.raises(ValueError, match=rf"^It is no file .*can't be reached \(no route\)\. Give one; for a {kind} "):
        check_hub(kind, "someone/something", "It", "Give one")


def test_a_name_that_the_hub_has_not(online: pytest.MonkeyPatch):
    response: Any = SimpleNamespace(headers={}, status_code=404, request=None)
    error = RepositoryNotFoundError("404\nRepository Not Found", response=response)
    online.setattr(huggingface_hub.HfApi, "model_info", raising(error))
    with pytest.raises(ValueError, match="the Hub has none of this name: 404 Repository Not Found. Correct it."):
        check_hub("model", "nope", "It", "Give one")


def test_what_is_in_the_cache_or_on_the_hub_passes(online: pytest.MonkeyPatch):
    asked: list[str] = []
    online.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, timeout: asked.append(name))
    check_hub("model", "a/b", "It", "Give one")
    assert asked == ["a/b"]
    online.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: f"/cache/{file}")
    check_hub("model", "a/b", "It", "Give one")
    online.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    check_hub("dataset", "a/b", "It", "Give one")
    assert asked == ["a/b"]


def test_a_plan_for_a_model_that_is_nowhere_says_so_before_it_is_read(online: pytest.MonkeyPatch):
    online.setattr(huggingface_hub.HfApi, "model_info", raising(ConnectionError("no route")))
    online.setattr("hf_mmparallel.modeling.loading.build_on_meta", lambda source: pytest.fail("read"))
    with pytest.raises(ValueError, match=r"^`--model nope` is no file or folder here, and the Hub, .*\(no route\)"):
        read_model("nope", {}, [])
