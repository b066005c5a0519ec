"""The store on UCM's real PosixStore: folders, shapes, sizes, repeats, settings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_shared.contract import PoolName
from hicache_shared.hostpool import build, preset
from hicache_shared.store import Code
from hicache_shared.testing.harness import storage_config
from hicache_shared.testing.rank import register
from hicache_ucm import UcmBackend
from hicache_ucm.client import NativeModule, NativeStore
from hicache_ucm.folder import TEMPORARY
from hicache_ucm.pool import ROUND_BYTES
from hicache_ucm.store import UcmStore
from tests.pools import TestPool, hashes
from tests.ucm.ucm_stores import (
    DEADLINE_S,
    KEYS,
    NAMESPACE,
    block_of,
    exists,
    get,
    make_pools,
    opened,
    put,
)

pytestmark = pytest.mark.backend("ucm")

OK, MISSING, WRONG_SIZE = int(Code.OK), int(Code.MISSING), int(Code.WRONG_SIZE)


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


def test_head_shards_share_a_folder_and_its_native_store(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    opening = NativeModule.open

    def counted(self: NativeModule, folder: Path, **shape: Any) -> NativeStore:
        made.append(folder)
        return opening(self, folder, **shape)

    monkeypatch.setattr(NativeModule, "open", counted)
    model = build(preset("mha"), pages=2, layout="page_head", layers_div=8)
    config = storage_config(is_mla_model=False, extra={"root": str(root)})
    backend = UcmBackend(replace(config, tp_size=2, tp_lcm_size=4, should_split_heads=True), {})
    register(backend, model)
    backend.close()
    assert len(made) == 1
