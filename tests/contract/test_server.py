"""A server process of one's own: started for a while, ended for sure, and clear about failures."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from hicache_shared.errors import BackendUnavailableError
from hicache_shared.server import LOOPBACK, OwnServer, free_ports, listens
from tests.processes import alive

LISTEN = """
import os, socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print(os.environ["GREETING"], flush=True)
while True:
    server.accept()[0].close()
"""


class Listener(OwnServer):
    """Takes connections and says nothing."""

    name: ClassVar[str] = "listener"
    source = LISTEN

    def place(self, folder: Path) -> None:
        self.address = f"{LOOPBACK}:{free_ports(1)[0]}"

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.source, *self.address.split(":")]

    def answers(self) -> bool:
        return listens(self.address)

    def environment(self) -> Mapping[str, str]:
        return {"GREETING": "good day"}


class Failing(Listener):
    source = "import sys; sys.exit('no such library')"

    def hint(self, log: str) -> str:
        return " (install it)" if "library" in log else ""


def test_a_server_answers_inside_the_context_and_is_gone_after(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Listener(log) as server:
        assert server.answers()
        assert server.log_text() == "good day\n"
        pid = server.pid
    assert not alive(pid)
    assert log.exists(), "a log that was asked for stays"


def test_ctrl_c_in_a_terminal_does_not_reach_a_server() -> None:
    with Listener(None) as server:
        assert os.getpgid(server.pid) != os.getpgrp()


def test_an_interrupted_start_leaves_no_process_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def interrupted(server: Listener) -> bool:
        started.append(server.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Listener, "answers", interrupted)
    with pytest.raises(KeyboardInterrupt), Listener(None):
        pass
    assert list(tmp_path.iterdir()) == []
    assert not alive(started[0])


def test_a_frozen_server_is_ended_too() -> None:
    with Listener(None) as server:
        pid = server.pid
        server.freeze()
    assert not alive(pid)


def test_a_frozen_server_goes_on_after_it_thawed() -> None:
    with Listener(None) as server:
        server.freeze()
        server.thaw()
        assert server.answers()


def test_a_killed_server_can_be_started_again_at_its_address() -> None:
    with Listener(None) as server:
        address, pid = server.address, server.pid
        server.kill()
        assert not server.answers()
        server.restart()
        assert (server.address, server.pid != pid, server.answers()) == (address, True, True)


def test_a_server_that_dies_at_once_shows_its_last_words_and_what_to_do() -> None:
    said = r"listener ended at once \(install it\); its log ends with:\n  no such library"
    with pytest.raises(BackendUnavailableError, match=said), Failing(None):
        pass


def test_a_server_is_started_by_its_context_alone() -> None:
    server = Listener(None)
    with pytest.raises(BackendUnavailableError, match="starts as a context manager"):
        server.restart()
    with pytest.raises(BackendUnavailableError, match="is not running"):
        server.kill()
    server.stop()


def test_a_server_does_not_outlive_a_parent_that_is_killed() -> None:
    source = (
        "import sys; from tests.contract.test_server import Listener\n"
        "with Listener(None) as server:\n"
        "    print(server.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watch = os.pidfd_open(pid)
        parent.kill()
        gone, _, _ = select.select([watch], [], [], 20)
        os.close(watch)
    assert gone
