"""The part of the suite about hit queries: which prefixes can be restored.

The numbers in names are those of ``docs/cases.md``: faults that people met in other adapters.
"""

from __future__ import annotations

import random
from typing import cast

import numpy as np
import pytest

from hicache_shared.contract import HiCacheStorage, PoolTransfer
from hicache_shared.controller import HostMemoryMode, ReferenceController
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.oracle import restorable_prefixes
from hicache_shared.testing.rank import KV, Rank, chain
from hicache_shared.testing.suite.fixtures import (
    LOGICAL_PAIRS,
    TRAILING_PAIRS,
    SuiteFixtures,
)


class HitSuite(SuiteFixtures):
    """A prefix that is reported can be restored, from every pool."""

    def test_case_01_prefixes_are_intersected_over_pools(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """Pages of every pool at random; the definitions say which prefixes are legal."""
        generator = random.Random(keys[0])
        rank.fill(21)
        for _ in range(6):
            hashes = chain(8, str(generator.random()))
            held = {
                name: {page for page in range(8) if generator.random() < 0.8} for name in rank.pools
            }
            rank.set_anchor(hashes)
            for name, pages in held.items():
                rank.set(name, [hashes[page] for page in sorted(pages)], sorted(pages))
            harness.settle()
            result = rank.backend.batch_exists_v2(hashes, rank.questions())
            expected = restorable_prefixes(8, held, rank.windows)
            assert result.restorable_prefix_pages == expected
            assert result.kv_hit_pages == max(expected, default=0)
            assert type(result.restorable_prefix_pages) is list

    @pytest.mark.parametrize("pair", TRAILING_PAIRS, ids="-".join, indirect=True)
    def test_case_01_the_minimum_of_maxima_is_not_the_answer(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """A trailing pool serves {1, 3} of three pages, the others {1, 2}: the answer is 1."""
        trailing = [name for name in rank.pools if name in rank.windows]
        rank.fill(22)
        rank.set_anchor(keys)
        for name in rank.pools:
            pages = [0, 2] if name in trailing else [0, 1]
            assert all(rank.set(name, [keys[page] for page in pages], pages))
        rank.set_anchor(keys[:3])
        harness.settle()
        questions = rank.questions()
        for question in questions:
            if question.keys is not None:
                question.keys = ["placeholder"]
        result = rank.backend.batch_exists_v2(keys[:3], questions)
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (1, [1])

    def test_case_06_a_sidecar_that_was_never_stored_is_no_hit(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        rank.fill(23)
        names = list(rank.pools)
        for missing in names:
            hashes = chain(4, keys[0] + missing)
            rank.set_anchor(hashes)
            for name in names:
                if name != missing:
                    rank.set(name, hashes, range(4))
            rank.set_anchor(hashes)
            harness.settle()
            assert rank.hit(hashes) == 0

    def test_case_06_an_unregistered_pool_is_an_error_that_names_it(
        self, rank: Rank, keys: list[str]
    ) -> None:
        ghost = PoolTransfer("ghost_pool", host_indices=np.arange(1), keys=keys[:1])
        with pytest.raises(Exception, match="ghost_pool"):
            rank.backend.batch_exists_v2(keys, [PoolTransfer("ghost_pool")])
        with pytest.raises(Exception, match="ghost_pool"):
            rank.backend.batch_get_v2([ghost])
        with pytest.raises(Exception, match="ghost_pool"):
            rank.backend.batch_set_v2([ghost])

    @pytest.mark.parametrize("pair", LOGICAL_PAIRS, ids="-".join, indirect=True)
    def test_case_07_a_logical_anchor_moves_nothing_and_the_sidecars_decide(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        anchor = rank.model.group.anchor_entry.host_pool
        slots = np.arange(8 * anchor.page_size)
        before = set(harness.raw_keys()) if harness.capabilities.raw else set()
        assert rank.backend.batch_set_v1(keys, slots) == [True] * 8
        assert rank.backend.batch_get_v1(keys, slots) == [True] * 8
        if harness.capabilities.raw:
            stored = set(harness.raw_keys()) - before
            assert not any(map(harness.raw_get, stored)), "an object with bytes"
        assert rank.backend.batch_exists(keys) == 0, "an anchor alone has nothing to restore"
        assert rank.hit(keys) == 0
        rank.set_everywhere(keys, range(8))
        harness.settle()
        assert rank.hit(keys) == 8

    @pytest.mark.parametrize("pair", LOGICAL_PAIRS, ids="-".join, indirect=True)
    def test_a_logical_anchor_moves_nothing_by_v2_either(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        kv = rank.transfer(KV, keys, range(8))
        assert rank.backend.batch_set_v2([kv]) == {KV: [True] * 8}
        assert rank.backend.batch_get_v2([kv]) == {KV: [True] * 8}
        assert rank.hit(keys) == 0

    def test_case_16_a_hole_at_the_start_is_no_hit(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        rank.fill(24)
        rank.set_anchor(keys)
        for name in rank.pools:
            pages = range(1, 8) if name not in rank.windows else range(8)
            assert all(rank.set(name, [keys[page] for page in pages], pages))
        rank.set_anchor(keys)
        harness.settle()
        result = rank.backend.batch_exists_v2(keys, rank.questions())
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])

    def test_a_chain_longer_than_what_is_stored_hits_what_is_stored(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        rank.fill(25)
        hashes = keys + chain(200, keys[0])
        rank.set_everywhere(keys, range(8))
        harness.settle()
        assert rank.hit(hashes) == 8

    @pytest.mark.parametrize("mode", ["cache", "buffer_only"])
    def test_operations_in_flight_come_back_byte_exact(
        self, harness: Harness, rank: Rank, keys: list[str], mode: HostMemoryMode
    ) -> None:
        """Backups, hit queries and prefetches at once, called as SGLang's controller does."""
        rank.fill(60)
        chains = [chain(4, f"{keys[0]}/{i}") for i in range(2)]
        sources, targets = [range(0, 4), range(4, 8)], [range(8, 12), range(12, 16)]
        saved = {name: [rank.page(name, page) for page in range(8)] for name in rank.pools}
        with ReferenceController(rank.model.group, rank.config, host_memory_mode=mode) as engine:
            engine.attach(cast(HiCacheStorage, rank.backend), registered=True)
            first, second = map(rank.operation, chains, sources)
            engine.submit_backup(first).result()
            harness.settle()
            running = engine.submit_backup(second)
            hit = engine.submit_query(first.hashes, first.transfers).result().kv_hit_pages
            restoring = engine.submit_prefetch(rank.operation(chains[0], targets[0]), hit)
            running.result()
            harness.settle()
            hits = engine.submit_query(second.hashes, second.transfers)
            assert (hit, restoring.result(), hits.result().kv_hit_pages) == (4, 4, 4)
            reading = engine.submit_prefetch(rank.operation(chains[1], targets[1]), 4)
            assert reading.result() == 4
        for name in rank.pools:
            window = rank.windows.get(name, 4)
            for source, target in zip(sources, targets, strict=True):
                restored = [rank.page(name, page) for page in list(target)[4 - window :]]
                assert restored == [saved[name][page] for page in list(source)[4 - window :]]
