"""
A script for `hf-mmparallel launch`: collectives in a loop, in which processes die as told, and survivors regroup.

Every process that lives prints `done` with its sum at the end. Each `--kill` is `id:step:how`.
"""

import argparse
import gc
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_mmparallel.world import ACTIVITY, track_activity
from hf_mmparallel.world.connections import end_collectives
from hf_mmparallel.world.membership import SIGN_INTERVAL_S, Membership
from hf_mmparallel.world.world import leave_groups

LOST_TIMEOUT_S = 30.0


class Deaths:
    """Kills this process as told."""

    def __init__(self, words: list[str], id: int):
        self.at = {point: how for word in words for own, point, how in [word.split(":")] if int(own) == id}

    def may_strike(self, point: str) -> None:
        how = self.at.pop(point, None)
        if how is None:
            return
        print(f"dying at {point} by {how} at {time.time():.4f}\n", end="", flush=True)
        if how == "exit":
            os._exit(1)
        elif how == "quit":
            os._exit(0)
        elif how == "orphan":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        elif how == "raise":
            raise ValueError("a bad sample")
        elif how == "sleep":
            with track_activity("reading samples"):
                time.sleep(1000)
        else:
            if how == "stop":
                time.sleep(2 * SIGN_INTERVAL_S)  # its last sign of life says where it stands
            os.kill(os.getpid(), getattr(signal, f"SIG{how.upper()}"))


def collectives(step: int, rank: int, size: int, pair: Any) -> int:
    """One collective of each kind; returns the sum over the ranks of their number plus one."""
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    received = torch.empty(1000)
    if size > 1:
        requests: list[Any] = [dist.isend(torch.full((1000,), float(step)), (rank + 1) % size)]
        requests.append(dist.irecv(received, (rank - 1) % size))
        for request in requests:
            request.wait()
        assert received[0] == step, (received[0], step)
    dist.barrier()
    dist.all_reduce(torch.ones(1), group=pair)
    return int(total.item())


def init_group(membership: Membership, timeout: timedelta) -> tuple[int, int, Any]:
    generation = membership.generation
    assert generation is not None
    rank, size = generation.rank_of(membership.id), len(generation.members)
    dist.init_process_group("gloo", store=membership.new_store(), rank=rank, world_size=size, timeout=timeout)
    group = dist.new_group(range(size))  # made by all, later than the default group
    return rank, size, group


def tell_life(id: int) -> None:
    while True:
        print(f"alive {id} at {time.time():.4f}\n", end="", flush=True)
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.005)
    parser.add_argument("--kill", action="append", default=[])
    parser.add_argument("--unregistered", action="store_true")
    parser.add_argument("--child", action="store_true", help="hold the sockets open in a child")
    parser.add_argument("--touch", default="", help="a file to make at step 20; each process then says that it lives")
    options = parser.parse_args()
    torch.set_num_threads(1)
    membership = Membership.from_environment()
    assert membership is not None
    deaths = Deaths(options.kill, membership.id)

    def abort() -> None:
        print(f"abort in {membership.id} at {time.time():.4f}\n", end="", flush=True)
        end_collectives("gloo")

    membership.start(abort)
    if not options.unregistered:
        membership.register()
    timeout = timedelta(seconds=60)
    step, group, fresh = 0, None, True
    rank = size = 0
    while step < options.steps:
        try:
            if fresh:
                deaths.may_strike("init")
                rank, size, group = init_group(membership, timeout)
                fresh = False
                if options.child and os.fork() == 0:
                    time.sleep(15)
                    os._exit(0)
                agreed = torch.tensor([step])
                dist.all_reduce(agreed, dist.ReduceOp.MIN)
                step = int(agreed.item())
            ACTIVITY.step = step
            ACTIVITY.now("a collective", waits=True)
            if step == 20 and options.touch:
                Path(options.touch).touch()
                threading.Thread(target=tell_life, args=(membership.id,), daemon=True).start()
            deaths.may_strike(str(step))
            assert collectives(step, rank, size, group) == size * (size + 1) // 2
            time.sleep(options.pause)
            step += 1
        except ValueError as error:
            membership.report(f"raised {type(error).__name__}: {error}")
            raise
        except RuntimeError as error:
            error.__traceback__ = None
            group = None
            while True:
                generation = membership.next_generation(LOST_TIMEOUT_S)
                leave_groups()
                gc.collect()
                deaths.may_strike("meet")
                if membership.meet(generation):
                    break
            membership.enter(generation)
            fresh = True
            print(f"met {membership.id} in generation {generation.number} at {time.time():.4f}\n", end="", flush=True)
    dist.barrier()
    membership.finish()
    dist.destroy_process_group()
    print(f"done {membership.id}: rank {rank} of {size}\n", end="", flush=True)


if __name__ == "__main__":
    main()
