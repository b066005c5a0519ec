"""How SGLang calls a backend: with or without zero copy, with torch tensors where it is there.

The suite speaks in numpy and moves KV by v1. What a backend sees is what SGLang's controller
would give it: without ``"interface_v1": 1`` the KV comes as flat pages, and where SGLang is
installed indices, pages and pools are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hicache_shared.contract import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from hicache_shared.layout import page_slots_of
from hicache_shared.testing.tensors import Tensors

_NAMES = {name.value: name for name in PoolName}


class EngineCalls:
    """A backend behind the calls of SGLang 0.5.23's ``HiCacheController``.

    Args:
        backend: what the harness made.
        zero_copy: whether KV goes by v1, or as flat pages.
        tensors: turns the suite's arrays and pools into what the backend sees.
    """

    def __init__(self, backend: HiCacheStorage, *, zero_copy: bool, tensors: Tensors) -> None:
        self.backend = backend
        self._zero_copy = zero_copy
        self._tensors = tensors
        self._anchor: Any = None
        self._pools: dict[int, Any] = {}

    def register_mem_pool_host(self, pool: Any) -> None:
        self._anchor = self._pool(pool)
        self.backend.register_mem_pool_host(self._anchor)

    def register_mem_host_pool_v2(self, pool: Any, name: str) -> None:
        self.backend.register_mem_host_pool_v2(self._pool(pool), name)

    def on_host_pools_registered(self) -> None:
        self.backend.on_host_pools_registered()

    # -- KV --------------------------------------------------------------------------------

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return self.backend.batch_exists(keys, _told(extra_info))

    def batch_set_v1(
        self, keys: list[str], indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store host pages of the anchor; without zero copy, one answer for all of them."""
        if self._zero_copy:
            return self.backend.batch_set_v1(keys, self._tensors.array(indices), _told(extra_info))
        pages = [self._anchor.get_data_page(index) for index in self._firsts(indices, keys)]
        return [self.backend.batch_set(keys, pages)] * len(keys)

    def batch_get_v1(
        self, keys: list[str], indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fill host pages of the anchor; without zero copy, those that ``batch_get`` gave."""
        if self._zero_copy:
            return self.backend.batch_get_v1(keys, self._tensors.array(indices), _told(extra_info))
        targets = [self._anchor.get_dummy_flat_data_page() for _ in keys]
        found = self.backend.batch_get(keys, targets) or [None] * len(keys)
        for index, page in zip(self._firsts(indices, keys), found, strict=True):
            if page is not None:
                self._anchor.set_from_flat_data_page(index, page)
        return [page is not None for page in found]

    def batch_set(self, keys: list[str], pages: Sequence[Any]) -> bool:
        return self.backend.batch_set(keys, [self._tensors.array(page) for page in pages])

    def batch_get(self, keys: list[str], targets: Sequence[Any]) -> list[Any]:
        """One flat page or None a key. An answer of None stands for no page at all."""
        found = self.backend.batch_get(keys, [self._tensors.array(target) for target in targets])
        return [self._tensors.plain(page) for page in found or [None] * len(keys)]

    def set(self, key: str, page: Any) -> bool:
        return self.backend.set(key, self._tensors.array(page))

    def get(self, key: str, target: Any) -> Any:
        return self._tensors.plain(self.backend.get(key, self._tensors.array(target)))

    def exists(self, key: str) -> bool:
        return self.backend.exists(key)

    def seen(self, pages: Sequence[Any]) -> list[Any]:
        """Flat pages as the backend sees them."""
        return [self._tensors.array(page) for page in pages]

    # -- sidecars ------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The answer as SGLang reads it: without a list, every prefix up to the hit."""
        seen = None if transfers is None else self._seen(transfers)
        result = self.backend.batch_exists_v2(keys, seen, _told(extra_info))
        if result.restorable_prefix_pages is None:
            return replace(result, restorable_prefix_pages=list(range(1, result.kv_hit_pages + 1)))
        return result

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self.backend.batch_set_v2(self._seen(transfers), extra_info=_told(extra_info))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self.backend.batch_get_v2(self._seen(transfers), extra_info=_told(extra_info))

    # -- the rest ----------------------------------------------------------------------------------

    def get_stats(self) -> Any:
        return self.backend.get_stats()

    def clear(self) -> None:
        self.backend.clear()

    def close(self) -> None:
        """Close the backend, if it can be; SGLang asks for no more."""
        close = getattr(self.backend, "close", None)
        if close is not None:
            close()

    def _pool(self, pool: Any) -> Any:
        """A pool as the backend sees it: the same object each time."""
        if id(pool) not in self._pools:
            self._pools[id(pool)] = self._tensors.pool(pool)
        return self._pools[id(pool)]

    def _firsts(self, indices: Any, keys: list[str]) -> list[Any]:
        """The first slot of each page."""
        slots = self._tensors.array(indices)
        return [slots[page * page_slots_of(self._anchor)] for page in range(len(keys))]

    def _seen(self, transfers: list[PoolTransfer]) -> list[PoolTransfer]:
        """With tensors for arrays, and SGLang's own names of pools, which are no plain strings."""
        return [
            replace(
                transfer,
                name=_NAMES.get(str(transfer.name), transfer.name),
                host_indices=self._tensors.array(transfer.host_indices),
            )
            for transfer in transfers
        ]


def _told(extra_info: HiCacheStorageExtraInfo | None) -> HiCacheStorageExtraInfo:
    """SGLang passes one in every call, with no prefix keys unless it is to pass them."""
    return extra_info if extra_info is not None else HiCacheStorageExtraInfo()
