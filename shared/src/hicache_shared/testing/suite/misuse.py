"""The part of the suite about wrong calls, late and repeated registration.

The numbers in names are those of ``docs/cases.md``: faults that people met in other adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from hicache_shared.contract import PoolTransfer
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.rank import KV, Rank, chain, register, same, small_model
from hicache_shared.testing.suite.fixtures import ONE_LAYOUT_PAIRS, SuiteFixtures

TOMORROW = "a_pool_of_tomorrow"


class MisuseSuite(SuiteFixtures):
    """A wrong call is refused; a repeated registration is none, and a late one no exception."""

    def test_indices_that_do_not_fit_are_refused_and_move_nothing(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """By an error that names the pool, or by a no for every key. SGLang's pools check
        nothing: a slot past the end of K points into V."""
        rank.write(keys, range(8))
        rank.set_everywhere(keys[:2], range(2))
        harness.settle()
        rank.fill(25)
        before = rank.image()
        for name, pool in rank.pools.items():
            if name == KV and not harness.capabilities.zero_copy:
                continue  # its pages come as they are, without indices
            for indices in misfits(pool.page_size, pool.size).values():
                get, put = calls_with(rank, name, indices)
                is_refused(name, partial(get, keys[:2]))
                is_refused(name, partial(put, keys[2:4]))
            assert same(before, rank.image())
            assert rank.get(name, keys[2:4], [8, 9]) == [False] * 2, "a refused page was stored"
            before = rank.image()

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    def test_a_wrong_call_leaves_the_backend_as_it_was(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        """Right calls before, between and after wrong ones."""
        rank.write(keys, range(8))
        rank.set_everywhere(keys, range(8))
        harness.settle()
        ghost = PoolTransfer("ghost_pool", host_indices=np.arange(1), keys=keys[:1])
        wrong: list[Callable[[], object]] = [
            partial(rank.backend.batch_get_v2, [ghost]),
            partial(rank.backend.batch_set_v2, [ghost]),
            partial(rank.backend.batch_exists_v2, keys, [*rank.questions(), ghost]),
        ]
        for name in rank.pools:
            for call in wrong:
                with suppress(Exception):
                    call()
            assert rank.hit(keys) == 8
            assert rank.get(name, keys, range(8, 16)) == [True] * 8
            assert all(rank.is_whole(name, key, 8 + i) for i, key in enumerate(keys))

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
        """A name that no release of SGLang knows; after pages have moved, and twice."""
        late = small_model(harness, "mla", "page_first").group.anchor_entry.host_pool
        rank.set_everywhere(keys, range(8))
        for _ in range(2):
            rank.backend.register_mem_host_pool_v2(late, TOMORROW)
        transfer = PoolTransfer(TOMORROW, host_indices=np.arange(2 * late.page_size), keys=keys[:2])
        late.kv_buffer[:] = stored = np.random.default_rng(27).integers(
            0, 60000, late.kv_buffer.shape, late.kv_buffer.dtype
        )
        assert rank.backend.batch_set_v2([transfer]) == {TOMORROW: [True, True]}
        harness.settle()
        asked = [*rank.questions(), PoolTransfer(TOMORROW)]
        assert rank.hit(keys) == 8
        assert rank.backend.batch_exists_v2(keys, asked).kv_hit_pages == 2
        late.kv_buffer[: 2 * late.page_size] = 0
        transfer.keys = [keys[0], *chain(1, keys[0])]
        assert rank.backend.batch_get_v2([transfer]) == {TOMORROW: [True, False]}
        one_page = slice(0, late.page_size)
        assert np.array_equal(late.kv_buffer[one_page], stored[one_page])
        rest = slice(2 * late.page_size, None)
        assert np.array_equal(late.kv_buffer[rest], stored[rest])


def misfits(width: int, size: int) -> dict[str, Any]:
    """Indices that fit no two pages of ``width`` slots in a pool of ``size`` slots."""
    wrong = {
        "too few": np.arange(width),
        "too many": np.arange(width * 3),
        "past the end": np.arange(size, size + 2 * width),
        "far past the end": np.arange(9 * size, 9 * size + 2 * width),
        "negative": np.arange(-2 * width, 0),
    }
    if width > 1:
        wrong["a slot too few"] = np.arange(2 * width - 1)
        wrong["unaligned"] = np.arange(1, 2 * width + 1)
    return wrong


Call = Callable[[list[str]], list[bool]]


def calls_with(rank: Rank, name: str, indices: Any) -> tuple[Call, Call]:
    """A get and a set of a pool at the given slots: KV by v1, the others by v2."""
    if name == KV:
        backend = rank.backend
        return (
            lambda keys: backend.batch_get_v1(keys, indices),
            lambda keys: backend.batch_set_v1(keys, indices),
        )

    def transfer(keys: list[str]) -> list[PoolTransfer]:
        return [PoolTransfer(name, host_indices=indices, keys=keys)]

    return (
        lambda keys: rank.backend.batch_get_v2(transfer(keys))[name],
        lambda keys: rank.backend.batch_set_v2(transfer(keys))[name],
    )


def is_refused(name: str, call: Callable[[], list[bool]]) -> None:
    """Fails unless a call answers no for every key, or raises an error that names the pool."""
    try:
        answers = call()
    except Exception as error:  # noqa: BLE001 - which errors a backend has, it says itself
        if name not in str(error):
            pytest.fail(f"an error that does not name pool {name}: {error!r}")
    else:
        assert not any(answers), f"indices that do not fit pool {name} were accepted"
