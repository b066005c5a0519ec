"""Epochs of a namespace: the client can neither delete nor list, so a clear changes the keys.

A page's key has the epoch of its namespace in it. A clear begins a new one, and no page of
an earlier epoch is asked for again; the client evicts them in time.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from pathlib import Path
from typing import Protocol

from hicache_shared.errors import ClearError

MOUNTS = Path("/proc/self/mountinfo")

_ESCAPED = re.compile(r"\\([0-7]{3})")
"""How a space, tab, line end or backslash stands in a mount point."""


class Epochs(Protocol):
    """Thread-safe."""

    def of(self, namespace: str) -> str:
        """What is between a pool's prefix and a page's hash now; empty before any clear."""

    def advance(self, namespace: str) -> None:
        """Begin a new epoch. Every call that starts afterwards has it; raises ClearError."""


class PrivateEpochs:
    """Of a store that lives and dies with its client in this process."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()

    def of(self, namespace: str) -> str:
        number = self._numbers.get(namespace)
        return "" if number is None else f"e{number}/"

    def advance(self, namespace: str) -> None:
        with self._lock:
            self._numbers[namespace] = self._numbers.get(namespace, 0) + 1


class SharedEpochs:
    """Of a standalone server: a small file a namespace in a folder beside its socket.

    Every client reaches the server through that folder, so all of them see a clear in the
    next call they begin. The files outlive the server and its clients, as pages on a disk
    may. They are not objects of the store, which would evict them.

    Args:
        socket: path of the server's socket. Links are followed, since all clients must look in
            one folder, whichever path each was given.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket.resolve()
        self._folder = self._socket.with_name(f"{self._socket.name}.epochs")
        self._seen: dict[str, tuple[tuple[int, int], str]] = {}

    def of(self, namespace: str) -> str:
        """About 2 us where nothing was cleared since.

        Raises:
            OSError: the file is there and cannot be read.
        """
        path = self._path(namespace)
        try:
            stat = os.stat(path)  # noqa: PTH116 - a third of the time of Path.stat
        except FileNotFoundError:
            return ""
        version = (stat.st_ino, stat.st_mtime_ns)
        seen = self._seen.get(namespace)
        if seen is None or seen[0] != version:
            # Named by the time of the clear, so that no epoch ever comes again.
            seen = (version, f"e{stat.st_mtime_ns:x}/")
            self._seen[namespace] = seen
        return seen[1]

    def advance(self, namespace: str) -> None:
        """Raises ClearError where other clients may not see the folder, or it is not ours."""
        try:
            if self.mounted_alone():
                raise ClearError(
                    f"UMBP cannot clear: {self._socket} is mounted without its folder, so other "
                    "clients of the server would not see it; mount the folder"
                )
            self._folder.mkdir(exist_ok=True)
            with (self._folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._replace(Path(self._path(namespace)))
        except OSError as error:
            raise ClearError(
                f"UMBP cannot clear {namespace!r}: the epoch is kept beside the server's socket, "
                f"and {self._folder} cannot be written ({error}); clear as the user who runs the "
                "server, or give another namespace"
            ) from error

    def _replace(self, path: Path) -> None:
        """Put a new file in place, with a time later than the old one's."""
        before = path.stat().st_mtime_ns if path.exists() else 0
        fresh = path.with_name(f"{path.name}.new")
        fresh.touch()
        now = max(time.time_ns(), before + 1)
        os.utime(fresh, ns=(now, now))
        fresh.replace(path)

    def mounted_alone(self) -> bool:
        """Whether the folder around the socket is not the one that other clients look in.

        A socket that was mounted alone lies on another device than its folder, or is a mount
        of its own where both come from one file system.
        """
        if device_of(self._socket) != device_of(self._socket.parent):
            return True
        return str(self._socket) in mounts()

    def _path(self, namespace: str) -> str:
        return f"{self._folder}/{namespace.replace('/', '_')}"


def device_of(path: Path) -> int:
    """The device that a path lies on."""
    return path.stat().st_dev


def mounts() -> set[str]:
    """Where something is mounted (Linux; proc_pid_mountinfo(5)); empty where it is not told."""
    if not MOUNTS.exists():
        return set()
    lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    return {_ESCAPED.sub(lambda code: chr(int(code[1], 8)), line.split(" ")[4]) for line in lines}


class NoEpochs:
    """Of a store over several machines, which share no folder."""

    def of(self, namespace: str) -> str:
        return ""

    def advance(self, namespace: str) -> None:
        raise ClearError(
            f"UMBP with a master cannot clear {namespace!r}: its client can neither delete nor "
            "list keys, and its own clear would empty the store of every model; set another "
            '"namespace" in the extra config instead, and old pages are evicted in time'
        )
