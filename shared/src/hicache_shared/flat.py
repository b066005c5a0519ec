"""KV as flat pages: how SGLang moves it through ``dynamic`` without ``"interface_v1": 1``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hicache_shared.errors import TransferError
from hicache_shared.hostmem import byte_view
from hicache_shared.layout import Access
from hicache_shared.plan import Operation
from hicache_shared.registry import PoolRegistry
from hicache_shared.staging import Move, StagingArea
from hicache_shared.store import Code, StoredPool
from hicache_shared.transfer import Transfers


class FlatPages:
    """Stores and reads flat tensors of the primary pool. Thread-safe."""

    def __init__(self, pools: PoolRegistry, transfers: Transfers) -> None:
        self._pools = pools
        self._transfers = transfers

    def set(self, keys: Sequence[str], values: Sequence[Any] | None) -> bool:
        """Store ``values[i]``, a contiguous tensor or array of a page's bytes, under ``keys[i]``.

        Returns:
            Whether all were stored; for a logical anchor, whose pages are empty, always.

        Raises:
            TransferError: another number of values than keys, or the backend moves KV by
                ``batch_set_v1``.
        """
        pages = list(values) if values is not None else []
        if len(pages) != len(keys):
            raise TransferError(f"{len(keys)} keys with {len(pages)} flat pages")
        stored = self._stored()
        if stored is None:
            return True
        codes = self._move(
            "set", stored, keys, lambda area, move: area.put(keys, pages.__getitem__, move)
        )
        return not any(codes)

    def get(self, keys: Sequence[str], targets: Sequence[Any] | None) -> list[Any]:
        """Fill ``targets[i]`` (fresh tensors of the pool's kind if None) and return them.

        Returns:
            A tensor a key, None where the page is missing or the target has another size.

        Raises:
            TransferError: another number of targets than keys, or the backend moves KV by
                ``batch_get_v1``.
        """
        if targets is None:
            pool = self._pools.kv.pool
            pages = [pool.get_dummy_flat_data_page() for _ in keys]
        else:
            pages = list(targets)
        if len(pages) != len(keys):
            raise TransferError(f"{len(keys)} keys with {len(pages)} targets")
        stored = self._stored()
        if stored is None:
            return pages
        fitting = [i for i, page in enumerate(pages) if page.nbytes == stored.layout.page_bytes]

        def take(i: int, page: memoryview) -> None:
            byte_view(pages[fitting[i]])[:] = page

        def get(area: StagingArea, move: Move) -> list[int]:
            codes = [int(Code.WRONG_SIZE)] * len(keys)
            found = area.get([keys[i] for i in fitting], take, move)
            for i, code in zip(fitting, found, strict=True):
                codes[i] = code
            return codes

        codes = self._move("get", stored, keys, get)
        return [page if code == Code.OK else None for page, code in zip(pages, codes, strict=True)]

    def _stored(self) -> StoredPool | None:
        """The primary pool's flat form; None for a logical anchor."""
        kv = self._pools.kv
        if kv.logical:
            return None
        (stored, *_) = kv.stored
        if stored.layout.access is not Access.STAGED:
            raise TransferError(
                'flat KV pages on a backend with "interface_v1": 1, which moves KV by '
                "batch_get_v1 and batch_set_v1"
            )
        return stored

    def _move(
        self,
        operation: Operation,
        stored: StoredPool,
        keys: Sequence[str],
        work: Callable[[StagingArea, Move], list[int]],
    ) -> list[int]:
        """A code a page, counted; see :meth:`Transfers.staged`."""
        started, until = time.perf_counter(), self._transfers.until()
        self._transfers.note_slow_path("KV is copied in flat form", len(keys))
        codes = self._transfers.staged(operation, stored, len(keys), work, until)
        self._transfers.note_flat(operation, stored, codes, time.perf_counter() - started)
        return codes
