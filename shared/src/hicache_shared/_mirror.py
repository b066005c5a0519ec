"""Our own copy of SGLang's v2 storage types, for machines without SGLang.

Field names, order and defaults equal those of
``sglang.srt.mem_cache.hicache_storage`` in SGLang 0.5.23; tensors are typed as
``Any`` because this package imports neither torch nor SGLang. Import these names
from :mod:`hicache_shared.contract`, which picks SGLang's own where it is installed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class PoolName(str, Enum):
    """The pool names this release knows. Any other string is a valid name too."""

    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    AUXILIARY_SWA = "auxiliary_swa"
    INDEXER = "indexer"
    DEEPSEEK_V4_C1 = "deepseek_v4_c1"
    DEEPSEEK_V4_C1_INDEXER = "deepseek_v4_c1_indexer"
    DEEPSEEK_V4_C1_INDEXER_SCALE = "deepseek_v4_c1_indexer_scale"
    DEEPSEEK_V4_C2 = "deepseek_v4_c2"
    DEEPSEEK_V4_C2_INDEXER = "deepseek_v4_c2_indexer"
    DEEPSEEK_V4_C2_INDEXER_SCALE = "deepseek_v4_c2_indexer_scale"
    DEEPSEEK_V4_C4 = "deepseek_v4_c4"
    DEEPSEEK_V4_C4_INDEXER = "deepseek_v4_c4_indexer"
    DEEPSEEK_V4_C4_INDEXER_SCALE = "deepseek_v4_c4_indexer_scale"
    DEEPSEEK_V4_C128 = "deepseek_v4_c128"
    DEEPSEEK_V4_C4_ROPE = "deepseek_v4_c4_rope"
    DEEPSEEK_V4_C128_ROPE = "deepseek_v4_c128_rope"
    DEEPSEEK_V4_C4_STATE = "deepseek_v4_c4_state"
    DEEPSEEK_V4_C4_INDEXER_STATE = "deepseek_v4_c4_indexer_state"
    DEEPSEEK_V4_C128_STATE = "deepseek_v4_c128_state"
    DRAFT = "draft"
    DRAFT_INDEXER = "draft_indexer"
    DRAFT_SWA = "draft_swa"

    def __str__(self) -> str:
        return self.value


class PoolHitPolicy(str, Enum):
    """Which pages of a prefix a pool must hold for the prefix to be restorable."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    """What one call moves for one pool.

    ``host_indices`` is a CPU int64 tensor of token slots, ``len(keys)`` times the
    pool's page size of them; ``keys`` are page hashes.
    """

    name: PoolName | str
    host_indices: Any = None
    device_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: PoolName | str | None = None
    block_pages: int = 0
    group_pages: int = 0


@dataclass(frozen=True)
class SidecarPoolSpec:
    """A pool whose indices are those of another pool."""

    pool_name: PoolName | str
    indices_from_pool: PoolName | str
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    """The answer to a hit query: the longest restorable prefix and all of them, in pages."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})

    def update_kv_hit_pages(self, kv_hit_pages: int) -> None:
        self.kv_hit_pages = max(self.kv_hit_pages, kv_hit_pages)

    def update_extra_pool_hit_pages(self, results: dict[str, int]) -> None:
        self.extra_pool_hit_pages.update(results)


@dataclass
class HiCacheStorageExtraInfo:
    """What SGLang passes beside the keys; ``prefix_keys`` precede them in the chain."""

    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


@dataclass
class HiCacheStorageConfig:
    """Ranks, model name and extra configuration that SGLang hands a backend."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None

    def __post_init__(self) -> None:
        if self.dcp_size < 1 or not 0 <= self.dcp_rank < self.dcp_size:
            raise ValueError("Invalid DCP size or rank for HiCache storage.")
        if self.dcp_size == 1:
            return
        if not self.is_mla_model:
            raise ValueError("DCP storage shard identity currently requires MLA.")
        if (
            self.tp_size % self.dcp_size != 0
            or not 0 <= self.tp_rank < self.tp_size
            or self.tp_rank % self.dcp_size != self.dcp_rank
        ):
            raise ValueError("DCP storage requires contiguous DCP groups within TP.")
        if (
            self.logical_page_size is None
            or self.logical_page_size <= 0
            or self.logical_page_size % self.dcp_size != 0
        ):
            raise ValueError("DCP storage requires a DCP-aligned logical page size.")

    @property
    def is_storage_writer(self) -> bool:
        """Whether this rank writes the pools that every rank holds alike."""
        return not self.is_mla_model or self.tp_rank == self.dcp_rank


@dataclass
class StorageMetrics:
    """Pages moved and bandwidths seen (GB/s, 2**30) since the last drain."""

    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class HiCacheStorage(ABC):
    """The interface SGLang's dynamic factory requires of a backend class."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if not hasattr(self, "registered_pools"):
            self.registered_pools: dict[Any, Any] = {}
        self.registered_pools[host_pool_name] = host_pool

    def on_host_pools_registered(self) -> None:
        """The first burst of registrations is over; late pools come through v2 alone."""

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        raise NotImplementedError

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        raise NotImplementedError

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        raise NotImplementedError

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        raise NotImplementedError

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        raise NotImplementedError

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    @abstractmethod
    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool: ...

    @abstractmethod
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        for i, key in enumerate(keys):
            if not self.exists(key):
                return i
        return len(keys)

    def clear(self) -> None:
        """Forget everything stored; raises when it could not."""

    def get_stats(self) -> StorageMetrics | None:
        return None
