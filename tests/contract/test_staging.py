"""Pages that are copied through a staging area."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hicache_shared import staging
from hicache_shared.layout import flat_layout
from hicache_shared.staging import StagingArea
from hicache_shared.store import Code, PageBatch, StoredPool
from tests.contract.core_support import FakeTensor, mla

STORED = StoredPool(flat_layout("kv", mla()), "p/", "n", b"")
PAGE_BYTES = STORED.layout.page_bytes


class Shelf:
    """Moves batches by address between the area and a dict; answers given codes."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.batches: list[list[str]] = []
        self.registered: list[tuple[int, int]] = []
        self.refused: set[str] = set()

    def register(self, address: int, nbytes: int) -> None:
        self.registered.append((address, nbytes))

    def memory(self, address: Any) -> Any:
        (start, nbytes), *_ = self.registered
        assert start <= address
        assert address + PAGE_BYTES <= start + nbytes
        return np.asarray(_At(address, PAGE_BYTES))

    def put(self, batch: PageBatch) -> list[int]:
        self.batches.append(list(batch.hashes))
        for key, address in zip(batch.hashes, batch.addresses, strict=True):
            self.objects[key] = self.memory(address).tobytes()
        return [Code.NO_SPACE if key in self.refused else Code.OK for key in batch.hashes]

    def get(self, batch: PageBatch) -> list[int]:
        self.batches.append(list(batch.hashes))
        for key, address in zip(batch.hashes, batch.addresses, strict=True):
            self.memory(address)[:] = np.frombuffer(self.objects[key], np.uint8)
        return [Code.MISSING if key in self.refused else Code.OK for key in batch.hashes]


class _At:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def page(number: int) -> Any:
    return np.full(PAGE_BYTES, number + 1, np.uint8)


@pytest.fixture(params=[1, 2, 3, 8])
def area(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(staging, "STAGING_BYTES", request.param * PAGE_BYTES + PAGE_BYTES // 2)
    shelf = Shelf()
    area = StagingArea(STORED, shelf.register)
    assert area.capacity_pages == request.param
    return area, shelf


def test_more_pages_than_the_area_holds_go_in_parts_each_with_its_own_bytes(area: Any) -> None:
    staged, shelf = area
    keys = [f"k{i}" for i in range(7)]
    assert staged.put(keys, page, shelf.put) == [Code.OK] * 7
    assert shelf.objects == {f"k{i}": page(i).tobytes() for i in range(7)}
    assert [key for batch in shelf.batches for key in batch] == keys
    assert all(len(batch) <= staged.capacity_pages for batch in shelf.batches)
    taken: dict[int, bytes] = {}
    order = keys[::-1]
    shelf.refused = {"k2"}
    codes = staged.get(order, lambda i, data: taken.update({i: bytes(data)}), shelf.get)
    assert codes == [Code.MISSING if key == "k2" else Code.OK for key in order]
    assert taken == {6 - i: page(i).tobytes() for i in range(7) if i != 2}


def test_a_page_of_another_size_is_not_stored_and_its_neighbours_are(area: Any) -> None:
    staged, shelf = area
    pages = [page(0), page(1)[:-1], np.zeros(PAGE_BYTES + 1, np.uint8), page(3)]
    shelf.refused = {"d"}
    codes = staged.put(list("abcd"), pages.__getitem__, shelf.put)
    assert codes == [Code.OK, Code.WRONG_SIZE, Code.WRONG_SIZE, Code.NO_SPACE]
    assert shelf.objects == {"a": page(0).tobytes(), "d": page(3).tobytes()}


def test_a_page_that_exists_only_during_the_call_is_stored_whole(area: Any) -> None:
    """A pool's flat page may be a fresh tensor that nobody else holds."""
    staged, shelf = area
    keys = [f"k{i}" for i in range(4)]
    staged.put(keys, lambda i: FakeTensor(page(i), owns=True), shelf.put)
    assert shelf.objects == {f"k{i}": page(i).tobytes() for i in range(4)}


def test_the_area_is_registered_once_and_holds_one_page_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "STAGING_BYTES", 1)
    shelf = Shelf()
    area = StagingArea(STORED, shelf.register)
    assert area.capacity_pages == 1
    ((address, nbytes),) = shelf.registered
    assert (address % 4096, nbytes) == (0, PAGE_BYTES)


def test_a_store_that_takes_only_its_own_memory_gives_that_of_the_area() -> None:
    own = np.zeros(1 << 26, np.uint8)
    shelf = Shelf()
    area = StagingArea(STORED, shelf.register, lambda nbytes: own[:nbytes])
    assert shelf.registered == [(own.ctypes.data, area.capacity_pages * PAGE_BYTES)]


def test_nothing_to_move_calls_no_store(area: Any) -> None:
    staged, shelf = area
    assert staged.put([], page, shelf.put) == []
    assert staged.get([], lambda i, data: None, shelf.get) == []
    assert shelf.batches == []
