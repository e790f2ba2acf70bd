"""Values that a person wrote into a file as what they must be, or a sentence that says what is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any


def reject_unknown_keys(what: str, keys: Sequence[str], known: Sequence[str]) -> None:
    """Raises `ValueError` naming the nearest known key for the first key that is not known."""
    for key in keys:
        if key not in known:
            text = str(key)
            near = difflib.get_close_matches(text, known, n=1) or [name for name in known if name.startswith(text)]
            hint = f"Did you mean `{near[0]}`?" if near else f"Known: {', '.join(f'`{name}`' for name in known)}."
            raise ValueError(f"{what} has no `{key}`. {hint}")


def read_mapping(value: Any, what: str, needed: Sequence[str] = (), known: Sequence[str] | None = None) -> Mapping:
    """
    A mapping with some keys.

    Args:
        value: What was written.
        what (`str`): What it is, for errors.
        needed (`Sequence[str]`, *optional*): Keys that it must have.
        known (`Sequence[str]`, *optional*): Other keys that it may have; any when left out.

    Raises:
        `ValueError`: For another type, an unknown key, and a missing one.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is `{value!r}`; it must be a mapping of keys to values.")
    if known is not None:
        reject_unknown_keys(what, list(value), [*needed, *known])
    for key in needed:
        if key not in value:
            raise ValueError(f"{what} has no `{key}`; it has {[str(name) for name in value]}. Add it.")
    return value


def read_list(value: Any, what: str) -> Sequence[Any]:
    """A list, or a `ValueError`."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} is `{value!r}`; it must be a list.")
    return value


def read_count(value: Any, what: str, least: int = 0) -> int:
    """A whole number, or a `ValueError`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} is `{value!r}`; it must be a whole number of at least {least}.")
    return value


def read_flag(value: Any, what: str) -> bool:
    """True or false, or a `ValueError`."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} is `{value!r}`; it must be `true` or `false`.")
    return value


def read_name(value: Any, what: str) -> str:
    """A name, or a `ValueError`."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is `{value!r}`; it must be a name.")
    return value


def plain_data(value: Any) -> Any:
    """Sets, tuples, paths and string enumerations as what JSON holds."""
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain_data(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return value.value if hasattr(value, "value") else value
