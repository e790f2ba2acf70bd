"""
Two network namespaces as two hosts: each has its own address, its own loopback, and a cable to the other.

    with TwoHosts() as hosts:
        first, second = hosts.run([["python", "a.py"], ["python", "b.py"]], timeout=60)
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "mmparallel"
_count = itertools.count()


@dataclass(frozen=True)
class Finished:
    """What a command did: its exit code (negative: the signal that ended it) and its output, both streams together."""

    returncode: int
    output: str


def available() -> str | None:
    """Why two hosts cannot be made here, or `None` where they can."""
    if _ip_program() is None:
        return "the `ip` program is missing (Debian package iproute2)"
    try:
        with TwoHosts() as hosts:
            done = hosts.run([["true"], ["true"]], timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None) or str(error)
        return f"network namespaces cannot be made: {stderr.strip()}"
    failed = [result.output.strip() for result in done if result.returncode]
    return f"network namespaces cannot be entered: {failed[0]}" if failed else None


class TwoHosts:
    """Two namespaces joined by a pair of virtual interfaces, removed with everything that runs in them on exit."""

    addresses = ("10.77.0.1", "10.77.0.2")
    interface = "eth0"  # the cabled one, on both

    def __init__(self) -> None:
        identity = f"{_PREFIX}-{os.getpid()}-{next(_count)}"
        self.names = (f"{identity}-a", f"{identity}-b")

    def __enter__(self) -> TwoHosts:
        _remove_left_over()
        try:
            for name in self.names:
                _ip("netns", "add", name)
            first, second = self.names
            end = ("name", self.interface)
            _ip("link", "add", *end, "netns", first, "type", "veth", "peer", *end, "netns", second)
            for name, address in zip(self.names, self.addresses, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", self.interface)
                for device in ("lo", self.interface):
                    _ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills what runs on the hosts and removes them."""
        for name in self.names:
            _remove(name)

    def cut(self) -> None:
        """Pulls the cable: packets are lost from now on, and no connection is closed."""
        _ip("-n", self.names[0], "link", "set", self.interface, "down")

    def run(
        self, commands: Sequence[Sequence[str]], timeout: float, env: Mapping[str, str] | None = None
    ) -> list[Finished]:
        """Runs a command on each host at the same time; what runs after the timeout is killed with its children."""
        own = {"GLOO_SOCKET_IFNAME": self.interface, "RES_OPTIONS": "timeout:1 attempts:1"}  # no name server answers
        environment = {**os.environ, **own, **(env or {})}
        deadline = time.monotonic() + timeout
        with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
            logs = [Path(folder, name) for name in self.names]
            processes = []
            try:
                for name, command, log in zip(self.names, commands, logs, strict=True):
                    entered = [_ip_program() or "ip", "netns", "exec", name, *command]
                    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
                    with log.open("wb") as stream:
                        process = subprocess.Popen(
                            entered, stdout=stream, env=environment, start_new_session=True, **streams
                        )
                    processes.append(process)
                for process in processes:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.0, deadline - time.monotonic()))
            finally:
                for name in self.names:
                    _kill_all(name)
                for process in processes:
                    process.wait(10)
            return [
                Finished(process.returncode, log.read_text(errors="replace"))
                for process, log in zip(processes, logs, strict=True)
            ]


def _ip_program() -> str | None:
    """Where `ip` is; it may lie outside the path of an ordinary user."""
    return shutil.which("ip", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def _ip(*words: str) -> str:
    """Runs `ip` and returns its output."""
    command = [_ip_program() or "ip", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


def _kill_all(name: str) -> None:
    """Kills every process on a host."""
    with contextlib.suppress(subprocess.SubprocessError):
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _remove(name: str) -> None:
    """Kills what runs on a host and removes it; nothing happens where there is none."""
    with contextlib.suppress(subprocess.SubprocessError):
        _kill_all(name)
        _ip("netns", "delete", name)


def _remove_left_over() -> None:
    """Removes the hosts of test runs that were killed."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"{_PREFIX}-") and not Path("/proc", name.split("-")[1]).exists():
            _remove(name)
