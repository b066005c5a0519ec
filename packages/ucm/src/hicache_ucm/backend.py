"""The class that SGLang loads."""

from __future__ import annotations

from typing import ClassVar

from hicache_shared.backend import HiCacheBackend
from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.errors import ConfigError
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
            ConfigError: the root is another rank's too, and would have no locks.
            BackendUnavailableError: UCM is not installed, or the root cannot be used.
        """
        if not config.shared and storage_config.dp_rank > 0:
            raise ConfigError(
                f"shared: this is data-parallel rank {storage_config.dp_rank}, which stores the "
                "same pages as the others, and without locks two at a time publish a mix of both; "
                "leave shared out"
            )
        return UcmStore(native_module(), config)
