"""The class that SGLang loads for ``--hicache-storage-backend mori`` after an opt-in.

SGLang allows pools to its in-tree ``mori`` that it keeps from ``dynamic`` backends; those that
this adapter cannot store are refused here, by name. See ``hicache_shared.takeover``.
"""

from __future__ import annotations

from typing import Any

from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.errors import LayoutError
from hicache_umbp.backend import UmbpBackend


class MoriBackend(UmbpBackend):
    """UMBP under SGLang's own name for it.

    Args:
        storage_config: ranks, model name and extra configuration.
        host_pool: the primary host pool, or None.

    Raises:
        LayoutError: the host pool is made of page envelopes.
        ConfigError, BackendUnavailableError: as :class:`UmbpBackend`.
    """

    in_tree_name = "mori"

    def __init__(self, storage_config: HiCacheStorageConfig, host_pool: Any = None) -> None:
        # Before the client exists: SGLang takes back the whole attachment when this raises.
        _refuse_envelopes(host_pool)
        super().__init__(storage_config, host_pool)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        _refuse_envelopes(mem_pool_host)
        super().register_mem_pool_host(mem_pool_host)


def _refuse_envelopes(pool: Any) -> None:
    """SGLang makes such pools for ``mori`` with --enable-unified-memory (0.5.22 and later)."""
    if getattr(pool, "stores_page_envelope", False):
        raise LayoutError(
            f"host pool {pool.pool_label!r} is made of page envelopes, which move in memory: "
            "hicache-umbp cannot store them; leave out --enable-unified-memory, or leave 'mori' "
            "out of HICACHE_ADAPTERS_OVERRIDE for SGLang's own adapter"
        )
