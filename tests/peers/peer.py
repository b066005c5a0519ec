"""Backends of others, made as SGLang 0.5.23 makes them, for the same suite as ours."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from hicache_shared.contract import HiCacheStorage, HiCacheStorageConfig
from hicache_shared.errors import ConfigError
from hicache_shared.testing import Harness
from hicache_shared.testing.harness import with_extra

PAGE_LAYOUTS = ("page_first", "page_first_direct", "page_head")
"""SGLang switches Mooncake away from layer_first, which UMBP refuses."""

DCP_KINDS = ("file", "mooncake")
"""With others SGLang's controller refuses decode context parallelism."""


class PeerHarness(Harness):
    """Makes backends by SGLang's own factory, with the anchor pool.

    Attributes:
        kind: SGLang's ``--hicache-storage-backend``.
        extra_config: SGLang's, added to what the suite gives.
    """

    kind: ClassVar[str]

    def __init__(self) -> None:
        self.extra_config: dict[str, Any] = {}
        module: Any = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory")
        self._factory = module.StorageBackendFactory

    def make(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        return self.make_for(config, None)

    def make_for(
        self, config: HiCacheStorageConfig, anchor: Any, *, own_client: bool = False
    ) -> HiCacheStorage:
        if config.dcp_size > 1 and self.kind not in DCP_KINDS:
            raise ConfigError(f"SGLang refuses decode context parallelism with {self.kind!r}")
        config = with_extra(config, self.extra_config)
        backend: HiCacheStorage = self._factory.create_backend(self.kind, config, anchor)
        return backend


class FilesHarness(PeerHarness):
    """A backend that keeps each object in a file: the key is its path in the folder.

    Attributes:
        pattern: of the objects' file names.
        folder: all files are under it.
    """

    pattern: ClassVar[str]
    folder: Path

    def raw_keys(self) -> list[str]:
        found = self.folder.rglob(self.pattern)
        return sorted(str(path.relative_to(self.folder)) for path in found if path.is_file())

    def raw_get(self, key: str) -> bytes | None:
        path = self.folder / key
        return path.read_bytes() if path.exists() else None

    def raw_put(self, key: str, value: bytes) -> None:
        (self.folder / key).write_bytes(value)

    def raw_delete(self, key: str) -> None:
        (self.folder / key).unlink(missing_ok=True)


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a module, replaced for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
