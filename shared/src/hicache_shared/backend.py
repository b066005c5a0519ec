"""The SGLang boundary: what an adapter's backend class inherits.

Misuse raises (an unregistered pool, indices that do not fit); a fault of the store is an
answer: False, a counter, and a line in the log when the state changes.
"""

from __future__ import annotations

import logging
import threading
import weakref
from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar

from hicache_shared.config import CommonConfig, load
from hicache_shared.contract import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    StorageMetrics,
)
from hicache_shared.errors import ClearError, ConfigError
from hicache_shared.flat import FlatPages
from hicache_shared.hits import Question, query
from hicache_shared.identity import ModelIdentity
from hicache_shared.lifecycle import CallGate
from hicache_shared.plan import Operation, check_together, plan_get, plan_set
from hicache_shared.registry import PoolRegistry, anchor_of, uses_flat_kv
from hicache_shared.stats import Stats
from hicache_shared.store import PageStore
from hicache_shared.transfer import Transfers

log = logging.getLogger(__name__)

Keys = list[str]
ExtraInfo = HiCacheStorageExtraInfo | None


class HiCacheBackend(HiCacheStorage):
    """SGLang's storage interface over a :class:`~hicache_shared.store.PageStore`.

    A subclass sets ``name`` and ``config_type`` and opens its store. Thread-safe: SGLang
    calls exists, get and set from threads of their own.

    Args:
        storage_config: ranks, model name and extra configuration.
        kwargs: what SGLang's factory passes a second; unused.

    Raises:
        ConfigError: a setting is wrong or the model has no name.
        BackendUnavailableError: the client or its server cannot be had.
    """

    name: ClassVar[str]
    config_type: ClassVar[type[CommonConfig]] = CommonConfig
    in_tree_name: ClassVar[str] = ""
    """Of SGLang's own storage backend that this class is loaded in place of, if it is for one."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        self.config = load(self.config_type, storage_config.extra_config)
        model = _model_identity(self.config, storage_config)
        flat_kv = uses_flat_kv(storage_config)
        if flat_kv:
            log.warning(
                "%s: KV goes through flat page copies; for zero copy add "
                '"interface_v1": 1 to --hicache-storage-backend-extra-config',
                self.name,
            )
        self._store = self.open_store(self.config, storage_config)
        self._pools = PoolRegistry(
            self._store,
            model,
            storage_config,
            flat_kv=flat_kv,
            draft_model=self.config.draft_model_id or "",
            in_tree_name=self.in_tree_name,
        )
        self._namespace = model.text()
        self._stats = Stats(keep_samples=storage_config.enable_storage_metrics)
        self._transfers = Transfers(self._store, self._pools, self._stats, self.config.deadline_s)
        self._flat = FlatPages(self._pools, self._transfers)
        self._gate = CallGate()
        self._closing = threading.RLock()
        # Runs at interpreter exit too, where a call in flight would abort the process.
        self._finalizer = weakref.finalize(
            self, _close, self._gate, self._store, self._pools, self.config.drain_s, self.name
        )
        log.info("%s: storage namespace %s", self.name, self._namespace)

    @abstractmethod
    def open_store(self, config: Any, storage_config: HiCacheStorageConfig) -> PageStore:
        """Connect to the native store.

        Raises:
            ConfigError, BackendUnavailableError: with what to change.
        """

    # -- registration (a closed backend takes no pools) --------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the primary pool, or the anchor of a host pool group."""
        with self._gate.call() as is_open:
            if is_open:
                self._pools.add_anchor(anchor_of(mem_pool_host))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register a pool by name, at any time; the same pool again changes nothing."""
        with self._gate.call() as is_open:
            if is_open:
                self._pools.add(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        with self._gate.call() as is_open:
            if is_open:
                self._pools.open()

    # -- v2 ---------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: Keys,
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: ExtraInfo = None,
    ) -> PoolTransferResult:
        """Which prefixes of ``keys`` can be restored from KV and every pool asked about."""
        with self._gate.call() as is_open:
            if not is_open:
                return PoolTransferResult(0, {}, [])
            questions = [Question(self._pools.kv, PoolHitPolicy.ALL_PAGES)]
            questions += [Question.of(t, self._pools[t.name]) for t in pool_transfers or ()]
            physical = [question for question in questions if not question.pool.logical]
            ask = partial(self._transfers.present, self._transfers.until())
            return query(keys, physical, ask, together=self._store.caps.together)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: ExtraInfo = None
    ) -> dict[str, list[bool]]:
        """Fill host pages; one answer a key, True only if exactly the page's bytes came."""
        return _by_name(transfers, self._move("get", transfers))

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: ExtraInfo = None
    ) -> dict[str, list[bool]]:
        """Store host pages; one answer a key, True only if the page can be read back."""
        return _by_name(transfers, self._move("set", transfers, _depth(extra_info)))

    # -- v1 ---------------------------------------------------------------------------

    def batch_exists(self, keys: Keys, extra_info: ExtraInfo = None) -> int:
        """Pages in the leading run of KV; 0 for a logical anchor, which has nothing to restore."""
        return self.batch_exists_v2(keys, None, extra_info).kv_hit_pages

    def batch_get_v1(
        self, keys: Keys, host_indices: Any, extra_info: ExtraInfo = None
    ) -> list[bool]:
        return self._move("get", [_kv_transfer(keys, host_indices)])[0]

    def batch_set_v1(
        self, keys: Keys, host_indices: Any, extra_info: ExtraInfo = None
    ) -> list[bool]:
        return self._move("set", [_kv_transfer(keys, host_indices)], _depth(extra_info))[0]

    # -- flat pages, as SGLang passes them without "interface_v1" -------------------------

    def batch_get(self, keys: Keys, target_locations: Any = None, target_sizes: Any = None) -> Any:
        """Flat KV pages as tensors of the pool's kind, None for each that is missing."""
        with self._gate.call() as is_open:
            return self._flat.get(keys, target_locations) if is_open else [None] * len(keys)

    def batch_set(
        self,
        keys: Keys,
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store flat KV pages; whether all of them were."""
        with self._gate.call() as is_open:
            return is_open and self._flat.set(keys, values)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        targets = None if target_location is None else [target_location]
        return self.batch_get([key], targets)[0]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # -- the rest -------------------------------------------------------------------------

    @property
    def namespace(self) -> str:
        """What the keys of this deployment begin with; ``clear`` is scoped to it."""
        return self._namespace

    @property
    def stats(self) -> Stats:
        """Pages not moved with their reasons, and pages that took a slower path."""
        return self._stats

    def get_stats(self) -> StorageMetrics | None:
        """A fresh record since the last call, of v1 and v2 calls alike, in SGLang's type."""
        return self._stats.drain()

    def clear(self) -> None:
        """Forget everything stored under this namespace, by any rank, and nothing else.

        Raises:
            ClearError: something may be left, or the backend is closed.
        """
        with self._gate.call() as is_open:
            if not is_open:
                raise ClearError(f"{self.name}: clear after close")
            self._store.clear(self._namespace)

    def close(self) -> None:
        """Refuse new calls, wait for the running ones, then release the client. Idempotent.

        A second thread that closes waits for the first, so that all is over on return.
        """
        with self._closing:
            self._finalizer()

    def _move(
        self, operation: Operation, transfers: list[PoolTransfer], depth: int | None = None
    ) -> list[list[bool]]:
        plan = plan_get if operation == "get" else plan_set
        with self._gate.call() as is_open:
            if not is_open:
                return [[False] * len(t.keys or ()) for t in transfers]
            plans = [plan(self._pools[t.name], t.keys, t.host_indices) for t in transfers]
            check_together(operation, plans)
            return self._transfers.move(operation, plans, depth)


def _depth(extra_info: ExtraInfo) -> int | None:
    """Pages before a call's first one; None unless SGLang passes prefix keys."""
    if extra_info is None or extra_info.prefix_keys is None:
        return None
    return len(extra_info.prefix_keys)


def _kv_transfer(keys: Keys, host_indices: Any) -> PoolTransfer:
    return PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys)


def _by_name(transfers: list[PoolTransfer], answers: list[list[bool]]) -> dict[str, list[bool]]:
    """Answers by pool, names as given; a pool that appears twice has its answers in order."""
    result: dict[str, list[bool]] = {}
    for transfer, answer in zip(transfers, answers, strict=True):
        result.setdefault(transfer.name, []).extend(answer)
    return result


def _model_identity(config: CommonConfig, storage_config: HiCacheStorageConfig) -> ModelIdentity:
    model = config.model_id or storage_config.model_name
    if not model:
        raise ConfigError(
            "the model has no name, so its pages could be taken for another model's: "
            'set "model_id" in the extra config, for example "deepseek-ai/DeepSeek-V4-Flash"'
        )
    collisions = {
        "model_id": "two checkpoints served under one name",
        "revision": "two revisions of a checkpoint",
        "kv_cache_dtype": "two 8-bit KV cache formats",
    }
    missing = {field: what for field, what in collisions.items() if not getattr(config, field)}
    if missing:
        log.warning(
            "not set: %s. SGLang does not pass them, so these would share pages: %s",
            ", ".join(missing),
            "; ".join(missing.values()),
        )
    return ModelIdentity(
        namespace=config.namespace,
        model=model,
        revision=config.revision or "",
        kv_cache_dtype=config.kv_cache_dtype or "",
    )


def _close(
    gate: CallGate, store: PageStore, pools: PoolRegistry, drain_s: float, name: str
) -> None:
    if not gate.close(drain_s):
        # Closing under a running call crashes native clients; leaving it open does not.
        log.error("%s: calls still run after %.0f s; the client is left open", name, drain_s)
        return
    store.close()
    pools.release()
