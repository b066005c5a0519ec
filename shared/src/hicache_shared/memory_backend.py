"""The reference backend: HiCache over process memory. For tests and demonstrations."""

from __future__ import annotations

import threading
from typing import ClassVar

from hicache_shared.backend import HiCacheBackend
from hicache_shared.config import CommonConfig, setting
from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.memory import MemoryStore, Shelf

_shelves: dict[str, Shelf] = {}
_shelves_lock = threading.Lock()


def shelf_named(name: str) -> Shelf:
    """The process-wide shelf of that name."""
    with _shelves_lock:
        return _shelves.setdefault(name, Shelf())


class MemoryConfig(CommonConfig):
    """Settings of the reference backend."""

    shelf: str = setting(
        "default",
        env="HICACHE_MEMORY_SHELF",
        example="default",
        description="Name of the process-wide shelf that backends of one name share.",
    )


class MemoryBackend(HiCacheBackend):
    """Keeps pages in a process-wide dictionary. Nothing outlives the process."""

    name = "memory"
    config_type = MemoryConfig
    store_type: ClassVar[type[MemoryStore]] = MemoryStore

    def open_store(self, config: MemoryConfig, storage_config: HiCacheStorageConfig) -> MemoryStore:
        return self.store_type(shelf_named(config.shelf))
