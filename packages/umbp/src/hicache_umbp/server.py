"""UMBP's servers of one's own, for tests, trials and benchmarks."""

from __future__ import annotations

import importlib.util
import os
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from hicache_shared.errors import BackendUnavailableError
from hicache_shared.server import LOOPBACK, OwnServer, free_ports
from hicache_umbp.client import INSTALL
from hicache_umbp.config import UNIX
from hicache_umbp.paging import HIGHEST, STEP
from hicache_umbp.peer import Peer, State, TcpPeer, UnixPeer


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


class _Server(OwnServer):
    """A server of UMBP, which takes its settings from its environment."""

    def __init__(self, log: Path | None, options: Mapping[str, str]) -> None:
        super().__init__(log)
        self._options = dict(options)

    @abstractmethod
    def peer(self) -> Peer:
        """How to ask whether the server answers."""

    def answers(self) -> bool:
        return self.peer().state(1.0) is State.UP

    def environment(self) -> Mapping[str, str]:
        return self._options


class UmbpServer(_Server):
    """A standalone server that keeps pages in memory, at a socket in a folder of its own.

    Args:
        capacity_bytes: memory that it gives to the store.
        page_bytes: bytes that it gives out at once; see :mod:`hicache_umbp.paging`.
        log: file for its log; a temporary one where not given.
        options: further variables of its environment.
    """

    name: ClassVar[str] = "umbp_standalone_server"

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

    def place(self, folder: Path) -> None:
        self.address = f"{UNIX}{folder}/umbp.sock"

    def command(self) -> list[str]:
        return [str(program(self.name)), self.address]


class UmbpMaster(_Server):
    """A master on loopback, and its metrics beside it.

    Clients of it open a port on all interfaces, so use it in a network namespace.

    Args:
        log: file for its log; a temporary one where not given.
        options: further variables of its environment.
    """

    name: ClassVar[str] = "umbp_master"

    def __init__(
        self, *, log: Path | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(log, options or {})
        self._metrics_port = 0

    def peer(self) -> Peer:
        host, _, port = self.address.rpartition(":")
        return TcpPeer(host, int(port))

    def place(self, folder: Path) -> None:
        port, self._metrics_port = free_ports(2)
        self.address = f"{LOOPBACK}:{port}"

    def command(self) -> list[str]:
        return [str(program(self.name)), self.address, str(self._metrics_port)]
