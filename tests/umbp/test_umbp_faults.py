"""A server that is killed, frozen or started again gives answers, in bounded time."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_shared.errors import BackendUnavailableError, ClearError, LayoutError
from hicache_shared.store import Code
from hicache_umbp import client as client_module
from hicache_umbp.memory import shared_bytes
from hicache_umbp.peer import State, TcpPeer, UnixPeer
from hicache_umbp.server import UmbpServer
from hicache_umbp.store import UmbpStore
from tests.pools import TestPool, hashes
from tests.umbp.umbp_stores import exists, new_store

pytestmark = [pytest.mark.backend("umbp"), pytest.mark.faults]

ROOT = Path(__file__).parents[2]
N = 8
PATIENCE_S = 15.0
"""Longer than a call may take by far: a test of "bounded", not of speed."""

WAIT_S = 30.0
DOWN = {Code.UNAVAILABLE}


@pytest.fixture
def server() -> Iterator[UmbpServer]:
    with UmbpServer(capacity_bytes=64 << 20, page_bytes=16384) as running:
        yield running


def opened(server: UmbpServer, nbytes: int = 34_560) -> tuple[UmbpStore, TestPool]:
    store, _ = new_store({"standalone_address": server.address})
    pool = TestPool.make("hc1/fault", "kv", 2 * N, (nbytes,), shared_bytes)
    store.open([pool.stored])
    pool.arrays.fill(1)
    return store, pool


def until(store: UmbpStore, pool: TestPool) -> None:
    """Put pages until they are in."""
    end = time.monotonic() + WAIT_S
    while store.put([pool.pages(hashes(N))], 1.0) != [[Code.OK] * N]:
        assert time.monotonic() < end
        time.sleep(0.01)


def restored(store: UmbpStore, pool: TestPool) -> None:
    """The pages come back byte-exact."""
    before = pool.arrays.contents(list(range(N)))
    assert store.get([pool.pages(hashes(N), list(range(N, 2 * N)))], 5.0) == [[Code.OK] * N]
    assert pool.arrays.contents(list(range(N, 2 * N))) == before


def test_a_killed_server_is_told_from_a_miss_and_found_again(
    server: UmbpServer, caplog: pytest.LogCaptureFixture
) -> None:
    store, pool = opened(server)
    pages = pool.pages(hashes(N))
    assert store.put([pages], 5.0) == [[Code.OK] * N]
    assert store.get([pool.pages(hashes(N, 50))], 5.0) == [[Code.MISSING] * N]
    assert store.healthy()
    server.kill()
    with caplog.at_level(logging.WARNING, "hicache_umbp"):
        started = time.monotonic()
        for _ in range(20):
            assert exists(store, pool.ask(hashes(N))) == [[False] * N]
            assert set(store.get([pages], 5.0)[0]) == DOWN
            assert set(store.put([pages], 5.0)[0]) == DOWN
            assert not store.healthy()
        assert time.monotonic() - started < PATIENCE_S
        with pytest.raises(ClearError, match="away"):
            store.clear("hc1/fault")
        assert len([r for r in caplog.records if "is not there" in r.message]) == 1
        server.restart()
        until(store, pool)
    assert store.healthy()
    restored(store, pool)
    assert len([r for r in caplog.records if "is back" in r.message]) == 1
    store.close()


def test_the_first_get_after_a_kill_says_why(server: UmbpServer) -> None:
    for call in ("get", "put"):
        store, pool = opened(server)
        assert store.put([pool.pages(hashes(N))], 5.0) == [[Code.OK] * N]
        server.kill()
        assert set(getattr(store, call)([pool.pages(hashes(N))], 5.0)[0]) == DOWN
        server.restart()
        store.close()


def test_health_sees_a_kill_and_a_return_without_any_call(server: UmbpServer) -> None:
    store, pool = opened(server)
    server.kill()
    end = time.monotonic() + WAIT_S
    while store.healthy():
        assert time.monotonic() < end
        time.sleep(0.01)
    server.restart()
    while not store.healthy():
        assert time.monotonic() < end
        time.sleep(0.01)
    until(store, pool)
    store.close()


def test_a_server_that_was_started_again_between_calls_is_noticed(server: UmbpServer) -> None:
    store, pool = opened(server)
    assert store.put([pool.pages(hashes(N))], 5.0) == [[Code.OK] * N]
    for first in ("put", "exists"):
        server.kill()
        server.restart()
        if first == "put":
            assert store.put([pool.pages(hashes(N))], 5.0) == [[Code.OK] * N]
        else:
            assert exists(store, pool.ask(hashes(N))) == [[False] * N]
            until(store, pool)
        restored(store, pool)
    store.close()


def test_memory_that_is_registered_while_the_server_is_away_works_when_it_is_back(
    server: UmbpServer,
) -> None:
    store, pool = opened(server)
    server.kill()
    exists(store, pool.ask(hashes(1)))
    late = TestPool.make("hc1/fault", "late", 2 * N, (1000, 24), shared_bytes)
    store.register(late.stored)
    late.arrays.fill(3)
    server.restart()
    until(store, late)
    restored(store, late)
    store.close()


@pytest.mark.parametrize("components", [(1 << 20,), (700_000, 348_576)], ids=len)
@pytest.mark.parametrize("mode", ["embedded", "standalone"])
def test_a_page_that_is_evicted_while_it_is_read_is_right_or_missing(
    server: UmbpServer, mode: str, components: tuple[int, ...]
) -> None:
    """A store of 64 pages, a writer that evicts all of them in turn, and three readers."""
    embedded = {"dram_capacity_bytes": "64mb"}
    settings = embedded if mode == "embedded" else {"standalone_address": server.address}
    store, _ = new_store(settings)
    pools = [TestPool.make("hc1/race", "kv", N, components, shared_bytes) for _ in range(4)]
    store.open([pool.stored for pool in pools])
    written: list[int] = []
    ended = threading.Event()
    read: list[bool] = []

    def byte_of(page: int) -> int:
        return page % 251

    def write() -> None:
        pool = pools[0]
        for turn in range(25):
            for page in range(N):
                for buffer, nbytes in zip(pool.arrays.kv_buffer, components, strict=True):
                    buffer[page, :nbytes] = byte_of(turn * N + page)
            codes = store.put([pool.pages(hashes(N, turn * N))], 1.0)[0]
            written.extend(turn * N + page for page, code in enumerate(codes) if code == Code.OK)
        ended.set()

    def work(pool: TestPool) -> None:
        while not ended.is_set():
            pages = written[-64:]
            there = exists(store, pool.ask([hashes(1, page)[0] for page in pages]))[0]
            oldest = [page for page, is_there in zip(pages, there, strict=True) if is_there][:N]
            names = [hashes(1, page)[0] for page in oldest]
            codes = store.get([pool.pages(names)], 1.0)[0] if names else []
            for place, (page, code) in enumerate(zip(oldest, codes, strict=True)):
                if code == Code.OK:
                    bytes_read = np.frombuffer(pool.arrays.page(place), np.uint8)
                    read.append(bool((bytes_read == byte_of(page)).all()))

    threads = [threading.Thread(target=write)]
    threads += [threading.Thread(target=work, args=(pool,)) for pool in pools[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) > 50
    assert all(read)
    store.close()


def test_a_frozen_server_is_not_waited_for_and_a_thawed_one_is_found(
    server: UmbpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The native client would wait for it without end."""
    monkeypatch.setattr("hicache_umbp.session.PULSE_AFTER_S", 0.0)
    monkeypatch.setattr("hicache_umbp.session.PULSE_S", 0.3)
    store, pool = opened(server)
    pages = pool.pages(hashes(N))
    assert store.put([pages], 5.0) == [[Code.OK] * N]
    server.freeze()
    started = time.monotonic()
    for _ in range(5):
        assert set(store.get([pages], 5.0)[0]) == DOWN
        assert set(store.put([pages], 5.0)[0]) == DOWN
        assert exists(store, pool.ask(hashes(N))) == [[False] * N]
    assert not store.healthy()
    assert time.monotonic() - started < PATIENCE_S
    assert len([r for r in caplog.records if "does not answer" in r.message]) == 1
    server.thaw()
    end = time.monotonic() + WAIT_S
    while exists(store, pool.ask(hashes(N))) != [[True] * N]:
        assert time.monotonic() < end
        time.sleep(0.01)
    restored(store, pool)
    store.close()


def test_the_client_of_a_frozen_server_is_let_go_without_waiting_for_it(
    server: UmbpServer,
) -> None:
    """Its end would wait for the server while holding the interpreter's lock."""
    program = textwrap.dedent(
        """
        import os, signal, sys
        from hicache_shared.hostmem import Region
        from hicache_umbp import session as sessions
        from hicache_umbp.config import UmbpConfig
        from hicache_umbp.memory import shared_bytes
        from hicache_umbp.modes import mode_of
        from tests.umbp.umbp_stores import ALONE
        sessions.PULSE_AFTER_S, sessions.PULSE_S = 0.0, 0.3
        config = UmbpConfig.model_validate({"standalone_address": sys.argv[1]})
        session = sessions.Session(mode_of(config, ALONE))
        session.open([])
        memory = shared_bytes(4096)
        session.register(Region(memory.ctypes.data, memory.nbytes))
        os.kill(int(sys.argv[2]), signal.SIGSTOP)
        while session.client() is not None:
            pass
        session.close()
        os.kill(int(sys.argv[2]), signal.SIGCONT)
        """
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, server.address, str(server.pid)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_health_sees_a_frozen_server_however_often_it_is_asked(
    server: UmbpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_umbp.session.PULSE_S", 0.3)
    monkeypatch.setattr("hicache_umbp.session.LOOK_S", 0.0)
    store, pool = opened(server)
    server.freeze()
    end = time.monotonic() + WAIT_S
    while store.healthy():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert exists(store, pool.ask(hashes(N))) == [[False] * N]
    server.thaw()
    until(store, pool)
    assert store.healthy()
    store.close()


def test_the_state_of_a_server_is_seen_without_the_client(
    server: UmbpServer, tmp_path: Path
) -> None:
    peer = server.peer()
    assert (peer.state(5.0), peer.listens()) == (State.UP, True)
    before = peer.identity()
    server.freeze()
    assert (peer.state(0.2), peer.listens()) == (State.SILENT, True)
    server.thaw()
    assert peer.state(5.0) is State.UP
    server.kill()
    assert (peer.state(5.0), peer.listens()) == (State.DEAD, False)
    server.restart()
    assert (peer.state(5.0), peer.identity() != before) == (State.UP, True)
    absent = UnixPeer(tmp_path / "none")
    assert (absent.state(1.0), absent.listens(), absent.identity()) == (State.DEAD, False, None)
    nobody = TcpPeer("127.0.0.1", 1)
    assert (nobody.state(1.0), nobody.listens()) == (State.DEAD, False)


def test_memory_that_a_standalone_server_cannot_map_is_an_error_that_says_what_to_do(
    server: UmbpServer,
) -> None:
    store, _ = new_store({"standalone_address": server.address})
    pool = TestPool.make("hc1/plain", "kv", 4, (1000,))
    with pytest.raises(LayoutError, match=r"UMBPHostMemAllocator \(AnonymousShm\)"):
        store.open([pool.stored])
    good, own = opened(server)
    with pytest.raises(LayoutError, match="standalone server"):
        good.register(pool.stored)
    assert good.put([own.pages(hashes(N))], 5.0) == [[Code.OK] * N]
    good.close()


def test_an_absent_server_is_named(tmp_path: Path) -> None:
    store, _ = new_store({"standalone_address": f"unix://{tmp_path}/none.sock"})
    with pytest.raises(BackendUnavailableError, match=r"none\.sock is not there; start it"):
        store.open([])


def test_a_missing_client_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mori.umbp", None)
    with pytest.raises(BackendUnavailableError, match=r"hicache-umbp\[client\]"):
        client_module.native_module()


@pytest.mark.parametrize("mode", ["embedded", "standalone"])
@pytest.mark.parametrize("closes", [True, False])
def test_a_process_ends_cleanly_and_the_client_writes_nothing_to_standard_output(
    server: UmbpServer, mode: str, closes: bool
) -> None:
    program = textwrap.dedent(
        """
        import sys
        from hicache_shared.hostmem import aligned_bytes
        from hicache_umbp.client import quiet
        from hicache_umbp.memory import shared_bytes
        quiet()
        from tests.pools import TestPool, hashes
        from tests.umbp.umbp_stores import new_store
        address = sys.argv[1]
        store, _ = new_store({"standalone_address": address} if address else {})
        pool = TestPool.make(
            "hc1/exit", "kv", 4, (1000,), shared_bytes if address else aligned_bytes
        )
        store.open([pool.stored])
        assert store.put([pool.pages(hashes(4))], 5.0) == [[0] * 4]
        assert store.get([pool.pages(hashes(5), [0, 1, 2, 3, 3])], 5.0) == [[0] * 4 + [1]]
        if sys.argv[2] == "True":
            store.close()
        """
    )
    address = server.address if mode == "standalone" else ""
    ended = subprocess.run(
        [sys.executable, "-c", program, address, str(closes)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout == ""


def test_shared_memory_is_given_back_when_nothing_uses_it() -> None:
    first = shared_bytes(1 << 20)
    address = first.ctypes.data
    view = first[100:200].view(np.uint16)
    del first
    view[:] = 7
    second = shared_bytes(1 << 20)
    assert second.ctypes.data != address
    del view
    assert shared_bytes(1 << 20).ctypes.data == address
