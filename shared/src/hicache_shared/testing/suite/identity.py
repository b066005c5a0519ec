"""The part of the suite about identity: no deployment or rank reads what another stored.

The numbers in names are those of ``docs/cases.md``: faults that people met in other adapters.
"""

from __future__ import annotations

from functools import partial

import pytest

from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.models import spec_of, with_dcp
from hicache_shared.testing.rank import KV, Rank
from hicache_shared.testing.suite.fixtures import (
    MLA_MAMBA_PAIRS,
    ONE_LAYOUT_PAIRS,
    PAGE_HEAD_PAIRS,
    NewRank,
    SuiteFixtures,
    allowed,
    needs,
    not_supported,
)

Place = tuple[int, int]
"""A rank, and how many there are."""

ACROSS = [((0, 2), (1, 2)), ((1, 2), (0, 2)), ((0, 2), (0, 4)), ((0, 1), (0, 2)), ((0, 2), (0, 1))]
ACROSS_IDS = ["to the next", "from the next", "to more", "from one alone", "to one alone"]


class IdentitySuite(SuiteFixtures):
    """A hit never crosses from one deployment or shard to another."""

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

    @pytest.mark.parametrize(
        "pair", ONE_LAYOUT_PAIRS + MLA_MAMBA_PAIRS[:1], ids="-".join, indirect=True
    )
    @pytest.mark.parametrize(("writer", "reader"), ACROSS, ids=ACROSS_IDS)
    def test_case_04_replicated_pools_are_shared_over_ranks_and_sharded_ones_never(
        self, harness: Harness, new_rank: NewRank, keys: list[str], writer: Place, reader: Place
    ) -> None:
        """Cases 2 and 4: a rank of one place among the tensor-parallel ranks writes, another
        reads. Of a replicated pool the bytes are the writer's, whichever rank it is."""
        one, other = (new_rank(tp_rank=rank, tp_size=size) for rank, size in (writer, reader))
        one.fill(16)
        one.set_everywhere(keys, range(8))
        harness.settle()
        shared = {name for name in one.pools if one.model.is_mla_model and name != "mamba"}
        assert other.hit(keys) == (8 if shared == set(one.pools) else 0)
        if KV in one.pools:
            assert other.backend.batch_exists(keys) == (8 if KV in shared else 0)
        for name in one.pools:
            replicated = name in shared
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

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    @pytest.mark.parametrize(("writer", "reader"), ACROSS, ids=ACROSS_IDS)
    @pytest.mark.parametrize("ranks", ["pp", "attn_cp"])
    def test_case_05_what_one_stage_or_rank_stored_no_other_finds(
        self,
        harness: Harness,
        new_rank: NewRank,
        keys: list[str],
        ranks: str,
        writer: Place,
        reader: Place,
    ) -> None:
        """Replicated over tensor-parallel ranks or not: these hold other layers or tokens."""
        one, other = (
            new_rank(**{f"{ranks}_rank": rank, f"{ranks}_size": size})
            for rank, size in (writer, reader)
        )
        one.fill(19)
        one.set_everywhere(keys, range(8))
        harness.settle()
        assert (one.hit(keys), other.hit(keys)) == (8, 0)
        for name in other.pools:
            assert other.get(name, keys, range(8)) == [False] * 8

    @pytest.mark.parametrize("pair", [("mla", "page_first")], ids="-".join, indirect=True)
    def test_case_05_dcp_ranks_read_their_own_bytes_or_are_refused(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """Each rank of two has every second token of a page, and a page of the same hash, of one
        rank alone or of another of two or four, is not its page. SGLang refuses this with
        ``dynamic``, so a backend may, by an error that says so."""
        ranks = dcp_ranks(new_rank, 2)
        for i, rank in enumerate(ranks):
            rank.fill(21 + i)
            rank.set_everywhere(keys[:4], range(4))
        ranks[0].set_everywhere(keys[4:], range(4, 8))
        harness.settle()
        assert [rank.hit(keys) for rank in ranks] == [8, 4]
        assert ranks[1].get(KV, keys, range(8, 16)) == [True] * 4 + [False] * 4
        assert ranks[0].get(KV, keys, range(8, 16)) == [True] * 8
        for rank in ranks:
            for page in range(4):
                assert rank.page(KV, 8 + page) == rank.page(KV, page)
        for other in (*dcp_ranks(new_rank, 1), *dcp_ranks(new_rank, 4)):
            assert other.hit(keys) == 0
            assert other.get(KV, keys, range(8)) == [False] * 8

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

    @pytest.mark.parametrize("pair", PAGE_HEAD_PAIRS, ids="-".join, indirect=True)
    def test_a_page_of_which_a_head_shard_is_missing_is_a_miss(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """One of two ranks of TP 4 has stored; a rank of TP 2 needs both. Neither the heads of the
        other rank of TP 2 nor an eighth, of as many bytes here, are those of the quarter."""
        split = {"tp_lcm_size": 4, "should_split_heads": True}
        quarter = new_rank(tp_rank=1, tp_size=4, heads_over=4, tp_lcm_size=4)
        others = [
            new_rank(tp_rank=0, tp_size=2, heads_over=2, **split),
            new_rank(tp_rank=1, tp_size=2, heads_over=2, **split),
            new_rank(tp_rank=1, tp_size=8, heads_over=4, tp_lcm_size=8),
        ]
        quarter.fill(53)
        assert all(quarter.set(KV, keys, range(8)))
        harness.settle()
        for rank in others:
            assert rank.backend.batch_exists(keys) == 0
            assert rank.get(KV, keys, range(8)) == [False] * 8
        assert quarter.backend.batch_exists(keys) == 8


def dcp_ranks(new_rank: NewRank, size: int) -> list[Rank]:
    """The ranks of a group of decode context parallelism, each with its own part of pages."""
    if not hasattr(HiCacheStorageConfig, "dcp_size"):
        not_supported("this SGLang has no decode context parallelism for storage; 0.5.23 has")
    ranks = []
    for i in range(size):
        spec = with_dcp(spec_of("mla"), i, size)
        place = {"tp_rank": i, "tp_size": size}
        if size > 1:
            tokens = size * spec.page_tokens
            place |= {"dcp_rank": i, "dcp_size": size, "logical_page_size": tokens}
        make = partial(new_rank, model=spec, **place)
        ranks.append(allowed(make, "ranks of decode context parallelism"))
    return ranks
