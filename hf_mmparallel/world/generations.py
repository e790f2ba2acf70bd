"""Who trains together: members, losses and generations, and their text form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Member:
    """A process of the job."""

    id: int  # its number in the job, which no other process ever gets
    node: int  # number of its launcher, of which each host has one


@dataclass(frozen=True)
class Loss:
    """The loss of a member."""

    member: Member
    reason: str  # how it ended, such as "killed by SIGKILL"
    time: float  # when its launcher noticed, in seconds since the epoch


@dataclass(frozen=True)
class Generation:
    """The members that train together, until some are lost or others join."""

    number: int  # 0 for those that the job starts with; each change makes the next
    members: tuple[Member, ...]  # by ascending id; a position in it is the rank in this generation
    losses: tuple[Loss, ...] = ()  # members of the generation before that were lost
    joined: tuple[Member, ...] = ()  # members that were not in the generation before
    answered: tuple[int, ...] = ()  # ids of members that have let those in who waited, and wait for this generation

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(member.id for member in self.members)

    def rank_of(self, id: int) -> int:
        """The rank of a member in this generation."""
        return self.ids.index(id)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Generation:
        data = json.loads(text)
        return cls(
            data["number"],
            _members(data["members"]),
            tuple(Loss(Member(**loss["member"]), loss["reason"], loss["time"]) for loss in data["losses"]),
            _members(data["joined"]),
            tuple(data["answered"]),
        )


def _members(rows: list[Mapping[str, Any]]) -> tuple[Member, ...]:
    return tuple(Member(**row) for row in rows)
