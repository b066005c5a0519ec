"""The reference ``PageStore``: a dictionary of bytes, strict about everything.

It keeps copies, checks each address against the regions it was given, and answers with the
same codes as a real client. Several stores may share one :class:`Shelf`, as several ranks
share one server.
"""

from __future__ import annotations

import ctypes
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hicache_shared.errors import LayoutError
from hicache_shared.hostmem import Region, RegionSet, all_inside, merged
from hicache_shared.store import Caps, Code, KeyBatch, PageBatch, StoredPool, spans_of

FULL_PAUSES_S = (0.001, 0.004, 0.016)
"""How long a put that found no space waits before it tries again, seconds."""


@dataclass(frozen=True)
class Kept:
    """An object on a shelf: its bytes, and the CRC-32 of those that were put."""

    page: bytes
    crc: int

    @classmethod
    def of(cls, page: bytes) -> Kept:
        return cls(page, zlib.crc32(page))

    @cached_property
    def intact(self) -> bool:
        return zlib.crc32(self.page) == self.crc


class Shelf:
    """Objects by full key, behind any number of stores. Thread-safe.

    Attributes:
        capacity_bytes: most bytes that it may hold; None is no limit.
        broken: while it is, every call of its stores raises, as a client might.
        on_call: called first in each exists, get and put of its stores.
        on_full: called for each page that finds no space.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, Kept] = {}
        self.capacity_bytes = capacity_bytes
        self.broken = False
        self.on_call: Callable[[], None] = _nothing
        self.on_full: Callable[[], None] = _nothing

    @property
    def used_bytes(self) -> int:
        return sum(len(kept.page) for kept in list(self.objects.values()))

    def has_room(self, nbytes: int) -> bool:
        return self.capacity_bytes is None or self.used_bytes + nbytes <= self.capacity_bytes


def _nothing() -> None:
    pass


Spans = list[tuple[int, int]]
"""Address and bytes of each component of a host page."""

Page = tuple[str, Spans]
"""A full key, and where its host page lies."""


class MemoryStore:
    """A ``PageStore`` over a :class:`Shelf`.

    Args:
        shelf: the shared objects; a fresh one if None.
    """

    def __init__(self, shelf: Shelf | None = None) -> None:
        self._shelf = shelf or Shelf()
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
        self._shelf.on_call()
        objects = self._objects()
        return [
            [_is_whole(ask.pool, objects.get(ask.pool.prefix + key)) for key in ask.hashes]
            for ask in asks
        ]

    def put(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        self._shelf.on_call()
        until = time.monotonic() + deadline_s
        pages = [(batch.pool, self._pages(batch)) for batch in batches]
        codes = self._put_all(pages)
        for pause_s in FULL_PAUSES_S:
            full = any(Code.NO_SPACE in answer for answer in codes)
            if not full or time.monotonic() + pause_s > until:
                break
            time.sleep(pause_s)
            codes = self._put_all(pages)
        return codes

    def get(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        self._shelf.on_call()
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

    def _objects(self) -> dict[str, Kept]:
        if self._closed:
            raise RuntimeError("a call after close")
        if self._shelf.broken:
            raise ConnectionError("the shelf is broken")
        return self._shelf.objects

    def _pages(self, batch: PageBatch) -> list[Page]:
        """The full key, and address and size of each component, of every page of a batch."""
        pages = []
        for key, spans in spans_of(batch):
            if not all_inside(self._ordered, spans):
                raise LayoutError(f"pool {batch.pool.name!r}: a page outside registered memory")
            pages.append((batch.pool.prefix + key, spans))
        return pages

    def _put_all(self, pages: list[tuple[StoredPool, list[Page]]]) -> list[list[int]]:
        return [[self._put(pool, key, spans) for key, spans in batch] for pool, batch in pages]

    def _put(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        page = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in spans)
        objects = self._objects()
        with self._shelf.lock:
            held = objects.get(key)
            if held is not None and len(held.page) != pool.layout.page_bytes:
                return Code.WRONG_SIZE
            if held is not None and held.intact:
                return Code.OK
            if held is not None or self._shelf.has_room(len(page)):
                objects[key] = Kept.of(page)
                return Code.OK
        self._shelf.on_full()
        return Code.NO_SPACE

    def _get(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        kept = self._objects().get(key)
        if kept is None:
            return Code.MISSING
        if len(kept.page) != pool.layout.page_bytes:
            return Code.WRONG_SIZE
        if not kept.intact:
            return Code.CORRUPT
        offset = 0
        for address, nbytes in spans:
            ctypes.memmove(address, kept.page[offset : offset + nbytes], nbytes)
            offset += nbytes
        return Code.OK


def _is_whole(pool: StoredPool, kept: Kept | None) -> bool:
    """Whether a get would give the page: a hit that cannot be restored is none."""
    return kept is not None and len(kept.page) == pool.layout.page_bytes and kept.intact
