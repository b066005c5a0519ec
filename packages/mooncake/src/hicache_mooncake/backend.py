"""The class that SGLang loads."""

from __future__ import annotations

from typing import ClassVar

from hicache_mooncake.client import connect
from hicache_mooncake.config import MooncakeConfig
from hicache_mooncake.store import MooncakeStore
from hicache_shared.backend import HiCacheBackend
from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.store import PageStore


class MooncakeBackend(HiCacheBackend):
    """SGLang HiCache storage on Mooncake Store."""

    name: ClassVar[str] = "mooncake"
    config_type: ClassVar[type[MooncakeConfig]] = MooncakeConfig

    def open_store(self, config: MooncakeConfig, storage_config: HiCacheStorageConfig) -> PageStore:
        """Connect this rank's client.

        Raises:
            ConfigError: the device mapping leaves this rank out.
            BackendUnavailableError: no client or no master.
        """
        rank = storage_config
        client = connect(
            config,
            segment_bytes=config.segment_bytes(rank.tp_size * rank.pp_size),
            device=config.device_for(rank.tp_rank),
            offload=config.offload_folder(
                rank.dp_rank, rank.tp_rank, rank.pp_rank, rank.attn_cp_rank
            ),
        )
        return MooncakeStore(client, retry_start_s=config.retry_start_ms / 1000)
