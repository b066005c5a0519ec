"""The reference backend: HiCache over process memory. For tests and demonstrations."""

from __future__ import annotations

import threading

from pydantic import Field

from hicache_shared.backend import HiCacheBackend
from hicache_shared.config import CommonConfig
from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.memory import MemoryStore, Shelf

_shelves: dict[str, Shelf] = {}
_shelves_lock = threading.Lock()


class MemoryConfig(CommonConfig):
    """Settings of the reference backend."""

    shelf: str = Field(
        "default", description="Name of the process-wide shelf that backends of one name share."
    )


class MemoryBackend(HiCacheBackend):
    """Keeps pages in a process-wide dictionary. Nothing outlives the process."""

    name = "memory"
    config_type = MemoryConfig

    def open_store(self, config: MemoryConfig, storage_config: HiCacheStorageConfig) -> MemoryStore:
        with _shelves_lock:
            return MemoryStore(_shelves.setdefault(config.shelf, Shelf()))
