"""The part of the suite about faults, full stores, clear and close."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from hicache_shared.hostpool import AssembledModel, page_views
from hicache_shared.layout import is_logical
from hicache_shared.testing.harness import Harness, storage_config
from hicache_shared.testing.rank import FLAT_KV, Rank, chain, small_model
from hicache_shared.testing.suite.calls import flat_page
from hicache_shared.testing.suite.fixtures import (
    ONE_LAYOUT_PAIRS,
    TWO_PAIRS,
    NewRank,
    SuiteFixtures,
    needs,
)
from hicache_shared.testing.suite.forms import (
    Call,
    Form,
    assert_loaded,
    assert_memory,
    flat_forms,
    forms,
    in_time,
)

WAIT_S = 30.0
"""For events that come at once unless the code is broken."""


class FaultSuite(SuiteFixtures):
    """A store that is broken, full, cleared or closed gives answers."""

    def test_case_09_a_fault_of_the_store_is_an_answer(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        needs(harness, "faults")
        rank.fill(27)
        rank.set_everywhere(keys, range(8))
        harness.settle()
        with harness.fault():
            assert rank.hit(keys) == 0
            for name in rank.pools:
                assert rank.get(name, keys, range(8)) == [False] * 8
                assert rank.set(name, chain(8, name), range(8)) == [False] * 8
        assert rank.hit(keys) == 8, "the backend works again when the store does"

    @pytest.mark.parametrize("pair", TWO_PAIRS, ids="-".join, indirect=True)
    def test_case_09_every_form_of_call_answers_while_the_client_raises_and_works_afterwards(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        needs(harness, "faults")
        rank.fill(35)
        rank.set_everywhere(keys, range(8))
        harness.settle()
        for form in forms(rank, keys, range(8), range(8, 16)):
            _answers_in_a_fault(harness, rank, form)

    @pytest.mark.parametrize("pair", [("mla", "page_first")], ids="-".join, indirect=True)
    def test_case_09_every_form_of_flat_call_answers_while_the_client_raises_and_works_afterwards(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        needs(harness, "faults")
        rank = new_rank(extra=FLAT_KV)
        rank.fill(36)
        pages = [flat_page(rank, page) for page in range(8)]
        assert rank.backend.batch_set(keys, pages) is True
        harness.settle()
        for form in flat_forms(rank, keys, pages):
            _answers_in_a_fault(harness, rank, form)

    @pytest.mark.parametrize("pair", TWO_PAIRS, ids="-".join, indirect=True)
    def test_case_09_calls_of_several_threads_answer_while_the_client_raises(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        needs(harness, "faults")
        rank.fill(37)
        rank.set_everywhere(keys, range(8))
        harness.settle()
        every = forms(rank, keys, range(8), range(8, 16)) * 3
        memory = rank.image()
        with harness.fault():
            calls = [Call(form.call) for form in every]
            assert [call.answer() for call in calls] == [form.miss for form in every]
        assert_memory(rank, memory)
        calls = [Call(form.call) for form in every]
        assert [call.answer() for call in calls] == [form.whole for form in every]

    @pytest.mark.parametrize("pair", TWO_PAIRS, ids="-".join, indirect=True)
    @pytest.mark.parametrize("operation", ["set", "get", "hit"])
    def test_while_a_call_is_held_in_the_store_others_answer(
        self, harness: Harness, new_rank: NewRank, keys: list[str], operation: str
    ) -> None:
        needs(harness, "hold")
        rank = new_rank(extra={"deadline_s": 10})
        rank.fill(38)
        rank.set_everywhere(keys, range(8))
        harness.settle()
        name = next(iter(rank.pools))
        hashes = chain(4, keys[0])
        calls: dict[str, tuple[Callable[[], object], object]] = {
            "set": (lambda: rank.set(name, hashes, range(4)), [True] * 4),
            "get": (lambda: rank.get(name, keys[:4], range(8, 12)), [True] * 4),
            "hit": (lambda: rank.hit(keys), 8),
        }
        call, whole = calls[operation]
        wanted = {other: [rank.page(other, page) for page in range(8)] for other in rank.pools}
        with harness.hold() as waiting:
            held = Call(call)
            assert waiting.wait(WAIT_S)
            memory = rank.image()
            assert in_time(lambda: rank.hit(keys)) == 8
            for other, pages in wanted.items():
                assert_loaded(rank, other, keys[4:], pages[4:], range(12, 16))
                put = partial(rank.set, other, chain(4, f"{keys[0]}/{other}"), range(4))
                assert in_time(put) == [True] * 4
            assert_memory(rank, memory)
            assert held.is_alive()
        assert held.answer() == whole
        if operation == "get":
            assert [rank.page(name, page) for page in range(8, 12)] == wanted[name][:4]
        for other, pages in wanted.items():
            assert_loaded(rank, other, keys, pages, range(8, 16))
        if operation == "set":
            assert_loaded(rank, name, hashes, wanted[name][:4], range(8, 12))

    def test_case_11_clear_empties_this_namespace_at_once_and_nothing_else(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        names = [f"{keys[0][:8]}{i}" for i in (0, 1, 0)]
        mine, other, twin = (new_rank(deployment=name) for name in names)
        for rank in (mine, other):
            rank.fill(28)
            rank.set_everywhere(keys, range(8))
            harness.settle()
            for name in rank.pools:
                assert all(rank.get(name, keys, range(8)))
        assert [rank.hit(keys) for rank in (mine, other, twin)] == [8, 8, 8]
        mine.backend.clear()
        assert [rank.hit(keys) for rank in (mine, twin)] == [0, 0]
        for rank in (mine, twin):
            for name in rank.pools:
                assert rank.get(name, keys, range(8)) == [False] * 8
        assert other.hit(keys) == 8
        mine.set_everywhere(keys, range(8))
        harness.settle()
        assert mine.hit(keys) == twin.hit(keys) == 8, "the store takes pages after a clear"

    def test_case_11_clear_takes_the_pages_of_every_rank(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        ranks = [new_rank(tp_rank=i, tp_size=2, deployment=keys[0][:8]) for i in range(2)]
        for rank in ranks:
            rank.fill(32)
            rank.set_everywhere(keys, range(8))
        harness.settle()
        assert [rank.hit(keys) for rank in ranks] == [8, 8]
        ranks[0].backend.clear()
        assert [rank.hit(keys) for rank in ranks] == [0, 0]
        for name in ranks[1].pools:
            assert ranks[1].get(name, keys, range(8)) == [False] * 8

    @pytest.mark.parametrize("pair", TWO_PAIRS, ids="-".join, indirect=True)
    def test_case_11_a_clear_that_fails_raises(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        needs(harness, "faults")
        rank.set_everywhere(keys, range(8))
        with harness.fault(), pytest.raises(Exception, match=r"."):
            rank.backend.clear()

    def test_case_12_a_full_store_takes_what_fits_and_says_what_it_took(
        self, harness: Harness, pair: tuple[str, str], keys: list[str]
    ) -> None:
        needs(harness, "limited")
        model = small_model(harness, *pair)
        config = storage_config(is_mla_model=model.is_mla_model)
        name, page_bytes = _largest_pool(model)
        with harness.make_limited(config, 4 * page_bytes) as (backend, capacity_bytes):
            zero_copy = harness.capabilities.zero_copy
            rank = Rank(backend, model, config, zero_copy=zero_copy)
            rank.fill(30)
            stored = 0
            while stored * page_bytes < 2 * capacity_bytes:
                hashes = chain(8, f"{keys[0]}/{stored}")
                answers = rank.set(name, hashes, range(8))
                taken = [page for page, answer in enumerate(answers) if answer]
                targets = range(8, 8 + len(taken))
                assert all(rank.get(name, [hashes[page] for page in taken], targets))
                read = [rank.page(name, target) for target in targets]
                assert read == [rank.page(name, page) for page in taken]
                stored += len(taken)
                if len(taken) < 8:
                    break
            assert stored >= capacity_bytes // page_bytes // 2

    @pytest.mark.parametrize("pair", TWO_PAIRS, ids="-".join, indirect=True)
    def test_case_12_a_put_takes_the_space_that_comes_free_meanwhile(
        self, harness: Harness, pair: tuple[str, str], keys: list[str]
    ) -> None:
        needs(harness, "relief")
        model = small_model(harness, *pair)
        config = storage_config(is_mla_model=model.is_mla_model, extra={"deadline_s": 10})
        name, page_bytes = _largest_pool(model)
        with harness.make_limited(config, 16 * page_bytes) as (backend, _):
            zero_copy = harness.capabilities.zero_copy
            rank = Rank(backend, model, config, zero_copy=zero_copy)
            rank.fill(33)
            with harness.relieve() as refused:
                assert rank.set(name, keys, range(8)) == [True] * 8
                assert refused.is_set(), "the store was never full"
            assert rank.get(name, keys, range(8, 16)) == [True] * 8
            for page in range(8):
                assert rank.page(name, 8 + page) == rank.page(name, page)

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    def test_case_15_no_interleaving_of_close_and_calls_crashes(
        self, new_rank: NewRank, keys: list[str]
    ) -> None:
        rank = new_rank(own_client=True)
        rank.fill(29)
        start = threading.Barrier(5)

        def work(call: Callable[[], object]) -> None:
            start.wait()
            for _ in range(20):
                call()

        def close() -> None:
            start.wait()
            rank.backend.close()

        name = next(iter(rank.pools))
        with ThreadPoolExecutor(5) as threads:
            running = [
                threads.submit(work, lambda: rank.set(name, keys, range(8))),
                threads.submit(work, lambda: rank.get(name, keys, range(8, 16))),
                threads.submit(work, lambda: rank.hit(keys)),
                threads.submit(work, lambda: rank.backend.batch_exists(keys)),
                threads.submit(close),
            ]
        for future in running:
            future.result()
        assert rank.get(name, keys, range(8)) == [False] * 8
        assert rank.set(name, keys, range(8)) == [False] * 8
        assert rank.hit(keys) == 0
        rank.backend.close()

    @pytest.mark.parametrize("pair", TWO_PAIRS, ids="-".join, indirect=True)
    @pytest.mark.parametrize("operation", ["set", "get", "hit"])
    def test_case_15_close_waits_for_the_call_that_is_in_the_store(
        self, harness: Harness, rank: Rank, keys: list[str], operation: str
    ) -> None:
        needs(harness, "hold")
        rank.fill(34)
        rank.set_everywhere(keys, range(8))
        harness.settle()
        name = next(iter(rank.pools))
        calls: dict[str, tuple[Callable[[], object], object]] = {
            "set": (lambda: rank.set(name, chain(8, keys[0]), range(8)), [True] * 8),
            "get": (lambda: rank.get(name, keys, range(8, 16)), [True] * 8),
            "hit": (lambda: rank.hit(keys), 8),
        }
        call, whole = calls[operation]
        with ThreadPoolExecutor(2) as threads:
            with harness.hold() as waiting:
                running = threads.submit(call)
                assert waiting.wait(WAIT_S)
                closing = threads.submit(rank.backend.close)
                _until(lambda: rank.hit(keys) == 0)
                # That close does not return can only be seen by giving it some time to.
                with pytest.raises(TimeoutError):
                    closing.result(0.1)
            assert running.result() == whole
            closing.result()


def _answers_in_a_fault(harness: Harness, rank: Rank, form: Form) -> None:
    """A form of call is a miss while the client raises, and whole before and after."""
    memory = rank.image()
    with harness.fault():
        assert in_time(form.call) == form.miss, form.name
        assert in_time(form.call) == form.miss, form.name
    assert_memory(rank, memory)
    assert in_time(form.call) == form.whole, f"{form.name} after a fault"


def _until(true: Callable[[], bool]) -> None:
    """Poll until something holds."""
    until = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.001)


def _largest_pool(model: AssembledModel) -> tuple[str, int]:
    """The name and page bytes of the physical pool with the largest pages."""
    sizes = {
        str(entry.name): sum(view.nbytes for view in page_views(entry.host_pool, 0))
        for entry in model.group.entries
        if not is_logical(entry.host_pool)
    }
    name = max(sizes, key=sizes.__getitem__)
    return name, sizes[name]
