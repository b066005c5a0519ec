"""The part of the suite about the forms of a call: flat, long, repeated, counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hicache_shared.testing.harness import Harness
from hicache_shared.testing.page_bytes import bytes_of
from hicache_shared.testing.rank import FLAT_KV, KV, PAGES, Rank, chain
from hicache_shared.testing.suite.fixtures import (
    FLAT_PAIRS,
    SIDECAR_PAIRS,
    TWO_PAIRS,
    NewRank,
    SuiteFixtures,
    needs,
)

ONE_LAYER = 1000
"""Divides any number of layers down to one."""

EMPTY: dict[str, list[float]] = {
    "prefetch_pgs": [],
    "backup_pgs": [],
    "prefetch_bandwidth": [],
    "backup_bandwidth": [],
}


class CallSuite(SuiteFixtures):
    """The same pages in every form of call that SGLang makes."""

    # -- flat KV, as SGLang passes it without "interface_v1" ---------------------------------

    @pytest.mark.parametrize("pair", FLAT_PAIRS, ids="-".join, indirect=True)
    def test_flat_kv_comes_back_byte_exact(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        rank = new_rank(extra=FLAT_KV)
        backend, pool = rank.backend, rank.pools[KV]
        rank.fill(70)
        stored = [rank.page(KV, page) for page in range(8)]
        assert backend.batch_set(keys, [flat_page(rank, page) for page in range(8)]) is True
        harness.settle()
        assert backend.batch_exists(keys) == 8
        assert backend.exists(keys[7]) is True
        rank.fill(71)
        found = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        for page, value in enumerate(found):
            pool.set_from_flat_data_page((8 + page) * pool.page_size, value)
        assert [rank.page(KV, page) for page in range(8, 16)] == stored

    @pytest.mark.parametrize("pair", FLAT_PAIRS, ids="-".join, indirect=True)
    def test_an_absent_flat_page_is_none_and_its_neighbours_come(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        rank = new_rank(extra=FLAT_KV)
        backend, pool = rank.backend, rank.pools[KV]
        rank.fill(72)
        pages = [flat_page(rank, page) for page in range(8)]
        assert backend.set(keys[0], pages[0]) is True
        assert backend.batch_set(keys[2:4], pages[2:4]) is True
        harness.settle()
        found = backend.batch_get(keys[:4], [pool.get_dummy_flat_data_page() for _ in range(4)])
        assert [value is None for value in found] == [False, True, False, False]
        for page in (0, 2, 3):
            assert bytes_of(found[page]) == bytes_of(pages[page])
        assert bytes_of(backend.get(keys[0], pool.get_dummy_flat_data_page())) == bytes_of(pages[0])
        assert backend.get(keys[1], pool.get_dummy_flat_data_page()) is None
        assert [backend.exists(key) for key in keys[:3]] == [True, False, True]
        assert backend.batch_exists(keys) == 1

    @pytest.mark.parametrize("pair", FLAT_PAIRS, ids="-".join, indirect=True)
    def test_flat_kv_and_sidecars_hit_together_and_never_the_pools_own_pages(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """The two forms of a page may differ in their bytes, so neither stands for the other."""
        needs(harness, "zero_copy")
        flat, own = new_rank(extra=FLAT_KV), new_rank()
        flat.fill(73)
        for name in flat.pools:
            if name != KV:
                assert all(flat.set(name, keys, range(8)))
        assert flat.hit(keys) == 0
        assert flat.backend.batch_set(keys, [flat_page(flat, page) for page in range(8)]) is True
        harness.settle()
        assert flat.hit(keys) == 8
        if harness.capabilities.zero_copy:
            assert own.backend.batch_exists(keys) == 0
            assert own.get(KV, keys, range(8)) == [False] * 8

    @pytest.mark.parametrize("pair", [("mla", "page_first")], ids="-".join, indirect=True)
    def test_many_flat_pages_in_one_call_come_back_byte_exact(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        rank = new_rank(extra=FLAT_KV, layers_div=ONE_LAYER)
        hashes = chain(200, keys[0])
        generator = np.random.default_rng(74)
        empty = rank.pools[KV].get_dummy_flat_data_page()
        pages = [generator.integers(0, 60000, empty.shape, empty.dtype) for _ in hashes]
        assert rank.backend.batch_set(hashes, pages) is True
        harness.settle()
        assert rank.backend.batch_exists(hashes) == 200
        found = rank.backend.batch_get(hashes, [np.zeros_like(empty) for _ in hashes])
        assert [bytes_of(page) for page in found] == [bytes_of(page) for page in pages]

    # -- many pages, and a pool more than once ------------------------------------------------

    @pytest.mark.parametrize("pair", SIDECAR_PAIRS, ids="-".join, indirect=True)
    def test_a_pool_twice_in_one_call_has_its_answers_in_order(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        rank.fill(76)
        names = rank.sidecars
        stored = {name: [rank.page(name, page) for page in range(8)] for name in names}
        puts = [rank.transfer(name, keys[:3], range(3)) for name in names]
        puts += [rank.transfer(name, keys[3:], range(3, 8)) for name in names]
        assert rank.backend.batch_set_v2(puts) == {name: [True] * 8 for name in names}
        harness.settle()
        absent = chain(2, keys[0])
        gets = [rank.transfer(name, [absent[0], *keys[:3]], range(8, 12)) for name in names]
        gets += [rank.transfer(name, [*keys[3:5], absent[1]], range(12, 15)) for name in names]
        answers = [False, True, True, True, True, True, False]
        assert rank.backend.batch_get_v2(gets) == dict.fromkeys(names, answers)
        for name in names:
            assert [rank.page(name, page) for page in range(9, 14)] == stored[name][:5]

    @pytest.mark.parametrize("pair", TWO_PAIRS, ids="-".join, indirect=True)
    def test_a_chain_longer_than_the_host_pools_moves_in_several_calls(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        rank = new_rank(layers_div=ONE_LAYER)
        hashes = chain(200, keys[0])
        parts = [hashes[start : start + PAGES] for start in range(0, len(hashes), PAGES)]
        stored: dict[str, list[bytes]] = {name: [] for name in rank.pools}
        for seed, part in enumerate(parts):
            rank.fill(seed)
            rank.set_everywhere(part, range(len(part)))
            for name, pages in stored.items():
                pages += [rank.page(name, page) for page in range(len(part))]
        harness.settle()
        assert rank.hit(hashes) == 200
        assert rank.hit(hashes + chain(3, keys[1])) == 200
        rank.fill(77)
        for name, pages in stored.items():
            found: list[bytes] = []
            for part in parts:
                targets = range(PAGES - len(part), PAGES)
                assert rank.get(name, part, targets) == [True] * len(part)
                found += [rank.page(name, page) for page in targets]
            assert found == pages

    # -- metrics -----------------------------------------------------------------------------------

    def test_get_stats_tells_the_pages_of_each_call_once(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """KV by v1 and the others by v2; a backend without metrics answers None throughout."""
        rank = new_rank(enable_storage_metrics=True)
        rank.fill(80)
        metrics = rank.backend.get_stats()
        if metrics is None:
            rank.set_everywhere(keys, range(8))
            assert rank.backend.get_stats() is None
            return
        assert lists_of(metrics) == EMPTY
        for name in rank.pools:
            assert all(rank.set(name, keys, range(8)))
            put = rank.backend.get_stats()
            harness.settle()
            assert all(rank.get(name, keys, range(8, 16)))
            got = rank.backend.get_stats()
            assert lists_of(rank.backend.get_stats()) == EMPTY
            for seen, moved, other in ((put, "backup", "prefetch"), (got, "prefetch", "backup")):
                lists = lists_of(seen)
                assert sum(lists[f"{moved}_pgs"]) == 8
                assert len(lists[f"{moved}_bandwidth"]) == len(lists[f"{moved}_pgs"])
                assert all(rate > 0 for rate in lists[f"{moved}_bandwidth"])
                assert lists[f"{other}_pgs"] == lists[f"{other}_bandwidth"] == []
        assert lists_of(metrics) == EMPTY, "a record that was handed out changes no more"


def flat_page(rank: Rank, page: int) -> Any:
    """A copy of a host page of KV in the pool's flat form."""
    pool = rank.pools[KV]
    return np.array(pool.get_data_page(page * pool.page_size, flat=True))


def lists_of(metrics: Any) -> dict[str, list[float]]:
    """The four lists of SGLang's ``StorageMetrics``."""
    return {name: list(getattr(metrics, name)) for name in EMPTY}
