"""The packaged servers: started for a while, ended for sure, and clear about why they fail."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hicache_shared.errors import BackendUnavailableError
from hicache_umbp import server as server_module
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
        assert os.getpgid(pid) != os.getpgrp(), "Ctrl-C in a terminal would reach it"
    assert not alive(pid)


def test_a_frozen_server_is_ended_too() -> None:
    with UmbpServer(capacity_bytes=64 * MB) as server:
        pid = server.pid
        server.freeze()
    assert not alive(pid)


def test_a_killed_server_can_be_started_again_at_its_address() -> None:
    with UmbpServer(capacity_bytes=64 * MB) as server:
        address, pid = server.address, server.pid
        server.kill()
        server.restart()
        assert (server.address, server.pid != pid, alive(server.pid)) == (address, True, True)


def test_an_interrupted_start_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(server: UmbpServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(UmbpServer, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt), UmbpServer():
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_dies_at_once_shows_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "server"
    script.write_text("#!/bin/sh\necho no such library >&2\nexit 127\n")
    script.chmod(0o755)
    monkeypatch.setattr(server_module, "program", lambda name: script)
    with (
        pytest.raises(BackendUnavailableError, match=r"ended at once(.|\n)*no such library"),
        UmbpServer(),
    ):
        pass


def test_a_server_does_not_outlive_a_parent_that_is_killed() -> None:
    source = (
        "import sys; from hicache_umbp.server import UmbpServer\n"
        "with UmbpServer() as server:\n"
        "    print(server.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watch = os.pidfd_open(pid)
        parent.kill()
        gone, _, _ = select.select([watch], [], [], 20)
        os.close(watch)
    assert gone


def test_the_programs_are_found_without_loading_the_client() -> None:
    assert program("umbp_master").name == "umbp_master"
    with pytest.raises(BackendUnavailableError, match=r"hicache-umbp\[client\]"):
        program("umbp_nothing")
