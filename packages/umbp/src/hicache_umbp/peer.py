"""Whether a server answers, without the native client, which may wait for ever.

The native client waits without end for a server that is frozen, its constructor and its end
while holding the interpreter's lock. So a server is asked here before the client is.
"""

from __future__ import annotations

import enum
import os
import socket
import sys
import time
from pathlib import Path
from typing import Protocol

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""How an HTTP/2 connection begins (RFC 9113, 3.4): the preface, and empty settings. A gRPC
server sends its own settings at once."""


CONNECT_S = 0.5
"""Seconds within which another machine accepts a connection."""


class State(enum.Enum):
    UP = "answers"
    DEAD = "is not there"
    SILENT = "does not answer"


class Peer(Protocol):
    """A server. Thread-safe."""

    name: str

    def identity(self) -> object:
        """Changes when another process serves; cheap, and says nothing of life."""

    def listens(self) -> bool:
        """Whether a process holds the server's address, be it frozen; about 30 us."""

    def state(self, timeout_s: float) -> State:
        """Whether the server answers; under a millisecond where it does."""


class UnixPeer:
    """A gRPC server at a Unix socket."""

    def __init__(self, path: Path) -> None:
        self.name = f"unix://{path}"
        self._path = str(path)

    def identity(self) -> object:
        try:
            stat = os.stat(self._path)  # noqa: PTH116 - in every call
        except OSError:
            return None
        return stat.st_ino, stat.st_ctime_ns

    def listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.setblocking(False)
            try:
                connection.connect(self._path)
            except BlockingIOError:
                return True  # its queue of connections is full
            except OSError:
                return False
            return True

    def state(self, timeout_s: float) -> State:
        until = time.monotonic() + timeout_s
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            try:
                connection.connect(self._path)
                return _greeted(connection, until)
            except OSError as error:
                return _why_not(error)

    def counts_processes_as_here(self) -> bool:
        """Whether the server is in the PID namespace of this process; True if it is not there.

        Where ``/proc`` hides the server, being visible at all is taken for it.
        """
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(CONNECT_S)
            try:
                connection.connect(self._path)
            except OSError:
                return True
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid = int.from_bytes(credentials[:4], sys.byteorder)
        return pid != 0 and _levels(pid) <= 1


def _levels(pid: int) -> int:
    """PID namespaces from this one down to a process's (proc_pid_status(5)); 0 if not told."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((len(line.split()) - 1 for line in status.splitlines() if "NSpid:" in line), 0)


class TcpPeer:
    """A gRPC server at a TCP port."""

    def __init__(self, host: str, port: int) -> None:
        self.name = f"{host}:{port}"
        self._address = (host, port)

    def identity(self) -> object:
        return None

    def listens(self) -> bool:
        try:
            socket.create_connection(self._address, CONNECT_S).close()
        except OSError:
            return False
        return True

    def state(self, timeout_s: float) -> State:
        until = time.monotonic() + timeout_s
        try:
            with socket.create_connection(self._address, timeout_s) as connection:
                return _greeted(connection, until)
        except OSError as error:
            return _why_not(error)


def _greeted(connection: socket.socket, until: float) -> State:
    connection.settimeout(max(0.001, until - time.monotonic()))
    connection.sendall(HELLO)
    return State.UP if connection.recv(1) else State.DEAD


def _why_not(error: OSError) -> State:
    return State.SILENT if isinstance(error, TimeoutError | BlockingIOError) else State.DEAD
