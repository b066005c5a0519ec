"""UMBP's native client, thinly: asked once what it has, and answers a bool a key.

What is known of the client's behaviour is in this file; what to do about it is the store's
affair. Every failure of the client is False: a dead server looks like all misses.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from hicache_shared.errors import BackendUnavailableError
from hicache_umbp.pages import Pages

INSTALL = (
    "pip install 'hicache-umbp[client]' with Python 3.12 (amd-mori has wheels for CPython 3.10 "
    "and 3.12, on Linux with glibc 2.38 or newer and ROCm 7)"
)

LOG_LEVEL_VARIABLE = "MORI_UMBP_LOG_LEVEL"
"""How much the native client logs to standard output."""


class Native(Protocol):
    """What is used of ``mori.umbp.UMBPClient`` (1.2.4). All calls release the GIL.

    Not in 1.2.2: ``supports_ranged_io`` and the two calls for ranges.
    """

    def batch_exists(self, keys: list[str]) -> list[bool]: ...
    def batch_get_into_ptr(
        self, keys: list[str], ptrs: list[int], sizes: list[int]
    ) -> list[bool]: ...
    def batch_put_from_ptr(
        self, keys: list[str], ptrs: list[int], sizes: list[int]
    ) -> list[bool]: ...
    def batch_put_from_ptr_with_depth(
        self, keys: list[str], ptrs: list[int], sizes: list[int], depths: list[int]
    ) -> list[bool]: ...
    def batch_put_ranges_from_ptr(
        self,
        keys: list[str],
        object_sizes: list[int],
        ptrs: list[list[int]],
        sizes: list[list[int]],
        dst_offsets: list[list[int]],
    ) -> list[bool]: ...
    def batch_get_ranges_into_ptr(
        self,
        keys: list[str],
        ptrs: list[list[int]],
        sizes: list[list[int]],
        src_offsets: list[list[int]],
    ) -> list[bool]: ...
    def register_memory(self, ptr: int, size: int) -> bool: ...


def native_module() -> Any:
    """The module ``mori.umbp``.

    Raises:
        BackendUnavailableError: it is not installed or does not load.
    """
    try:
        return importlib.import_module("mori.umbp")
    except (ImportError, AttributeError) as error:
        raise BackendUnavailableError(
            f"the UMBP client cannot be loaded ({error}); install it: {INSTALL}"
        ) from error


def quiet() -> None:
    """Let the native client log errors only, unless the operator said otherwise."""
    os.environ.setdefault(LOG_LEVEL_VARIABLE, "error")


@dataclass(frozen=True, slots=True)
class Staging:
    """What one native call must fit into, such as the memory between an SSD and its callers: a
    call that needs more fails whole.

    Attributes:
        page_bytes: bytes of a piece; an object takes whole ones.
        pages: pieces there are.
    """

    page_bytes: int
    pages: int

    def parts(self, sizes: list[int]) -> Iterator[range]:
        """Runs of objects that fit at once, one at least."""
        start = used = 0
        for i, size in enumerate(sizes):
            needed = -(-size // self.page_bytes)
            if i > start and used + needed > self.pages:
                yield range(start, i)
                start, used = i, 0
            used += needed
        if start < len(sizes):
            yield range(start, len(sizes))


class UmbpClient:
    """One native client. Data calls may be made from several threads at once.

    Args:
        native: a ``mori.umbp.UMBPClient``.
        staging: what its calls must fit into; None where nothing bounds them.

    Attributes:
        ranged: whether several buffers can be one object (not in 1.2.2).
        takes_depth: whether a put can be told the depth of a page in its chain.
    """

    def __init__(self, native: Native, staging: Staging | None = None) -> None:
        self._native = native
        self._staging = staging
        ranged = getattr(native, "supports_ranged_io", None)
        self.ranged = ranged is not None and bool(ranged())
        self.takes_depth = hasattr(native, "batch_put_from_ptr_with_depth")

    def exists(self, keys: list[str]) -> list[bool]:
        return self._native.batch_exists(keys)

    def get(self, pages: Pages) -> list[bool]:
        """Read objects into memory: True only where an object is exactly as long as its page.

        With ranges a longer object is True as well: page bytes are read from its start.
        """
        if self._staging is None:
            return self._get(pages)
        parts = self._staging.parts(pages.sizes)
        return [answer for part in parts for answer in self._get(pages.subset(part))]

    def _get(self, pages: Pages) -> list[bool]:
        if pages.parts is None:
            return self._native.batch_get_into_ptr(pages.keys, pages.addresses, pages.sizes)
        return self._native.batch_get_ranges_into_ptr(
            pages.keys, pages.addresses, pages.parts, pages.offsets
        )

    def put(self, pages: Pages, depths: list[int] | None = None) -> list[bool]:
        """Store one object a page.

        A key that exists is True and keeps its bytes, whatever its size. A key that comes
        twice is False the second time. True is no promise: what was put is evicted at once
        where all else was read within the client's lease (500 ms).

        Args:
            pages: what to store.
            depths: pages before each in its chain; not for pages of several buffers.
        """
        if self._staging is None:
            return self._put(pages, depths)
        answers: list[bool] = []
        for part in self._staging.parts(pages.sizes):
            deep = None if depths is None else [depths[i] for i in part]
            answers += self._put(pages.subset(part), deep)
        return answers

    def _put(self, pages: Pages, depths: list[int] | None) -> list[bool]:
        if pages.parts is not None:
            return self._native.batch_put_ranges_from_ptr(
                pages.keys, pages.sizes, pages.addresses, pages.parts, pages.offsets
            )
        if depths is not None and self.takes_depth:
            return self._native.batch_put_from_ptr_with_depth(
                pages.keys, pages.addresses, pages.sizes, depths
            )
        return self._native.batch_put_from_ptr(pages.keys, pages.addresses, pages.sizes)

    def register(self, address: int, nbytes: int) -> bool:
        """Make host memory usable for transfers without a copy.

        Raises:
            RuntimeError: of a standalone server's client, for memory of another allocator or
                where the server does not answer.
        """
        return bool(self._native.register_memory(address, nbytes))

    def leak(self) -> None:
        """Keep the native client for ever, since its end would wait for a frozen server.

        It would wait holding the interpreter's lock.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._native))
