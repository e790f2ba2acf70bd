"""Connections of launchers to that of node 0, which carry nothing: they end with the process that holds them."""

from __future__ import annotations

import contextlib
import socket

_REACH_TIMEOUT_S = 5.0


class Lifelines:
    """The end of node 0 of the connections."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self._server.setblocking(False)
        self._lines: dict[socket.socket, int | None] = {}  # the launcher that holds each, once it has said so

    @property
    def port(self) -> int:
        return self._server.getsockname()[1]

    def ended(self) -> set[int]:
        """The launchers whose connections have ended since the last call; does not wait."""
        with contextlib.suppress(BlockingIOError):
            while True:
                line, _ = self._server.accept()
                line.setblocking(False)
                self._lines[line] = None
        nodes: set[int] = set()
        for line in list(self._lines):
            told = _read(line)
            if told:
                self._lines[line] = int(told)
            elif told is not None:
                line.close()
                nodes |= {node for node in [self._lines.pop(line)] if node is not None}
        return nodes

    def close(self) -> None:
        for one in (self._server, *self._lines):
            one.close()


class Lifeline:
    """The end of another launcher of its connection; without one, where it can't be made, only silence tells."""

    def __init__(self, host: str, port: int, node: int):
        self._line: socket.socket | None = None
        with contextlib.suppress(OSError):
            self._line = socket.create_connection((host, port), _REACH_TIMEOUT_S)
            self._line.sendall(str(node).encode())
            self._line.setblocking(False)

    @property
    def has_ended(self) -> bool:
        """Whether node 0, or something between, has ended the connection."""
        return self._line is not None and _read(self._line) == b""

    def close(self) -> None:
        if self._line is not None:
            self._line.close()


def _read(line: socket.socket) -> bytes | None:
    """What a connection has to say; nothing at its end, `None` while it is silent."""
    try:
        return line.recv(64)
    except BlockingIOError:
        return None
    except OSError:
        return b""
