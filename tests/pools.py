"""Small pools with gaps between pages, so that a stray write shows, over memory to choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_shared.hostmem import aligned_bytes
from hicache_shared.layout import layouts_of
from hicache_shared.store import KeyBatch, PageBatch, StoredPool

GAP = 64
FILL = 0xEE

Allocate = Callable[[int], npt.NDArray[np.uint8]]


@dataclass
class ArrayPool:
    """A host pool of ``pages`` pages, one slot each, with one array a component."""

    pages: int
    component_bytes: tuple[int, ...]
    allocate: Allocate = aligned_bytes
    layout: str = "page_first"
    page_size: int = 1
    dtype: str = "uint8"
    kv_buffer: list[npt.NDArray[np.uint8]] = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.pages
        self.kv_buffer = [
            self.allocate(self.pages * (nbytes + GAP)).reshape(self.pages, nbytes + GAP)
            for nbytes in self.component_bytes
        ]
        self.wipe()

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        spans = [
            (buffer.ctypes.data + int(i) * buffer.strides[0], nbytes)
            for i in indices
            for buffer, nbytes in zip(self.kv_buffer, self.component_bytes, strict=True)
        ]
        return [address for address, _ in spans], [nbytes for _, nbytes in spans]

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for buffer, nbytes in zip(self.kv_buffer, self.component_bytes, strict=True):
            buffer[:, :nbytes] = rng.integers(0, 256, (self.pages, nbytes), dtype=np.uint8)

    def wipe(self) -> None:
        for buffer in self.kv_buffer:
            buffer[:] = FILL

    def page(self, page: int) -> bytes:
        return b"".join(
            buffer[page, :nbytes].tobytes()
            for buffer, nbytes in zip(self.kv_buffer, self.component_bytes, strict=True)
        )

    def contents(self, pages: list[int]) -> list[bytes]:
        return [self.page(page) for page in pages]

    def gaps_untouched(self) -> bool:
        return all(
            bool((buffer[:, nbytes:] == FILL).all())
            for buffer, nbytes in zip(self.kv_buffer, self.component_bytes, strict=True)
        )


@dataclass
class TestPool:
    """A pool as the store sees it, and its array pool."""

    __test__ = False

    arrays: ArrayPool
    stored: StoredPool

    @classmethod
    def make(
        cls,
        namespace: str,
        name: str,
        pages: int,
        component_bytes: tuple[int, ...],
        allocate: Allocate = aligned_bytes,
    ) -> TestPool:
        arrays = ArrayPool(pages, component_bytes, allocate)
        (layout,) = layouts_of(name, arrays)
        digest = blake2b(repr((namespace, name, component_bytes)).encode(), digest_size=16).digest()
        stored = StoredPool(layout, f"{namespace}/{name}-{digest.hex()}/", namespace, digest)
        return cls(arrays, stored)

    def key(self, page_hash: str) -> str:
        return self.stored.prefix + page_hash

    def ask(self, hashes: list[str]) -> KeyBatch:
        return KeyBatch(self.stored, hashes)

    def pages(
        self, hashes: list[str], pages: list[int] | None = None, depth: int | None = None
    ) -> PageBatch:
        places = list(range(len(hashes))) if pages is None else pages
        return PageBatch(self.stored, hashes, self.stored.layout.addresses(places), depth)


def hashes(count: int, start: int = 0) -> list[str]:
    return [f"{i:064x}" for i in range(start, start + count)]
