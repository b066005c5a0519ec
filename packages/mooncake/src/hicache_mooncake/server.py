"""A Mooncake master of one's own, for tests, trials and benchmarks."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from hicache_mooncake.client import INSTALL
from hicache_shared.errors import BackendUnavailableError
from hicache_shared.server import LOOPBACK, OwnServer, free_ports, listens


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


class MooncakeMaster(OwnServer):
    """A master on loopback while the context lasts.

    Its metadata service is not started, since that binds every interface; clients use
    ``P2PHANDSHAKE``.

    Args:
        log: file for the master's log; a temporary one where not given.
        options: more flags of ``mooncake_master``.

    Attributes:
        address: ``host:port``, for ``master_server_address``; set once entered.
        admin_address: ``host:port`` of its HTTP service (metrics, keys, segments).
    """

    name: ClassVar[str] = "mooncake_master"

    def __init__(self, *, log: Path | None = None, options: Sequence[str] = ()) -> None:
        super().__init__(log)
        self._options = tuple(options)
        self.admin_address = ""

    def place(self, folder: Path) -> None:
        rpc_port, admin_port = free_ports(2)
        self.address = f"{LOOPBACK}:{rpc_port}"
        self.admin_address = f"{LOOPBACK}:{admin_port}"

    def command(self) -> list[str]:
        return [
            str(master_program()),
            f"--rpc_address={LOOPBACK}",
            f"--rpc_port={_port(self.address)}",
            f"--metrics_host={LOOPBACK}",
            f"--metrics_port={_port(self.admin_address)}",
            *self._options,
        ]

    def answers(self) -> bool:
        return listens(self.address)

    def hint(self, log: str) -> str:
        if "shared libraries" not in log:
            return ""
        return " (on Debian: apt-get install libibverbs1 libnuma1 libcurl4)"


def _port(address: str) -> str:
    return address.rsplit(":", 1)[1]
