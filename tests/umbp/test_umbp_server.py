"""The packaged servers: started for a while, ended for sure, and clear about why they fail."""

from __future__ import annotations

import os

import pytest

from hicache_shared.errors import BackendUnavailableError
from hicache_umbp.peer import State
from hicache_umbp.server import UmbpMaster, UmbpServer, program

pytestmark = pytest.mark.backend("umbp")

MB = 2**20


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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
