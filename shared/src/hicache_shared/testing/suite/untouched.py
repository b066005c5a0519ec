"""The part of the suite about host memory: what a call may not touch, and may not keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hicache_shared.layout import buffers_of
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.page_bytes import bytes_of
from hicache_shared.testing.rank import FLAT_KV, KV, Rank, chain, same
from hicache_shared.testing.suite.fixtures import (
    ONE_LAYOUT_PAIRS,
    SIDECAR_PAIRS,
    NewRank,
    SuiteFixtures,
    needs,
)

ONE_PAIR = [("mla", "page_first")]


class UntouchedSuite(SuiteFixtures):
    """Host memory outside a page's own bytes stays as it is, and is the caller's after a call."""

    def test_a_get_with_misses_changes_its_own_pages_alone(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """What becomes of a page that is missed is not said: it is the caller's to reuse."""
        rank.write(keys, range(8))
        for name in rank.pools:
            assert all(rank.set(name, keys[::2], range(0, 8, 2)))
        harness.settle()
        rank.fill(100)
        for name in rank.pools:
            before = Surroundings(rank, name, range(4, 12))
            assert rank.get(name, keys, range(4, 12)) == [True, False] * 4
            assert all(rank.is_whole(name, keys[i], 4 + i) for i in range(0, 8, 2))
            assert before.are_untouched()

    @pytest.mark.parametrize("pair", SIDECAR_PAIRS, ids="-".join, indirect=True)
    def test_a_get_of_several_pools_with_misses_changes_their_pages_alone(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """Each pool misses other pages, and one has none of them."""
        rank.write(keys, range(8))
        held = {name: range(i % 3, 8) for i, name in enumerate(rank.sidecars[1:])}
        for name, pages in held.items():
            assert all(rank.set(name, [keys[page] for page in pages], pages))
        harness.settle()
        rank.fill(101)
        before = Surroundings(rank, None, range(8, 16))
        gets = [rank.transfer(name, keys, range(8, 16)) for name in rank.sidecars]
        answers = rank.backend.batch_get_v2(gets)
        for name in rank.sidecars:
            there = held.get(name, range(0))
            assert answers[name] == [page in there for page in range(8)]
            assert all(rank.is_whole(name, keys[page], 8 + page) for page in there)
        assert before.are_untouched()

    def test_sets_and_hit_queries_change_no_host_memory(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        rank.fill(102)
        before = rank.image()
        for _ in range(2):
            rank.set_everywhere(keys, range(8))
            harness.settle()
            assert rank.hit(keys) == 8
            rank.backend.batch_exists(keys)
        assert same(before, rank.image())

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    def test_an_object_of_another_size_changes_no_memory_but_the_pages(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """One that is longer than the page would write over the next one."""
        needs(harness, "raw")
        rank.fill(103)
        for name in rank.pools:
            before = set(harness.raw_keys())
            assert all(rank.set(name, keys[:1], [0]))
            objects = set(harness.raw_keys()) - before
            value = harness.raw_get(next(iter(objects)))
            assert value is not None
            for length in (0, 1, len(value) // 2, len(value) + 1, 2 * len(value)):
                for key in objects:
                    harness.raw_put(key, (value * 2)[:length] or b"\0")
                surroundings = Surroundings(rank, name, [8])
                assert rank.get(name, keys[:1], [8]) == [False]
                assert surroundings.are_untouched()

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    def test_no_reference_to_host_memory_is_kept_after_a_get(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """What the caller writes to a page that was filled stays, and is nobody's page."""
        one, other = new_rank(), new_rank()
        one.write(keys, range(8))
        one.set_everywhere(keys, range(8))
        harness.settle()
        for name in one.pools:
            assert one.get(name, keys, range(8, 16)) == [True] * 8
        one.fill(104)
        image = one.image()
        for rank in (other, one):
            for name in rank.pools:
                assert rank.get(name, keys[:1], [0]) == [True]
                assert rank.is_whole(name, keys[0], 0)
            if rank is other:
                assert same(image, one.image())

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    def test_pages_outlive_the_host_pools_they_were_stored_from(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """SGLang destroys the pools at shutdown, and closes the backend after that."""
        one, other = new_rank(), new_rank()
        one.write(keys, range(8))
        one.set_everywhere(keys, range(8))
        for name in one.pools:
            assert one.get(name, keys, range(8, 16)) == [True] * 8
        in_other_use = [buffers_of(name, pool) for name, pool in one.pools.items()]
        one.fill(106)
        one.model.destroy()
        harness.settle()
        for seed in range(2):
            other.fill(seed)
            assert other.hit(keys) == 8
            for name in other.pools:
                assert other.get(name, keys, range(8)) == [True] * 8
                assert all(other.is_whole(name, key, i) for i, key in enumerate(keys))
            one.backend.close()
        del in_other_use

    @pytest.mark.parametrize("pair", ONE_PAIR, ids="-".join, indirect=True)
    def test_no_reference_to_flat_pages_is_kept(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        rank = new_rank(extra=FLAT_KV)
        generator = np.random.default_rng(105)
        empty = rank.pools[KV].get_dummy_flat_data_page()
        pages = [generator.integers(0, 60000, empty.shape, empty.dtype) for _ in keys]
        given = [page.copy() for page in pages]
        assert rank.backend.batch_set(keys, given) is True
        for page in given:
            page[:] = 1
        harness.settle()
        hashes = [*keys, *chain(1, keys[0])]
        targets = [np.full_like(empty, 2) for _ in hashes]
        found = rank.backend.batch_get(hashes, targets)
        assert found[8] is None
        got = list(map(bytes_of, found[:8]))
        assert got == list(map(bytes_of, pages))
        for target in targets:
            target[:] = 3
        again = rank.backend.batch_get(keys, [np.zeros_like(empty) for _ in keys])
        assert list(map(bytes_of, again)) == got
        assert all((target == 3).all() for target in targets)


class Surroundings:
    """Everything in host memory but the pages that a get may change.

    Args:
        rank: whose memory.
        name: of the pool whose pages they are; None for all pools.
        pages: host pages that may change.
    """

    def __init__(self, rank: Rank, name: str | None, pages: Any) -> None:
        self._rank = rank
        self._pages = [(pool, page) for pool in rank.pools for page in pages]
        if name is not None:
            self._pages = [(name, page) for page in pages]
        self._saved = [rank.page(pool, page) for pool, page in self._pages]
        self._before = rank.image()

    def are_untouched(self) -> bool:
        """Whether nothing else changed; the pages are given back what they held."""
        for (pool, page), value in zip(self._pages, self._saved, strict=True):
            self._rank.put_page(pool, page, value)
        return same(self._before, self._rank.image())
