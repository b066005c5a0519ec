"""The v2 storage contract: SGLang's own types where it is installed, equal ones where not.

SGLang's dynamic factory accepts a class only if it is a subclass of *its*
``HiCacheStorage``, and its controller compares with *its* enums, so inside SGLang
these names must be SGLang's objects. Pool names are strings: a name this release
does not know works like any other.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from hicache_shared._mirror import StorageMetrics

SGLANG_INSTALLED = importlib.util.find_spec("sglang") is not None

if TYPE_CHECKING or not SGLANG_INSTALLED:
    from hicache_shared._mirror import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
        SidecarPoolSpec,
    )
else:
    # An SGLang that is installed but does not import is an error to show, not a
    # reason to fall back: SGLang would refuse our classes without saying why.
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
        SidecarPoolSpec,
    )

STORAGE_BATCH_PAGES = 128
"""Most pages SGLang's controller passes in one v1 call (``STORAGE_BATCH_SIZE``)."""


def new_storage_metrics() -> StorageMetrics:
    """An empty record of the type that SGLang's scheduler asserts.

    SGLang's class is imported here and not above, since its module pulls in half the
    engine; whoever calls ``get_stats`` inside SGLang has loaded it long before.
    """
    if not SGLANG_INSTALLED:
        return StorageMetrics()
    from sglang.srt.observability import metrics_collector

    metrics: StorageMetrics = metrics_collector.StorageMetrics()
    return metrics


BLOCK_GROUPS = "block_groups"
"""The value of ``PoolHitPolicy.BLOCK_GROUPS``, a member that SGLang has since 0.5.22; a
transfer has ``block_pages`` and ``group_pages`` since then too."""


def dcp_place(config: HiCacheStorageConfig) -> tuple[int, int]:
    """Rank and size under decode context parallelism, which SGLang has since 0.5.23."""
    return getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)


def writes_replicated_pools(config: HiCacheStorageConfig) -> bool:
    """Whether this rank writes the pools that every rank holds alike.

    SGLang says so since 0.5.23 (``is_storage_writer``); before, its controller let rank 0.
    """
    return not config.is_mla_model or config.tp_rank == dcp_place(config)[0]


def rank_config(
    model_name: str | None, *, is_mla_model: bool, extra_config: dict[str, Any], **changes: Any
) -> HiCacheStorageConfig:
    """The configuration of a rank alone, as SGLang would make it, with some fields changed."""
    alone: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
    }
    return HiCacheStorageConfig(
        is_mla_model=is_mla_model,
        model_name=model_name,
        extra_config=extra_config,
        **{**alone, **changes},
    )


__all__ = [
    "BLOCK_GROUPS",
    "SGLANG_INSTALLED",
    "STORAGE_BATCH_PAGES",
    "HiCacheStorage",
    "HiCacheStorageConfig",
    "HiCacheStorageExtraInfo",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "PoolTransferResult",
    "SidecarPoolSpec",
    "StorageMetrics",
    "dcp_place",
    "new_storage_metrics",
    "rank_config",
    "writes_replicated_pools",
]
