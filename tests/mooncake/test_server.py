"""The packaged master: started on loopback, ended for sure, and clear about why it fails."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hicache_mooncake import server as server_module
from hicache_mooncake.server import MooncakeMaster, master_program
from hicache_shared.errors import BackendUnavailableError
from tests.processes import alive

pytestmark = pytest.mark.backend("mooncake")


def test_a_master_answers_inside_the_context_and_is_gone_after(tmp_path: Path) -> None:
    log = tmp_path / "master.log"
    with MooncakeMaster(log=log) as master:
        host, port = master.address.split(":")
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port)), timeout=5).close()
        pid = master.pid
    assert not alive(pid)
    assert "Master service started" in log.read_text()


def test_a_killed_master_can_be_started_again_at_its_address() -> None:
    with MooncakeMaster() as master:
        address, pid = master.address, master.pid
        master.kill()
        master.restart()
        assert (master.address, master.pid != pid) == (address, True)
        assert alive(master.pid)


def test_a_master_that_dies_at_once_shows_its_last_words() -> None:
    with (
        pytest.raises(BackendUnavailableError, match=r"ended at once(.|\n)*no_such_flag") as caught,
        MooncakeMaster(options=["--no_such_flag=1"]),
    ):
        pass
    assert "apt-get" not in str(caught.value)


def test_missing_libraries_name_the_debian_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mooncake_master"
    program.write_text(
        "#!/bin/sh\necho error while loading shared libraries: libibverbs.so.1 >&2\nexit 127\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(server_module, "master_program", lambda: program)
    with (
        pytest.raises(BackendUnavailableError, match="libibverbs1 libnuma1 libcurl4"),
        MooncakeMaster(),
    ):
        pass


def test_the_program_is_found_without_loading_the_client() -> None:
    assert master_program().name == "mooncake_master"
