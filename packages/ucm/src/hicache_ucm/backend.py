"""The class that SGLang loads."""

from __future__ import annotations

from typing import ClassVar

from hicache_shared.backend import HiCacheBackend
from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.store import PageStore
from hicache_ucm.client import native_module
from hicache_ucm.config import UcmConfig
from hicache_ucm.store import UcmStore


class UcmBackend(HiCacheBackend):
    """SGLang HiCache storage on UCM's PosixStore."""

    name: ClassVar[str] = "ucm"
    config_type: ClassVar[type[UcmConfig]] = UcmConfig

    def open_store(self, config: UcmConfig, storage_config: HiCacheStorageConfig) -> PageStore:
        """Look at the root; pools open their folders as they come.

        Raises:
            BackendUnavailableError: UCM is not installed, or the root cannot be used.
        """
        return UcmStore(native_module(), config)
