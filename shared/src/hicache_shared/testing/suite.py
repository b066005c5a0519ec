"""The conformance suite: what every backend does, for every model and memory layout.

Each test writes through the contract and, where it can, looks behind it. The numbers in
names are those of ``docs/cases.md``: faults that people met in other adapters.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache_shared.contract import PoolTransfer
from hicache_shared.controller import HostMemoryMode, ReferenceController
from hicache_shared.errors import HiCacheError, LayoutError, UnknownPoolError
from hicache_shared.hostpool import build, preset
from hicache_shared.testing.calls import CallSuite
from hicache_shared.testing.faults import FaultSuite
from hicache_shared.testing.fixtures import (
    ILLEGAL_PAIRS,
    LEGAL_PAIRS,
    LOGICAL_PAIRS,
    MLA_MAMBA_PAIRS,
    PAGE_HEAD_PAIRS,
    TRAILING_PAIRS,
    NewRank,
    needs,
)
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.oracle import restorable_prefixes
from hicache_shared.testing.rank import KV, PAGES, Rank, chain, register, small_model


class BackendSuite(CallSuite, FaultSuite):
    """Subclass it in a module that has a fixture ``harness``; everything else is inherited."""

    # -- bytes ------------------------------------------------------------------------

    def test_pages_come_back_byte_exact_and_nothing_else_changes(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """Case 3: every component, also of unequal sizes, into other host pages."""
        rank.fill(1)
        stored = {name: [rank.page(name, page) for page in range(8)] for name in rank.pools}
        rank.set_everywhere(keys, range(8))
        harness.settle()
        rank.fill(2)
        before = rank.image()
        targets = [15, 8, 14, 0, 3, 9, 12, 5]
        other = {name: [rank.page(name, page) for page in targets] for name in rank.pools}
        for name in rank.pools:
            assert rank.get(name, keys, targets) == [True] * 8
            assert [rank.page(name, page) for page in targets] == stored[name]
        for name in rank.pools:
            for page, value in zip(targets, other[name], strict=True):
                rank.put_page(name, page, value)
        after = rank.image()
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))

    def test_all_pools_in_one_call_come_back_byte_exact(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        rank.fill(3)
        sidecars = [name for name in rank.pools if name != KV]
        stored = {name: [rank.page(name, page) for page in range(8)] for name in sidecars}
        puts = [rank.transfer(name, keys, range(8)) for name in sidecars]
        assert rank.backend.batch_set_v2(puts) == {name: [True] * 8 for name in sidecars}
        harness.settle()
        rank.fill(4)
        gets = [rank.transfer(name, keys, range(8, 16)) for name in sidecars]
        assert rank.backend.batch_get_v2(gets) == {name: [True] * 8 for name in sidecars}
        for name in sidecars:
            assert [rank.page(name, page) for page in range(8, 16)] == stored[name]

    def test_case_08_every_key_has_one_answer_in_order(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        rank.fill(5)
        for name in rank.pools:
            for count in (0, 1, 3, 8):
                answers = rank.set(name, keys[:count], range(count))
                assert answers == [True] * count
                assert all(type(answer) is bool for answer in answers)
        harness.settle()
        absent = chain(8, keys[0])
        mixed = [keys[0], absent[1], keys[2], keys[3], absent[4], keys[5], absent[6], keys[7]]
        for name in rank.pools:
            answers = rank.get(name, mixed, range(8, 16))
            assert answers == [True, False, True, True, False, True, False, True]
            assert all(type(answer) is bool for answer in answers)

    def test_case_10_an_object_is_exactly_the_page_that_the_pool_describes(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        needs(harness, "raw")
        rank.fill(6)
        for name in rank.pools:
            before = set(harness.raw_keys())
            assert rank.set(name, keys[:1], [2]) == [True]
            objects = [harness.raw_get(key) for key in set(harness.raw_keys()) - before]
            assert sum(len(value or b"") for value in objects) == len(rank.page(name, 2))
            assert b"".join(value or b"" for value in objects) == rank.page(name, 2)

    def test_case_13_one_absent_page_leaves_its_neighbours_whole(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        rank.fill(7)
        pages = range(8)
        stored = {name: [rank.page(name, page) for page in pages] for name in rank.pools}
        some = [page for page in pages if page != 3]
        for name in rank.pools:
            assert all(rank.set(name, [keys[page] for page in some], some))
        harness.settle()
        rank.fill(8)
        for name in rank.pools:
            assert rank.get(name, keys, pages) == [page != 3 for page in pages]
            assert [rank.page(name, page) for page in some] == [stored[name][p] for p in some]

    def test_case_14_a_key_keeps_the_bytes_it_was_stored_with(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        rank.fill(9)
        first = {name: rank.page(name, 0) for name in rank.pools}
        rank.set_everywhere(keys[:1], [0])
        rank.fill(10)
        rank.set_everywhere(keys[:1], [0])
        harness.settle()
        for name in rank.pools:
            assert rank.get(name, keys[:1], [5]) == [True]
            assert rank.page(name, 5) == first[name]

    def test_no_reference_to_host_memory_is_kept_after_a_set(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        rank.fill(11)
        stored = {name: rank.page(name, 0) for name in rank.pools}
        rank.set_everywhere(keys[:1], [0])
        rank.fill(12)
        harness.settle()
        for name in rank.pools:
            assert rank.get(name, keys[:1], [1]) == [True]
            assert rank.page(name, 1) == stored[name]

    def test_a_page_stored_twice_in_one_call_is_stored_once(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        rank.fill(13)
        for name in rank.pools:
            assert rank.set(name, [keys[0], keys[1], keys[0]], [0, 1, 0]) == [True] * 3
            harness.settle()
            stored = rank.page(name, 0)
            assert rank.get(name, [keys[0], keys[0]], [4, 5]) == [True, True]
            assert rank.page(name, 4) == rank.page(name, 5) == stored

    # -- identity -----------------------------------------------------------------------

    @pytest.mark.parametrize("field", ["model_id", "revision", "kv_cache_dtype", "namespace"])
    def test_case_02_another_deployment_never_hits(
        self, harness: Harness, new_rank: NewRank, keys: list[str], field: str
    ) -> None:
        one, other = new_rank(), new_rank(extra={field: "other"})
        one.fill(14)
        one.set_everywhere(keys, range(8))
        harness.settle()
        assert one.hit(keys) == 8
        assert other.hit(keys) == 0
        for name in other.pools:
            assert other.get(name, keys, range(8)) == [False] * 8

    def test_case_02_an_object_of_another_size_is_a_miss(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        needs(harness, "raw")
        rank.fill(15)
        for name in rank.pools:
            before = set(harness.raw_keys())
            assert all(rank.set(name, keys[:1], [0]))
            (short, *_) = set(harness.raw_keys()) - before
            before = set(harness.raw_keys())
            assert all(rank.set(name, keys[1:2], [1]))
            (long, *_) = set(harness.raw_keys()) - before
            assert all(rank.set(name, keys[2:3], [2]))
            value = harness.raw_get(short)
            assert value is not None
            harness.raw_put(short, value[:-1])
            harness.raw_put(long, value + b"\0")
            whole = rank.page(name, 2)
            assert rank.get(name, keys[:3], [8, 9, 10]) == [False, False, True]
            assert rank.page(name, 10) == whole

    @pytest.mark.parametrize("pair", LEGAL_PAIRS + MLA_MAMBA_PAIRS, ids="-".join, indirect=True)
    @pytest.mark.parametrize("place", [(1, 2), (0, 4)], ids=["other rank", "other size"])
    def test_case_04_replicated_pools_are_shared_over_ranks_and_sharded_ones_never(
        self, harness: Harness, new_rank: NewRank, keys: list[str], place: tuple[int, int]
    ) -> None:
        """Cases 2 and 4: rank 0 of 2 writes; rank 1 of 2 or rank 0 of 4 reads."""
        one, other = new_rank(tp_rank=0, tp_size=2), new_rank(tp_rank=place[0], tp_size=place[1])
        one.fill(16)
        one.set_everywhere(keys, range(8))
        harness.settle()
        kv = KV in one.pools and one.model.is_mla_model
        assert other.backend.batch_exists(keys) == (8 if kv else 0)
        for name in one.pools:
            replicated = one.model.is_mla_model and name != "mamba"
            assert other.get(name, keys, range(8)) == [replicated] * 8
            if replicated:
                assert other.page(name, 7) == one.page(name, 7)

    @pytest.mark.parametrize("ranks", ["pp", "attn_cp"])
    def test_case_05_each_stage_and_rank_reads_its_own_bytes(
        self, harness: Harness, new_rank: NewRank, keys: list[str], ranks: str
    ) -> None:
        pair = [new_rank(**{f"{ranks}_rank": i, f"{ranks}_size": 2}) for i in range(2)]
        for i, rank in enumerate(pair):
            rank.fill(18 + i)
            rank.set_everywhere(keys, range(8))
        harness.settle()
        stored = [{name: rank.page(name, 3) for name in rank.pools} for rank in pair]
        for rank, own in zip(pair, stored, strict=True):
            rank.fill(20)
            for name in rank.pools:
                assert rank.get(name, keys[3:4], [0]) == [True]
                assert rank.page(name, 0) == own[name]

    @pytest.mark.parametrize("pair", PAGE_HEAD_PAIRS, ids="-".join, indirect=True)
    def test_head_shards_are_shared_between_tp_sizes(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """A rank of TP 2 holds the heads of two ranks of TP 4, each a shard of its own."""
        quarters = [
            new_rank(tp_rank=rank, tp_size=4, heads_over=4, tp_lcm_size=4) for rank in range(2)
        ]
        half = new_rank(tp_rank=0, tp_size=2, heads_over=2, tp_lcm_size=4, should_split_heads=True)
        for seed, quarter in enumerate(quarters):
            quarter.fill(50 + seed)
            assert all(quarter.set(KV, keys[:4], range(4)))
        harness.settle()
        half.fill(52)
        assert half.get(KV, keys[:4], range(8, 12)) == [True] * 4
        for page in range(4):
            parts = zip(*(quarter.components(KV, page) for quarter in quarters), strict=True)
            assert half.components(KV, 8 + page) == [first + second for first, second in parts]
        assert all(half.set(KV, keys[4:], range(4)))
        harness.settle()
        for quarter in quarters:
            assert quarter.get(KV, keys[4:], range(12, 16)) == [True] * 4
        parts = zip(*(quarter.components(KV, 12) for quarter in quarters), strict=True)
        assert half.components(KV, 0) == [first + second for first, second in parts]

    # -- hits -----------------------------------------------------------------------------

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
            for name, pages in held.items():
                rank.set(name, [hashes[page] for page in pages], sorted(pages))
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
        for name in rank.pools:
            pages = [0, 2] if name in trailing else [0, 1]
            assert all(rank.set(name, [keys[page] for page in pages], pages))
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
            for name in names:
                if name != missing:
                    rank.set(name, hashes, range(4))
            harness.settle()
            assert rank.hit(hashes) == 0

    def test_case_06_an_unregistered_pool_is_an_error_that_names_it(
        self, rank: Rank, keys: list[str]
    ) -> None:
        ghost = PoolTransfer("ghost_pool", host_indices=np.arange(1), keys=keys[:1])
        with pytest.raises(UnknownPoolError, match="ghost_pool"):
            rank.backend.batch_exists_v2(keys, [PoolTransfer("ghost_pool")])
        with pytest.raises(UnknownPoolError, match="ghost_pool"):
            rank.backend.batch_get_v2([ghost])
        with pytest.raises(UnknownPoolError, match="ghost_pool"):
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
        kv = PoolTransfer(KV, host_indices=slots, keys=keys)
        assert rank.backend.batch_set_v2([kv]) == {KV: [True] * 8}
        if harness.capabilities.raw:
            assert set(harness.raw_keys()) <= before
        assert rank.backend.batch_exists(keys) == 0, "an anchor alone has nothing to restore"
        assert rank.hit(keys) == 0
        rank.set_everywhere(keys, range(8))
        harness.settle()
        assert rank.hit(keys) == 8

    def test_case_16_a_hole_at_the_start_is_no_hit(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        rank.fill(24)
        for name in rank.pools:
            pages = range(1, 8) if name not in rank.windows else range(8)
            assert all(rank.set(name, [keys[page] for page in pages], pages))
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
        assert rank.hit([]) == 0

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
            engine.attach(rank.backend)
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

    # -- misuse ------------------------------------------------------------------------------

    def test_indices_that_do_not_fit_are_an_error_and_move_nothing(
        self, rank: Rank, keys: list[str]
    ) -> None:
        before = rank.image()
        for name, pool in rank.pools.items():
            width, size = pool.page_size, pool.size
            wrong = {
                "too few": np.arange(width * 2 - 1) if width > 1 else np.arange(1),
                "too many": np.arange(width * 3),
                "past the end": np.arange(size - width, size + width),
                "negative": np.arange(-width, width),
                "twice": np.concatenate([np.arange(width)] * 2),
            }
            if width > 1:
                wrong["unaligned"] = np.arange(1, 2 * width + 1)
            for indices in wrong.values():
                transfer = PoolTransfer(name, host_indices=indices, keys=keys[:2])
                with pytest.raises(HiCacheError, match=name):
                    rank.backend.batch_get_v2([transfer])
                with pytest.raises(HiCacheError, match=name):
                    rank.backend.batch_set_v2([transfer])
        assert all(np.array_equal(a, b) for a, b in zip(before, rank.image(), strict=True))

    def test_case_18_registering_the_same_storage_again_changes_nothing(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        register(rank.backend, rank.model)
        rank.fill(26)
        rank.set_everywhere(keys, range(8))
        harness.settle()
        assert rank.hit(keys) == 8

    def test_a_pool_that_is_registered_late_works_like_the_others(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        late = small_model(harness, "mla", "page_first").group.anchor_entry.host_pool
        rank.backend.register_mem_host_pool_v2(late, "a_pool_of_tomorrow")
        transfer = PoolTransfer(
            "a_pool_of_tomorrow", host_indices=np.arange(2 * late.page_size), keys=keys[:2]
        )
        assert rank.backend.batch_set_v2([transfer]) == {"a_pool_of_tomorrow": [True, True]}
        harness.settle()
        assert rank.backend.batch_get_v2([transfer]) == {"a_pool_of_tomorrow": [True, True]}

    @pytest.mark.parametrize(("model", "layout"), ILLEGAL_PAIRS)
    def test_an_illegal_pair_of_model_and_layout_is_an_error_that_names_the_layout(
        self, harness: Harness, model: str, layout: str
    ) -> None:
        with pytest.raises(LayoutError, match=layout):
            build(preset(model), pages=PAGES, layout=layout, allocate=harness.allocate)
