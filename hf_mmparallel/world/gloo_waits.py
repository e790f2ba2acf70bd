"""
Releases threads that gloo has left waiting. When a connection ends, gloo wakes the threads that wait for messages that
have not begun, but a thread whose message is written or read in part waits until the time limit of its group
(`signalException` in gloo's `transport/tcp/pair.cc`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

_TASKS = Path("/proc/self/task")
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
