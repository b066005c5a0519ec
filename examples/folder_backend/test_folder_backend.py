"""The conformance suite on the folder backend."""

from pathlib import Path
from tempfile import TemporaryDirectory

from folder_backend import FolderBackend

from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.testing import BackendSuite, Capabilities, Harness
from hicache_shared.testing.harness import IDENTITY_FIELDS, with_extra


class FolderHarness(Harness):
    name = "folder"
    capabilities = Capabilities(
        raw=True, restart=True, zero_copy=True, flat=True, identity=IDENTITY_FIELDS
    )

    def __init__(self) -> None:
        self._folder = TemporaryDirectory()

    def make(self, config: HiCacheStorageConfig) -> FolderBackend:
        return FolderBackend(with_extra(config, {"folder": self._folder.name}), {})

    def raw_keys(self) -> list[str]:
        return [str(path) for path in Path(self._folder.name).rglob("*") if path.is_file()]

    def raw_get(self, key: str) -> bytes | None:
        return Path(key).read_bytes() if Path(key).exists() else None

    def raw_put(self, key: str, value: bytes) -> None:
        Path(key).write_bytes(value)

    def raw_delete(self, key: str) -> None:
        Path(key).unlink(missing_ok=True)

    def close(self) -> None:
        self._folder.cleanup()


class TestFolder(BackendSuite):
    harness_type = FolderHarness
