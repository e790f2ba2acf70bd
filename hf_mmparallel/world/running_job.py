"""How a launcher finds a running job, and its place in it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from . import generations as keys

_REACH_TIMEOUT = timedelta(seconds=30)
_MEETING_S = 60.0  # in which all launchers end their workers, which they kill after less than half of it
_POLL_S = 0.02


@dataclass(frozen=True)
class Joining:
    """The place of a launcher in a job that runs already."""

    address: tuple[str, int]  # of the job's store
    prefix: str  # of its keys
    node: int  # number of this launcher in it
    first_id: int  # number of the first process of this launcher; the others follow
    num_processes: int  # that the job started with
    processes_per_node: int  # how many of them each launcher started

    def settings(self) -> dict[str, Any]:
        return {
            "host": self.address[0],
            "port": self.address[1],
            "first_id": self.first_id,
            "num_processes": self.num_processes,
            "processes_per_node": self.processes_per_node,
        }


def publish_job(store: Any, prefix: str, num_nodes: int, num_members: int) -> None:
    """Lets launchers find a job that has started."""
    store.add(keys.NUM_NODES, num_nodes)
    store.add(keys.NUM_MEMBERS, num_members)
    job = {"prefix": prefix, "num_processes": num_members, "processes_per_node": num_members // num_nodes}
    store.underlying_store.set(keys.JOB, json.dumps(job))


def start_together(address: tuple[str, int], prefix: str, num_launchers: int) -> None:
    """Waits until no workers of an earlier start run on any host, and clears what they left in the store."""
    store = keys.connect(address, prefix)
    if store.add(keys.NUM_READY, 1) == num_launchers:
        everything = store.underlying_store
        for key in everything.list_keys():
            if "torchelastic" not in key and "hf_mmparallel/" not in key:
                everything.delete_key(key)
        store.set(keys.READY, "")
    end = time.monotonic() + _MEETING_S
    while not store.check([keys.READY]):  # a signal gets through meanwhile
        if time.monotonic() > end:
            num_ready = store.add(keys.NUM_READY, 0)
            raise TimeoutError(
                f"Only {num_ready} of {num_launchers} launchers were there to start the job again after "
                f"{_MEETING_S:g} s. Start it again on all hosts."
            )
        time.sleep(_POLL_S)


def parse_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"`--join {text}` is no HOST:PORT. The launcher of machine 0 prints it when the training starts."
        )
    return host.strip("[]"), int(port)


def take_place(address: tuple[str, int], num_processes: int) -> Joining:
    """
    Reserves a place, with numbers that are never given again, in the running job whose store is at `address`; raises
    `ValueError` if there is none, or if its nodes have another number of processes.
    """
    where = f"{address[0]}:{address[1]}"
    try:
        store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=_REACH_TIMEOUT)
        job = json.loads(store.get(keys.JOB))
    except DistError as error:
        raise ValueError(
            f"No running job was found at {where} within {_REACH_TIMEOUT.seconds} s. Give the address that its "
            "launcher prints when the training starts."
        ) from error
    per_node = job["processes_per_node"]
    if per_node < job["num_processes"] and num_processes % per_node:
        raise ValueError(
            f"The job at {where} has {per_node} processes on each host, and this launcher would add {num_processes}. "
            f"Whole nodes join: use `--num_processes {per_node}`."
        )
    members = keys.connect(address, job["prefix"])
    node = members.add(keys.NUM_NODES, 1) - 1
    # Numbers of a node start at a multiple of its size, so that nodes can be told by them.
    end = members.add(keys.NUM_MEMBERS, 2 * num_processes)
    first_id = -(-(end - 2 * num_processes) // num_processes) * num_processes
    return Joining(address, job["prefix"], node, first_id, job["num_processes"], per_node)
