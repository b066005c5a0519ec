"""Memory for the trailers of the objects of one call, reused from call to call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_shared.store import PageBatch
from hicache_umbp.pages import TRAILER_BYTES

FEWEST = 256
"""Trailers of the smallest piece of memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """Trailers of one call: ``uint8[n, TRAILER_BYTES]``, and the address of each."""

    bytes: npt.NDArray[np.uint8]
    addresses: list[int]

    def write(self, batches: Sequence[PageBatch]) -> None:
        """Put the trailer of each page's pool in its place."""
        start = 0
        for batch in batches:
            end = start + len(batch.hashes)
            self.bytes[start:end] = np.frombuffer(batch.pool.digest, np.uint8)
            start = end

    def right(self, batches: Sequence[PageBatch]) -> list[bool]:
        """Whether the trailer of each page is its pool's."""
        answers: list[bool] = []
        for batch in batches:
            start = len(answers)
            part = self.bytes[start : start + len(batch.hashes)]
            answers += (part == np.frombuffer(batch.pool.digest, np.uint8)).all(axis=1).tolist()
        return answers


class Trailers:
    """Lends trailers, zeroed. Thread-safe.

    Args:
        allocate: gives host memory that the client can use.
        register: told of each piece of it, once.
    """

    def __init__(
        self,
        allocate: Callable[[int], npt.NDArray[np.uint8]],
        register: Callable[[int, int], None],
    ) -> None:
        self._allocate = allocate
        self._register = register
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, count: int) -> Iterator[Lent]:
        memory = self._take(count)
        try:
            part = memory[:count]
            part[:] = 0
            start = memory.ctypes.data
            yield Lent(part, list(range(start, start + count * TRAILER_BYTES, TRAILER_BYTES)))
        finally:
            with self._lock:
                self._free.append(memory)

    def _take(self, count: int) -> npt.NDArray[np.uint8]:
        with self._lock:
            for i, memory in enumerate(self._free):
                if len(memory) >= count:
                    return self._free.pop(i)
            size = max(FEWEST, 1 << (count - 1).bit_length())
            fresh = self._allocate(size * TRAILER_BYTES)
            self._register(fresh.ctypes.data, fresh.nbytes)
            return fresh.reshape(size, TRAILER_BYTES)
