"""Stores that write a page in parts of one size, and pages that they would cut too fine."""

from __future__ import annotations

import logging
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.hostmem import aligned_bytes
from hicache_shared.hostpool import MambaGeometry, MambaHostPool, MHAGeometry
from hicache_shared.layout import Access, equal_parts
from hicache_shared.memory import MemoryStore
from hicache_shared.memory_backend import MemoryBackend, MemoryConfig
from hicache_shared.registry import SMALL_PART_BYTES
from hicache_shared.store import Caps, StoredPool
from tests.contract.core_support import PAGE, config, fill, mha, transfer

MOST = 4


class PartStore(MemoryStore):
    """Takes at most ``MOST`` unequal parts a page; notes the pools that it is given."""

    caps = Caps(max_components=None, max_unequal_parts=MOST)

    def __init__(self) -> None:
        super().__init__()
        self.pools: list[StoredPool] = []

    def register(self, pool: StoredPool) -> None:
        self.pools.append(pool)
        super().register(pool)


class PartBackend(MemoryBackend):
    def open_store(self, config: MemoryConfig, storage_config: HiCacheStorageConfig) -> PartStore:
        return PartStore()


def states(temporal: int, channels: int) -> MambaHostPool:
    """Slots of a temporal state of ``4 x temporal`` bytes and ``2 x channels`` of convolution."""
    geometry = MambaGeometry(layers=1, temporal_shape=(temporal,), conv_shapes=((channels,),))
    return MambaHostPool(geometry, pages=8, layout="page_first")


def stored_as(pool: object, name: str = "mamba") -> tuple[PartBackend, StoredPool]:
    backend = PartBackend(config(), {})
    backend.register_mem_pool_host(mha() if name != "kv" else pool)
    if name != "kv":
        backend.register_mem_host_pool_v2(pool, name)
    backend.on_host_pools_registered()
    store = backend._store
    assert isinstance(store, PartStore)
    return backend, next(stored for stored in store.pools if stored.name == name)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=6))
def test_parts_tile_every_component_and_no_larger_part_does(sizes: list[int]) -> None:
    part_bytes, parts = equal_parts(tuple(sizes))
    assert part_bytes * parts == sum(sizes)
    assert all(size % part_bytes == 0 for size in sizes)
    assert part_bytes == gcd(*sizes)


def test_a_page_of_very_many_small_parts_is_staged_logged_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = states(100, 3)  # 400 and 6 bytes: parts of 2, 203 of them
    backend, stored = stored_as(pool)
    assert stored.layout.access is Access.STAGED
    assert stored.layout.component_bytes == (406,)
    for seed, buffer in enumerate(pool.get_hybrid_pool_buffer()):
        fill(buffer, seed)
    before = [[buffer[i].tobytes() for buffer in pool.get_hybrid_pool_buffer()] for i in (0, 1)]
    assert backend.batch_set_v2([transfer("mamba", ["a", "b"], [0, 1], 1)]) == {"mamba": [True] * 2}
    assert backend.batch_get_v2([transfer("mamba", ["b", "a"], [6, 7], 1)]) == {"mamba": [True] * 2}
    after = [[buffer[i].tobytes() for buffer in pool.get_hybrid_pool_buffer()] for i in (7, 6)]
    assert after == before
    assert sum(backend.stats.slow_paths().values()) == 4
    assert len([record for record in caplog.records if "slower path" in record.message]) == 1
    backend.close()


@pytest.mark.parametrize(
    ("temporal", "channels", "why"),
    [
        (6, 6, "24 and 12 bytes are 3 parts"),
        (2 * SMALL_PART_BYTES, SMALL_PART_BYTES // 2, "9 parts, each of 8 KiB"),
    ],
)
def test_few_or_large_parts_are_moved_without_a_copy(
    temporal: int, channels: int, why: str
) -> None:
    backend, stored = stored_as(states(temporal, channels))
    assert stored.layout.access is Access.AFFINE, why
    assert len(stored.layout.component_bytes) == 2
    backend.close()


def test_components_of_one_size_are_moved_without_a_copy_however_many() -> None:
    backend, stored = stored_as(mha(layout="layer_first", layers=9), "kv")
    assert stored.layout.access is Access.AFFINE
    assert len(stored.layout.component_bytes) == 18 > MOST
    backend.close()


def test_a_pool_without_a_flat_form_keeps_to_its_small_parts_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    geometry = MHAGeometry(layers=1, head_num=1, head_dim=101, v_head_dim=100)
    pool = geometry.pool(
        label="kv", pages=8, page_size=PAGE, layout="page_first", allocate=aligned_bytes
    )
    with caplog.at_level(logging.WARNING):
        backend, stored = stored_as(pool, "kv")
    assert stored.layout.access is Access.AFFINE
    assert "keeps to its many small parts" in caplog.text
    backend.close()
