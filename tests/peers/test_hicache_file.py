"""The suite on SGLang's ``HiCacheFile`` (``--hicache-storage-backend file``)."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hicache_shared.testing import BackendSuite, Capabilities
from tests.peers.peer import FilesHarness


class HiCacheFileHarness(FilesHarness):
    name = "HiCacheFile"
    kind = "file"
    pattern = "*.bin"
    capabilities = Capabilities(raw=True, restart=True, flat=True)
    requires = ("sglang", "torch")
    distributions = ("sglang",)

    def __init__(self) -> None:
        super().__init__()
        self._temporary = TemporaryDirectory(prefix="hicache_file_")
        self.folder = Path(self._temporary.name)
        self.extra_config = {"file_storage_path": self._temporary.name}

    def forget(self) -> None:
        for key in self.raw_keys():
            self.raw_delete(key)

    def close(self) -> None:
        self._temporary.cleanup()


class TestHiCacheFile(BackendSuite):
    harness_type = HiCacheFileHarness
