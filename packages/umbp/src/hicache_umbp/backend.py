"""The class that SGLang loads."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from hicache_shared.backend import HiCacheBackend
from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.errors import BackendUnavailableError, ConfigError
from hicache_shared.hostmem import aligned_bytes
from hicache_umbp.config import UNIX, UmbpConfig
from hicache_umbp.epoch import Epochs, NoEpochs, PrivateEpochs, SharedEpochs
from hicache_umbp.memory import shared_bytes
from hicache_umbp.modes import mode_of
from hicache_umbp.peer import State
from hicache_umbp.session import PULSE_S, Session
from hicache_umbp.store import UmbpStore


class UmbpBackend(HiCacheBackend):
    """SGLang HiCache storage on UMBP."""

    name: ClassVar[str] = "umbp"
    config_type: ClassVar[type[UmbpConfig]] = UmbpConfig

    def open_store(self, config: UmbpConfig, storage_config: HiCacheStorageConfig) -> UmbpStore:
        """Look for the client and its server; the client is made when the pools are known.

        Raises:
            ConfigError: a setting does not work with the installed client or on this rank.
            BackendUnavailableError: no client or no server.
        """
        mode = mode_of(config, storage_config)
        if mode.peer is not None and (state := mode.peer.state(PULSE_S)) is not State.UP:
            raise BackendUnavailableError(
                f"UMBP's server at {mode.peer.name} {state.value}; start it, and check its address"
            )
        if mode.peer is None and storage_config.is_mla_model and storage_config.tp_size > 1:
            raise ConfigError(
                f"an embedded UMBP store is private to its rank, and SGLang lets one of the "
                f"{storage_config.tp_size} TP ranks write this model's pools, so the others would "
                "never hit; set standalone_address or master_address"
            )
        epochs = epochs_of(config)
        if isinstance(epochs, SharedEpochs) and epochs.mounted_alone():
            raise ConfigError(
                f"standalone_address: {config.standalone_address} is mounted without its folder, "
                "so a clear by another client would not be seen here; mount the folder"
            )
        return UmbpStore(
            Session(mode),
            epochs,
            allocate=shared_bytes if config.standalone_address else aligned_bytes,
            retry_start_s=config.retry_start_ms / 1000,
        )

    @property
    def unregistered_bytes(self) -> int:
        """Host memory that the client refused; its pages are copied once more."""
        store = self._store
        return store.unregistered_bytes if isinstance(store, UmbpStore) else 0


def epochs_of(config: UmbpConfig) -> Epochs:
    """How a clear works in the mode of these settings."""
    if config.standalone_address:
        return SharedEpochs(Path(config.standalone_address.removeprefix(UNIX)))
    return NoEpochs() if config.master_address else PrivateEpochs()
