"""Validation of values that a person wrote into a file, with error messages that name the value and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any


def reject_unknown_keys(what: str, keys: Sequence[str], known: Sequence[str]) -> None:
    """Raises `ValueError` for the first unknown key; the message names the most similar known one."""
    for key in keys:
        if key not in known:
            text = str(key)
            near = difflib.get_close_matches(text, known, n=1) or [name for name in known if name.startswith(text)]
            hint = f"Did you mean `{near[0]}`?" if near else f"Known: {', '.join(f'`{name}`' for name in known)}."
            raise ValueError(f"{what} has no `{key}`. {hint}")


def read_mapping(value: Any, what: str, needed: Sequence[str] = (), known: Sequence[str] | None = None) -> Mapping:
    """
    Returns a mapping with all `needed` keys and no others but `known` ones, which are any by default; raises
    `ValueError` for anything else.
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
    """Returns a list or tuple, raises `ValueError` for anything else."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} is `{value!r}`; it must be a list.")
    return value


def read_count(value: Any, what: str, least: int = 0) -> int:
    """Returns a whole number of at least `least`, raises `ValueError` for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} is `{value!r}`; it must be a whole number of at least {least}.")
    return value


def read_microbatches(data: Mapping[str, Any]) -> tuple[int, tuple[int, ...] | None]:
    """Returns `num_microbatches` and `replica_microbatches` of a plan, raises `ValueError` if they contradict."""
    count = read_count(data.get("num_microbatches", 1), "`num_microbatches` of the plan", 1)
    if data.get("replica_microbatches") is None:
        return count, None
    what = "`replica_microbatches` of the plan"
    counts = tuple(read_count(own, f"A number in {what}", 1) for own in read_list(data["replica_microbatches"], what))
    mean = -(-sum(counts) // max(1, len(counts)))
    if data.get("num_microbatches", mean) != mean:
        raise ValueError(
            f"`num_microbatches={count}` contradicts `replica_microbatches={list(counts)}`, whose mean, rounded up, "
            f"is {mean}. Leave `num_microbatches` out."
        )
    return mean, counts


def read_flag(value: Any, what: str) -> bool:
    """Returns a bool, raises `ValueError` for anything else."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} is `{value!r}`; it must be `true` or `false`.")
    return value


def read_number(value: Any, what: str) -> float:
    """Returns a number of at least 0, also `1e-5`, which YAML reads as text; raises `ValueError` for anything else."""
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 <= number < float("inf"):
        raise ValueError(f"{what} is `{value!r}`; it must be a number of at least 0.")
    return number


def read_name(value: Any, what: str) -> str:
    """Returns a string, raises `ValueError` for anything else."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is `{value!r}`; it must be a name.")
    return value


def plain_data(value: Any) -> Any:
    """Converts sets, tuples, paths and string enumerations to JSON types."""
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain_data(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return value.value if hasattr(value, "value") else value
