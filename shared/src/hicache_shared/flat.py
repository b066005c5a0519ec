"""KV as flat pages: how SGLang moves it through ``dynamic`` without ``"interface_v1": 1``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hicache_shared.errors import TransferError
from hicache_shared.hostmem import byte_view
from hicache_shared.layout import Access
from hicache_shared.registry import PoolRegistry
from hicache_shared.store import Code, StoredPool
from hicache_shared.transfer import Operation, Transfers


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
        self._note(keys)
        codes = self._pools.staging(stored).put(keys, pages.__getitem__, self._mover("set"))
        return not any(codes)

    def get(self, keys: Sequence[str], targets: Sequence[Any] | None) -> list[Any]:
        """Fill ``targets[i]`` (fresh tensors of the pool's kind if None) and return them.

        Returns:
            A tensor a key, None where the page is missing or the target has another size.

        Raises:
            TransferError: another number of targets than keys, or the backend moves KV by
                ``batch_get_v1``.
        """
        pool = self._pools.kv.pool
        pages = list(targets) if targets is not None else []
        pages = pages or [pool.get_dummy_flat_data_page() for _ in keys]
        if len(pages) != len(keys):
            raise TransferError(f"{len(keys)} keys with {len(pages)} targets")
        stored = self._stored()
        if stored is None:
            return pages
        self._note(keys)
        sizes_fit = [page.nbytes == stored.layout.page_bytes for page in pages]

        def take(i: int, page: memoryview) -> None:
            if sizes_fit[i]:
                byte_view(pages[i])[:] = page

        codes = self._pools.staging(stored).get(keys, take, self._mover("get"))
        return [
            page if code == Code.OK and fits else None
            for page, code, fits in zip(pages, codes, sizes_fit, strict=True)
        ]

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
        self._pools.open()
        return stored

    def _mover(self, operation: Operation) -> Any:
        return lambda batch: self._transfers.move_batches(operation, [batch])[0]

    def _note(self, keys: Sequence[str]) -> None:
        self._transfers.note_slow_path("KV is copied in flat form", len(keys))
