"""The fold of hit policies, against a brute-force oracle and by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_shared.contract import PoolHitPolicy, PoolName, PoolTransferResult
from hicache_shared.errors import TransferError
from hicache_shared.fold import PoolPresence, fold
from tests.contract import fold_oracle

ALL = PoolHitPolicy.ALL_PAGES
TRAILING = PoolHitPolicy.TRAILING_PAGES
GROUPS = PoolHitPolicy.BLOCK_GROUPS


def presence(pool: fold_oracle.Pool, *, as_array: bool = False) -> PoolPresence:
    name, present, policy, window, block_pages, group_pages = pool
    held = np.array(present, dtype=np.bool_) if as_array else present
    return PoolPresence(name, held, PoolHitPolicy(policy), window, block_pages, group_pages)


def folded(
    pages: int, pools: list[fold_oracle.Pool], *, as_array: bool = False
) -> tuple[int, dict[str, int], list[int] | None]:
    result = fold(pages, [presence(pool, as_array=as_array) for pool in pools])
    return result.kv_hit_pages, result.extra_pool_hit_pages, result.restorable_prefix_pages


def masks(pages: int) -> list[list[bool]]:
    return [list(bits) for bits in itertools.product([False, True], repeat=pages)]


GEOMETRIES = [
    ("all_pages", 1, 0, 0),
    ("trailing_pages", 1, 0, 0),
    ("trailing_pages", 2, 0, 0),
    ("trailing_pages", 3, 0, 0),
    ("block_groups", 1, 1, 1),
    ("block_groups", 1, 2, 1),
    ("block_groups", 1, 2, 2),
    ("block_groups", 1, 3, 2),
]


def small_pools(name: str, pages: int) -> Iterator[fold_oracle.Pool]:
    for policy, window, block_pages, group_pages in GEOMETRIES:
        for present in masks(pages):
            yield (name, present, policy, window, block_pages, group_pages)


@pytest.mark.parametrize("pages", range(8))
def test_every_single_pool_of_few_pages_agrees_with_the_oracle(pages: int) -> None:
    for asked in range(pages + 1):
        for pool in small_pools("a", asked):
            assert folded(pages, [pool]) == fold_oracle.answer(pages, [pool]), pool


@pytest.mark.parametrize("pages", range(5))
def test_every_pair_of_pools_of_few_pages_agrees_with_the_oracle(pages: int) -> None:
    for a, b in itertools.product(small_pools("a", pages), small_pools("b", pages)):
        assert folded(pages, [a, b]) == fold_oracle.answer(pages, [a, b]), (a, b)


GATING_PAIRS = list(itertools.combinations_with_replacement(GEOMETRIES[:4], 2))


@pytest.mark.parametrize(("first", "second"), GATING_PAIRS)
def test_every_pair_of_gating_pools_of_six_pages_agrees_with_the_oracle(
    first: tuple[str, int, int, int], second: tuple[str, int, int, int]
) -> None:
    for one, other in itertools.product(masks(6), masks(6)):
        pools: list[fold_oracle.Pool] = [("a", one, *first), ("b", other, *second)]
        assert folded(6, pools) == fold_oracle.answer(6, pools), pools


@st.composite
def chains(draw: st.DrawFn) -> tuple[int, list[fold_oracle.Pool]]:
    pages = draw(st.integers(0, 60))
    pools = []
    for _ in range(draw(st.integers(0, 5))):
        present = draw(
            st.lists(st.sampled_from([True] * 7 + [False]), min_size=0, max_size=pages)
            | st.just([True] * pages)
        )
        policy = draw(st.sampled_from(["all_pages", "trailing_pages", "block_groups"]))
        block_pages = draw(st.integers(1, 8))
        pools.append(
            (
                draw(st.sampled_from("abc")),
                present,
                policy,
                draw(st.integers(1, 70)),
                block_pages,
                draw(st.integers(1, block_pages)),
            )
        )
    return pages, pools


@given(chains(), st.booleans())
def test_longer_chains_of_many_pools_agree_with_the_oracle(
    chain: tuple[int, list[fold_oracle.Pool]], as_array: bool
) -> None:
    pages, pools = chain
    assert folded(pages, pools, as_array=as_array) == fold_oracle.answer(pages, pools)


def test_case_1_the_answer_is_the_intersection_and_not_the_minimum_of_maxima() -> None:
    a = PoolPresence("a", [True, False, True], TRAILING)  # legal: 1 and 3
    b = PoolPresence("b", [True, True, False], TRAILING)  # legal: 1 and 2
    result = fold(3, [a, b])
    assert result.extra_pool_hit_pages == {"a": 3, "b": 2}
    assert result.restorable_prefix_pages == [1]
    assert result.kv_hit_pages == 1


@pytest.mark.parametrize("policy", [ALL, TRAILING])
def test_case_16_a_hole_at_the_start_of_an_all_pages_pool_leaves_nothing(
    policy: PoolHitPolicy,
) -> None:
    kv = PoolPresence(PoolName.KV, [False, True, True, True], ALL)
    other = PoolPresence("other", [True] * 4, policy)
    assert fold(4, [kv, other]).kv_hit_pages == 0
    assert fold(4, [kv, other]).restorable_prefix_pages == []


def test_a_sliding_window_kept_for_the_tail_alone_can_serve_only_the_whole_chain() -> None:
    kv = PoolPresence(PoolName.KV, [True] * 12, ALL)
    swa = PoolPresence(PoolName.SWA, [False] * 10 + [True] * 2, TRAILING, window=2)
    assert fold(12, [kv, swa]).restorable_prefix_pages == [12]


def test_a_prefix_shorter_than_the_window_needs_all_its_pages() -> None:
    swa = PoolPresence(PoolName.SWA, [True, True, False, True], TRAILING, window=3)
    assert fold(4, [swa]).restorable_prefix_pages == [1, 2]


def test_block_groups_never_gate_the_hit_and_are_not_cut_by_it() -> None:
    kv = PoolPresence(PoolName.KV, [True, True, False, False], ALL)
    absent = PoolPresence("absent", [False] * 4, GROUPS, block_pages=2, group_pages=1)
    full = PoolPresence("full", [True] * 4, GROUPS, block_pages=2, group_pages=1)
    result = fold(4, [kv, absent, full])
    assert result.restorable_prefix_pages == [1, 2]
    assert result.extra_pool_hit_pages == {"kv": 2, "absent": 0, "full": 4}


def test_a_block_counts_by_the_group_at_its_end_and_an_incomplete_block_not_at_all() -> None:
    held = [False, True, False, True, True, True, True]
    pool = PoolPresence("c", held, GROUPS, block_pages=2, group_pages=1)
    assert fold(7, [pool]).extra_pool_hit_pages == {"c": 6}


@pytest.mark.parametrize(
    "pools",
    [[], [PoolPresence("c", [True] * 4, GROUPS, block_pages=2, group_pages=1)]],
    ids=["no-pool", "block-groups-alone"],
)
def test_without_a_gating_pool_there_is_nothing_to_restore(pools: list[PoolPresence]) -> None:
    result = fold(4, pools)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])


def test_pages_that_were_not_asked_about_are_absent() -> None:
    kv = PoolPresence(PoolName.KV, [True] * 5, ALL)
    short = PoolPresence("short", [True] * 3, TRAILING, window=2)
    result = fold(5, [kv, short])
    assert result.restorable_prefix_pages == [1, 2, 3]
    assert result.extra_pool_hit_pages == {"kv": 5, "short": 3}


def test_a_pool_named_twice_reports_the_smaller_boundary() -> None:
    pools = [PoolPresence("a", [True] * 3, ALL), PoolPresence("a", [True, False, True], ALL)]
    assert fold(3, pools).extra_pool_hit_pages == {"a": 1}
    assert fold(3, pools[::-1]).extra_pool_hit_pages == {"a": 1}


def test_only_true_counts_as_present() -> None:
    assert fold(2, [PoolPresence("a", [True, 2], ALL)]).kv_hit_pages == 1  # type: ignore[list-item]
    odd = PoolPresence("a", np.array([1, -1]), ALL)
    assert fold(2, [odd]).kv_hit_pages == 1


def test_answers_are_plain_python_values_as_sglang_requires() -> None:
    pools = [
        PoolPresence(PoolName.KV, np.ones(4, dtype=np.bool_), ALL),
        PoolPresence(PoolName.SWA, np.ones(4, dtype=np.bool_), TRAILING, window=2),
        PoolPresence("c", np.ones(4, dtype=np.bool_), GROUPS, block_pages=2, group_pages=1),
    ]
    result = fold(4, pools)
    assert type(result) is PoolTransferResult
    assert type(result.kv_hit_pages) is int
    assert type(result.restorable_prefix_pages) is list
    assert {type(p) for p in result.restorable_prefix_pages} == {int}
    assert {type(p) for p in result.extra_pool_hit_pages.values()} == {int}
    assert list(result.extra_pool_hit_pages) == [PoolName.KV, PoolName.SWA, "c"]


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (PoolPresence("p", [True] * 5, ALL), "'p'.* at most 4 pages, got 5"),
        (PoolPresence("p", [True], TRAILING, window=0), "'p'.* window of 1 page or more"),
        (PoolPresence("p", [True], GROUPS), "'p'.* block_pages >= 1"),
        (PoolPresence("p", [True], GROUPS, block_pages=2), "got 2 and 0"),
        (PoolPresence("p", [True], GROUPS, block_pages=2, group_pages=3), "got 2 and 3"),
        (PoolPresence("p", [True], "some_pages"), "'p'.* hit policy"),  # type: ignore[arg-type]
    ],
)
def test_an_impossible_pool_is_an_error_that_names_it(pool: PoolPresence, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        fold(4, [pool])
