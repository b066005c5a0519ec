"""Native tasks: whatever happens, a call is left only when they are over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hicache_shared.store import Code
from hicache_ucm.client import Addresses, NativeError, NativeStore
from hicache_ucm.flight import Flight
from hicache_ucm.folder import Folder
from hicache_ucm.health import Health
from hicache_ucm.pool import Part, PoolStore, rounds
from hicache_ucm.store import UcmStore
from tests.pools import TestPool, hashes
from tests.ucm.ucm_stores import DEADLINE_S, exists

KEYS = hashes(4)


class CountedNative(NativeStore):
    """Tasks are numbers; notes which are waited for."""

    def __init__(self) -> None:
        super().__init__(None)
        self.begun = 0
        self.waited: list[int] = []

    def load(self, ids: bytes, addresses: Addresses) -> int:
        self.begun += 1
        return self.begun - 1

    def wait(self, task: int) -> None:
        self.waited.append(task)
        if task == 0:
            raise NativeError("-50002")


@pytest.fixture
def native() -> CountedNative:
    return CountedNative()


@pytest.fixture
def part(tmp_path: Path, native: CountedNative) -> Part:
    pool = TestPool.make("hc1/test", "kv", 4, (64,))
    store = PoolStore(pool.stored, Folder(tmp_path, 0), native, removes=False)
    return Part.of(store, pool.pages(KEYS), slice(None))


def test_tasks_under_way_are_waited_for_once_when_a_call_breaks_off(
    part: Part, native: CountedNative
) -> None:
    def break_off() -> None:
        with Flight(health) as flight:
            flight.load(part)
            assert flight.load(part).wait() is None
            flight.load(part)
            raise ZeroDivisionError

    health = Health("/root", 0)
    with pytest.raises(ZeroDivisionError):
        break_off()
    assert sorted(native.waited) == [0, 1, 2]
    assert not health.hangs(), "the call is over"


def test_a_task_of_no_pages_is_over_and_asks_nothing(part: Part, native: CountedNative) -> None:
    with Flight(Health("/root", 1)) as flight:
        assert flight.load(part.subset([])).wait() is None
    assert native.begun == 0


def test_each_page_of_a_batch_that_failed_has_its_own_answer(part: Part) -> None:
    with Flight(Health("/root", 1)) as flight:
        errors = flight.one_by_one(part, flight.load)
    assert [error is None for error in errors] == [False, True, True, True]


def test_a_large_call_is_cut_into_rounds_of_all_its_pools(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between them a call looks at its deadline."""
    pool = TestPool.make("hc1/test", "kv", 16, (64,))
    batches = [pool.pages(hashes(count)) for count in (16, 0, 3)]
    monkeypatch.setattr("hicache_ucm.pool.ROUND_BYTES", 64 * 5)
    cut = list(rounds([part.pool] * 3, batches))
    assert [sum(map(len, parts)) for parts in cut] == [4, 5, 5, 5]
    for i, batch in enumerate(batches):
        whole = Part.of(part.pool, batch, slice(None))
        assert b"".join(parts[i].ids for parts in cut) == whole.ids
        addresses = np.concatenate([parts[i].addresses for parts in cut])
        assert (addresses == whole.addresses).all()


@pytest.mark.backend("ucm")
def test_tasks_that_ucm_refuses_to_begin_are_failures(
    store: UcmStore, pools: dict[str, TestPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: NativeStore, ids: bytes, addresses: Addresses) -> int:
        raise NativeError("-50000")

    kv = pools["kv"]
    batch = kv.pages(KEYS)
    with monkeypatch.context() as patched:
        patched.setattr(NativeStore, "dump", refuse)
        assert store.put([batch], DEADLINE_S) == [[int(Code.FAILED)] * 4]
        assert not store.healthy()
    assert exists(store, kv.ask(KEYS)) == [[False] * 4]
    assert store.put([batch], DEADLINE_S) == [[int(Code.OK)] * 4]
    with monkeypatch.context() as patched:
        patched.setattr(NativeStore, "load", refuse)
        assert store.get([batch], DEADLINE_S) == [[int(Code.FAILED)] * 4]
        assert not store.healthy()
    assert store.get([batch], DEADLINE_S) == [[int(Code.OK)] * 4]
    assert store.healthy()


@pytest.mark.backend("ucm")
def test_a_lookup_that_fails_finds_nothing_and_is_said(
    store: UcmStore, pools: dict[str, TestPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: NativeStore, ids: bytes) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        raise NativeError("-50002")

    kv = pools["kv"]
    store.put([kv.pages(KEYS)], DEADLINE_S)
    with monkeypatch.context() as patched:
        patched.setattr(NativeStore, "lookup", refuse)
        assert exists(store, kv.ask(KEYS)) == [[False] * 4]
        assert not store.healthy()
    assert exists(store, kv.ask(KEYS)) == [[True] * 4]
    assert store.healthy()


@pytest.mark.backend("ucm")
def test_a_full_disk_is_not_tried_beyond_the_time_for_it(
    store: UcmStore, pools: dict[str, TestPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the deadline is: SGLang keeps the pages meanwhile."""
    tried = []

    def refuse(self: NativeStore, ids: bytes, addresses: Addresses) -> int:
        tried.append(len(addresses))
        raise NativeError("-50002")

    monkeypatch.setattr(NativeStore, "dump", refuse)
    monkeypatch.setattr(Folder, "free_bytes", lambda _: 0)
    monkeypatch.setattr("hicache_ucm.writing.SPACE_WAIT_S", 0)
    assert store.put([pools["kv"].pages(KEYS)], DEADLINE_S) == [[int(Code.NO_SPACE)] * 4]
    assert tried == [4, 1, 1, 1, 1]


@pytest.mark.backend("ucm")
def test_space_that_is_made_while_a_call_waits_for_it_is_no_failure(
    store: UcmStore,
    pools: dict[str, TestPool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where old pages are removed, a disk is nearly full all the time."""
    dump = NativeStore.dump
    begun = []

    def refuse_at_first(self: NativeStore, ids: bytes, addresses: Addresses) -> int:
        begun.append(ids)
        if len(begun) <= 5:
            raise NativeError("-50002")
        return dump(self, ids, addresses)

    monkeypatch.setattr(NativeStore, "dump", refuse_at_first)
    monkeypatch.setattr(Folder, "free_bytes", lambda _: 0)
    assert store.put([pools["kv"].pages(KEYS)], DEADLINE_S) == [[int(Code.OK)] * 4]
    assert len(begun) == 6
    assert store.healthy()
    assert not caplog.records
