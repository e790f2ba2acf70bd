"""Who trains together: members, losses and generations, and their text form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore


@dataclass(frozen=True, order=True)
class Member:
    """A process of the job."""

    id: int  # its number in the job, which no other process ever gets
    node: int  # number of its launcher, of which each host has one


@dataclass(frozen=True)
class Loss:
    member: Member
    reason: str  # how it ended, such as "killed by SIGKILL"
    time: float  # when its launcher noticed, in seconds since the epoch
    place: str = ""  # the exception and the line that raised it, if it ended by one


LEFT = "it was asked to leave by SIGTERM or SIGUSR1"  # reason of a member that has left between two steps


@dataclass(frozen=True)
class Generation:
    """The members that train together, until some are lost or others join."""

    number: int  # 0 for those that the job starts with; each change makes the next
    members: tuple[Member, ...]  # by ascending id; a position in it is the rank in this generation
    losses: tuple[Loss, ...] = ()  # members of the generation before that were lost
    joined: tuple[Member, ...] = ()  # members that were not in the generation before
    answered: tuple[int, ...] = ()  # ids of members that have let those in who waited, and wait for this generation
    anew: str = ""  # why members of whom none was lost leave their collectives and meet again; empty if they need not

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(member.id for member in self.members)

    def rank_of(self, id: int) -> int:
        return self.ids.index(id)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Generation:
        data = json.loads(text)
        return cls(
            data["number"],
            _members(data["members"]),
            tuple(Loss(**{**loss, "member": Member(**loss["member"])}) for loss in data["losses"]),
            _members(data["joined"]),
            tuple(data["answered"]),
            data["anew"],
        )


def _members(rows: list[Mapping[str, Any]]) -> tuple[Member, ...]:
    return tuple(Member(**row) for row in rows)


# The store of `hf-mmparallel launch`, which the launcher of node 0 hosts: how to reach it, and its keys.

FOREVER = timedelta(days=3650)


def connect(address: tuple[str, int], prefix: str, timeout: timedelta = FOREVER) -> Any:
    """Returns a connection to the store at a host and port; each thread that waits needs one of its own."""
    store = TCPStore(*address, is_master=False, wait_for_workers=False)
    store.set_timeout(timeout)
    return PrefixStore(prefix, store)


# Keys of the launcher's store. Everything that launchers and workers report goes through one queue, so that the
# launcher of node 0 decides about one event after the other. Each process has a queue for the generations it makes.

EVENTS, END = "events", "end"
NUM_NODES, NUM_MEMBERS, NUM_INFORMED = "num_nodes", "num_members", "num_informed"
NUM_READY, READY = "num_ready", "ready"  # of launchers that start a job again
MET, ABANDONED = "met", "abandoned"


LIFELINES = "lifelines"  # port of node 0 to which other launchers hold connections
JOB = "hf_mmparallel/job"  # key, without a prefix, of what a launcher that joins has to know of the job
_PIECE_BYTES = 4 * 2**20  # the store takes values of up to 8 MiB


def put(store: Any, key: str, data: bytes) -> None:
    pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
    for index, piece in enumerate(pieces):
        store.set(f"{key}/{index}", piece)
    store.set(key, str(len(pieces)))


def take(store: Any, key: str) -> bytes:
    """The data of [`put`]; waits until it is there."""
    return b"".join(store.get(f"{key}/{index}") for index in range(int(store.get(key))))


def generation_key(number: int) -> str:
    return f"generation/{number}"


def news_key(id: int) -> str:
    return f"news/{id}"


def meeting_key(number: int) -> str:
    """Key of the outcome of a meeting, [`MET`] or [`ABANDONED`]."""
    return f"meeting/{number}"


def beat_key(node: int) -> str:
    return f"beat/{node}"
