"""The suite on the reference backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest

from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.memory import MemoryStore, Shelf
from hicache_shared.memory_backend import MemoryBackend, MemoryConfig, shelf_named
from hicache_shared.testing import BackendSuite, Capabilities, Harness

pytestmark = pytest.mark.backend("memory")


class MemoryHarness(Harness):
    name = "memory"
    capabilities = Capabilities(raw=True, limited=True, faults=True)

    def __init__(self) -> None:
        self._shelf_name = uuid4().hex
        self._shelf = shelf_named(self._shelf_name)

    def make(self, config: HiCacheStorageConfig) -> MemoryBackend:
        extra = {**(config.extra_config or {}), "shelf": self._shelf_name}
        config.extra_config = extra
        return MemoryBackend(config, {})

    @contextmanager
    def make_limited(
        self, config: HiCacheStorageConfig, wanted_bytes: int
    ) -> Iterator[tuple[MemoryBackend, int]]:
        class Limited(MemoryBackend):
            def open_store(self, config: MemoryConfig, storage_config: object) -> MemoryStore:
                return MemoryStore(Shelf(), wanted_bytes)

        backend = Limited(config, {})
        try:
            yield backend, wanted_bytes
        finally:
            backend.close()

    @contextmanager
    def fault(self) -> Iterator[None]:
        self._shelf.broken = True
        try:
            yield
        finally:
            self._shelf.broken = False

    def raw_keys(self) -> list[str]:
        return list(self._shelf.objects)

    def raw_get(self, key: str) -> bytes | None:
        return self._shelf.objects.get(key)

    def raw_put(self, key: str, value: bytes) -> None:
        self._shelf.objects[key] = value

    def raw_delete(self, key: str) -> None:
        self._shelf.objects.pop(key, None)


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with MemoryHarness() as harness:
        yield harness


class TestMemory(BackendSuite):
    pass
