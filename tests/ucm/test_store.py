"""The store on UCM's real PosixStore: folders, shapes, sizes, repeats, settings."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_shared.contract import PoolName
from hicache_shared.errors import BackendUnavailableError, ConfigError
from hicache_shared.hostmem import byte_view
from hicache_shared.hostpool import build, preset
from hicache_shared.layout import Access, layouts_of
from hicache_shared.store import Code, PageBatch, StoredPool
from hicache_shared.testing.harness import storage_config
from hicache_shared.testing.rank import register
from hicache_ucm import UcmBackend
from hicache_ucm.client import NativeError, NativeModule, NativeStore
from hicache_ucm.folder import TEMPORARY
from hicache_ucm.pool import ROUND_BYTES
from hicache_ucm.store import UcmStore
from tests.pools import TestPool, hashes
from tests.ucm.ucm_stores import DEADLINE_S, NAMESPACE, block_of, exists, make_pools, opened

pytestmark = pytest.mark.backend("ucm")

OK, MISSING, WRONG_SIZE = int(Code.OK), int(Code.MISSING), int(Code.WRONG_SIZE)
KEYS = hashes(8)


def put(store: UcmStore, *pools: TestPool, keys: list[str] = KEYS) -> list[list[int]]:
    return store.put([pool.pages(keys) for pool in pools], DEADLINE_S)


def get(store: UcmStore, *pools: TestPool, keys: list[str] = KEYS) -> list[list[int]]:
    return store.get([pool.pages(keys) for pool in pools], DEADLINE_S)


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_deepseek_v4_flash_makes_exactly_its_six_folders(root: Path) -> None:
    model = build(preset("deepseek-v4-flash"), pages=2, layout="page_first")
    config = storage_config(is_mla_model=True, extra={"root": str(root)})
    backend = UcmBackend(config, {})
    try:
        register(backend, model)
        home = root / backend.namespace
        assert {path.name for path in home.iterdir()} == {
            "swa_6589440x1",
            "deepseek_v4_c4_786240x1",
            "deepseek_v4_c4_indexer_177408x1",
            "deepseek_v4_c4_state_2752512x1",
            "deepseek_v4_c4_indexer_state_688128x1",
            "deepseek_v4_c128_34560x1",
        }
        assert not any(str(PoolName.KV) == path.name.split("_")[0] for path in home.iterdir())
    finally:
        backend.close()


def test_folders_are_named_by_pool_and_parts_and_shared_by_no_two_pools(
    root: Path, store: UcmStore
) -> None:
    twin = TestPool.make(NAMESPACE, "kv2", 16, (4096,))
    odd = TestPool.make(NAMESPACE, "../kv", 16, (4096,))
    for pool in (twin, odd):
        store.register(pool.stored)
    names = {path.name for path in (root / NAMESPACE).iterdir()}
    plain = {"kv_4096x1", "kv2_4096x1", "indexer_1000x1", "layers_512x3", "mamba_200x19"}
    assert names > plain
    (other,) = names - plain
    assert other.startswith("pool-.._kv-")


def test_pages_of_every_shape_are_one_file_each_of_their_bytes(
    root: Path, store: UcmStore, pools: dict[str, TestPool]
) -> None:
    assert put(store, *pools.values()) == [[OK] * 8] * 4
    for pool in pools.values():
        for page, key in enumerate(KEYS):
            assert block_of(root, pool, key).read_bytes() == pool.arrays.page(page)


def test_pages_of_every_shape_come_back_and_nothing_beside_them_changes(
    store: UcmStore, pools: dict[str, TestPool]
) -> None:
    put(store, *pools.values())
    stored = {name: [pool.arrays.page(i) for i in range(8)] for name, pool in pools.items()}
    for pool in pools.values():
        pool.arrays.wipe()
    places = [15, 8, 14, 0, 3, 9, 12, 5]
    batches = [pool.pages(KEYS, places) for pool in pools.values()]
    assert store.get(batches, DEADLINE_S) == [[OK] * 8] * 4
    for name, pool in pools.items():
        assert [pool.arrays.page(i) for i in places] == stored[name]
        assert pool.arrays.gaps_untouched()


def test_one_absent_page_of_eight_is_one_missing_and_seven_whole(
    root: Path, store: UcmStore, pools: dict[str, TestPool]
) -> None:
    put(store, *pools.values())
    for pool in pools.values():
        block_of(root, pool, KEYS[3]).unlink()
        stored = [pool.arrays.page(i) for i in range(8)]
        pool.arrays.wipe()
        (codes,) = get(store, pool)
        assert codes == [OK, OK, OK, MISSING, OK, OK, OK, OK]
        assert [pool.arrays.page(i) for i in range(8) if i != 3] == stored[:3] + stored[4:]
        assert exists(store, pool.ask(KEYS)) == [[i != 3 for i in range(8)]]


@pytest.mark.parametrize("nbytes", [0, 1, 3999, 4097, 8192])
def test_a_truncated_and_an_oversize_block_are_misses_until_they_are_stored_again(
    root: Path, store: UcmStore, pools: dict[str, TestPool], nbytes: int
) -> None:
    kv = pools["kv"]
    put(store, kv)
    page = kv.arrays.page(5)
    block_of(root, kv, KEYS[5]).write_bytes((page * 2)[:nbytes])
    assert get(store, kv) == [[OK] * 5 + [WRONG_SIZE] + [OK] * 2]
    assert put(store, kv) == [[OK] * 8]
    assert block_of(root, kv, KEYS[5]).read_bytes() == page
    assert get(store, kv) == [[OK] * 8]


def test_a_folder_in_place_of_a_block_is_one_page_and_no_more(
    root: Path, store: UcmStore, pools: dict[str, TestPool]
) -> None:
    """An error of the operating system, which fails UCM's whole task."""
    indexer = pools["indexer"]
    put(store, indexer)
    block = block_of(root, indexer, KEYS[2])
    block.unlink()
    block.mkdir()
    codes = get(store, indexer)[0]
    assert codes[2] != OK
    assert codes[:2] + codes[3:] == [OK] * 7
    codes = put(store, indexer)[0]
    assert codes[2] != OK
    assert codes[:2] + codes[3:] == [OK] * 7


def test_a_page_that_is_there_is_not_written_again(
    root: Path, store: UcmStore, pools: dict[str, TestPool]
) -> None:
    kv = pools["kv"]
    put(store, kv)
    before = [block_of(root, kv, key).stat().st_ino for key in KEYS]
    kv.arrays.fill(99)
    assert put(store, kv, keys=hashes(10)) == [[OK] * 10]
    assert [block_of(root, kv, key).stat().st_ino for key in KEYS] == before


def test_a_page_that_comes_twice_is_written_once(
    root: Path, store: UcmStore, pools: dict[str, TestPool]
) -> None:
    kv = pools["kv"]
    keys = [KEYS[0], KEYS[1], KEYS[0]]
    assert put(store, kv, keys=keys) == [[OK] * 3]
    assert store.put([kv.pages(KEYS[:3]), kv.pages(KEYS[:3])], DEADLINE_S) == [[OK] * 3] * 2
    assert block_of(root, kv, KEYS[0]).read_bytes() == kv.arrays.page(0)


def test_a_page_that_another_writes_is_waited_for_and_then_there(
    store: UcmStore, root: Path, pools: dict[str, TestPool]
) -> None:
    """Two backends of one process, as two processes, whose bytes differ to tell them apart."""
    others = make_pools()
    kv, theirs = pools["kv"], others["kv"]
    theirs.arrays.fill(77)
    second = opened(root)
    second.open([theirs.stored])
    keys = hashes(16)
    try:
        for start in range(8):
            some = [f"{start}{key[1:]}" for key in keys]
            with ThreadPoolExecutor(2) as both:
                ours = both.submit(put, store, kv, keys=some)
                twins = both.submit(put, second, theirs, keys=some)
            assert ours.result() == twins.result() == [[OK] * 16]
            for page, key in enumerate(some):
                written = block_of(root, kv, key).read_bytes()
                assert written in (kv.arrays.page(page), theirs.arrays.page(page))
    finally:
        second.close()


def test_a_call_of_more_than_a_round_is_whole(root: Path) -> None:
    pages = 5
    big = TestPool.make(NAMESPACE, "big", pages, (ROUND_BYTES // 4 + 4096,))
    small = TestPool.make(NAMESPACE, "small", pages, (100,))
    big.arrays.kv_buffer[0][:, ::4096] = np.arange(pages, dtype=np.uint8)[:, None]
    small.arrays.fill(1)
    store = opened(root, deadline_s=10)
    store.open([big.stored, small.stored])
    try:
        keys = hashes(pages)
        batches = [big.pages(keys), small.pages(keys)]
        assert store.put(batches, 60) == [[OK] * pages] * 2
        before = [buffer.copy() for buffer in (*big.arrays.kv_buffer, *small.arrays.kv_buffer)]
        big.arrays.wipe()
        small.arrays.wipe()
        assert store.get(batches, 60) == [[OK] * pages] * 2
        after = [*big.arrays.kv_buffer, *small.arrays.kv_buffer]
        assert (before[0][:, :-64] == after[0][:, :-64]).all()
        assert (before[1][:, :-64] == after[1][:, :-64]).all()
    finally:
        store.close()


def test_what_the_deadline_leaves_no_time_for_is_not_begun(
    store: UcmStore, pools: dict[str, TestPool]
) -> None:
    kv = pools["kv"]
    assert store.put([kv.pages(KEYS)], -1) == [[int(Code.TIMEOUT)] * 8]
    assert exists(store, kv.ask(KEYS)) == [[False] * 8]
    assert store.get([kv.pages(KEYS)], -1) == [[int(Code.TIMEOUT)] * 8]
    assert not any(store.exists([kv.ask(KEYS)], -1)[0])


def test_empty_batches_are_answered(store: UcmStore, pools: dict[str, TestPool]) -> None:
    kv, mamba = pools["kv"], pools["mamba"]
    assert store.put([kv.pages([]), mamba.pages(KEYS)], DEADLINE_S) == [[], [OK] * 8]
    assert store.get([kv.pages([])], DEADLINE_S) == [[]]
    assert exists(store, kv.ask([]), mamba.ask(KEYS)) == [[], [True] * 8]


def test_four_thousand_pages_are_asked_about_in_order(
    store: UcmStore, pools: dict[str, TestPool]
) -> None:
    kv = pools["kv"]
    put(store, kv)
    keys = hashes(4096)
    (answers,) = exists(store, kv.ask(list(reversed(keys))))
    assert answers == [False] * 4088 + [True] * 8


def test_close_frees_every_thread(root: Path, pools: dict[str, TestPool]) -> None:
    before = threads()
    store = opened(root)
    store.open([pool.stored for pool in pools.values()])
    put(store, *pools.values())
    assert threads() > before
    store.close()
    assert threads() == before


def test_stale_temporary_files_are_removed_at_start(
    root: Path, store: UcmStore, pools: dict[str, TestPool]
) -> None:
    kv = pools["kv"]
    put(store, kv)
    block = block_of(root, kv, KEYS[0])
    stale = block.with_name(f"{block.name[:-1]}0{TEMPORARY}")
    stale.write_bytes(b"half")
    second = opened(root)
    second.open([kv.stored])
    for cleaner in second._cleaners:
        cleaner.join()
    second.close()
    assert not stale.exists()
    assert block.exists()


def test_clear_takes_pools_that_are_not_open_and_no_other_namespace(
    root: Path, store: UcmStore, pools: dict[str, TestPool]
) -> None:
    put(store, *pools.values())
    other = TestPool.make("hc1/other-0123456789abcdef", "kv", 16, (4096,))
    store.register(other.stored)
    put(store, other)
    clearing = opened(root)
    clearing.clear(NAMESPACE)
    clearing.close()
    assert exists(store, *(pool.ask(KEYS) for pool in pools.values())) == [[False] * 8] * 4
    assert exists(store, other.ask(KEYS)) == [[True] * 8]
    assert put(store, *pools.values()) == [[OK] * 8] * 4, "the store takes pages after a clear"


def test_clear_of_what_was_never_stored_is_done(store: UcmStore) -> None:
    store.clear("hc1/never-0123456789abcdef")


# -- settings ------------------------------------------------------------------------------


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
