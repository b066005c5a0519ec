"""The slow path: pages that have no addresses go through a staging page, flattened.

Two kinds of page come this way: those of pools that list no addresses (Mamba states with
side states), and the flat KV pages that SGLang passes without ``"interface_v1": 1``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_shared.hostmem import aligned_bytes, byte_view
from hicache_shared.store import Code, PageBatch, StoredPool

STAGING_BYTES = 32 << 20
"""Upper bound of a staging area, which holds one page at least."""

Move = Callable[[PageBatch], list[int]]
"""Moves one batch through the store; a :class:`Code` a page."""


class StagingArea:
    """Reused memory for some pages of one stored pool. Thread-safe: one user at a time.

    Args:
        stored: the pool.
        register: told of the memory, once.
        allocate: where the memory comes from.
    """

    def __init__(
        self,
        stored: StoredPool,
        register: Callable[[int, int], None],
        allocate: Callable[[int], npt.NDArray[np.uint8]] = aligned_bytes,
    ) -> None:
        self._stored = stored
        self._page_bytes = stored.layout.page_bytes
        self.capacity_pages = max(1, min(128, STAGING_BYTES // self._page_bytes))
        self._memory = allocate(self.capacity_pages * self._page_bytes)
        self._address = self._memory.ctypes.data
        self._lock = threading.Lock()
        register(self._address, self._memory.nbytes)

    def put(self, keys: Sequence[str], page_of: Callable[[int], Any], move: Move) -> list[int]:
        """Store pages in flat form; ``page_of(i)`` is the flat tensor of ``keys[i]``.

        A tensor of another size than the page is ``WRONG_SIZE`` and is not stored.
        """
        codes: list[int] = []
        for start in range(0, len(keys), self.capacity_pages):
            part = range(start, min(start + self.capacity_pages, len(keys)))
            with self._lock:
                good = [i for i in part if self._fill(i - start, byte_view(page_of(i)))]
                moved = dict(zip(good, move(self._batch(keys, good, start)), strict=True))
            codes.extend(moved.get(i, Code.WRONG_SIZE) for i in part)
        return codes

    def get(
        self, keys: Sequence[str], take: Callable[[int, memoryview], None], move: Move
    ) -> list[int]:
        """Read pages in flat form; ``take(i, bytes)`` is called for each page that came.

        The bytes are valid only during that call.
        """
        codes: list[int] = []
        for start in range(0, len(keys), self.capacity_pages):
            part = range(start, min(start + self.capacity_pages, len(keys)))
            with self._lock:
                moved = move(self._batch(keys, part, start))
                for i, code in zip(part, moved, strict=True):
                    if code == Code.OK:
                        take(i, self._slot(i - start).data)
            codes.extend(moved)
        return codes

    def _batch(self, keys: Sequence[str], which: Sequence[int], start: int) -> PageBatch:
        addresses = [self._address + (i - start) * self._page_bytes for i in which]
        return PageBatch(self._stored, [keys[i] for i in which], addresses)

    def _slot(self, index: int) -> Any:
        return self._memory[index * self._page_bytes : (index + 1) * self._page_bytes]

    def _fill(self, index: int, page: Any) -> bool:
        if page.nbytes != self._page_bytes:
            return False
        self._slot(index)[:] = page
        return True
