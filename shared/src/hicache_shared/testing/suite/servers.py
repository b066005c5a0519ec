"""The part of the suite that stops, freezes and restarts a server of its own."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import pytest

from hicache_shared.testing.harness import Harness
from hicache_shared.testing.rank import Rank, chain
from hicache_shared.testing.suite.calls import ONE_LAYER
from hicache_shared.testing.suite.fixtures import TWO_PAIRS, SuiteFixtures, needs
from hicache_shared.testing.suite.forms import (
    BOUND_S,
    Call,
    assert_loaded,
    assert_memory,
    forms,
    in_time,
)

Test = TypeVar("Test", bound=Callable[..., None])

RECOVERY_S = 60.0
"""Until a server that is there again has to be used again."""

ONE_POOL, MANY_POOLS = TWO_PAIRS

AWAY = ["stopped", "frozen"]


def on_own_server(*pairs: tuple[str, str]) -> Callable[[Test], Test]:
    """Marks a test of server faults; a mark of the class would be one of the whole suite."""

    faults: Callable[[Test], Test] = pytest.mark.faults

    def mark(test: Test) -> Test:
        marked: Test = pytest.mark.parametrize("pair", pairs, ids="-".join, indirect=True)(test)
        return faults(marked)

    return mark


class ServerSuite(SuiteFixtures):
    """A server that is away is a miss, and one that is back is used again."""

    @pytest.fixture
    def own(self, harness: Harness) -> Iterator[Harness]:
        """A harness on a server that no other test uses."""
        needs(harness, "server")
        with harness.own_server() as own:
            yield own

    @pytest.fixture
    def stored(self, own: Harness, pair: tuple[str, str], keys: list[str]) -> Iterator[Rank]:
        """A rank whose first eight host pages are stored in every pool, under ``keys``."""
        rank = Rank.make(own, *pair, layers_div=ONE_LAYER)
        rank.fill(95)
        rank.set_everywhere(keys, range(8))
        own.settle()
        assert rank.hit(keys) == 8
        yield rank
        rank.backend.close()

    @on_own_server(*TWO_PAIRS)
    @pytest.mark.parametrize("fault", AWAY)
    def test_every_form_of_call_is_a_miss_in_time_while_the_server_is_away(
        self, own: Harness, stored: Rank, keys: list[str], fault: str
    ) -> None:
        every = forms(stored, keys, range(8), range(8, 16))
        misses = {form.name: form.miss for form in every}
        memory = stored.image()
        with away(own, fault):
            calls = {form.name: Call(form.call) for form in every}
            assert {name: call.answer() for name, call in calls.items()} == misses
            assert {form.name: in_time(form.call) for form in every} == misses
        assert_memory(stored, memory)
        works_again(stored, keys[0])
        for name in stored.pools:
            assert_right_or_a_miss(stored, name, keys, range(8, 16))

    @on_own_server(ONE_POOL)
    @pytest.mark.parametrize("fault", AWAY)
    def test_a_clear_while_the_server_is_away_raises_in_time_or_has_cleared(
        self, own: Harness, stored: Rank, keys: list[str], fault: str
    ) -> None:
        with away(own, fault):
            error = Call(stored.backend.clear).error()
        works_again(stored, keys[0])
        if error is None:
            assert in_time(partial(stored.hit, keys)) == 0
            for name in stored.pools:
                assert_loaded(stored, name, keys, [None] * 8, range(8, 16))
        for name in stored.pools:
            assert_right_or_a_miss(stored, name, keys, range(8, 16))

    @on_own_server(ONE_POOL)
    @pytest.mark.parametrize("fault", AWAY)
    def test_close_is_over_in_time_while_the_server_is_away(
        self, own: Harness, stored: Rank, keys: list[str], fault: str
    ) -> None:
        every = forms(stored, keys, range(8), range(8, 16))
        with away(own, fault):
            in_time(stored.backend.close)
            for form in every:
                assert in_time(form.call) == form.miss, form.name

    @on_own_server(MANY_POOLS)
    def test_pages_of_a_server_that_was_restarted_are_right_or_a_miss(
        self, own: Harness, stored: Rank, keys: list[str]
    ) -> None:
        own.stop_server()
        own.start_server()
        for name in stored.pools:
            assert_right_or_a_miss(stored, name, keys, range(8, 16))
        works_again(stored, keys[0])
        for name in stored.pools:
            assert_right_or_a_miss(stored, name, keys, range(8, 16))

    @on_own_server(MANY_POOLS)
    @pytest.mark.parametrize("fault", [*AWAY, "restarted", "paused"])
    def test_calls_in_flight_are_right_or_a_miss_in_time_when_the_server_goes(
        self, own: Harness, stored: Rank, keys: list[str], fault: str
    ) -> None:
        if fault == "frozen":
            needs(own, "gives_up")
        workers = [Worker(call) for call in calls_in_flight(stored, keys)]
        try:
            for worker in workers:
                worker.wait_for_calls(3)
            with away(own, fault):
                for worker in workers:
                    worker.wait_for_calls(2)
        finally:
            for worker in workers:
                worker.end()
        works_again(stored, keys[0])
        for name in stored.pools:
            assert_right_or_a_miss(stored, name, keys, range(8, 16))


class Worker:
    """Makes one call again and again, in a thread of its own, until it is ended."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._ending = threading.Event()
        self._made = threading.Semaphore(0)
        self._running = Call(self._work)

    def wait_for_calls(self, count: int) -> None:
        """Return when that many calls have ended from now on; the first may run already."""
        while self._made.acquire(blocking=False):
            pass
        for _ in range(count):
            if not self._made.acquire(timeout=BOUND_S):
                self._running.error(0)  # raises where the call has not ended
                self._running.answer()

    def end(self) -> None:
        """Make no more calls; raises what a call raised."""
        self._ending.set()
        self._running.answer()

    def _work(self) -> None:
        while not self._ending.is_set():
            self._call()
            self._made.release()


def calls_in_flight(rank: Rank, keys: list[str]) -> list[Callable[[], None]]:
    """Gets, sets and questions that check what they are told; no two share a target page."""

    def putting() -> Callable[[], None]:
        names, turns = itertools.cycle(rank.pools), itertools.count()

        def put() -> None:
            hashes = chain(8, f"{keys[0]}/{next(turns) % 16}")
            assert len(rank.set(next(names), hashes, range(8))) == 8

        return put

    def getting(pages: range) -> Callable[[], None]:
        names = itertools.cycle(rank.pools)
        hashes, targets = [keys[page] for page in pages], [8 + page for page in pages]
        return lambda: load_right_or_miss(rank, next(names), hashes, pages, targets)

    def ask() -> None:
        assert 0 <= rank.hit(keys) <= 8

    return [putting(), ask, getting(range(4)), getting(range(4, 8))]


@contextmanager
def away(own: Harness, fault: str) -> Iterator[None]:
    """The server is stopped or frozen while inside; restarted and paused are over at once."""
    if fault in ("stopped", "restarted"):
        go, come = own.stop_server, own.start_server
    else:
        go, come = own.freeze_server, own.thaw_server
    go()
    if fault in AWAY:
        try:
            yield
        finally:
            come()
    else:
        come()
        yield


def works_again(rank: Rank, salt: str) -> None:
    """Fresh pages of every pool can be stored, are a hit and come back, before long."""
    until = time.monotonic() + RECOVERY_S
    for turn in itertools.count():
        keys = chain(2, f"{salt}/again/{turn}")
        puts = [in_time(partial(rank.set, name, keys, range(2))) for name in rank.pools]
        if all(map(all, puts)) and in_time(partial(rank.hit, keys)) == 2:
            break
        assert time.monotonic() < until, f"not used again within {RECOVERY_S:.0f} s"
        time.sleep(0.1)
    for name in rank.pools:
        assert_loaded(rank, name, keys, [rank.page(name, page) for page in range(2)], range(8, 10))


def assert_right_or_a_miss(rank: Rank, name: str, keys: list[str], targets: Sequence[int]) -> None:
    """Load pages that were stored from the first on; nothing but the target pages changes."""
    kept = [rank.page(name, target) for target in targets]
    memory = rank.image()
    load_right_or_miss(rank, name, keys, range(len(keys)), targets)
    for target, value in zip(targets, kept, strict=True):
        rank.put_page(name, target, value)
    assert_memory(rank, memory)


def load_right_or_miss(
    rank: Rank, name: str, keys: list[str], sources: Sequence[int], targets: Sequence[int]
) -> None:
    """Load pages; each that is said to have come has the bytes of its source."""
    answers = in_time(partial(rank.get, name, keys, targets))
    assert len(answers) == len(keys)
    for source, target, answer in zip(sources, targets, answers, strict=True):
        is_right = not answer or rank.page(name, target) == rank.page(name, source)
        assert is_right, f"pool {name}: True with other bytes"
