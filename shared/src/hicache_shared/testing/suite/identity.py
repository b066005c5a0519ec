"""The part of the suite about identity: no deployment or rank reads what another stored.

The numbers in names are those of ``docs/cases.md``: faults that people met in other adapters.
"""

from __future__ import annotations

import pytest

from hicache_shared.testing.harness import Harness
from hicache_shared.testing.rank import KV, Rank
from hicache_shared.testing.suite.fixtures import (
    LEGAL_PAIRS,
    MLA_MAMBA_PAIRS,
    PAGE_HEAD_PAIRS,
    NewRank,
    SuiteFixtures,
    needs,
)


class IdentitySuite(SuiteFixtures):
    """A hit never crosses from one deployment or shard to another."""

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
