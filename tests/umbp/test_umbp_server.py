"""The packaged servers: started for a while, ended for sure, and clear about why they fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_shared.errors import BackendUnavailableError
from hicache_umbp.peer import State
from hicache_umbp.server import UmbpMaster, UmbpServer, program
from tests.processes import alive

pytestmark = pytest.mark.backend("umbp")

MB = 2**20

ROOT = Path(__file__).parents[2]

IN_A_CONTAINER = [
    *("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"),
]
"""Processes of two containers have the same IDs."""


@pytest.mark.parametrize("kind", [UmbpServer, UmbpMaster])
def test_a_server_answers_inside_the_context_and_is_gone_after(
    kind: type[UmbpServer] | type[UmbpMaster],
) -> None:
    with kind() as server:
        assert server.peer().state(5.0) is State.UP
        pid = server.pid
    assert not alive(pid)


def test_a_killed_server_can_be_started_again_at_its_address() -> None:
    with UmbpServer(capacity_bytes=64 * MB) as server:
        address, pid = server.address, server.pid
        server.kill()
        server.restart()
        assert (server.address, server.pid != pid, alive(server.pid)) == (address, True, True)


def test_the_programs_are_found_without_loading_the_client() -> None:
    assert program("umbp_master").name == "umbp_master"
    with pytest.raises(BackendUnavailableError, match=r"hicache-umbp\[client\]"):
        program("umbp_nothing")


OPENS = """
import sys
from hicache_shared.errors import BackendUnavailableError
from tests.umbp.umbp_stores import new_store
store, _ = new_store({"standalone_address": sys.argv[1]})
try:
    store.open([])
except BackendUnavailableError as error:
    print(error)
"""


class ServerInAContainer(UmbpServer):
    def command(self) -> list[str]:
        return [*IN_A_CONTAINER, *super().command()]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
@pytest.mark.parametrize("inside", ["neither", "client", "server"])
def test_a_server_that_counts_processes_otherwise_is_refused(inside: str) -> None:
    """The client's name there is its process ID, and clients of one name share memory."""
    kind = ServerInAContainer if inside == "server" else UmbpServer
    with kind(capacity_bytes=64 * MB) as server:
        command = [*(IN_A_CONTAINER if inside == "client" else []), sys.executable, "-c", OPENS]
        done = subprocess.run(
            [*command, server.address], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
        server.kill()
    assert done.returncode == 0, done.stderr[-2000:]
    assert ("is in another PID namespace" in done.stdout) == (inside != "neither")
