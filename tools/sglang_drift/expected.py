"""What this repository expects of each SGLang release: the one place to mend.

Classes come from our copy, ``shared/src/hicache_shared/_mirror.py``, which is that of the newest
release here; the rest of the contract is written down below. ``SINCE`` and ``UNTIL`` say what
an older release lacks or still has.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.sglang_drift.shapes import CALLS, CONSTANTS, EXTRA_KEYS, NAMES, Contract

SUPPORTED = ("0.5.21", "0.5.22", "0.5.23")
"""The supported releases, the oldest first."""

CLASSES = (
    "HiCacheStorage",
    "HiCacheStorageConfig",
    "HiCacheStorageExtraInfo",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "PoolTransferResult",
    "SidecarPoolSpec",
)
"""Classes of SGLang's ``hicache_storage``; ours have the same names."""

ENUMS = ("PoolHitPolicy", "PoolName")
"""Those of them whose order means nothing."""

METRICS = "StorageMetrics"
"""The class of SGLang's ``metrics_collector`` that the scheduler asserts."""

FACTORY = "StorageBackendFactory"
PLUGINS = "plugins"

SINCE = {
    "PoolHitPolicy.BLOCK_GROUPS": "0.5.22",
    "PoolTransfer.block_pages": "0.5.22",
    "PoolTransfer.group_pages": "0.5.22",
    "HiCacheStorage.on_host_pools_registered": "0.5.23",
    "HiCacheStorageConfig.dcp_rank": "0.5.23",
    "HiCacheStorageConfig.dcp_size": "0.5.23",
    "HiCacheStorageConfig.is_storage_writer": "0.5.23",
    "HiCacheStorageConfig.logical_page_size": "0.5.23",
    "PoolName.AUXILIARY_SWA": "0.5.23",
    f"{CALLS}.on_host_pools_registered()": "0.5.23",
    f"{CALLS}.describe_l3_object_layout(sidecar_pool_specs=_, swa_trailing_pages=_, "
    "page_size=_)": "0.5.23",
    f"{NAMES}.supports_page_envelope_host": "0.5.22",
}
"""Members that releases before the given one lack."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A member that we no longer have: in which release last, after which member, and its text."""

    last: str
    after: str
    text: str


UNTIL = {
    "PoolTransfer.anchor_index_parts": Gone("0.5.21", "indices_from_pool", "= None"),
}
"""Members of older releases that newer ones and our copy lack."""

TAKEN_OVER = ("mooncake", "mori")
"""In-tree names that an adapter can be loaded under (``hicache_shared.takeover``)."""

REST: Contract = {
    CONSTANTS: {"STORAGE_BATCH_SIZE": "= 128"},
    CALLS: dict.fromkeys(
        (
            "batch_exists(_, _)",
            "batch_exists_v2(_, _, _)",
            "batch_get(_, _)",
            "batch_get_v1(_, _, _)",
            "batch_get_v2(_, extra_info=_)",
            "batch_set(_, _)",
            "batch_set_v1(_, _, _)",
            "batch_set_v2(_, extra_info=_)",
            "clear()",
            "close()",
            "describe_l3_object_layout(sidecar_pool_specs=_, swa_trailing_pages=_, page_size=_)",
            "get_stats()",
            "on_host_pools_registered()",
            "register_mem_host_pool_v2(_, _)",
            "register_mem_pool_host(_)",
        ),
        "called",
    ),
    EXTRA_KEYS: dict.fromkeys(
        (
            "hicache_storage_pass_prefix_keys",
            "interface_v1",
            "prefetch_threshold",
            "prefetch_timeout_base",
            "prefetch_timeout_per_ki_token",
            "tp_lcm_size",
        ),
        "read",
    ),
    FACTORY: {
        "register_backend": "classmethod (cls, name, module_path, class_name)",
        "create_backend": "classmethod (cls, backend_name, storage_config, mem_pool_host, "
        "**kwargs)",
        "dynamic needs": "['backend_name', 'module_path', 'class_name']",
        "dynamic makes": "backend_class(storage_config, kwargs)",
        "mooncake makes": "backend_class(storage_config, mem_pool_host)",
        "mori makes": "backend_class(storage_config, mem_pool_host)",
    },
    NAMES: {
        "attach_storage_backend": "mooncake, mori",
        "get_allocator_from_storage": "mooncake, mori",
        "maybe_init_shared_mooncake_transfer_engine": "mooncake",
        "resolve_storage_layout_compatibility": "mooncake",
        "should_backup": "mooncake",
        "supports_page_envelope_host": "mori",
    },
    PLUGINS: {"GENERAL_PLUGINS_GROUP": "= 'sglang.srt.plugins'"},
}
"""The contract beside the classes."""
