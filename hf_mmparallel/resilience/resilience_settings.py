"""The settings of a run that survives failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..plan.reading import read_count, read_mapping


@dataclass(frozen=True)
class ResilienceSettings:
    """
    What a run has to survive.

    Args:
        failures (`int`, *optional*, defaults to 1):
            Nodes that may be lost at the same time without the loss of any layer; one more copy of the model than that
            is trained.
        ranks_per_node (`int`, *optional*):
            Ranks that are lost together. By default those of a host; on a single host each rank by itself.
    """

    failures: int = 1
    ranks_per_node: int | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ResilienceSettings:
        """Reads settings; raises `ValueError` for an unknown key, or a value that is no number or below 1."""
        data = read_mapping(data, "`resilience`", [], ["failures", "ranks_per_node"])
        values = {name: read_count(value, f"`{name}` of `resilience`", 1) for name, value in data.items()}
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}
