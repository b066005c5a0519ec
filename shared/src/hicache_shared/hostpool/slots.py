"""Allocation of token slots, whole pages at a time."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Any

import numpy as np

from hicache_shared.errors import TransferError
from hicache_shared.hostpool.memory import IndexArray


class Slots:
    """The free list of one pool. Thread-safe.

    Slots are handed out page by page, the longest free first, as SGLang does. SGLang
    looks for a double free in some of its pools only; here it is always refused.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._offsets = np.arange(page_size, dtype=np.int64)
        self._used = np.zeros(pages, dtype=bool)
        self._free = deque(range(pages))
        self._lock = Lock()

    def clear(self) -> None:
        """Make every slot free, whoever holds it."""
        with self._lock:
            self._used[:] = False
            self._free = deque(range(len(self._used)))

    def available(self) -> int:
        """How many slots are free."""
        return len(self._free) * self._page_size

    def alloc(self, need_size: int) -> IndexArray | None:
        """``need_size`` slots, ``int64[need_size]``, or None if fewer are free.

        Raises:
            TransferError: ``need_size`` is not a multiple of the page size.
        """
        pages, rest = divmod(need_size, self._page_size)
        if rest or pages < 0:
            raise TransferError(
                f"slots are allocated in whole pages of {self._page_size}, asked for {need_size}"
            )
        with self._lock:
            if pages > len(self._free):
                return None
            taken = np.array([self._free.popleft() for _ in range(pages)], dtype=np.int64)
            self._used[taken] = True
        return (taken[:, None] * self._page_size + self._offsets).reshape(-1)

    def free(self, indices: Any) -> int:
        """Give slots back; returns how many.

        Raises:
            TransferError: the slots are not whole pages of this pool in order, or a page
                is not allocated. Nothing is freed then.
        """
        pages = self._whole_pages(np.asarray(indices, dtype=np.int64).reshape(-1))
        with self._lock:
            idle = sorted({page for page in pages if not self._used[page]})
            if idle or len(set(pages)) < len(pages):
                raise TransferError(
                    f"double free: pages {idle or sorted(pages)} are not allocated "
                    "or are named twice; free each page once"
                )
            self._used[pages] = False
            self._free.extend(pages)
        return len(pages) * self._page_size

    def _whole_pages(self, slots: IndexArray) -> list[int]:
        if slots.size % self._page_size:
            raise TransferError(
                f"slots are freed in whole pages of {self._page_size}, got {slots.size}"
            )
        rows = slots.reshape(-1, self._page_size)
        pages, rest = np.divmod(rows[:, 0], self._page_size)
        inside = (pages >= 0) & (pages < len(self._used)) & (rest == 0)
        if not inside.all() or (rows - rows[:, :1] != self._offsets).any():
            raise TransferError(
                f"slots to free are not whole pages of {self._page_size} inside a pool of "
                f"{len(self._used)} pages"
            )
        result: list[int] = pages.tolist()
        return result
