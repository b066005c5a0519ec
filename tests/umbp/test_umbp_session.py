"""Registering memory while the server ends, freezes or is started again."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_shared.store import Code
from hicache_umbp.memory import shared_bytes
from hicache_umbp.server import UmbpServer
from hicache_umbp.store import UmbpStore
from tests.pools import TestPool, hashes
from tests.umbp.umbp_stores import exists, new_store

pytestmark = [pytest.mark.backend("umbp"), pytest.mark.faults]

ROOT = Path(__file__).parents[2]
N = 8
WAIT_S = 30.0


@pytest.fixture
def server() -> Iterator[UmbpServer]:
    with UmbpServer(capacity_bytes=64 << 20, page_bytes=16384) as running:
        yield running


def opened(server: UmbpServer) -> tuple[UmbpStore, TestPool, TestPool]:
    """A store with a pool of one component, and a pool of two that it does not know yet."""
    store, _ = new_store({"standalone_address": server.address})
    pool = TestPool.make("hc1/session", "kv", 2 * N, (1000,), shared_bytes)
    late = TestPool.make("hc1/session", "late", 2 * N, (1000, 24), shared_bytes)
    store.open([pool.stored])
    pool.arrays.fill(1)
    late.arrays.fill(2)
    assert store.put([pool.pages(hashes(N))], 5.0) == [[Code.OK] * N]
    return store, pool, late


def works(store: UmbpStore, pool: TestPool) -> None:
    """Pages go in, in the end, and come back."""
    end = time.monotonic() + WAIT_S
    while store.put([pool.pages(hashes(N))], 1.0) != [[Code.OK] * N]:
        assert time.monotonic() < end
        time.sleep(0.01)
    before = pool.arrays.contents(list(range(N)))
    assert store.get([pool.pages(hashes(N), list(range(N, 2 * N)))], 5.0) == [[Code.OK] * N]
    assert pool.arrays.contents(list(range(N, 2 * N))) == before


def test_memory_registered_just_after_the_server_was_killed_is_known_when_it_is_back(
    server: UmbpServer,
) -> None:
    """The session has heard of the server a moment ago, so it calls the dead one's client."""
    store, _, late = opened(server)
    server.kill()
    store.register(late.stored)
    server.restart()
    works(store, late)
    store.close()


@pytest.mark.parametrize("call", ["get", "put"])
def test_the_first_trailers_asked_of_a_dead_server_raise_nothing(
    server: UmbpServer, call: str
) -> None:
    store, pool, late = opened(server)
    store.register(late.stored)
    assert exists(store, pool.ask(hashes(N))) == [[True] * N]
    server.kill()
    assert getattr(store, call)([late.pages(hashes(N))], 5.0) == [[Code.UNAVAILABLE] * N]
    server.restart()
    works(store, late)
    store.close()


def test_calls_do_not_wait_for_a_registration_that_waits_for_a_frozen_server(
    server: UmbpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_umbp.session.PULSE_S", 0.3)
    store, pool, late = opened(server)
    client = store._session._client
    assert client is not None
    register, begun, answers = client.register, threading.Event(), []

    def noted(address: int, nbytes: int) -> bool:
        begun.set()
        return register(address, nbytes)

    monkeypatch.setattr(client, "register", noted)
    server.freeze()
    registering = threading.Thread(target=store.register, args=(late.stored,))
    registering.start()
    assert begun.wait(WAIT_S)
    monkeypatch.setattr("hicache_umbp.session.PULSE_AFTER_S", 0.0)
    asking = threading.Thread(
        target=lambda: answers.append(exists(store, pool.ask(hashes(N)))), daemon=True
    )
    asking.start()
    asking.join(WAIT_S)
    waits = asking.is_alive()
    server.thaw()
    registering.join(WAIT_S)
    assert not waits
    assert answers == [[[False] * N]]
    works(store, late)
    store.close()


CLOSES = """
import os, signal, sys
from pathlib import Path
from hicache_umbp.memory import shared_bytes
from tests.pools import TestPool, hashes
from tests.umbp.umbp_stores import new_store
store, _ = new_store({"standalone_address": sys.argv[1]})
pool = TestPool.make("hc1/close", "kv", 4, (1000,), shared_bytes)
store.open([pool.stored])
assert store.put([pool.pages(hashes(4))], 5.0) == [[0] * 4]
os.kill(int(sys.argv[2]), signal.SIGSTOP)
threads = list(Path("/proc", sys.argv[2], "task").glob("*/stat"))
while any(thread.read_text().rpartition(")")[2].split()[0] != "T" for thread in threads):
    pass
store.close()
"""


def test_closing_does_not_wait_for_a_server_that_froze_a_moment_ago(server: UmbpServer) -> None:
    """In a process of its own, since the client's end holds the interpreter's lock."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", CLOSES, server.address, str(server.pid)],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            cwd=ROOT,
        )
    finally:
        server.thaw()
    assert ended.returncode == 0, ended.stderr[-2000:]
