"""
Ends the collectives of this process from another thread, so that a main thread that is blocked in one raises. NCCL has
a function for it; gloo's `abort` releases no thread that waits, so its sockets are shut down, which peers notice at
once, even where a stopped peer or a data-loader worker keeps the other end open.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from .. import _environment

_FILES = Path("/proc/self/fd")
_INFOS = Path("/proc/self/fdinfo")
# Releases threads that gloo has left waiting. When a connection ends, gloo wakes the threads that wait for messages
# that have not begun, but a thread whose message is written or read in part waits until the time limit of its group
# (`signalException` in gloo's `transport/tcp/pair.cc`).

_TASKS = Path("/proc/self/task")
_KNOCK_S = 1.0
_LOOKS, _LOOK_S = 100, 0.001
_LOOP = "gloo_tcp_loop"  # name of gloo's threads, one for each group


def end_collectives(backend: str) -> None:
    """
    Ends the collectives of this process, running and future ones, in all its groups; may be called by any thread.

    Args:
        backend (`str`): Backends of the groups, as `torch.distributed.get_backend` names them.
    """
    if "nccl" in backend:
        dist.distributed_c10d._abort_process_group()
    end_gloo_connections()


def end_gloo_connections(most_ranks: int = 1) -> int:
    """Shuts down the connections of all gloo groups of this process, and no other ones; returns how many were open."""
    watched = {descriptor: inode for loop in gloo_loops() for descriptor, inode in _watched(loop).items()}
    for descriptor in watched:
        # a group that others have joined may have more ranks than were launched: `most_ranks`
        _end_awaited(descriptor, max(most_ranks, _largest_group()))
    return sum(shut_down(descriptor, inode) for descriptor, inode in watched.items())


def _end_awaited(descriptor: int, num_ranks: int) -> None:
    """Ends the connections that gloo awaits at a socket that listens: it gets them from this process, closed."""
    with contextlib.suppress(OSError), _socket(descriptor) as candidate:
        if _accepts(candidate):
            for rank in range(num_ranks):
                with socket.socket(candidate.family, socket.SOCK_STREAM) as knock:
                    knock.settimeout(_KNOCK_S)
                    knock.connect(candidate.getsockname())
                    knock.sendall(rank.to_bytes(8, sys.byteorder))  # which a peer sends first: its rank


def _largest_group() -> int:
    """No group of a job that nobody has joined has more ranks."""
    return max(_environment.launched_processes()[0], dist.get_world_size() if dist.is_initialized() else 1)


def shut_down(descriptor: int, inode: int | None = None) -> bool:
    """Shuts down a connection, which its owner may close at any time; returns whether it was open."""
    with contextlib.suppress(OSError), _socket(descriptor) as connection:
        # Another file may have got the number of a closed one. A socket that listens is left: gloo aborts the process
        # if it cannot accept connections.
        if inode in (None, os.fstat(connection.fileno()).st_ino) and not _accepts(connection):
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def gloo_loops() -> list[int]:
    """Returns the file descriptors of gloo's epoll sets, of which each group has one."""
    # gloo waits there for a pipe, for a socket that listens, and for its connections, those made later included
    loops = [loop for loop in _epolls() if _is_gloo(loop)]
    threads = [task for task in _TASKS.iterdir() if _read(task / "comm").strip() == _LOOP]
    if len(loops) <= len(threads):
        return loops
    own: set[int] = set()  # those that its threads wait for; they look at what they got in between
    for _ in range(_LOOKS):
        own.update(loop for task in threads if (loop := _first_argument(_read(task / "syscall"))) in loops)
        if len(own) == len(threads):
            break
        time.sleep(_LOOK_S)
    return [loop for loop in loops if loop in own] or loops


def _is_gloo(loop: int) -> bool:
    """Whether an epoll set has one pipe, and otherwise TCP sockets, of which one listens."""
    links = {descriptor: _link(descriptor) for descriptor in _watched(loop)}
    sockets = [descriptor for descriptor, link in links.items() if link.startswith("socket:")]
    pipes = [link for link in links.values() if link.startswith("pipe:")]
    return len(pipes) == 1 and len(pipes) + len(sockets) == len(links) and any(map(_listens, sockets))


def _listens(descriptor: int) -> bool:
    with contextlib.suppress(OSError), _socket(descriptor) as candidate:
        return candidate.family in (socket.AF_INET, socket.AF_INET6) and _accepts(candidate)
    return False


def _accepts(candidate: socket.socket) -> bool:
    return candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


def _socket(descriptor: int) -> socket.socket:
    """A socket object for a copy of a descriptor, so that closing it leaves the original open."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # not a socket
        os.close(copy)
        raise


def _epolls() -> Iterator[int]:
    for name in os.listdir(_FILES) if _FILES.exists() else ():
        if _link(int(name)) == "anon_inode:[eventpoll]":
            yield int(name)


def _watched(loop: int) -> dict[int, int]:
    rows = re.findall(r"^tfd:\s*(\d+) .*\bino:\s*([0-9a-f]+)", _read(_INFOS / str(loop)), re.MULTILINE)
    return {int(descriptor): int(inode, 16) for descriptor, inode in rows}


def _first_argument(syscall: str) -> int | None:
    """First argument of the system call that a thread is in; `None` if it is in none."""
    words = syscall.split()
    return int(words[1], 16) if len(words) > 2 else None


def _link(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(_FILES / str(descriptor))
    return ""


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


_MEMORY = Path("/proc/self/mem")
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # number of the system call
_CLASS = "N4gloo9transport3tcp13UnboundBuffer"
_TABLE, _ABORTS = f"_ZTV{_CLASS}E", (f"_Z{_CLASS}13abortWaitSendEv", f"_Z{_CLASS}13abortWaitRecvEv")
_MEMBERS_BYTES = 512  # farther from the start of a buffer is no condition variable of it
_WORD = struct.calcsize("P")


class GlooWaits:
    """The waits of this process for gloo, to be looked at twice after its connections were ended."""

    def __init__(self) -> None:
        self._before: set[tuple[str, int]] = set()

    def end_stuck(self) -> int:
        """Ends waits at the same address as in the call before, and returns their number; results are undefined."""
        # a wait that was there at the call before is stuck if connections were ended before that call
        waits = set(_waits())
        stuck, self._before = waits & self._before, waits
        return sum(_end(address) for _, address in stuck)


def _waits() -> Iterator[tuple[str, int]]:
    """The threads that wait for a condition, and the address at which they do."""
    for task in _TASKS.iterdir() if _TASKS.exists() else ():
        with contextlib.suppress(OSError):
            number, *arguments = (task / "syscall").read_text().split()
            if number == str(_FUTEX):
                yield task.name, int(arguments[0], 16)


def _end(address: int) -> bool:
    """Ends the wait at an address, if it is in a buffer of gloo."""
    functions = _functions()
    buffer = functions and _buffer_around(address, functions[0])
    if not functions or not buffer:
        return False
    # gloo ends waits by these functions of a buffer, which torch calls for no collective
    for abort in functions[1]:
        abort(ctypes.c_void_p(buffer))
    return True


@cache
def _functions() -> tuple[int, tuple[Callable[[ctypes.c_void_p], None], ...]] | None:
    """What a buffer of gloo begins with, and the functions that end its waits; `None` if torch does not show them."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        loaded = ctypes.CDLL(str(library))
        table = ctypes.addressof(ctypes.c_void_p.in_dll(loaded, _TABLE))
        aborts = tuple(getattr(loaded, name) for name in _ABORTS)
    except (OSError, ValueError, AttributeError):
        return None
    for abort in aborts:
        abort.restype, abort.argtypes = None, (ctypes.c_void_p,)
    return table + 2 * _WORD, aborts  # behind an offset and the type


def _buffer_around(address: int, beginning: int) -> int | None:
    """The start of the buffer of gloo that an address belongs to."""
    # the thread waits at a member of the buffer, which begins with its table of virtual functions
    first = (address - _MEMBERS_BYTES) // _WORD * _WORD
    with contextlib.suppress(OSError), _MEMORY.open("rb", buffering=0) as memory:
        words = struct.unpack(f"{_MEMBERS_BYTES // _WORD}P", os.pread(memory.fileno(), _MEMBERS_BYTES, first))
        for index in reversed(range(len(words))):
            if words[index] == beginning:
                return first + index * _WORD
    return None
