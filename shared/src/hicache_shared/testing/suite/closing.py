"""The part of the suite about the end of a backend: close among calls, and what comes after.

The numbers in names are those of ``docs/cases.md``: faults that people met in other adapters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from hicache_shared.contract import PoolTransfer
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.rank import Rank, register, same, small_model
from hicache_shared.testing.suite.fixtures import (
    MHA_PAIR,
    ONE_LAYOUT_PAIRS,
    TWO_PAIRS,
    NewRank,
    SuiteFixtures,
    needs,
)

CLOSE_PAIRS = [*TWO_PAIRS, MHA_PAIR]


class CloseSuite(SuiteFixtures):
    """A backend ends once, whoever else calls, and takes nothing of others with it."""

    @pytest.mark.parametrize("pair", CLOSE_PAIRS, ids="-".join, indirect=True)
    def test_case_15_what_comes_after_close_is_an_error_or_a_no(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """Registration, statistics and clear too; and the host memory is not touched."""
        rank = new_rank(own_client=True)
        rank.write(keys, range(8))
        rank.set_everywhere(keys, range(8))
        late = small_model(harness, "mla", "page_first").group.anchor_entry.host_pool
        rank.backend.close()
        before = rank.image()
        slots = np.arange(late.page_size)
        transfer = PoolTransfer("late", host_indices=slots, keys=keys[:1])
        calls: list[Callable[[], object]] = [
            partial(register, rank.backend, rank.model),
            partial(rank.backend.register_mem_host_pool_v2, late, "late"),
            partial(rank.backend.batch_set_v2, [transfer]),
            partial(rank.backend.batch_get_v2, [transfer]),
            rank.backend.clear,
            partial(rank.backend.batch_exists, keys),
            partial(rank.hit, keys),
            *(partial(rank.set, name, keys, range(8)) for name in rank.pools),
            *(partial(rank.get, name, keys, range(8, 16)) for name in rank.pools),
            rank.backend.close,
        ]
        for call in calls:
            assert is_no(answer_of(call)), call
        answer_of(rank.backend.get_stats)
        assert same(before, rank.image())

    @pytest.mark.parametrize("pair", CLOSE_PAIRS, ids="-".join, indirect=True)
    def test_case_15_close_from_several_threads_is_one(
        self, new_rank: NewRank, keys: list[str]
    ) -> None:
        rank = new_rank(own_client=True)
        rank.set_everywhere(keys, range(8))
        at_once([rank.backend.close] * 4)
        rank.backend.close()

    @pytest.mark.parametrize("pair", TWO_PAIRS, ids="-".join, indirect=True)
    @pytest.mark.parametrize("others", ["clear", "register", "get_stats"])
    def test_case_15_close_meets_calls_that_are_no_reads_or_writes(
        self, harness: Harness, new_rank: NewRank, keys: list[str], others: str
    ) -> None:
        """Of several backends, as which call is first cannot be told; each may be an error."""
        ranks = [new_rank(own_client=True, deployment=f"{keys[0][:8]}{i}") for i in range(2)]
        calls: list[Callable[[], object]] = []
        for rank in ranks:
            rank.set_everywhere(keys, range(8))
            calls += [partial(answer_of, call) for call in two_calls(harness, rank, others)]
            calls.append(rank.backend.close)
        at_once(calls)
        for rank in ranks:
            for name in rank.pools:
                assert is_no(answer_of(partial(rank.get, name, keys, range(8, 16))))

    @pytest.mark.parametrize("pair", CLOSE_PAIRS, ids="-".join, indirect=True)
    def test_a_backend_that_is_closed_leaves_others_their_pages(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """Of the same deployment and of another one; of the same process, as in a restart of
        SGLang's storage."""
        first, second, other = new_rank(), new_rank(), new_rank(deployment="other")
        for rank in (first, other):
            rank.write(keys, range(8))
            rank.set_everywhere(keys, range(8))
        harness.settle()
        first.backend.close()
        for rank in (second, other, new_rank()):
            reads_everything(rank, keys)
        second.backend.close()
        reads_everything(other, keys)

    @pytest.mark.parametrize("pair", CLOSE_PAIRS, ids="-".join, indirect=True)
    def test_host_pools_are_destroyed_before_the_backend_is_closed(
        self, new_rank: NewRank, keys: list[str]
    ) -> None:
        """As SGLang does it at shutdown; a destroyed pool looks like a logical anchor."""
        rank = new_rank(own_client=True)
        rank.set_everywhere(keys, range(8))
        rank.model.destroy()
        rank.backend.get_stats()
        rank.backend.close()

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    def test_pages_outlive_every_backend_that_stored_them(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """An engine that is started again finds what it stored."""
        needs(harness, "restart")
        ranks = [new_rank() for _ in range(2)]
        ranks[0].write(keys, range(8))
        ranks[0].set_everywhere(keys, range(8))
        harness.settle()
        for rank in ranks:
            rank.backend.close()
        harness.restart()
        reads_everything(new_rank(), keys)


def reads_everything(rank: Rank, keys: list[str]) -> None:
    """The content of ``keys``, from every pool."""
    assert rank.hit(keys) == 8
    for name in rank.pools:
        assert rank.get(name, keys, range(8, 16)) == [True] * 8
        assert all(rank.is_whole(name, key, 8 + i) for i, key in enumerate(keys))


def two_calls(harness: Harness, rank: Rank, which: str) -> list[Callable[[], object]]:
    """Two calls of one kind that is no read or write."""
    late = [small_model(harness, "mla", "page_first").group.anchor_entry for _ in range(2)]
    calls: dict[str, list[Callable[[], object]]] = {
        "clear": [rank.backend.clear] * 2,
        "register": [
            partial(rank.backend.register_mem_host_pool_v2, entry.host_pool, f"late_{i}")
            for i, entry in enumerate(late)
        ],
        "get_stats": [rank.backend.get_stats] * 2,
    }
    return calls[which]


def answer_of(call: Callable[[], object]) -> object:
    """What a call answers, None where it is an error."""
    with suppress(Exception):
        return call()
    return None


def is_no(answer: object) -> bool:
    """Whether an answer, of one key or of many, by pool or not, has nothing but no in it."""
    if isinstance(answer, dict):
        return all(map(is_no, answer.values()))
    return not any(answer) if isinstance(answer, list) else not answer


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Run each in a thread of its own, all starting together."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        start.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as threads:
        list(threads.map(run, calls))
