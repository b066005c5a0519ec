"""Page sizes and watermarks: the rule of the client's memory, held by properties."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_umbp import paging
from hicache_umbp.client import Staging

SIZES = st.lists(st.integers(1, 300_000), min_size=1, max_size=6)


@given(SIZES)
def test_the_page_is_the_largest_candidate_that_wastes_little(sizes: list[int]) -> None:
    page = paging.page_bytes(sizes)
    assert min(min(sizes), paging.LEAST_PAGE_BYTES) <= page <= max(sizes)
    sizes = [size for size in sizes if size >= paging.LEAST_PAGE_BYTES] or sizes
    larger = [
        -(-size // parts)
        for size in sizes
        for parts in range(1, max(1, size // paging.LEAST_PAGE_BYTES) + 1)
        if -(-size // parts) > page
    ]
    if paging.waste(page, sizes) <= paging.MOST_WASTE:
        assert all(paging.waste(other, sizes) > paging.MOST_WASTE for other in larger)
    else:
        assert all(paging.waste(other, sizes) >= paging.waste(page, sizes) for other in larger)


@pytest.mark.parametrize("size", [1, 1000, 34_560, 6_439_680])
def test_objects_of_one_size_waste_nothing(size: int) -> None:
    assert paging.waste(paging.page_bytes([size]), [size]) == 0.0


def test_no_objects_leave_the_clients_own_page_and_a_full_memory() -> None:
    assert paging.page_bytes([]) == 0
    assert paging.watermarks(1 << 30, 0, []) == (paging.HIGHEST, paging.HIGHEST - paging.STEP)
    assert paging.watermarks(1 << 30, 4096, [])[0] == paging.HIGHEST


@given(SIZES, st.integers(2, 64))
def test_where_nothing_was_evicted_the_largest_object_finds_space(
    sizes: list[int], holds: int
) -> None:
    """The client evicts when a put leaves more than the high mark in use, and only then."""
    page = paging.page_bytes(sizes)
    capacity = holds * max(sizes) + 13
    high, low = paging.watermarks(capacity, page, sizes)
    assert 0 < low < high <= paging.HIGHEST
    largest = -(-max(sizes) // page)
    pages = capacity // page
    for used in range(max(0, pages - 3 * largest), pages + 1):
        if used * page <= high * capacity and high > paging.STEP:
            assert pages - used >= largest


@given(st.lists(st.integers(1, 10_000), max_size=30), st.integers(1, 500), st.integers(1, 40))
def test_parts_of_a_call_cover_it_in_order_and_fit_where_an_object_fits(
    sizes: list[int], page: int, pages: int
) -> None:
    parts = list(Staging(page, pages).parts(sizes))
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    needs = [[-(-sizes[i] // page) for i in part] for part in parts]
    assert all(len(need) == 1 or sum(need) <= pages for need in needs)
    for need, following in itertools.pairwise(needs):
        assert sum(need) + following[0] > pages, "the next one would have fitted"
