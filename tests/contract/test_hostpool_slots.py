"""Slots of the reference pools: whole pages, never twice, safe among threads."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache_shared.errors import LayoutError, TransferError, UnknownPoolError
from hicache_shared.hostpool import (
    HostPoolGroup,
    LogicalHostPool,
    MHAGeometry,
    MHAHostPool,
    PoolEntry,
    V4Geometry,
    V4PagedHostPool,
    V4StateHostPool,
)
from hicache_shared.hostpool.memory import IndexArray
from hicache_shared.hostpool.slots import Slots

PAGES, PAGE_SIZE = 5, 3


def mha_pool() -> MHAHostPool:
    geometry = MHAGeometry(layers=1, head_num=1, head_dim=1)
    return MHAHostPool(geometry, pages=PAGES, page_size=PAGE_SIZE, layout="page_first")


def taken(slots: IndexArray | None) -> IndexArray:
    """Slots of an allocation that must have found some."""
    assert slots is not None
    return slots


class SlotMachine(RuleBasedStateMachine):
    """Slots against a set of those that are held."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = mha_pool()
        self.held: list[IndexArray] = []

    @rule(pages=st.integers(0, PAGES + 1))
    def alloc(self, pages: int) -> None:
        room = PAGES - sum(len(h) for h in self.held) // PAGE_SIZE
        got = self.pool.alloc(pages * PAGE_SIZE)
        if pages > room:
            assert got is None
            return
        assert got is not None
        assert got.dtype == np.int64
        assert got.shape == (pages * PAGE_SIZE,)
        rows = got.reshape(-1, PAGE_SIZE)
        assert (rows % PAGE_SIZE == np.arange(PAGE_SIZE)).all()
        assert (rows // PAGE_SIZE == rows[:, :1] // PAGE_SIZE).all()
        if pages:
            self.held.append(got)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_and_free_again(self, data: st.DataObject) -> None:
        indices = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        assert self.pool.free(indices) == len(indices)
        with pytest.raises(TransferError, match="double free"):
            self.pool.free(indices)

    @precondition(lambda self: self.held)
    @rule()
    def free_one_page_twice_in_a_call(self) -> None:
        page = self.held[0][:PAGE_SIZE]
        with pytest.raises(TransferError, match="double free"):
            self.pool.free(np.concatenate([page, page]))

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.held = []

    @invariant()
    def no_slot_is_held_twice_and_none_is_lost(self) -> None:
        held = [slot for indices in self.held for slot in indices.tolist()]
        assert len(set(held)) == len(held)
        assert self.pool.available_size() == PAGES * PAGE_SIZE - len(held)


TestSlotMachine = SlotMachine.TestCase


@pytest.mark.parametrize(
    "indices",
    [[0, 1], [1, 2, 3], [0, 1, 1], [0, 2, 1], [15, 16, 17], [-3, -2, -1]],
    ids=["part", "misaligned", "repeated", "disordered", "past the end", "negative"],
)
def test_only_whole_pages_inside_the_pool_are_freed(indices: list[int]) -> None:
    pool = mha_pool()
    pool.alloc(PAGES * PAGE_SIZE)
    with pytest.raises(TransferError, match="whole pages of 3"):
        pool.free(np.array(indices))
    assert pool.available_size() == 0


def test_a_part_of_a_page_is_not_allocated() -> None:
    with pytest.raises(TransferError, match="whole pages of 3, asked for 4"):
        mha_pool().alloc(4)


def test_freeing_nothing_frees_nothing() -> None:
    assert mha_pool().free(np.array([], dtype=np.int64)) == 0


def test_slots_come_back_the_longest_free_first() -> None:
    pool = LogicalHostPool(pages=3, page_size=1)
    first = taken(pool.alloc(2))
    pool.free(first)
    assert taken(pool.alloc(3)).tolist() == [2, 0, 1]


def test_threads_never_get_the_same_slot() -> None:
    pool = LogicalHostPool(pages=400, page_size=4)

    def worker(_: int) -> list[int]:
        kept = []
        for _ in range(50):
            kept.append(taken(pool.alloc(4)))
            pool.free(kept.pop(0))
            kept.append(taken(pool.alloc(4)))
        return [slot for indices in kept for slot in indices.tolist()]

    with ThreadPoolExecutor(8) as threads:
        held = [slot for part in threads.map(worker, range(8)) for slot in part]
    assert len(held) == len(set(held)) == 400 * 4
    assert pool.available_size() == 0


class GuardedDeque(deque[int]):
    """A free list that may change only while ``lock`` is held.

    The interpreter lock hides an unlocked check-then-take from the test above.
    """

    lock: Any

    def popleft(self) -> int:
        assert self.lock.locked()
        return super().popleft()

    def extend(self, pages: Any) -> None:
        assert self.lock.locked()
        super().extend(pages)


def test_the_free_list_changes_under_its_lock_alone() -> None:
    slots = Slots(pages=3, page_size=2)
    guarded = GuardedDeque(slots._free)
    guarded.lock = slots._lock
    slots._free = guarded
    assert slots.free(taken(slots.alloc(4))) == 4
    assert slots.available() == 6


def test_v4_rounds_an_allocation_up_to_pages() -> None:
    geometry = V4Geometry(layers=1, row_bytes=1)
    pool = V4PagedHostPool(geometry, pages=2, page_size=4, layout="page_first", label="swa")
    assert taken(pool.alloc(5)).tolist() == list(range(8))
    assert pool.alloc(1) is None


def test_v4_states_have_no_slots_of_their_own() -> None:
    geometry = V4Geometry(layers=1, row_bytes=1, state=True)
    pool = V4StateHostPool(geometry, pages=2, page_size=4, layout="page_first", label="state")
    with pytest.raises(NotImplementedError, match="slots of the SWA pool"):
        pool.alloc(4)
    with pytest.raises(NotImplementedError):
        pool.free(np.arange(4))
    with pytest.raises(NotImplementedError):
        pool.available_size()
    pool.clear()


def group_of_two() -> HostPoolGroup:
    return HostPoolGroup(
        [
            PoolEntry("side", LogicalHostPool(pages=1, page_size=2)),
            PoolEntry("kv", LogicalHostPool(pages=2, page_size=2), is_primary_index_anchor=True),
        ]
    )


def test_a_group_allocates_from_its_anchor_or_the_named_pool() -> None:
    group = group_of_two()
    assert group.anchor_entry.name == "kv"
    assert group.size == group.logical_size == 4
    kept = taken(group.alloc(2))
    assert (group.available_size(), group.available_size("side")) == (2, 2)
    assert taken(group.alloc(2, pool="side")).tolist() == [0, 1]
    assert group.alloc(2, pool="side") is None
    group.free(kept)
    assert group.available_size() == 4
    group.clear()
    assert group.available_size("side") == 2


def test_a_group_reclaims_once_before_it_gives_up() -> None:
    group = group_of_two()
    kept = taken(group.alloc(4))
    asked: list[int] = []

    def reclaim(need: int) -> None:
        asked.append(need)
        group.free(kept[:2])

    assert taken(group.alloc(2, reclaim=reclaim)).tolist() == kept[:2].tolist()
    assert group.alloc(4, reclaim=asked.append) is None
    assert asked == [2, 4]


def test_a_group_takes_late_pools_but_no_second_name_or_anchor() -> None:
    group = group_of_two()
    late = LogicalHostPool(pages=1, page_size=2)
    group.add_entry(PoolEntry("draft", late))
    assert group.get_pool("draft") is late
    with pytest.raises(LayoutError, match="'draft' is already"):
        group.add_entry(PoolEntry("draft", late))
    with pytest.raises(LayoutError, match="anchor"):
        group.add_entry(PoolEntry("other", late, is_primary_index_anchor=True))
    with pytest.raises(UnknownPoolError, match="no host pool 'swa' in the group; it has side, kv"):
        group.get_pool("swa")


def test_a_group_needs_an_entry_unique_names_and_one_anchor() -> None:
    pool = LogicalHostPool(pages=1, page_size=2)
    with pytest.raises(LayoutError, match="needs an entry"):
        HostPoolGroup([])
    with pytest.raises(LayoutError, match="unique"):
        HostPoolGroup([PoolEntry("kv", pool), PoolEntry("kv", pool)])
    with pytest.raises(LayoutError, match="2 anchors"):
        HostPoolGroup([PoolEntry("kv", pool, True), PoolEntry("swa", pool, True)])
