"""The suite on the reference backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Event
from uuid import uuid4

import pytest

from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.memory import MemoryStore, Shelf
from hicache_shared.memory_backend import MemoryBackend, MemoryConfig, shelf_named
from hicache_shared.store import KeyBatch, PageBatch
from hicache_shared.testing import BackendSuite, Capabilities, Harness, Holding
from hicache_shared.testing.harness import IDENTITY_FIELDS

pytestmark = pytest.mark.backend("memory")


class HeldStore(MemoryStore):
    """A store in which a call can be made to wait."""

    def __init__(self, shelf: Shelf, holding: Holding) -> None:
        super().__init__(shelf)
        self._holding = holding

    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> list[list[bool]]:
        self._holding.pass_by()
        return super().exists(asks, deadline_s)

    def put(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        self._holding.pass_by()
        return super().put(batches, deadline_s)

    def get(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        self._holding.pass_by()
        return super().get(batches, deadline_s)


class MemoryHarness(Harness):
    name = "memory"
    capabilities = Capabilities(
        raw=True,
        limited=True,
        faults=True,
        hold=True,
        restart=True,
        zero_copy=True,
        identity=IDENTITY_FIELDS,
    )
    distributions = ("hicache-shared",)

    def __init__(self) -> None:
        self._shelf_name = uuid4().hex
        self._shelf = shelf_named(self._shelf_name)
        self._holding = Holding()

    def make(self, config: HiCacheStorageConfig) -> MemoryBackend:
        holding = self._holding

        class Held(MemoryBackend):
            def open_store(self, config: MemoryConfig, storage_config: object) -> MemoryStore:
                return HeldStore(shelf_named(config.shelf), holding)

        extra = {**(config.extra_config or {}), "shelf": self._shelf_name}
        config.extra_config = extra
        return Held(config, {})

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

    def hold(self) -> AbstractContextManager[Event]:
        return self._holding.hold()

    def forget(self) -> None:
        self._shelf.objects.clear()

    def raw_keys(self) -> list[str]:
        return list(self._shelf.objects)

    def raw_get(self, key: str) -> bytes | None:
        return self._shelf.objects.get(key)

    def raw_put(self, key: str, value: bytes) -> None:
        self._shelf.objects[key] = value

    def raw_delete(self, key: str) -> None:
        self._shelf.objects.pop(key, None)


class TestMemory(BackendSuite):
    harness_type = MemoryHarness
