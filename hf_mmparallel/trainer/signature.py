"""The signature of the installed version's `Trainer`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from transformers import Trainer

_STOCK = inspect.signature(Trainer.__init__)
F = TypeVar("F", bound=Callable)


def shows_stock_signature(init: F) -> F:
    """Gives a constructor the signature of the stock Trainer, followed by its own keyword-only arguments."""
    own = [p for p in inspect.signature(init).parameters.values() if p.kind is p.KEYWORD_ONLY]
    shown: Any = init
    shown.__signature__ = _STOCK.replace(parameters=[*_STOCK.parameters.values(), *own])
    return init


def by_name(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of a Trainer by name; raises `TypeError` for unknown ones and those given twice."""
    given = dict(_STOCK.bind(self, *args, **kwargs).arguments)
    return {name: value for name, value in given.items() if name != "self"}
