"""From host pools that SGLang registers to the pools of a store, with their keys."""

from __future__ import annotations

import logging
import threading
from typing import Any

from hicache_shared.contract import HiCacheStorageConfig, PoolName
from hicache_shared.errors import LayoutError, UnknownPoolError
from hicache_shared.identity import (
    DRAFT_POOLS,
    ModelIdentity,
    head_shards,
    pool_identity,
)
from hicache_shared.layout import (
    Access,
    PoolLayout,
    equal_parts,
    flat_layout,
    is_logical,
    layouts_of,
    page_slots_of,
)
from hicache_shared.plan import OPERATIONS, Operation, RegisteredPool
from hicache_shared.staging import StagingArea
from hicache_shared.store import PageStore, StoredPool

log = logging.getLogger(__name__)

KV = str(PoolName.KV)

RANK_0_ALONE = ("dynamic", "mori")
"""Storage backends with which SGLang backs up attention heads beside an MLA target on rank 0
alone; with ``mooncake`` it does on every rank (``HybridCacheController.should_backup``)."""

SMALL_PART_BYTES = 8192
"""A part costs a store a system call, about as long as it takes to copy this much."""


class PoolRegistry:
    """The pools of one backend. Reads are lock-free; registrations take turns.

    Args:
        store: told of every pool, and of staging memory.
        model: the deployment's identity.
        config: this rank's place.
        flat_kv: whether KV pages come in flat form (no ``"interface_v1": 1``).
        draft_model: the checkpoint of the draft pools.
        in_tree_name: of SGLang's storage backend that the backend is loaded as, if of any.
    """

    def __init__(
        self,
        store: PageStore,
        model: ModelIdentity,
        config: HiCacheStorageConfig,
        *,
        flat_kv: bool,
        draft_model: str = "",
        in_tree_name: str = "",
    ) -> None:
        self._store = store
        self._model = model
        self._config = config
        self._flat_kv = flat_kv
        self._draft_model = draft_model
        self._in_tree_name = in_tree_name
        self._pools: dict[str, RegisteredPool] = {}
        self._staging: dict[tuple[StoredPool, Operation], StagingArea] = {}
        self._page_tokens = 0
        self._opened = False
        self._lock = threading.RLock()

    def __getitem__(self, name: str) -> RegisteredPool:
        """Raises UnknownPoolError, which names the pools there are."""
        pool = self._pools.get(name)
        if pool is None:
            known = ", ".join(sorted(self._pools)) or "none"
            raise UnknownPoolError(f"pool {str(name)!r} is not registered; registered: {known}")
        return pool

    @property
    def kv(self) -> RegisteredPool:
        return self[KV]

    def add_anchor(self, pool: Any) -> None:
        """Register the primary pool; its page is what page hashes are chained over.

        Raises:
            LayoutError: it cannot be stored.
        """
        with self._lock:
            if KV not in self._pools:
                self._page_tokens = page_slots_of(pool)
            self._add(KV, pool)

    def add(self, name: str, pool: Any) -> None:
        """Register a pool; the same one again changes nothing.

        Raises:
            LayoutError: it cannot be stored, another has its name, or there is no anchor yet.
        """
        with self._lock:
            if KV not in self._pools:
                raise LayoutError(
                    f"pool {name!r} came before the anchor pool (register_mem_pool_host)"
                )
            self._add(name, pool)

    def open(self) -> None:
        """Make the store ready for the pools registered so far; once."""
        if self._opened:
            return
        with self._lock:
            if self._opened:
                return
            pools = list(self._pools.values())
            self._store.open([stored for pool in pools for stored in pool.stored])
            for pool in pools:
                self._stage(pool)
            self._opened = True

    @property
    def opened(self) -> bool:
        return self._opened

    def staging(self, stored: StoredPool, operation: Operation) -> StagingArea:
        """The staging area of a pool that needs one.

        Gets and sets have areas of their own, so that a set which waits for space in a full
        store holds up no get.
        """
        return self._staging[stored, operation]

    def release(self) -> None:
        """Forget the pools, and with them the memory that was kept alive."""
        with self._lock:
            self._pools = {}
            self._staging = {}

    def _add(self, name: str, pool: Any) -> None:
        known = self._pools.get(name)
        if known is not None:
            if known.pool is pool:
                return
            raise LayoutError(f"pool {name!r} is already registered with other memory")
        registered = self._look(name, pool)
        if self._opened:
            for stored in registered.stored:
                self._store.register(stored)
            self._stage(registered)
        self._pools = {**self._pools, name: registered}

    def _look(self, name: str, pool: Any) -> RegisteredPool:
        if is_logical(pool):
            layouts: tuple[PoolLayout, ...] = ()
        elif name == KV and self._flat_kv:
            layouts = (flat_layout(name, pool),)
        else:
            shards = head_shards(str(pool.layout), hasattr(pool, "head_num"), self._config)
            layouts = layouts_of(
                name,
                pool,
                split_factor=shards.factor,
                first_shard=shards.first,
                shard_count=shards.count,
            )
            if any(self._too_fine(layout) for layout in layouts):
                layouts = _flat_if_it_can(layouts, name, pool)
        for layout in layouts:
            self._check(layout)
        return RegisteredPool(
            name=name,
            pool=pool,
            pages=int(pool.size) // int(pool.page_size),
            page_slots=page_slots_of(pool),
            stored=tuple(self._stored(layout) for layout in layouts),
        )

    def _too_fine(self, layout: PoolLayout) -> bool:
        """Whether the store would cut pages into so many small parts that copying is faster."""
        most = self._store.caps.max_unequal_parts
        if most is None or len(set(layout.component_bytes)) == 1:
            return False
        part_bytes, parts = equal_parts(layout.component_bytes)
        return parts > most and part_bytes < SMALL_PART_BYTES

    def _check(self, layout: PoolLayout) -> None:
        most = self._store.caps.max_components
        parts = len(layout.component_bytes)
        if most is not None and parts > most:
            way_out = (
                "use --hicache-mem-layout page_first"
                if layout.memory_layout == "layer_first"
                else "such a pool needs a store of several buffers an object (Caps.max_components)"
            )
            raise LayoutError(
                f"pool {layout.name!r} in memory layout {layout.memory_layout!r} has {parts} "
                f"buffers a page and this store takes {most}; {way_out}"
            )
        config = self._config
        name = "dynamic" if _is_dynamic(config) else self._in_tree_name
        if config.is_mla_model and config.tp_size > 1 and layout.per_head and name in RANK_0_ALONE:
            raise LayoutError(
                f"pool {layout.name!r} holds attention heads beside an MLA target: SGLang backs it "
                f"up on rank 0 alone with --hicache-storage-backend {name}, so the other "
                f"{config.tp_size - 1} ranks would never hit; run with TP 1 or without L3 storage"
            )

    def _stored(self, layout: PoolLayout) -> StoredPool:
        if layout.name in DRAFT_POOLS and not self._draft_model:
            log.warning(
                "pool %r: draft_model_id is not set and SGLang does not pass it, so two draft "
                "checkpoints under one model would share pages",
                layout.name,
            )
        identity = pool_identity(
            layout,
            model=self._model,
            config=self._config,
            page_tokens=self._page_tokens,
            draft_model=self._draft_model,
        )
        return StoredPool(layout, identity.prefix(), self._model.text(), identity.digest())

    def _stage(self, pool: RegisteredPool) -> None:
        for stored in pool.stored:
            if stored.layout.access is Access.STAGED:
                for operation in OPERATIONS:
                    area = StagingArea(
                        stored, self._store.register_memory, self._store.caps.allocate
                    )
                    self._staging[stored, operation] = area


def _flat_if_it_can(
    layouts: tuple[PoolLayout, ...], name: str, pool: Any
) -> tuple[PoolLayout, ...]:
    """The pool's flat form; its buffers where it has none (K and V of different head size)."""
    try:
        return (flat_layout(name, pool),)
    except LayoutError as error:
        log.warning("pool %r keeps to its many small parts a page: %s", name, error)
        return layouts


def anchor_of(pool: Any) -> Any:
    """The primary host pool: a pool as it is, or the anchor of a host pool group."""
    return pool.anchor_entry.host_pool if hasattr(pool, "anchor_entry") else pool


def uses_flat_kv(config: HiCacheStorageConfig) -> bool:
    """Whether SGLang will pass KV as flat pages (``dynamic`` without ``interface_v1``)."""
    return _is_dynamic(config) and not (config.extra_config or {}).get("interface_v1")


def _is_dynamic(config: HiCacheStorageConfig) -> bool:
    return "module_path" in (config.extra_config or {})
