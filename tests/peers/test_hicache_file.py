"""The suite on SGLang's ``HiCacheFile`` (``--hicache-storage-backend file``)."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hicache_shared.testing import BackendSuite, Capabilities
from tests.peers.peer import Files, PeerHarness


class HiCacheFileHarness(PeerHarness):
    name = "HiCacheFile"
    kind = "file"
    capabilities = Capabilities(raw=True, restart=True, flat=True)
    requires = ("sglang", "torch")
    distributions = ("sglang",)

    def __init__(self) -> None:
        super().__init__()
        self._folder = TemporaryDirectory(prefix="hicache_file_")
        self._files = Files(Path(self._folder.name), "*.bin")
        self.extra_config = {"file_storage_path": self._folder.name}

    def forget(self) -> None:
        self._files.empty()

    def raw_keys(self) -> list[str]:
        return self._files.keys()

    def raw_get(self, key: str) -> bytes | None:
        return self._files.get(key)

    def raw_put(self, key: str, value: bytes) -> None:
        self._files.put(key, value)

    def raw_delete(self, key: str) -> None:
        self._files.delete(key)

    def close(self) -> None:
        self._folder.cleanup()


class TestHiCacheFile(BackendSuite):
    harness_type = HiCacheFileHarness
