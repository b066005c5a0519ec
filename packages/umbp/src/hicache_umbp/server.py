"""UMBP's servers of one's own, for tests, trials and benchmarks."""

from __future__ import annotations

import importlib.util
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
from typing import Self

from hicache_shared.errors import BackendUnavailableError
from hicache_umbp.client import INSTALL
from hicache_umbp.config import UNIX
from hicache_umbp.paging import HIGHEST, STEP
from hicache_umbp.peer import Peer, State, TcpPeer, UnixPeer

START_S = 30.0
STOP_S = 10.0
LOOPBACK = "127.0.0.1"


def program(name: str) -> Path:
    """A server in the installed client's package, made executable if it is not.

    Raises:
        BackendUnavailableError: there is none.
    """
    spec = importlib.util.find_spec("mori")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / name
        if path.is_file():
            if not os.access(path, os.X_OK):
                path.chmod(path.stat().st_mode | 0o111)
            return path
    raise BackendUnavailableError(f"{name} is not installed: {INSTALL}")


class _Server(ABC):
    """A server process while the context lasts.

    Not thread-safe; the thread that enters must live as long as the server, since Linux counts
    the end of that thread as the end of the parent.

    Attributes:
        address: where it answers; set once entered.
    """

    name: str

    def __init__(self, log: Path | None, options: Mapping[str, str] | None) -> None:
        self._log = log
        self._options = dict(options or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.address = ""

    @abstractmethod
    def _place(self, folder: Path) -> None:
        """Set the address."""

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def peer(self) -> Peer:
        """How to ask whether the server answers."""

    def __enter__(self) -> Self:
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="umbp-")
            folder = Path(self._folder.name)
            self._log = self._log or folder / "server.log"
            self._place(folder)
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
                [*_ending_with_parent(), *self._command()],
                env={**os.environ, **self._options},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        until = time.monotonic() + START_S
        peer = self.peer()
        while peer.state(1.0) is not State.UP:
            if self._ends_within(0.02):
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
        last = "\n  ".join(self.log_text().splitlines()[-5:])
        return f"{self.name} {what}; its log ends with:\n  {last}"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise BackendUnavailableError(f"this {self.name} is not running")
        return self._process


class UmbpServer(_Server):
    """A standalone server that keeps pages in memory, at a socket in a folder of its own.

    Args:
        capacity_bytes: memory that it gives to the store.
        page_bytes: bytes that it gives out at once; see :mod:`hicache_umbp.paging`.
        log: file for its log; a temporary one where not given.
        options: further variables of its environment.
    """

    name = "umbp_standalone_server"

    def __init__(
        self,
        *,
        capacity_bytes: int = 1 << 30,
        page_bytes: int = 0,
        log: Path | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        given = {
            "UMBP_DRAM_CAPACITY": str(capacity_bytes),
            "UMBP_SSD_ENABLED": "0",
            "UMBP_DRAM_HIGH_WM": str(HIGHEST),
            "UMBP_DRAM_LOW_WM": str(HIGHEST - STEP),
        }
        if page_bytes:
            given["UMBP_EMBEDDED_DRAM_PAGE_SIZE"] = str(page_bytes)
        super().__init__(log, {**given, **(options or {})})

    @property
    def socket(self) -> Path:
        return Path(self.address.removeprefix(UNIX))

    def peer(self) -> Peer:
        return UnixPeer(self.socket)

    def _place(self, folder: Path) -> None:
        self.address = f"{UNIX}{folder}/umbp.sock"

    def _command(self) -> list[str]:
        return [str(program(self.name)), self.address]


class UmbpMaster(_Server):
    """A master on loopback, and its metrics beside it.

    Clients of it open a port on all interfaces, so use it in a network namespace.

    Args:
        log: file for its log; a temporary one where not given.
        options: further variables of its environment.
    """

    name = "umbp_master"

    def __init__(
        self, *, log: Path | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(log, options)
        self._metrics_port = 0

    def peer(self) -> Peer:
        host, _, port = self.address.rpartition(":")
        return TcpPeer(host, int(port))

    def _place(self, folder: Path) -> None:
        port, self._metrics_port = _free_ports(2)
        self.address = f"{LOOPBACK}:{port}"

    def _command(self) -> list[str]:
        return [str(program(self.name)), self.address, str(self._metrics_port)]


def _ending_with_parent() -> list[str]:
    """A prefix that lets the kernel end the server with its parent, however that ends.

    util-linux has it; without it a parent that is killed leaves its server behind.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
