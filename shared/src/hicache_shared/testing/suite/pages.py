"""The part of the suite about bytes: what is stored comes back, whole, alone and in order.

The numbers in names are those of ``docs/cases.md``: faults that people met in other adapters.
"""

from __future__ import annotations

import numpy as np
import pytest

from hicache_shared.testing.harness import Harness
from hicache_shared.testing.rank import KV, Rank, chain
from hicache_shared.testing.suite.fixtures import (
    SIDECAR_PAIRS,
    TWO_PAIRS,
    NewRank,
    SuiteFixtures,
    needs,
)


class PageSuite(SuiteFixtures):
    """Pages come back byte-exact, and nothing else changes."""

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
            for count in (1, 3, 8):
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

    def test_a_call_about_no_pools_has_an_empty_answer(self, rank: Rank) -> None:
        """A prefetch whose trailing pools need nothing ends with ``batch_get_v2([])``."""
        assert rank.backend.batch_get_v2([]) == {}

    def test_case_10_an_object_is_exactly_the_page_that_the_pool_describes(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """Or several objects, of which each is a part of the page."""
        needs(harness, "raw")
        rank.fill(6)
        for name in rank.pools:
            before = set(harness.raw_keys())
            assert rank.set(name, keys[:1], [2]) == [True]
            objects = [harness.raw_get(key) or b"" for key in set(harness.raw_keys()) - before]
            page = rank.page(name, 2)
            assert sum(map(len, objects)) == len(page)
            assert all(page.find(value) >= 0 for value in objects)

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

    @pytest.mark.parametrize("pair", SIDECAR_PAIRS, ids="-".join, indirect=True)
    def test_each_pool_of_one_call_has_its_own_answers(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """Of each pool another page is absent."""
        rank.fill(81)
        names = rank.sidecars
        held = {name: [p for p in range(8) if p != i % 8] for i, name in enumerate(names)}
        stored = {name: [rank.page(name, page) for page in held[name]] for name in names}
        puts = [
            rank.transfer(name, [keys[page] for page in held[name]], held[name]) for name in names
        ]
        assert rank.backend.batch_set_v2(puts) == {name: [True] * 7 for name in names}
        harness.settle()
        rank.fill(82)
        found = rank.backend.batch_get_v2([rank.transfer(n, keys, range(8, 16)) for n in names])
        assert found == {name: [page in held[name] for page in range(8)] for name in names}
        for name in names:
            assert [rank.page(name, 8 + page) for page in held[name]] == stored[name]

    def test_changed_bytes_are_a_miss(self, harness: Harness, rank: Rank, keys: list[str]) -> None:
        needs(harness, "raw")
        needs(harness, "checksums")
        rank.fill(83)
        for name in rank.pools:
            before = set(harness.raw_keys())
            assert rank.set(name, keys[:1], [0]) == [True]
            (key, *_) = set(harness.raw_keys()) - before
            assert rank.set(name, keys[1:2], [1]) == [True]
            harness.raw_corrupt(key)
            whole = rank.page(name, 1)
            assert rank.get(name, keys[:2], [8, 9]) == [False, True]
            assert rank.page(name, 9) == whole

    @pytest.mark.parametrize("pair", TWO_PAIRS, ids="-".join, indirect=True)
    def test_case_11_what_is_stored_after_a_clear_has_its_new_bytes(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """A client may remember a key that it stored or read before."""
        ranks = [new_rank(deployment=keys[0][:8]) for _ in range(2)]
        for seed in (88, 89):
            ranks[0].fill(seed)
            ranks[0].set_everywhere(keys, range(8))
            harness.settle()
            for rank in ranks:
                for name in rank.pools:
                    stored = [ranks[0].page(name, page) for page in range(8)]
                    assert rank.get(name, keys, range(8, 16)) == [True] * 8
                    assert [rank.page(name, page) for page in range(8, 16)] == stored
            ranks[0].backend.clear()
