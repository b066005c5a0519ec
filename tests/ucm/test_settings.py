"""Settings: what reaches UCM, what is refused, and how a capacity is divided."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_shared.errors import BackendUnavailableError, ConfigError
from hicache_shared.hostmem import byte_view
from hicache_shared.hostpool import build, preset
from hicache_shared.layout import Access, layouts_of
from hicache_shared.store import Code, PageBatch, StoredPool
from hicache_shared.testing.harness import storage_config
from hicache_ucm import UcmBackend
from hicache_ucm.client import NativeError, NativeModule, NativeStore
from tests.pools import TestPool, hashes
from tests.ucm.ucm_stores import DEADLINE_S, KEYS, NAMESPACE, block_of, get, opened, put

pytestmark = pytest.mark.backend("ucm")

OK = int(Code.OK)


def test_every_setting_of_ucm_reaches_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, object] = {
        "posix_io_engine": "psync",
        "io_direct": True,
        "posix_data_trans_concurrency": 3,
        "data_dir_shard_bytes": 1,
        "posix_gc_trigger_threshold_ratio": 0.5,
        "posix_gc_recycle_percent": 0.25,
        "posix_gc_check_interval_sec": 7,
    }
    given = []
    opening = NativeModule.open

    def spied(self: NativeModule, folder: Path, **shape: Any) -> NativeStore:
        given.append(shape["settings"])
        return opening(self, folder, **shape)

    monkeypatch.setattr(NativeModule, "open", spied)
    pool = TestPool.make(NAMESPACE, "kv", 2, (4096,)).stored
    aligned = replace(pool, layout=replace(pool.layout, bases=(4096,), strides=(4096,)))
    with_removal = opened(root, capacity="2gb", **settings)
    with_removal.open([aligned])
    with_removal.close()
    assert given == [{**settings, "posix_lookup_concurrency": 1, "posix_capacity_gb": 2}]


def test_a_capacity_that_ucm_cannot_keep_names_the_smallest_that_it_can(root: Path) -> None:
    swa = TestPool.make(NAMESPACE, "swa", 2, (6_589_440,))
    c128 = TestPool.make(NAMESPACE, "c128", 2, (34_560,))
    store = opened(root, capacity="4gb", pool_capacity={"c128": "1gb"})
    with pytest.raises(ConfigError, match=r"'swa' has 4 GiB .*needs 24 GiB.* to 24gb") as failed:
        store.open([swa.stored, c128.stored])
    assert "lower data_dir_shard_bytes from 2" in str(failed.value)
    store.close()
    alone = opened(root, pool_capacity={"swa": "4gb"})
    with pytest.raises(ConfigError, match=r"raise pool_capacity\['swa'\] to 24gb"):
        alone.open([swa.stored])
    alone.close()
    enough = opened(root, capacity="4gb", data_dir_shard_bytes=1, pool_capacity={"c128": "1gb"})
    enough.open([swa.stored, c128.stored])
    enough.close()


def test_a_capacity_below_what_ucm_counts_in_is_refused(root: Path) -> None:
    store = opened(root, capacity="512mb")
    with pytest.raises(ConfigError, match=r"536,870,912 bytes.*whole\s*GiB"):
        store.open([TestPool.make(NAMESPACE, "kv", 2, (4096,)).stored])
    store.close()


def test_every_pool_whose_share_is_too_small_is_named_with_what_is_enough_for_all(
    root: Path,
) -> None:
    shapes = {"swa": 6_589_440, "c4": 786_240, "c128": 34_560}
    pools = [TestPool.make(NAMESPACE, name, 2, (nbytes,)).stored for name, nbytes in shapes.items()]
    store = opened(root, capacity="5gb")
    with pytest.raises(
        ConfigError, match=r"c128, c4 would have less .*capacity to 215gb, or set pool_capacity"
    ):
        store.open(pools)
    store.close()
    enough = opened(root, capacity="215gb")
    enough.open(pools)
    enough.close()


def test_opening_again_after_a_refusal_divides_the_capacity_the_same_way(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head shards: several objects a page, in one folder."""
    model = build(preset("mha"), pages=2, layout="page_head", layers_div=8)
    shards = layouts_of(
        "kv", model.group.anchor_entry.host_pool, split_factor=2, first_shard=0, shard_count=4
    )
    pools = [
        StoredPool(shard, f"{NAMESPACE}/kv-{i}/", NAMESPACE, bytes([i]) * 16)
        for i, shard in enumerate(shards)
    ]
    other = TestPool.make(NAMESPACE, "other", 2, (sum(s.page_bytes for s in shards),)).stored
    given = []

    def refuse(self: NativeModule, folder: Path, **shape: Any) -> NativeStore:
        given.append(shape["settings"]["posix_capacity_gb"])
        raise NativeError("-50002, 30")

    monkeypatch.setattr(NativeModule, "open", refuse)
    store = opened(root, capacity="8gb")
    for _ in range(3):
        with pytest.raises(BackendUnavailableError, match=r"Read-only file system; .*writable"):
            store.open([*pools, other])
    store.close()
    assert given == [4, 4, 4]


def test_a_capacity_of_a_pool_that_does_not_come_is_said(
    root: Path, pools: dict[str, TestPool], caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(root, pool_capacity={"swaa": "1gb", "kv": "1gb"})
    store.open([pools["kv"].stored])
    store.close()
    assert "pool_capacity names ['swaa']; the pools are ['kv']" in caplog.text


def test_two_processes_of_different_capacity_are_told_what_to_make_equal(
    root: Path, pools: dict[str, TestPool]
) -> None:
    first, second = opened(root, capacity="2gb"), opened(root, capacity="3gb")
    first.open([pools["kv"].stored])
    with pytest.raises(
        BackendUnavailableError, match=r"capacity_gb\(this=3, first=2\)(.|\n)*pool_capacity"
    ):
        second.open([pools["kv"].stored])
    second.close()
    first.close()


def test_reading_a_page_makes_it_the_newest_where_the_oldest_are_removed(
    root: Path, pools: dict[str, TestPool]
) -> None:
    kv = pools["kv"]
    store = opened(root, capacity="2gb")
    store.open([kv.stored])
    put(store, kv)
    for key in KEYS:
        os.utime(block_of(root, kv, key), (1, 1))
    get(store, kv, keys=KEYS[:4])
    store.close()
    assert [block_of(root, kv, key).stat().st_mtime > 1 for key in KEYS] == [True] * 4 + [False] * 4


def test_direct_io_is_refused_where_pages_are_no_whole_blocks(
    root: Path, pools: dict[str, TestPool]
) -> None:
    store = opened(root, io_direct=True)
    with pytest.raises(ConfigError, match=r"io_direct: pages of pool 'indexer'.*4096"):
        store.open([pools["indexer"].stored])
    store.close()


@pytest.mark.parametrize(
    "place",
    [
        {"bases": (4096 + 512,)},
        {"strides": (4096 + 64,)},
        {"access": Access.ASKED, "bases": (), "strides": ()},
    ],
)
def test_going_past_the_page_cache_is_refused_where_pages_lie_unaligned_or_anywhere(
    root: Path, place: dict[str, Any]
) -> None:
    pool = TestPool.make(NAMESPACE, "kv", 2, (4096,)).stored
    aligned = replace(pool.layout, bases=(4096,), strides=(4096,))
    store = opened(root, io_direct=True)
    with pytest.raises(ConfigError, match=r"pages of pool 'kv' .* blocks of 4096 bytes"):
        store.open([replace(pool, layout=replace(aligned, **place))])
    store.open([replace(pool, layout=aligned)])
    store.close()


def test_whole_blocks_go_past_the_page_cache(root: Path) -> None:
    model = build(preset("mla"), pages=16, layout="page_first", layers_div=8)
    pool = model.group.anchor_entry.host_pool
    (layout,) = layouts_of("kv", pool)
    stored = StoredPool(layout, f"{NAMESPACE}/kv-0/", NAMESPACE, bytes(16))
    rng = np.random.default_rng(1)
    byte_view(pool.kv_buffer)[:] = rng.integers(0, 256, pool.kv_buffer.nbytes, dtype=np.uint8)
    before = byte_view(pool.kv_buffer).copy()
    store = opened(root, io_direct=True)
    store.open([stored])
    pages = list(range(8))
    try:
        for turn in range(3):
            batch = PageBatch(stored, hashes(8, start=100 * turn), layout.addresses(pages))
            assert store.put([batch], DEADLINE_S) == [[OK] * 8]
            byte_view(pool.kv_buffer)[: 8 * layout.page_bytes] = 0
            assert store.get([batch], DEADLINE_S) == [[OK] * 8]
        assert (byte_view(pool.kv_buffer) == before).all()
    finally:
        store.close()


def test_a_root_of_one_rank_needs_no_lock_file(root: Path, pools: dict[str, TestPool]) -> None:
    store = opened(root, shared=False)
    store.open([pool.stored for pool in pools.values()])
    assert put(store, *pools.values()) == [[OK] * 8] * 4
    assert get(store, *pools.values()) == [[OK] * 8] * 4
    store.close()
    assert not list(root.rglob("*.lock"))


def test_ranks_that_store_the_same_pages_are_not_left_without_locks(root: Path) -> None:
    config = replace(
        storage_config(is_mla_model=True, extra={"root": str(root), "shared": False}), dp_rank=1
    )
    with pytest.raises(ConfigError, match="shared: this is data-parallel rank 1"):
        UcmBackend(config, {})
    UcmBackend(replace(config, dp_rank=0), {}).close()
