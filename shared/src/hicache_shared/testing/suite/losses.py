"""The part of the suite about pages that are gone, or of another size, when they are loaded.

Which ones is told by a hash of the key, so that every run and every backend has the same.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from hicache_shared.testing.harness import Harness
from hicache_shared.testing.rank import FLAT_KV, KV, Rank, chain
from hicache_shared.testing.suite.calls import ONE_LAYER
from hicache_shared.testing.suite.fixtures import (
    ONE_LAYOUT_PAIRS,
    NewRank,
    SuiteFixtures,
    needs,
)
from hicache_shared.testing.suite.forms import assert_loaded, in_time, plain

SIZES: dict[str, Callable[[bytes], bytes]] = {
    "whole": lambda value: value,
    "a byte short": lambda value: value[:-1],
    "half": lambda value: value[: len(value) // 2],
    "a byte long": lambda value: value + b"\0",
    "twice": lambda value: value + value,
}


class LossSuite(SuiteFixtures):
    """Exactly the pages that are lost are a miss, whatever was said of them before."""

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    def test_pages_that_go_between_lookup_and_load_are_a_miss_and_no_others(
        self, harness: Harness, new_rank: NewRank, request: pytest.FixtureRequest
    ) -> None:
        needs(harness, "raw")
        rank, keys = new_rank(layers_div=ONE_LAYER), fated_keys(request.node.nodeid, 3)
        rank.fill(90)
        objects = {name: stored_one_by_one(harness, rank, name, keys) for name in rank.pools}
        rank.set_anchor(keys)
        assert in_time(lambda: rank.hit(keys)) == 8
        lost = [page for page, key in enumerate(keys) if fate(key, 3) == 0]
        for of_pool in objects.values():
            for key in itertools.chain.from_iterable(of_pool[page] for page in lost):
                harness.raw_delete(key)
        for name in rank.pools:
            expected = [None if page in lost else rank.page(name, page) for page in range(8)]
            assert_loaded(rank, name, keys, expected, range(8, 16))
        gets = [rank.transfer(name, keys, range(8, 16)) for name in rank.sidecars]
        answers = in_time(lambda: rank.backend.batch_get_v2(gets))
        assert answers == {name: [page not in lost for page in range(8)] for name in rank.sidecars}
        assert in_time(lambda: rank.hit(keys)) <= min(lost)
        rank.set_everywhere([keys[page] for page in lost], lost)
        harness.settle()
        assert in_time(lambda: rank.hit(keys)) == 8
        for name in rank.pools:
            whole = [rank.page(name, page) for page in range(8)]
            assert_loaded(rank, name, keys, whole, range(8, 16))

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    def test_objects_of_another_size_are_a_miss_and_no_others(
        self, harness: Harness, new_rank: NewRank, request: pytest.FixtureRequest
    ) -> None:
        needs(harness, "raw")
        rank, names = new_rank(layers_div=ONE_LAYER), list(SIZES)
        keys = fated_keys(request.node.nodeid, len(names))
        rank.fill(91)
        of_key = [names[fate(key, len(names))] for key in keys]
        for name in rank.pools:
            for objects, size in zip(
                stored_one_by_one(harness, rank, name, keys), of_key, strict=True
            ):
                if size != "whole":
                    replant(harness, objects[-1], size)
            expected = [
                rank.page(name, page) if of_key[page] == "whole" else None for page in range(8)
            ]
            assert_loaded(rank, name, keys, expected, range(8, 16))

    @pytest.mark.parametrize("pair", [("mla", "page_first")], ids="-".join, indirect=True)
    def test_flat_pages_that_go_between_lookup_and_load_are_none_and_no_others(
        self, harness: Harness, new_rank: NewRank, request: pytest.FixtureRequest
    ) -> None:
        needs(harness, "raw")
        rank, keys = (
            new_rank(extra=FLAT_KV, layers_div=ONE_LAYER),
            fated_keys(request.node.nodeid, 3),
        )
        backend, empty = rank.backend, rank.pools[KV].get_dummy_flat_data_page
        generator = np.random.default_rng(92)
        pages = [generator.integers(0, 60000, empty().shape, empty().dtype) for _ in keys]
        objects = objects_of_each(harness, keys, lambda page: backend.set(keys[page], pages[page]))
        assert in_time(lambda: backend.batch_exists(keys)) == 8
        lost = [page for page, key in enumerate(keys) if fate(key, 3) == 0]
        for key in itertools.chain.from_iterable(objects[page] for page in lost):
            harness.raw_delete(key)
        expected = [None if page in lost else plain(pages[page]) for page in range(8)]
        found = in_time(lambda: backend.batch_get(keys, [empty() for _ in keys]))
        assert [plain(page) for page in found] == expected
        assert [plain(backend.get(key, empty())) for key in keys] == expected
        assert [backend.exists(key) for key in keys] == [page not in lost for page in range(8)]
        assert in_time(lambda: backend.batch_exists(keys)) == min(lost)


def fate(key: str, ways: int) -> int:
    """One of some ways that a page goes, told by its key alone."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % ways


def fated_keys(salt: str, ways: int) -> list[str]:
    """Eight page hashes of a chain that go all the ways there are."""
    chains = (chain(8, f"{salt}/{i}") for i in itertools.count())
    return next(keys for keys in chains if {fate(key, ways) for key in keys} == set(range(ways)))


def stored_one_by_one(harness: Harness, rank: Rank, name: str, keys: list[str]) -> list[list[str]]:
    """Store host pages from the first on; the objects that each page became."""
    return objects_of_each(
        harness, keys, lambda page: rank.set(name, [keys[page]], [page]) == [True]
    )


def objects_of_each(
    harness: Harness, keys: list[str], put: Callable[[int], bool]
) -> list[list[str]]:
    """Put pages one after another; the objects that each became."""
    objects: list[list[str]] = []
    for page in range(len(keys)):
        before = set(harness.raw_keys())
        assert put(page), f"page {page} was not stored"
        harness.settle()
        objects.append(sorted(set(harness.raw_keys()) - before))
        assert objects[-1], f"page {page} was stored and is no object"
    return objects


def replant(harness: Harness, key: str, size: str) -> None:
    """Put an object of another size in place of one."""
    value = harness.raw_get(key)
    assert value is not None
    harness.raw_put(key, SIZES[size](value))
