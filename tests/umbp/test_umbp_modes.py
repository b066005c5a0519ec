"""Every mode from one configuration: embedded in memory and on SSD, a server, a master."""

from __future__ import annotations

import json
import logging
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache_shared.errors import BackendUnavailableError, ClearError, ConfigError
from hicache_shared.hostpool import build, preset
from hicache_shared.store import Code
from hicache_shared.testing.harness import storage_config
from hicache_shared.testing.rank import Rank, chain
from hicache_umbp import UmbpBackend, client, modes, paging
from hicache_umbp.config import UmbpConfig
from hicache_umbp.epoch import SharedEpochs
from hicache_umbp.memory import shared_bytes
from hicache_umbp.modes import mode_of
from hicache_umbp.server import UmbpServer
from tests.pools import TestPool, hashes
from tests.umbp.umbp_stores import ALONE, exists, new_store

pytestmark = pytest.mark.backend("umbp")

ROOT = Path(__file__).parents[2]
N = 8


@pytest.fixture
def server() -> Iterator[UmbpServer]:
    with UmbpServer(capacity_bytes=256 << 20, page_bytes=11_520) as running:
        yield running


def test_pages_on_an_ssd_come_back_byte_exact(tmp_path: Path) -> None:
    store, _ = new_store(
        {
            "medium": "ssd",
            "ssd_storage_dir": str(tmp_path),
            "ssd_capacity_bytes": "256mb",
            "ssd_io_backend": "posix",
            "dram_capacity_bytes": "64mb",
        }
    )
    pools = [
        TestPool.make("hc1/ssd", "kv", 32, (34_560,)),
        TestPool.make("hc1/ssd", "mamba", 32, (30_000, 1700)),
    ]
    store.open([pool.stored for pool in pools])
    for seed, pool in enumerate(pools):
        pool.arrays.fill(seed)
    asks = [pool.pages(hashes(16)) for pool in pools]
    assert store.put(asks, 10.0) == [[Code.OK] * 16] * 2
    before = [pool.arrays.contents(list(range(16))) for pool in pools]
    targets = list(range(16, 32))
    assert store.get([p.pages(hashes(16), targets) for p in pools], 10.0) == [[Code.OK] * 16] * 2
    assert [pool.arrays.contents(targets) for pool in pools] == before
    assert sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()) > 16 * 34_560
    assert (tmp_path / "dp0_pp0_tp0_cp0").is_dir()
    store.close()


@pytest.mark.parametrize("slots", [40, None])
def test_calls_that_need_more_staging_than_there_is_are_split(
    tmp_path: Path, slots: int | None
) -> None:
    store, _ = new_store(
        {
            "medium": "ssd",
            "ssd_storage_dir": str(tmp_path),
            "ssd_capacity_bytes": "512mb",
            "ssd_io_backend": "posix",
            "ssd_staging_buffer_slots": slots,
        }
    )
    pools = [
        TestPool.make("hc1/ssd", "kv", 64, (1 << 20,)),
        TestPool.make("hc1/ssd", "c128", 64, (34_560,)),
        TestPool.make("hc1/ssd", "mamba", 64, (900_000, 1700)),
    ]
    store.open([pool.stored for pool in pools])
    for seed, pool in enumerate(pools):
        pool.arrays.fill(seed)
    batches = [pool.pages(hashes(32), depth=3) for pool in pools]
    assert store.put(batches, 10.0) == [[Code.OK] * 32] * 3
    before = [pool.arrays.contents(list(range(32))) for pool in pools]
    targets = list(range(32, 64))
    assert store.get([p.pages(hashes(32), targets) for p in pools], 10.0) == [[Code.OK] * 32] * 3
    assert [pool.arrays.contents(targets) for pool in pools] == before
    store.close()


def test_a_page_that_staging_cannot_hold_is_refused(tmp_path: Path) -> None:
    settings = {"medium": "ssd", "ssd_storage_dir": str(tmp_path), "ssd_staging_buffer_slots": 2}
    store, _ = new_store({**settings, "dram_page_size": "64kb"})
    pool = TestPool.make("hc1/ssd", "kv", 2, (1 << 20,))
    with pytest.raises(ConfigError, match="ssd_staging_buffer_slots: 2 of 65536 bytes"):
        store.open([pool.stored])


def test_a_local_rank_in_the_environment_makes_no_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers of the native client see and store nothing."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("UMBP_ROLE", "follower")
    store, _ = new_store({})
    pool = TestPool.make("hc1/rank", "kv", N, (1000,))
    store.open([pool.stored])
    assert store.put([pool.pages(hashes(N))], 5.0) == [[Code.OK] * N]
    assert exists(store, pool.ask(hashes(N))) == [[True] * N]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
def test_a_master_and_two_nodes_without_rdma() -> None:
    """The control plane: a page is known to all nodes and read on the one that put it."""
    done = subprocess.run(
        ["unshare", "--net", "--map-root-user", sys.executable, "-m", "tests.umbp.in_namespace"],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    good = [[Code.OK] * N] * 2
    assert (seen["put"], seen["own"], seen["known to the other"]) == (good, True, True)
    assert (seen["get"], seen["exact"]) == (good, True)
    assert seen["get of the other"] == [[Code.FAILED] * N] * 2
    assert 'set another "namespace"' in seen["clear"]
    put, there, healthy = seen["dead"]
    assert (put, there, healthy) == ([[Code.UNAVAILABLE] * N] * 2, [[False] * N] * 2, False)
    assert seen["back"]


def test_an_embedded_store_for_pools_that_ranks_share_is_refused() -> None:
    config = storage_config(is_mla_model=True, tp_size=2)
    with pytest.raises(ConfigError, match="would never hit"):
        UmbpBackend(config, {})
    UmbpBackend(storage_config(is_mla_model=False, tp_size=2), {}).close()


@pytest.mark.parametrize(
    "extra",
    [{"standalone_address": "unix:///nowhere/umbp.sock"}, {"master_address": "127.0.0.1:1"}],
)
def test_a_server_that_is_not_there_is_named_when_the_backend_is_made(
    extra: dict[str, Any],
) -> None:
    with pytest.raises(BackendUnavailableError, match="is not there; start it"):
        UmbpBackend(storage_config(is_mla_model=False, extra=extra), {})


def test_the_page_size_fits_the_pools_and_a_logical_anchor_adds_nothing() -> None:
    made: list[Any] = []

    class Noted(UmbpBackend):
        def open_store(self, config: UmbpConfig, storage_config: Any) -> Any:
            store = super().open_store(config, storage_config)
            mode = store._session.mode

            def connect(pages: Any) -> Any:
                made.extend(pages)
                return mode.connect(pages)

            store._session.mode = replace(mode, connect=connect)
            return store

    model = build(preset("deepseek-v4-flash"), layout="page_first", pages=2)
    config = storage_config(is_mla_model=True, extra={"dram_capacity_bytes": "256mb"})
    backend = Noted(config, {})
    Rank(backend, model, config)
    sizes = [size for (size,) in made]
    assert sorted(sizes) == [34_560, 177_408, 688_128, 786_240, 2_752_512, 6_589_440]
    page = paging.page_bytes(sizes)
    assert paging.LEAST_PAGE_BYTES <= page <= 36_000
    assert paging.waste(page, sizes) <= paging.MOST_WASTE
    backend.close()
    model.destroy()


WRITER = """
import random
import sys
from hicache_shared.hostpool import build, preset
from hicache_shared.testing.harness import storage_config
from hicache_shared.testing.rank import Rank, chain
from hicache_umbp import UmbpBackend
from hicache_umbp.memory import shared_bytes
model = build(preset("deepseek-v4-flash"), layout="page_first", pages=8, allocate=shared_bytes)
config = storage_config(is_mla_model=True, extra={"standalone_address": sys.argv[1]})
rank = Rank(UmbpBackend(config, {}), model, config)
for name in rank.pools:
    for page in range(8):
        size = len(rank.page(name, page))
        rank.put_page(name, page, random.Random(f"{name} {page}").randbytes(size))
rank.set_everywhere(chain(8, "two processes"), range(8))
if len(sys.argv) > 2:
    rank.backend.clear()
rank.backend.close()
"""


def write_elsewhere(server: UmbpServer, *arguments: str) -> None:
    """Store DeepSeek V4 Flash's pages from another process."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WRITER), server.address, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_deepseek_v4_flash_is_byte_exact_from_another_process_until_it_clears(
    server: UmbpServer,
) -> None:
    write_elsewhere(server)
    model = build(preset("deepseek-v4-flash"), layout="page_first", pages=8, allocate=shared_bytes)
    config = storage_config(is_mla_model=True, extra={"standalone_address": server.address})
    rank = Rank(UmbpBackend(config, {}), model, config)
    rank.fill(6)
    keys = chain(8, "two processes")
    assert rank.hit(keys) == 8
    order = [7, 0, 6, 1, 5, 2, 4, 3]
    gets = [rank.transfer(name, keys, order) for name in rank.pools]
    assert rank.backend.batch_get_v2(gets) == {name: [True] * 8 for name in rank.pools}
    for name in rank.pools:
        for page, target in enumerate(order):
            got = rank.page(name, target)
            assert got == random.Random(f"{name} {page}").randbytes(len(got))
    write_elsewhere(server, "and clear")
    assert rank.hit(keys) == 0
    rank.fill(5)
    rank.set_everywhere(keys, range(8))
    assert rank.hit(keys) == 8
    rank.backend.close()


def test_a_clear_outlives_the_client_that_did_it_and_is_never_undone(server: UmbpServer) -> None:
    pool = TestPool.make("hc1/epochs", "kv", N, (1000,), shared_bytes)
    pool.arrays.fill(1)

    def fresh() -> Any:
        store, _ = new_store({"standalone_address": server.address})
        store.open([pool.stored])
        return store

    one = fresh()
    for turn in range(3):
        assert one.put([pool.pages(hashes(N, turn))], 5.0) == [[Code.OK] * N]
        one.clear("hc1/epochs")
        two = fresh()
        for store in (one, two):
            assert exists(store, pool.ask(hashes(N + 3))) == [[False] * (N + 3)]
        one.close()
        one = two
    one.close()


def test_epochs_of_a_socket_mounted_without_its_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_umbp.epoch.device_of", lambda path: id(path))
    with pytest.raises(ClearError, match="mounted without its folder"):
        SharedEpochs(tmp_path / "s.sock").advance("hc1/x")


def test_epochs_in_a_folder_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    socket = tmp_path / "s.sock"
    socket.touch()
    (tmp_path / "s.sock.epochs").touch()
    with pytest.raises(ClearError, match="cannot be written"):
        SharedEpochs(socket).advance("hc1/x")


def test_an_epoch_that_cannot_be_read_counts_all_pages_as_missing(
    server: UmbpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = new_store({"standalone_address": server.address})
    pool = TestPool.make("hc1/unread", "kv", N, (1000,), shared_bytes)
    store.open([pool.stored])
    assert store.put([pool.pages(hashes(N))], 5.0) == [[Code.OK] * N]

    def unreadable(self: SharedEpochs, namespace: str) -> str:
        raise PermissionError("no")

    monkeypatch.setattr(SharedEpochs, "of", unreadable)
    assert exists(store, pool.ask(hashes(N))) == [[False] * N]
    assert store.get([pool.pages(hashes(N))], 5.0) == [[Code.UNAVAILABLE] * N]
    assert store.put([pool.pages(hashes(N))], 5.0) == [[Code.UNAVAILABLE] * N]
    store.close()


def test_settings_without_effect_are_warned_about_once_a_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = UmbpConfig.model_validate({"ssd_enabled": True, "node_address": "10.0.0.1"})
    with caplog.at_level(logging.WARNING, "hicache_umbp"):
        mode_of(config, ALONE)
    text = [record.message for record in caplog.records]
    assert len(text) == 2
    assert any("ssd_enabled has no effect here" in line and "memory alone" in line for line in text)


def test_a_refused_registration_is_warned_about_once_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = new_store({})
    pool = TestPool.make("hc1/refused", "kv", N, (1000,))
    store.open([])
    client = store._session._client
    assert client is not None
    monkeypatch.setattr(client, "register", lambda address, nbytes: False)
    for _ in range(2):
        store.register(pool.stored)
    assert len([r for r in caplog.records if "is not registered" in r.message]) == 1
    assert store.unregistered_bytes == sum(r.nbytes for r in pool.stored.layout.regions)
    pool.arrays.fill(1)
    assert store.put([pool.pages(hashes(N))], 5.0) == [[Code.OK] * N]


def test_a_store_too_small_for_its_pages_is_refused() -> None:
    store, _ = new_store({"dram_capacity_bytes": "1mb"})
    pool = TestPool.make("hc1/small", "kv", 2, (1 << 20,))
    with pytest.raises(ConfigError, match="hold no two objects"):
        store.open([pool.stored])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dram_low_watermark": 0.96}, "dram_low_watermark: 0.96 is not below the high one"),
        ({"dram_page_size": "1gb"}, "in pages of 1073741824"),
    ],
)
def test_memory_settings_with_which_no_page_would_be_evicted_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    store, _ = new_store({"dram_capacity_bytes": "16mb", **settings})
    pool = TestPool.make("hc1/marks", "kv", 2, (4 << 20,))
    with pytest.raises(ConfigError, match=words):
        store.open([pool.stored])


def test_a_high_watermark_without_room_above_it_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for nbytes, high, warned in ((1 << 20, 0.9, 0), (4 << 20, 0.9, 1), (4 << 20, 0.6, 0)):
        caplog.clear()
        store, _ = new_store({"dram_capacity_bytes": "16mb", "dram_high_watermark": high})
        store.open([TestPool.make("hc1/marks", "kv", 2, (nbytes,)).stored])
        assert len([r for r in caplog.records if "leaves no room" in r.message]) == warned


@pytest.mark.parametrize("high", [0.001, 0.005, 0.5, 1.0])
def test_a_low_watermark_that_was_not_given_is_between_nothing_and_the_high_one(
    high: float,
) -> None:
    config = UmbpConfig.model_validate({"dram_high_watermark": high})
    given, low = modes._watermarks(config, 0.97, 1)
    assert 0 < low < given == high


@pytest.mark.parametrize(
    ("settings", "missing", "words"),
    [
        ({"medium": "ssd"}, "UMBPMedium", "needs amd-mori 1.2.4"),
        (
            {"standalone_address": "unix:///s.sock"},
            "UMBPStandaloneProcessConfig",
            "has no standalone mode",
        ),
    ],
)
def test_what_an_older_client_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], missing: str, words: str
) -> None:
    module = client.native_module()

    class Older:
        def __getattr__(self, name: str) -> Any:
            if name == missing:
                raise AttributeError(name)
            return getattr(module, name)

    monkeypatch.setattr(modes, "native_module", Older)
    with pytest.raises(ConfigError, match=words):
        mode_of(UmbpConfig.model_validate(settings), ALONE)
