"""The part of the suite about several threads: backup, prefetch, queries and clear at once.

The numbers in names are those of ``docs/cases.md``: faults that people met in other adapters.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import numpy as np
import pytest

from hicache_shared.contract import PoolTransfer
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.page_bytes import bytes_of
from hicache_shared.testing.rank import FLAT_KV, PAGES, Rank, chain, small_model
from hicache_shared.testing.suite.calls import ONE_LAYER, flat_page
from hicache_shared.testing.suite.fixtures import (
    MHA_PAIR,
    ONE_LAYOUT_PAIRS,
    TWO_PAIRS,
    NewRank,
    SuiteFixtures,
)

THREADS = 4
CHAINS = 8


class ThreadSuite(SuiteFixtures):
    """Calls that run at once keep their bytes, as SGLang's threads need it."""

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    def test_backups_prefetches_and_queries_at_once_keep_their_bytes(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """One rank stores chains, another reads each as soon as it is stored; both are asked."""
        writer, reader = new_rank(), new_rank()
        chains = [chain(4, f"{keys[0]}/{i}") for i in range(CHAINS)]
        stored: SimpleQueue[int] = SimpleQueue()
        known: set[int] = set()
        over = threading.Event()

        def back_up() -> None:
            for i, hashes in enumerate(chains):
                pages = range(4 * (i % 2), 4 * (i % 2) + 4)
                writer.write(hashes, pages)
                writer.set_everywhere(hashes, pages)
                harness.settle()
                known.add(i)
                stored.put(i)

        def prefetch() -> None:
            for i in range(CHAINS):
                hashes = chains[stored.get(timeout=60)]
                assert reader.hit(hashes) == 4
                pages = range(4 * (i % 2), 4 * (i % 2) + 4)
                for name in reader.pools:
                    assert reader.get(name, hashes, pages) == [True] * 4
                    whole = zip(hashes, pages, strict=True)
                    assert all(reader.is_whole(name, key, page) for key, page in whole)

        def query(rank: Rank) -> None:
            while not over.is_set():
                for i, hashes in enumerate(chains):
                    there = i in known
                    hit = rank.hit(hashes)
                    assert hit == 4 if there else 0 <= hit <= 4

        def miss() -> None:
            absent = chain(4, f"{keys[0]}/absent")
            while not over.is_set():
                for name in reader.pools:
                    assert reader.get(name, absent, range(8, 12)) == [False] * 4

        with many_switches(), ThreadPoolExecutor(5) as threads:
            asking = [threads.submit(query, rank) for rank in (writer, reader)]
            asking.append(threads.submit(miss))
            moving = [threads.submit(back_up), threads.submit(prefetch)]
            try:
                for future in moving:
                    future.result()
            finally:
                over.set()
        for future in asking:
            future.result()

    @pytest.mark.parametrize("pair", [*TWO_PAIRS, MHA_PAIR], ids="-".join, indirect=True)
    def test_case_11_clear_while_pages_move_leaves_each_whole_or_absent(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """Two ranks of a deployment store, one of them clears, and the other reads meanwhile."""
        names = [f"{keys[0][:8]}{i}" for i in (0, 0, 1)]
        mine, twin, other = (new_rank(deployment=name) for name in names)
        other.write(keys, range(8))
        other.set_everywhere(keys, range(8))
        harness.settle()
        chains = {
            rank: [chain(4, f"{i}{keys[0]}/{n}") for n in range(CHAINS)]
            for i, rank in enumerate((mine, twin))
        }
        over = threading.Event()

        def store(rank: Rank) -> None:
            for hashes in chains[rank]:
                rank.write(hashes, range(4))
                rank.set_anchor(hashes)
                for name in rank.pools:
                    rank.set(name, hashes, range(4))

        def read(rank: Rank, pages: range) -> None:
            for hashes in [*chains[mine], *chains[twin]]:
                for name in rank.pools:
                    for key, page, answer in zip(
                        hashes, pages, rank.get(name, hashes, pages), strict=True
                    ):
                        assert not answer or rank.is_whole(name, key, page), "other bytes"

        def read_on() -> None:
            while not over.is_set():
                read(twin, range(8, 12))

        with many_switches(), ThreadPoolExecutor(3) as threads:
            reading = threads.submit(read_on)
            storing = [threads.submit(store, rank) for rank in (mine, twin)]
            try:
                while not all(future.done() for future in storing):
                    with suppress(Exception):  # one that failed says so by raising
                        mine.backend.clear()
            finally:
                over.set()
        for future in (reading, *storing):
            future.result()
        harness.settle()
        for rank in (mine, twin):
            read(rank, range(12, 16))
            for hashes in [*chains[mine], *chains[twin]]:
                hit = rank.hit(hashes)
                for name in rank.pools:
                    pages = range(max(0, hit - rank.windows.get(name, hit)), hit)
                    part = [hashes[page] for page in pages]
                    assert rank.get(name, part, pages) == [True] * len(pages)
        mine.backend.clear()
        assert {rank.hit(hashes) for rank in chains for hashes in chains[rank]} == {0}
        assert other.hit(keys) == 8
        other.fill(110)
        for name in other.pools:
            assert other.get(name, keys, range(8)) == [True] * 8
            assert all(other.is_whole(name, key, page) for page, key in enumerate(keys))

    @pytest.mark.parametrize("pair", TWO_PAIRS, ids="-".join, indirect=True)
    def test_pools_are_registered_late_while_others_move(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        rank = new_rank()
        rank.write(keys, range(8))
        rank.set_everywhere(keys, range(8))
        harness.settle()
        late = [small_model(harness, "mla", "page_first") for _ in range(4)]
        over = threading.Event()

        def move() -> None:
            while not over.is_set():
                assert rank.hit(keys) == 8
                for name in rank.pools:
                    assert rank.get(name, keys, range(8, 16)) == [True] * 8
                    assert rank.is_whole(name, keys[3], 11)

        with many_switches(), ThreadPoolExecutor(1) as threads:
            moving = threads.submit(move)
            try:
                for i, model in enumerate(late):
                    pool, name = model.group.anchor_entry.host_pool, f"late_{i}"
                    rank.backend.register_mem_host_pool_v2(pool, name)
                    slots = np.arange(4 * pool.page_size)
                    transfer = PoolTransfer(name, host_indices=slots, keys=keys[:4])
                    assert rank.backend.batch_set_v2([transfer]) == {name: [True] * 4}
                    harness.settle()
                    assert rank.backend.batch_get_v2([transfer]) == {name: [True] * 4}
            finally:
                over.set()
        moving.result()

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    def test_gets_and_sets_of_several_threads_keep_their_bytes(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        rank = new_rank(layers_div=ONE_LAYER)
        rank.fill(78)

        def work(thread: int) -> None:
            first = thread * (PAGES // THREADS)
            for turn in range(5):
                hashes = chain(2, f"{keys[0]}/{thread}/{turn}")
                sources = [first + turn % 2, first + 2]
                targets = [first + 1 - turn % 2, first + 3]
                for name in rank.pools:
                    wanted = [rank.page(name, page) for page in sources]
                    assert rank.set(name, hashes, sources) == [True, True]
                    harness.settle()
                    assert rank.get(name, hashes, targets) == [True, True]
                    assert [rank.page(name, page) for page in targets] == wanted
                    rank.put_page(name, sources[1], wanted[0])
                    rank.put_page(name, targets[0], wanted[1])

        in_threads(work)

    @pytest.mark.parametrize("pair", [("mla", "page_first")], ids="-".join, indirect=True)
    def test_flat_gets_and_sets_of_several_threads_keep_their_bytes(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        rank = new_rank(extra=FLAT_KV, layers_div=ONE_LAYER)
        rank.fill(79)
        pages = [flat_page(rank, page) for page in range(PAGES)]

        def work(thread: int) -> None:
            for turn in range(20):
                hashes = chain(4, f"{keys[0]}/{thread}/{turn}")
                own = [pages[(4 * thread + turn + i) % PAGES] for i in range(4)]
                assert rank.backend.batch_set(hashes, own) is True
                harness.settle()
                found = rank.backend.batch_get(hashes, [np.zeros_like(page) for page in own])
                assert [bytes_of(page) for page in found] == [bytes_of(page) for page in own]

        in_threads(work)


def in_threads(work: Callable[[int], None]) -> None:
    """Run ``work(0)``, ``work(1)``, ... at once, with as many switches as can be had."""
    with many_switches(), ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(THREADS)))


@contextmanager
def many_switches() -> Iterator[None]:
    """Let Python change threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
