"""A store that is full, dead or frozen gives answers, in bounded time."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_mooncake import client as client_module
from hicache_mooncake import health as health_module
from hicache_mooncake.client import connect
from hicache_mooncake.config import MooncakeConfig
from hicache_mooncake.health import Health
from hicache_mooncake.server import MooncakeMaster
from hicache_mooncake.store import MooncakeStore
from hicache_shared.errors import BackendUnavailableError, ClearError
from hicache_shared.store import Code
from tests.mooncake.holder import holder
from tests.mooncake.mooncake_stores import connected, exists
from tests.pools import TestPool, hashes

pytestmark = [pytest.mark.backend("mooncake"), pytest.mark.faults]

MB = 2**20
PATIENCE_S = 20.0
"""Longer than a call may take by far: a test of "bounded", not of speed."""


@pytest.fixture
def own_master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster() as running:
        yield running


@pytest.fixture
def short_leases() -> Iterator[MooncakeMaster]:
    """A master whose leases end soon, so that a full store has what to evict."""
    with MooncakeMaster(options=["--default_kv_lease_ttl=50"]) as running:
        yield running


def opened(
    master: MooncakeMaster, pages: int = 8, page_bytes: int = 34560, **more: object
) -> tuple[MooncakeStore, TestPool]:
    store = connected(master, 64 * MB, **more)
    pool = TestPool.make("hc1/fault", "kv", pages, (page_bytes,))
    store.open([pool.stored])
    pool.arrays.fill(1)
    return store, pool


def test_a_full_store_takes_every_page_in_the_end(short_leases: MooncakeMaster) -> None:
    """Six times what the segment holds, at full speed: eviction is asynchronous."""
    store, pool = opened(short_leases, pages=32, page_bytes=MB)
    for start in range(0, 384, 32):
        codes = store.put([pool.pages(hashes(32, start))], 10.0)
        assert codes == [[Code.OK] * 32]
    store.close()


def test_what_finds_no_space_says_so_and_the_rest_of_the_batch_is_in(
    own_master: MooncakeMaster,
) -> None:
    store, pool = opened(own_master, pages=40, page_bytes=2 * MB)
    codes = store.put([pool.pages(hashes(40))], 0.5)[0]
    assert set(codes) == {Code.OK, Code.NO_SPACE}
    assert codes.count(Code.OK) >= 24
    seen = exists(store, pool.ask(hashes(40)))[0]
    assert seen == [code == Code.OK for code in codes]
    store.close()


def test_closing_cuts_the_wait_for_space_short(own_master: MooncakeMaster) -> None:
    store, pool = opened(own_master, pages=1, page_bytes=80 * MB)
    store._closing.set()
    started = time.monotonic()
    assert store.put([pool.pages(hashes(1))], 600.0) == [[Code.NO_SPACE]]
    assert time.monotonic() - started < PATIENCE_S
    store.close()


def test_a_killed_master_gives_bounded_answers_and_a_new_one_is_found(
    own_master: MooncakeMaster, caplog: pytest.LogCaptureFixture
) -> None:
    store, pool = opened(own_master)
    ask, pages = pool.ask(hashes(8)), pool.pages(hashes(8))
    assert store.put([pages], 5.0) == [[Code.OK] * 8]
    own_master.kill()
    with caplog.at_level(logging.WARNING, "hicache_mooncake"):
        for _ in range(20):
            started = time.monotonic()
            assert exists(store, ask) == [[False] * 8]
            assert set(store.get([pages], 5.0)[0]) <= {Code.UNAVAILABLE, Code.TIMEOUT}
            assert set(store.put([pages], 5.0)[0]) <= {Code.UNAVAILABLE, Code.TIMEOUT}
            assert time.monotonic() - started < PATIENCE_S
        assert not store.healthy()
        with pytest.raises(ClearError):
            store.clear("hc1/fault")
    assert len([r for r in caplog.records if "is down" in r.message]) == 1
    own_master.restart()
    until = time.monotonic() + 60
    while time.monotonic() < until and store.put([pages], 1.0) != [[Code.OK] * 8]:
        store._closing.wait(0.2)
    assert store.get([pages], 5.0) == [[Code.OK] * 8]
    store.close()


@pytest.fixture
def holding(own_master: MooncakeMaster) -> Iterator[subprocess.Popen[str]]:
    with holder(own_master, 64 * MB) as process:
        yield process


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_pages_of_a_lost_holder_are_not_moved_and_never_take_long(
    own_master: MooncakeMaster, holding: subprocess.Popen[str], fault: signal.Signals
) -> None:
    store = connected(own_master, 0)
    pool = TestPool.make("hc1/fault", "kv", 16, (34560,))
    store.open([pool.stored])
    pool.arrays.fill(1)
    assert store.put([pool.pages(hashes(8))], 5.0) == [[Code.OK] * 8]
    os.kill(holding.pid, fault)
    lost = os.WEXITED if fault == signal.SIGKILL else os.WSTOPPED
    os.waitid(os.P_PID, holding.pid, lost | os.WNOWAIT)
    for _ in range(3):
        started = time.monotonic()
        codes = store.get([pool.pages(hashes(8))], 5.0)[0]
        assert set(codes) <= {Code.FAILED, Code.MISSING}
        codes = store.put([pool.pages(hashes(8, 8))], 1.0)[0]
        assert set(codes) <= {Code.FAILED, Code.MISSING, Code.NO_SPACE}
        assert time.monotonic() - started < PATIENCE_S
    store.close()


def test_a_closed_store_answers_and_does_not_touch_the_client(own_master: MooncakeMaster) -> None:
    store, pool = opened(own_master)
    store.close()
    assert store.put([pool.pages(hashes(8))], 5.0) == [[Code.UNAVAILABLE] * 8]
    assert store.get([pool.pages(hashes(8))], 5.0) == [[Code.UNAVAILABLE] * 8]
    assert exists(store, pool.ask(hashes(8))) == [[False] * 8]
    assert not store.healthy()
    with pytest.raises(ClearError):
        store.clear("hc1/fault")


def test_health_logs_a_change_once_and_holds_off_after_a_failed_call(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = [True]
    health = Health(lambda: beat[0], "m:1")
    monkeypatch.setattr(health_module, "HOLD_S", 0.0)
    with caplog.at_level(logging.WARNING, "hicache_mooncake"):
        assert health.up()
        beat[0] = False
        assert [health.up() for _ in range(5)] == [False] * 5
        beat[0] = True
        assert [health.up() for _ in range(5)] == [True] * 5
        monkeypatch.setattr(health_module, "HOLD_S", 1e6)
        health.saw(Code.FAILED)
        assert health.up()
        health.saw(Code.TIMEOUT)
        assert [health.up() for _ in range(5)] == [False] * 5
    assert ["down" in r.message for r in caplog.records] == [True, False, True]


def test_health_of_a_closed_client_is_down_without_asking_it() -> None:
    asked: list[int] = []

    def beat() -> bool:
        asked.append(1)
        return True

    health = Health(beat, "m:1")
    assert health.up()
    health.close()
    assert not health.up()
    assert asked == [1]


def test_an_absent_master_is_named_with_what_to_check() -> None:
    config = MooncakeConfig(
        master_server_address="127.0.0.1:9",
        local_hostname="127.0.0.1",
        protocol="tcp",
        setup_retries=1,
    )
    with pytest.raises(BackendUnavailableError, match=r"127\.0\.0\.1:9 within 1 tries"):
        connect(config, segment_bytes=0)


def test_a_missing_client_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(BackendUnavailableError, match="client-non-cuda"):
        client_module.native_module()


def test_rdma_without_a_device_and_a_tenant_are_warned_about(
    own_master: MooncakeMaster, caplog: pytest.LogCaptureFixture
) -> None:
    config = MooncakeConfig(master_server_address=own_master.address, tenant_id="t")
    with caplog.at_level(logging.WARNING, "hicache_mooncake"):
        client_module._warn_of_settings(config)
    text = " ".join(r.message for r in caplog.records)
    assert "isolates nothing" in text
    assert "shows no RDMA device" in text


@pytest.mark.parametrize("closes", [True, False])
def test_a_process_ends_cleanly_and_the_client_writes_nothing_to_standard_output(
    own_master: MooncakeMaster, closes: bool
) -> None:
    program = textwrap.dedent(
        """
        import sys
        from tests.mooncake.mooncake_stores import connected
        from tests.pools import TestPool, hashes
        from types import SimpleNamespace
        store = connected(SimpleNamespace(address=sys.argv[1]), 16 << 20)
        pool = TestPool.make("hc1/exit", "kv", 4, (1000,))
        store.open([pool.stored])
        assert store.put([pool.pages(hashes(4))], 5.0) == [[0] * 4]
        assert store.get([pool.pages(hashes(5), [0] * 5)], 5.0) == [[0] * 4 + [1]]
        if sys.argv[2] == "True":
            store.close()
        """
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, own_master.address, str(closes)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout == ""
