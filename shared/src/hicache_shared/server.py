"""A server process of one's own, for tests, trials and benchmarks."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from hicache_shared.errors import BackendUnavailableError

START_S = 30.0
STOP_S = 10.0
LOOPBACK = "127.0.0.1"


class OwnServer(ABC):
    """A server while the context lasts.

    Not thread-safe; the thread that enters must live as long as the server, since Linux counts
    the end of that thread as the end of the parent.

    Args:
        log: file for the server's log; a temporary one where not given.

    Attributes:
        name: the program's, for messages.
        address: where it answers; set once entered.
    """

    name: ClassVar[str]

    def __init__(self, log: Path | None) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.address = ""

    @abstractmethod
    def place(self, folder: Path) -> None:
        """Set the address; ``folder`` is the server's own and goes when it stops."""

    @abstractmethod
    def command(self) -> list[str]:
        """What starts it; raises BackendUnavailableError where it is not installed."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether it serves; takes a second at most."""

    def environment(self) -> Mapping[str, str]:
        """Variables that it gets beside those of this process."""
        return {}

    def hint(self, log: str) -> str:
        """What to do about an end that its log tells of; empty, or text that follows a space."""
        return ""

    def __enter__(self) -> Self:
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="hicache-server-")
            folder = Path(self._folder.name)
            self._log = self._log or folder / "server.log"
            self.place(folder)
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._running().pid

    def log_text(self) -> str:
        """What the server logged so far."""
        if self._log is None or not self._log.exists():
            return ""
        return self._log.read_text(errors="replace")

    def restart(self) -> None:
        """Start an (empty) server at the same address after :meth:`kill`.

        Raises:
            BackendUnavailableError: it does not start.
        """
        self._start()

    def kill(self) -> None:
        """End the server without warning."""
        process = self._running()
        process.kill()
        process.wait(STOP_S)

    def freeze(self) -> None:
        """Stop the server from running; its connections stay open."""
        os.kill(self._running().pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._running().pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """Let a frozen server run on."""
        os.kill(self._running().pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the server; harmless where it is not running."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = self._log = None

    def _start(self) -> None:
        if self._log is None:
            raise BackendUnavailableError(f"{self.name} starts as a context manager")
        with self._log.open("ab") as log:
            # In a process group of its own, so that Ctrl-C leaves it to be stopped by its user.
            self._process = subprocess.Popen(
                [*_ending_with_parent(), *self.command()],
                env={**os.environ, **self.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        until = time.monotonic() + START_S
        while not self.answers():
            if self._ends_within(0.05):
                raise BackendUnavailableError(self._why("ended at once"))
            if time.monotonic() > until:
                raise BackendUnavailableError(self._why(f"did not answer within {START_S:.0f} s"))

    def _ends_within(self, seconds: float) -> bool:
        try:
            self._running().wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _why(self, what: str) -> str:
        log = self.log_text()
        last = "\n  ".join(log.splitlines()[-5:])
        return f"{self.name} {what}{self.hint(log)}; its log ends with:\n  {last}"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise BackendUnavailableError(f"this {self.name} is not running")
        return self._process


def listens(address: str) -> bool:
    """Whether something takes connections at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    """Ports of loopback that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _ending_with_parent() -> list[str]:
    """A prefix that lets the kernel end the server with its parent, however that ends.

    util-linux has it; without it a parent that is killed leaves its server behind.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []
