"""The harness of the reference backend: every capability that process memory can have.

The suite is tested with it: the backend passes everything, and each of many broken ones derived
from it fails the test that is there for its fault.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar
from uuid import uuid4

from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.memory import Kept, Shelf
from hicache_shared.memory_backend import MemoryBackend, shelf_named
from hicache_shared.testing.harness import (
    IDENTITY_FIELDS,
    Capabilities,
    Harness,
    Holding,
    corrupted,
    with_extra,
)

FILLER = "filler"
"""Key of the object that takes up what is left of a limited shelf."""


class MemoryHarness(Harness):
    """Backends over one shelf in this process.

    Attributes:
        backend_type: what is made.
    """

    name = "memory"
    capabilities = Capabilities(
        raw=True,
        limited=True,
        faults=True,
        hold=True,
        relief=True,
        restart=True,
        keeps=True,
        checksums=True,
        zero_copy=True,
        flat=True,
        identity=IDENTITY_FIELDS,
    )
    distributions = ("hicache-shared",)
    backend_type: ClassVar[type[MemoryBackend]] = MemoryBackend

    def __init__(self) -> None:
        self._shelf_name = uuid4().hex
        self._shelf = shelf_named(self._shelf_name)
        self._limited = Shelf()
        self._holding = Holding()
        self._shelf.on_call = self._holding.pass_by

    def make(self, config: HiCacheStorageConfig) -> MemoryBackend:
        return self._on(self._shelf_name, config)

    @contextmanager
    def make_limited(
        self, config: HiCacheStorageConfig, wanted_bytes: int
    ) -> Iterator[tuple[MemoryBackend, int]]:
        name = uuid4().hex
        self._limited = shelf_named(name)
        self._limited.capacity_bytes = wanted_bytes
        backend = self._on(name, config)
        try:
            yield backend, wanted_bytes
        finally:
            backend.close()
            self._limited.objects.clear()

    @contextmanager
    def fault(self) -> Iterator[None]:
        self._shelf.broken = True
        try:
            yield
        finally:
            self._shelf.broken = False

    def hold(self) -> AbstractContextManager[threading.Event]:
        return self._holding.hold()

    @contextmanager
    def relieve(self) -> Iterator[threading.Event]:
        shelf, refused = self._limited, threading.Event()

        def on_full() -> None:
            shelf.objects.pop(FILLER, None)
            refused.set()

        free_bytes = (shelf.capacity_bytes or 0) - shelf.used_bytes
        shelf.objects[FILLER] = Kept.of(bytes(free_bytes))
        shelf.on_full = on_full
        yield refused

    def forget(self) -> None:
        self._shelf.objects.clear()

    def raw_keys(self) -> list[str]:
        return list(self._shelf.objects)

    def raw_get(self, key: str) -> bytes | None:
        kept = self._shelf.objects.get(key)
        return None if kept is None else kept.page

    def raw_put(self, key: str, value: bytes) -> None:
        self._shelf.objects[key] = Kept.of(value)

    def raw_delete(self, key: str) -> None:
        self._shelf.objects.pop(key, None)

    def raw_corrupt(self, key: str) -> None:
        """Change a byte, and leave the checksum as it was."""
        kept = self._shelf.objects[key]
        self._shelf.objects[key] = Kept(corrupted(kept.page), kept.crc)

    def _on(self, shelf_name: str, config: HiCacheStorageConfig) -> MemoryBackend:
        return self.backend_type(with_extra(config, {"shelf": shelf_name}), {})
