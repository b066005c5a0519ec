"""Reading and writing behind the contract: objects by the key that a backend gave them.

The native client can neither list nor delete, and keeps what a key holds. So what backends
put is noted on its way, and an object that is planted or deleted leaves its place: from then
on its key stands for another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hicache_shared.errors import HiCacheError
from hicache_shared.hostmem import aligned_bytes
from hicache_umbp.client import UmbpClient
from hicache_umbp.pages import TRAILER_BYTES, Pages

MOST_PLACES = 8
"""Places of memory that are tried before a registration counts as refused."""


class RawAccessError(HiCacheError, RuntimeError):
    """The client refused an access behind the contract."""


class RawUmbp:
    """A client to lend to backends in a test, and a way behind them. Thread-safe but for
    planting and deleting.

    Args:
        client: moves all bytes.
        allocate: gives memory that it can use.
    """

    def __init__(
        self,
        client: UmbpClient,
        *,
        allocate: Callable[[int], npt.NDArray[np.uint8]] = aligned_bytes,
    ) -> None:
        self.client = client
        self.ranged = client.ranged
        self.takes_depth = client.takes_depth
        self._allocate = allocate
        self._own: npt.NDArray[np.uint8] | None = None
        self._sizes: dict[str, int] = {}
        self._trailed: set[str] = set()
        self._moved: dict[str, str] = {}
        self._numbers = itertools.count()

    # -- as a backend calls it --------------------------------------------------------------

    def exists(self, keys: list[str]) -> list[bool]:
        return self.client.exists(self._places(keys))

    def get(self, pages: Pages) -> list[bool]:
        return self.client.get(replace(pages, keys=self._places(pages.keys)))

    def put(self, pages: Pages, depths: list[int] | None = None) -> list[bool]:
        answers = self.client.put(replace(pages, keys=self._places(pages.keys)), depths)
        self._sizes.update(zip(pages.keys, pages.sizes, strict=True))
        if pages.parts is not None:
            self._trailed.update(pages.keys)
        return answers

    def register(self, address: int, nbytes: int) -> bool:
        return self.client.register(address, nbytes)

    def leak(self) -> None:
        self.client.leak()

    # -- behind it --------------------------------------------------------------------------

    def raw_keys(self, prefix: str = "") -> list[str]:
        """Keys that begin with ``prefix`` and whose objects are there, in order."""
        keys = sorted(key for key in list(self._sizes) if key.startswith(prefix))
        return [key for key, there in zip(keys, self.exists(keys), strict=True) if there]

    def raw_get(self, key: str) -> bytes | None:
        """The object's bytes without a trailer, None where there is none."""
        whole = self._whole(key)
        if whole is None or key not in self._trailed:
            return whole
        return whole[:-TRAILER_BYTES]

    def raw_put(self, key: str, data: bytes) -> None:
        """Let ``key`` hold ``data``, with the trailer of the object that it held.

        Raises:
            RawAccessError: the client refused.
        """
        whole = self._whole(key)
        trailer = whole[-TRAILER_BYTES:] if whole and key in self._trailed else b""
        self.raw_delete(key)
        value = np.frombuffer(data + trailer, np.uint8)
        self._sizes[key] = value.nbytes
        memory = self._borrowed(value.nbytes)
        memory[:] = value
        place = self._places([key])
        self.client.put(Pages(place, [value.nbytes], [memory.ctypes.data]))
        if self.client.exists(place) != [True]:
            raise RawAccessError(f"putting {value.nbytes} bytes under {key!r} stored nothing")

    def raw_delete(self, key: str) -> None:
        """Let ``key`` hold nothing."""
        self._moved[key] = f"{key}~{next(self._numbers)}"

    def _whole(self, key: str) -> bytes | None:
        size = self._sizes.get(key)
        place = self._places([key])
        if size is None or self.client.exists(place) != [True]:
            return None
        memory = self._borrowed(size)
        got = self.client.get(Pages(place, [size], [memory.ctypes.data]))
        if got != [True]:
            raise RawAccessError(f"{key!r} has another size than the {size} bytes it was put with")
        return memory.tobytes()

    def _borrowed(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory of this object's own, registered once.

        A client that outlives the pools of others still knows theirs, and refuses memory that
        begins where one of them did; so another place is tried.
        """
        refused: list[npt.NDArray[np.uint8]] = []
        while self._own is None or self._own.nbytes < nbytes:
            memory = self._allocate(max(nbytes, 16 << 20))
            if self.client.register(memory.ctypes.data, memory.nbytes):
                self._own = memory
            elif len(refused) == MOST_PLACES:
                raise RawAccessError(f"registering {memory.nbytes} bytes failed")
            else:
                refused.append(memory)
        return self._own[:nbytes]

    def _places(self, keys: list[str]) -> list[str]:
        if not self._moved:
            return keys
        return [self._moved.get(key, key) for key in keys]
