"""The reference ``PageStore``: a dictionary of bytes, strict about everything.

It keeps copies, checks each address against the regions it was given, and answers with the
same codes as a real client. Several stores may share one :class:`Shelf`, as several ranks
share one server.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from hicache_shared.errors import LayoutError
from hicache_shared.hostmem import Region, RegionSet, all_inside, merged
from hicache_shared.store import Caps, Code, KeyBatch, PageBatch, StoredPool


class Shelf:
    """Objects by full key, behind any number of stores. Thread-safe.

    While ``broken``, every call of its stores raises, as a client might.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self.broken = False


class MemoryStore:
    """A ``PageStore`` over a :class:`Shelf`.

    Args:
        shelf: the shared objects; a fresh one if None.
        capacity_bytes: most bytes the shelf may hold; None is no limit.
    """

    def __init__(self, shelf: Shelf | None = None, capacity_bytes: int | None = None) -> None:
        self._shelf = shelf or Shelf()
        self._capacity = capacity_bytes
        self._regions = RegionSet()
        self._ordered: tuple[Region, ...] = ()
        self._closed = False

    @property
    def caps(self) -> Caps:
        return Caps(max_components=None)

    def open(self, pools: Sequence[StoredPool]) -> None:
        for pool in pools:
            self.register(pool)

    def register(self, pool: StoredPool) -> None:
        for region in pool.layout.regions:
            self.register_memory(region.address, region.nbytes)

    def register_memory(self, address: int, nbytes: int) -> None:
        region = self._regions.missing(Region(address, nbytes))
        if region is not None:
            self._regions.add(region)
            self._ordered = merged(self._regions)

    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> list[list[bool]]:
        objects = self._objects()
        return [[ask.pool.prefix + key in objects for key in ask.hashes] for ask in asks]

    def put(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        return [
            [self._put(batch.pool, key, spans) for key, spans in self._pages(batch)]
            for batch in batches
        ]

    def get(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        return [
            [self._get(batch.pool, key, spans) for key, spans in self._pages(batch)]
            for batch in batches
        ]

    def clear(self, namespace: str) -> None:
        objects = self._objects()
        with self._shelf.lock:
            for key in [key for key in objects if key.startswith(namespace + "/")]:
                del objects[key]

    def healthy(self) -> bool:
        return not self._closed

    def close(self) -> None:
        self._closed = True
        self._regions.drain()
        self._ordered = ()

    def _objects(self) -> dict[str, bytes]:
        if self._closed:
            raise RuntimeError("a call after close")
        if self._shelf.broken:
            raise ConnectionError("the shelf is broken")
        return self._shelf.objects

    def _pages(self, batch: PageBatch) -> list[tuple[str, list[tuple[int, int]]]]:
        """The full key, and address and size of each component, of every page of a batch."""
        sizes = batch.pool.layout.component_bytes
        pages = []
        for key, where in zip(batch.hashes, batch.addresses, strict=True):
            addresses = where if isinstance(where, list) else [where]
            spans = list(zip(addresses, sizes, strict=True))
            if not all_inside(self._ordered, spans):
                raise LayoutError(f"pool {batch.pool.name!r}: a page outside registered memory")
            pages.append((batch.pool.prefix + key, spans))
        return pages

    def _put(self, pool: StoredPool, key: str, spans: list[tuple[int, int]]) -> Code:
        page = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in spans)
        objects = self._objects()
        with self._shelf.lock:
            held = objects.get(key)
            if held is not None:
                return Code.OK if len(held) == pool.layout.page_bytes else Code.WRONG_SIZE
            used = sum(map(len, objects.values())) if self._capacity is not None else 0
            if self._capacity is not None and used + len(page) > self._capacity:
                return Code.NO_SPACE
            objects[key] = page
        return Code.OK

    def _get(self, pool: StoredPool, key: str, spans: list[tuple[int, int]]) -> Code:
        page = self._objects().get(key)
        if page is None:
            return Code.MISSING
        if len(page) != pool.layout.page_bytes:
            return Code.WRONG_SIZE
        offset = 0
        for address, nbytes in spans:
            ctypes.memmove(address, page[offset : offset + nbytes], nbytes)
            offset += nbytes
        return Code.OK
