"""The part of the suite about what a call may be given beside pages, and what it answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hicache_shared.contract import (
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.rank import FLAT_KV, KV, Rank, chain, same
from hicache_shared.testing.suite.fixtures import (
    FLAT_PAIRS,
    LOGICAL_PAIRS,
    ONE_LAYOUT_PAIRS,
    ONE_LAYOUT_SIDECAR_PAIRS,
    NewRank,
    SuiteFixtures,
)

EXTRAS = {
    "no prefix": HiCacheStorageExtraInfo(),
    "at the root": HiCacheStorageExtraInfo(prefix_keys=[]),
    "deep": HiCacheStorageExtraInfo(prefix_keys=chain(1000, "prefix")),
    "with a rank": HiCacheStorageExtraInfo(prefix_keys=None, extra_info={"pp_rank": 0}),
}

ONE_FLAT_PAIRS = [p for p in FLAT_PAIRS if p[1] == "page_first"]


class AnswerSuite(SuiteFixtures):
    """Plain answers, whatever form a call has."""

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    def test_answers_are_plain_lists_ints_and_dicts(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """SGLang calls ``.index`` on them, which numpy's arrays lack."""
        rank.write(keys, range(8))
        rank.set_anchor(keys)
        for name in rank.pools:
            assert_flags(rank.set(name, keys[:5], range(5)), 5)
            assert_flags(rank.set(name, keys[5:], range(5, 8)), 3)
        puts = [rank.transfer(name, keys[5:], range(5, 8)) for name in rank.sidecars]
        assert_flags_by_name(rank.backend.batch_set_v2(puts), dict.fromkeys(rank.sidecars, 3))
        harness.settle()
        hashes = [*keys, *chain(3, keys[0])]
        for name in rank.pools:
            assert_flags(rank.get(name, hashes, range(11)), 11)
        gets = [rank.transfer(name, hashes, range(11)) for name in rank.sidecars]
        assert_flags_by_name(rank.backend.batch_get_v2(gets), dict.fromkeys(rank.sidecars, 11))
        assert type(rank.backend.batch_exists(hashes)) is int
        result = rank.backend.batch_exists_v2(hashes, rank.questions())
        assert isinstance(result, PoolTransferResult)
        assert type(result.kv_hit_pages) is int
        assert type(result.restorable_prefix_pages) is list
        assert {type(pages) for pages in result.restorable_prefix_pages} == {int}
        assert result.kv_hit_pages == result.restorable_prefix_pages[-1] == 8
        assert isinstance(result.extra_pool_hit_pages, dict)
        assert {type(pages) for pages in result.extra_pool_hit_pages.values()} <= {int}
        assert set(result.extra_pool_hit_pages) <= {*rank.pools, KV}

    @pytest.mark.parametrize("pair", ONE_FLAT_PAIRS, ids="-".join, indirect=True)
    def test_answers_about_flat_pages_are_plain(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        rank = new_rank(extra=FLAT_KV)
        pool = rank.pools[KV]
        page = np.array(pool.get_data_page(0, flat=True))
        assert rank.backend.batch_set(keys[:2], [page, page]) is True
        assert rank.backend.set(keys[2], page) is True
        harness.settle()
        assert [rank.backend.exists(key) for key in keys[1:4]] == [True, True, False]
        assert type(rank.backend.exists(keys[0])) is bool
        assert type(rank.backend.batch_exists(keys)) is int
        targets = [pool.get_dummy_flat_data_page() for _ in keys]
        assert len(rank.backend.backend.batch_get(keys, rank.backend.seen(targets))) == 8

    @pytest.mark.parametrize("pair", LOGICAL_PAIRS[:1], ids="-".join, indirect=True)
    def test_case_07_flat_pages_of_a_logical_anchor_are_empty_and_are_there_when_stored(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """SGLang passes tensors of no elements where the anchor has no bytes."""
        rank = new_rank(extra=FLAT_KV)
        pool = rank.model.group.anchor_entry.host_pool
        pages = [pool.get_data_page(page * pool.page_size) for page in range(8)]
        assert rank.backend.batch_set(keys, pages) is True
        harness.settle()
        found = rank.backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        assert [page is not None and page.nbytes == 0 for page in found] == [True] * 8

    @pytest.mark.parametrize("pair", ONE_LAYOUT_SIDECAR_PAIRS, ids="-".join, indirect=True)
    def test_a_pool_may_be_named_by_enum_or_string(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """A member of ``PoolName`` hashes like its string, so either finds the answer."""
        rank.write(keys, range(8))
        assert rank.set(KV, keys, range(8)) == [True] * 8
        names: list[tuple[str, Any]] = [(name, PoolName(name)) for name in rank.sidecars]
        for pair in names:
            for name, pages in zip(pair, (range(4), range(4, 8)), strict=True):
                transfer = rank.transfer(pair[0], [keys[page] for page in pages], pages)
                transfer.name = name
                assert rank.backend.batch_set_v2([transfer]) == {pair[0]: [True] * 4}
        harness.settle()
        assert rank.hit(keys) == 8
        for kind in (0, 1):
            gets = [rank.transfer(pair[0], keys, range(8, 16)) for pair in names]
            asked = rank.questions()
            for transfer, pair in zip(gets, names, strict=True):
                transfer.name = pair[kind]
            for question in asked:
                question.name = PoolName(question.name) if kind else str(question.name)
            assert rank.backend.batch_exists_v2(keys, asked).kv_hit_pages == 8
            answers = rank.backend.batch_get_v2(gets)
            assert [answers[pair[1 - kind]] for pair in names] == [[True] * 8] * len(names)
            assert all(rank.is_whole(name, keys[7], 15) for name, _ in names)

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    def test_an_empty_batch_has_an_empty_answer(self, rank: Rank) -> None:
        """A prefetch whose trailing pools need nothing ends with ``batch_get_v2([])``."""
        backend, none = rank.backend, np.empty(0, np.int64)
        before = rank.image()
        assert backend.batch_exists([]) == 0
        for transfers in (None, [], rank.questions()):
            result = backend.batch_exists_v2([], transfers)
            assert (result.kv_hit_pages, result.restorable_prefix_pages or []) == (0, [])
        assert backend.batch_get_v1([], none) == backend.batch_set_v1([], none) == []
        for call in (backend.batch_get_v2, backend.batch_set_v2):
            assert call([]) == {}
            names = rank.sidecars
            transfers = [PoolTransfer(name, host_indices=none, keys=[]) for name in names]
            assert call(transfers) == {name: [] for name in names}
        assert same(before, rank.image())

    @pytest.mark.parametrize("pair", ONE_FLAT_PAIRS[:1], ids="-".join, indirect=True)
    def test_an_empty_batch_of_flat_pages_has_an_empty_answer(self, new_rank: NewRank) -> None:
        backend = new_rank(extra=FLAT_KV).backend
        assert backend.batch_set([], []) is True
        assert backend.batch_get([], []) == []
        assert backend.batch_exists([]) == 0

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    @pytest.mark.parametrize("stored", EXTRAS)
    def test_what_sglang_says_of_the_prefix_changes_no_answer(
        self, harness: Harness, rank: Rank, keys: list[str], stored: str
    ) -> None:
        """Keys before the call's own, or none; pages that are stored one way are read each way."""
        rank.write(keys, range(8))
        info = EXTRAS[stored]
        sidecars = [rank.transfer(name, keys, range(8)) for name in rank.sidecars]
        if sidecars:
            answers = rank.backend.batch_set_v2(sidecars, info)
            assert answers == {name: [True] * 8 for name in rank.sidecars}
        assert rank.backend.batch_set_v1(keys, rank.slots(KV, range(8)), info) == [True] * 8
        harness.settle()
        for read in EXTRAS.values():
            hashes = [*keys, *chain(1, keys[0])]
            result = rank.backend.batch_exists_v2(hashes, rank.questions(), read)
            assert result.kv_hit_pages == 8
            if KV in rank.pools:
                assert rank.backend.batch_exists(hashes, read) == 8
            rank.blank(range(8, 16))
            gets = [rank.transfer(name, keys, range(8, 16)) for name in rank.sidecars]
            assert rank.backend.batch_get_v2(gets, read) == {n: [True] * 8 for n in rank.sidecars}
            slots = rank.slots(KV, range(8, 16))
            assert rank.backend.batch_get_v1(keys, slots, read) == [True] * 8
            for name in rank.pools:
                assert all(rank.is_whole(name, key, 8 + i) for i, key in enumerate(keys))


def assert_flags(answer: Any, count: int) -> None:
    """A plain list of plain bools."""
    assert type(answer) is list
    assert [type(flag) for flag in answer] == [bool] * count


def assert_flags_by_name(answers: Any, counts: dict[str, int]) -> None:
    assert isinstance(answers, dict)
    assert set(answers) == set(counts)
    for name, count in counts.items():
        assert_flags(answers[name], count)
