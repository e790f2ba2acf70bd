"""Rows of `datasets` as they are stored: media are not decoded, but what else is encoded is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from typing import Any

MEDIA_FEATURES = frozenset({"Image", "Audio", "Video"})


def undecoded(feature: Any, kinds: Collection[str] = MEDIA_FEATURES) -> Any:
    """A feature of `datasets`, or features by name, whose media of some classes stay as they are stored."""
    if isinstance(feature, dict):
        return {name: undecoded(part, kinds) for name, part in feature.items()}
    if isinstance(feature, (list, tuple)):
        return [undecoded(part, kinds) for part in feature]
    if hasattr(feature, "feature"):
        return dataclasses.replace(feature, feature=undecoded(feature.feature, kinds))
    return dataclasses.replace(feature, decode=False) if type(feature).__name__ in kinds else feature


def stored_rows(table: Any) -> list[dict[str, Any]]:
    """The rows of a `pyarrow.Table`, as `datasets` gives them in the format "arrow"."""
    # `datasets` stores parts of messages that have unlike keys as strings of JSON (its feature `Json`), which it
    # decodes in other formats, and in which media are decoded, too.
    kinds = {field.name: field.type for field in table.schema if "json" in str(field.type)}
    rows = table.to_pylist()
    for row in rows:
        row |= {name: _decoded(row[name], kind) for name, kind in kinds.items()}
    return rows


def _decoded(value: Any, kind: Any) -> Any:
    """A value of an Arrow type, without strings of JSON."""
    import pyarrow as pa

    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_decoded(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: _decoded(value[field.name], field.type) for field in kind}
    return value
