"""A Mooncake master of one's own, for tests, trials and benchmarks."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from hicache_mooncake.client import INSTALL
from hicache_shared.errors import BackendUnavailableError

START_S = 30.0
STOP_S = 10.0
LOOPBACK = "127.0.0.1"


def master_program() -> Path:
    """The ``mooncake_master`` in the installed client's package.

    Raises:
        BackendUnavailableError: there is none.
    """
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        program = Path(folder) / "mooncake_master"
        if program.is_file():
            return program
    raise BackendUnavailableError(f"mooncake_master is not installed: {INSTALL}")


class MooncakeMaster:
    """A master on loopback while the context lasts.

    Its metadata service is not started, since that binds every interface; clients use
    ``P2PHANDSHAKE``. Not thread-safe; the thread that enters must live as long as the master,
    since Linux counts the end of that thread as the end of the parent.

    Attributes:
        address: ``host:port``, for ``master_server_address``; set once entered.
        admin_address: ``host:port`` of its HTTP service (metrics, keys, segments).
    """

    def __init__(self, *, log: Path | None = None, options: Sequence[str] = ()) -> None:
        """Args:
        log: file for the master's log; a temporary one where not given.
        options: more flags of ``mooncake_master``.
        """
        self._log = log
        self._options = tuple(options)
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.address = ""
        self.admin_address = ""

    def __enter__(self) -> Self:
        rpc_port, admin_port = _free_ports(2)
        self.address = f"{LOOPBACK}:{rpc_port}"
        self.admin_address = f"{LOOPBACK}:{admin_port}"
        try:
            if self._log is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="mooncake-master-")
                self._log = Path(self._temporary.name) / "master.log"
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
        """What the master logged so far."""
        if self._log is None or not self._log.exists():
            return ""
        return self._log.read_text(errors="replace")

    def restart(self) -> None:
        """Start an (empty) master on the same address after :meth:`kill`.

        Raises:
            BackendUnavailableError: it does not start.
        """
        self._start()

    def kill(self) -> None:
        """End the master without warning."""
        process = self._running()
        process.kill()
        process.wait(STOP_S)

    def freeze(self) -> None:
        """Stop the master from running; its connections stay open."""
        os.kill(self._running().pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._running().pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """Let a frozen master run on."""
        os.kill(self._running().pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the master; harmless where it is not running."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = self._log = None

    def _start(self) -> None:
        if self._log is None:
            raise BackendUnavailableError("a MooncakeMaster starts as a context manager")
        command = [
            *_ending_with_parent(),
            str(master_program()),
            f"--rpc_address={LOOPBACK}",
            f"--rpc_port={_port(self.address)}",
            f"--metrics_host={LOOPBACK}",
            f"--metrics_port={_port(self.admin_address)}",
            *self._options,
        ]
        with self._log.open("ab") as log:
            # In a process group of its own, so that Ctrl-C leaves it to be stopped by its user.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )
        self._await_answer()

    def _await_answer(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            try:
                socket.create_connection((LOOPBACK, _port(self.address)), timeout=1).close()
            except OSError:
                if self._ends_within(0.05):
                    raise BackendUnavailableError(self._why("ended at once")) from None
            else:
                return
        raise BackendUnavailableError(self._why(f"did not answer within {START_S:.0f} s"))

    def _ends_within(self, seconds: float) -> bool:
        try:
            self._running().wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _why(self, what: str) -> str:
        log = self.log_text()
        hint = (
            " (on Debian: apt-get install libibverbs1 libnuma1 libcurl4)"
            if "shared libraries" in log
            else ""
        )
        last = "\n  ".join(log.splitlines()[-5:])
        return f"mooncake_master {what}{hint}; its log ends with:\n  {last}"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise BackendUnavailableError("this MooncakeMaster is not running")
        return self._process


def _ending_with_parent() -> list[str]:
    """A prefix that lets the kernel end the master with its parent, however that ends.

    util-linux has it; without it a parent that is killed leaves its master behind.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []


def _port(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


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
