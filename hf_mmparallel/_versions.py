"""What differs between the supported versions of transformers; nothing else looks at them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any

from transformers.integrations import peft
from transformers.modeling_outputs import BaseModelOutputWithPast

_TESTED_PEFT = {"0.22.0": "0.21.2"}  # what transformers asks for -> what it works with
_EARLIER_CACHE = "past_key_values"
# what forwards, outputs and mask functions call the key-value cache: `"cache"` from transformers 5.24 on
CACHE = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else _EARLIER_CACHE


def takes_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a forward with an argument `cache` be called as this version of transformers calls its own."""
    if CACHE == "cache":
        from transformers.utils.deprecation import deprecate_kwarg

        return deprecate_kwarg(_EARLIER_CACHE, "5.40.0", new_name=CACHE)(forward)

    @wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if _EARLIER_CACHE in kwargs:
            kwargs["cache"] = kwargs.pop(_EARLIER_CACHE)
        return forward(*args, **kwargs)

    return renamed


def accept_tested_peft() -> None:
    """Lets `model.add_adapter` of transformers take the tested `peft` where it asks for one that is not released."""
    if peft.MIN_PEFT_VERSION in _TESTED_PEFT:
        peft.MIN_PEFT_VERSION = _TESTED_PEFT[peft.MIN_PEFT_VERSION]
