"""The part of the suite about hit policies: which pages of a pool a prefix needs.

The numbers in names are those of ``docs/cases.md``: faults that people met in other adapters.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from hicache_shared.contract import BLOCK_GROUPS, PoolHitPolicy, PoolTransfer
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.oracle import restorable_prefixes
from hicache_shared.testing.rank import KV, Rank, chain
from hicache_shared.testing.suite.fixtures import (
    LOGICAL_PAIRS,
    ONE_LAYOUT_PAIRS,
    ONE_LAYOUT_SIDECAR_PAIRS,
    SuiteFixtures,
    not_supported,
)

PHYSICAL_PAIRS = [p for p in ONE_LAYOUT_SIDECAR_PAIRS if p not in LOGICAL_PAIRS]
"""Models with sidecars whose KV has bytes."""


class PolicySuite(SuiteFixtures):
    """ALL_PAGES, TRAILING_PAGES and BLOCK_GROUPS, on any pool and with any window."""

    @pytest.mark.parametrize("pair", ONE_LAYOUT_SIDECAR_PAIRS, ids="-".join, indirect=True)
    def test_case_01_any_policy_of_any_pool_gives_the_prefixes_that_its_definition_gives(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """Pages, policies and windows at random, windows also longer than the chain."""
        generator = random.Random(keys[0])
        for _ in range(4):
            hashes = chain(8, str(generator.random()))
            held = store_some(rank, hashes, generator)
            harness.settle()
            for _ in range(4):
                windows = {name: generator.choice((0, 1, 2, 3, 9)) for name in rank.sidecars}
                windows = {name: window for name, window in windows.items() if window}
                asked = [ask(name, windows.get(name)) for name in rank.sidecars]
                result = rank.backend.batch_exists_v2(hashes, asked)
                expected = restorable_prefixes(8, held, windows)
                assert (result.kv_hit_pages, result.restorable_prefix_pages) == (
                    max(expected, default=0),
                    expected,
                )

    @pytest.mark.parametrize("pair", ONE_LAYOUT_SIDECAR_PAIRS, ids="-".join, indirect=True)
    def test_of_a_trailing_pools_keys_only_the_number_counts(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """SGLang gives placeholders there; none at all is a window of one page."""
        rank.write(keys, range(8))
        for name in rank.pools:
            pages = range(4, 8) if name == rank.sidecars[0] else range(8)
            assert all(rank.set(name, [keys[page] for page in pages], pages))
        rank.set_anchor(keys)
        harness.settle()
        absent = chain(8, keys[0])
        forms: list[tuple[list[str] | None, int]] = [
            (None, 1),
            ([], 1),
            (["placeholder"] * 3, 3),
            (absent[:3], 3),
            (keys[:3], 3),
        ]
        for given, window in forms:
            trailing = PoolTransfer(
                rank.sidecars[0], keys=given, hit_policy=PoolHitPolicy.TRAILING_PAGES
            )
            asked = [trailing, *(ask(name, None) for name in rank.sidecars[1:])]
            result = rank.backend.batch_exists_v2(keys, asked)
            assert result.restorable_prefix_pages == list(range(4 + window, 9))

    @pytest.mark.parametrize("pair", ONE_LAYOUT_SIDECAR_PAIRS, ids="-".join, indirect=True)
    def test_a_window_that_was_stored_at_the_tail_alone_restores_the_whole_chain_alone(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """What a sliding-window engine leaves behind: all KV, and the last pages of the window."""
        windows = dict.fromkeys(rank.sidecars, 2)
        rank.write(keys, range(8))
        for name in rank.pools:
            pages = range(6, 8) if name in windows else range(8)
            assert all(rank.set(name, [keys[page] for page in pages], pages))
        rank.set_anchor(keys)
        harness.settle()
        asked = [ask(name, window) for name, window in windows.items()]
        result = rank.backend.batch_exists_v2(keys, asked)
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (8, [8])
        shorter = rank.backend.batch_exists_v2(keys[:7], asked)
        assert (shorter.kv_hit_pages, shorter.restorable_prefix_pages) == (0, [])

    @pytest.mark.parametrize("pair", PHYSICAL_PAIRS, ids="-".join, indirect=True)
    def test_without_transfers_the_kv_alone_is_asked_about(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """So is every model on the decode side of prefill/decode disaggregation."""
        rank.write(keys, range(8))
        assert rank.set(KV, keys[:5], range(5)) == [True] * 5
        harness.settle()
        assert rank.backend.batch_exists(keys) == 5
        nothing: tuple[list[PoolTransfer] | None, ...] = (None, [])
        for transfers in nothing:
            assert rank.backend.batch_exists_v2(keys, transfers).kv_hit_pages == 5
        assert rank.hit(keys) == 0

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    def test_any_part_of_a_chain_can_be_asked_about(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """A hit query begins where the pages in memory end."""
        rank.write(keys, range(8))
        rank.set_everywhere(keys[3:7], range(3, 7))
        harness.settle()
        assert [rank.hit(keys[start:]) for start in range(8)] == [0, 0, 0, 4, 3, 2, 1, 0]

    @pytest.mark.parametrize("pair", PHYSICAL_PAIRS, ids="-".join, indirect=True)
    def test_block_groups_never_gate_the_hit(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """Nothing of the pool is stored, then a block of it, then all; where it reports, it
        reports whole groups from the start."""
        rank.write(keys, range(8))
        rank.set_anchor(keys)
        names = [name for name in rank.pools if name != rank.sidecars[0]]
        for name in names:
            assert all(rank.set(name, keys, range(8)))
        others = [ask(name, None) for name in names if name != KV]
        for pages, covered in ((range(0), 0), (range(3, 7), 0), (range(4), 4), (range(8), 8)):
            hashes = [keys[page] for page in pages]
            assert all(rank.set(rank.sidecars[0], hashes, pages))
            harness.settle()
            asked = [block_groups(rank.sidecars[0], 4), *others]
            result = rank.backend.batch_exists_v2(keys, asked)
            assert result.kv_hit_pages == 8
            assert result.restorable_prefix_pages == list(range(1, 9))
            reported = result.extra_pool_hit_pages.get(rank.sidecars[0], covered)
            assert reported == covered, "no verdict, or the right one"


def store_some(
    rank: Rank, hashes: list[str], generator: random.Random, share: float = 0.8
) -> dict[str, set[int]]:
    """Store pages of every pool at random; which they are."""
    rank.set_anchor(hashes)
    rank.write(hashes, range(len(hashes)))
    held = {}
    for name in rank.pools:
        pages = [page for page in range(len(hashes)) if generator.random() < share]
        assert all(rank.set(name, [hashes[page] for page in pages], pages))
        held[name] = set(pages)
    return held


def ask(name: str, window: int | None) -> PoolTransfer:
    """A pool in a hit query: all its pages, or those of a window."""
    if window is None:
        return PoolTransfer(name, hit_policy=PoolHitPolicy.ALL_PAGES)
    keys = ["placeholder"] * window
    return PoolTransfer(name, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)


def block_groups(name: str, pages: int) -> PoolTransfer:
    """A pool in a hit query by blocks of ``pages`` pages, all of which are the block's group."""
    known: dict[str, Any] = {policy.value: policy for policy in PoolHitPolicy}
    if BLOCK_GROUPS not in known:
        not_supported("this SGLang has no hit policy BLOCK_GROUPS; 0.5.22 and later have")
    policy = known[BLOCK_GROUPS]
    return PoolTransfer(name, hit_policy=policy, block_pages=pages, group_pages=pages)
