"""A reference storage controller: it calls a backend exactly as SGLang's does.

The order, the grouping and the arguments of the calls are those of SGLang 0.5.23's
``HybridCacheController`` (``_storage_hit_query``, ``_page_backup``, ``_page_transfer``,
``_sync_trailing_keys``, ``_trailing_chain_groups``), so that the conformance suite and the
``hicache`` command exercise the contract without SGLang. One difference is meant: SGLang
logs what a backend raises and counts a miss; here it reaches the caller, so that a test
sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self

from hicache_shared.contract import (
    STORAGE_BATCH_PAGES,
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    writes_replicated_pools,
)
from hicache_shared.errors import HiCacheError
from hicache_shared.sidecar import SlotGroup, resolve_derived

HostMemoryMode = Literal["cache", "buffer_only"]

_KINDS = ("backup", "query", "prefetch")


class PoolEntry(Protocol):
    """A host pool under its name."""

    @property
    def name(self) -> str: ...
    @property
    def host_pool(self) -> Any: ...


class PoolGroup(SlotGroup, Protocol):
    """As much of SGLang's ``HostPoolGroup`` as a controller needs."""

    @property
    def entries(self) -> Sequence[PoolEntry]: ...
    @property
    def anchor_entry(self) -> PoolEntry: ...

    def add_entry(self, entry: Any) -> None: ...


class PoolTraits(Protocol):
    """How a model uses one of its pools."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str | None:
        """The pool whose indices it uses; None if it has its own."""

    @property
    def policy(self) -> PoolHitPolicy: ...
    @property
    def window_pages(self) -> int:
        """For TRAILING_PAGES, how many last pages of a prefix are needed."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Consecutive pages of a chain, to be written or read.

    Attributes:
        hashes: page hashes.
        kv_indices: int64 slots of the anchor pool, its page size of them a hash.
        transfers: the pools beside the KV: those with slots of their own, with keys and
            ``host_indices``, then the derived ones.
        prefix_keys: all hashes before ``hashes`` where the backend is to be told them
            (``hicache_storage_pass_prefix_keys``), else None.
    """

    hashes: list[str]
    kv_indices: Any
    transfers: Sequence[PoolTransfer] = ()
    prefix_keys: list[str] | None = None


@dataclass(frozen=True, slots=True)
class BackupResult:
    """What was written, in pages.

    Attributes:
        kv_pages: leading pages whose KV was written, in whole batches. On a rank that does
            not write KV: all pages if its sidecars are whole, else 0.
        pool_pages: leading keys written, for each sidecar pool.
    """

    kv_pages: int
    pool_pages: dict[str, int] = field(default_factory=dict)


def model_transfers(pools: Sequence[PoolTraits], hashes: list[str]) -> list[PoolTransfer]:
    """The transfers that go with these pages' KV, still without slots.

    ``pools`` are a model's, the anchor first. As in SGLang, pools with slots of their own
    come before the derived ones; a trailing one holds the last ``window_pages`` pages; one
    derived from the KV has no keys, any other those of its source.
    """
    own = {
        str(pool.name): PoolTransfer(
            name=pool.name,
            keys=trailing_window(hashes, pool.window_pages)
            if pool.policy == PoolHitPolicy.TRAILING_PAGES
            else list(hashes),
            hit_policy=pool.policy,
        )
        for pool in pools[1:]
        if pool.source is None
    }
    derived = [
        PoolTransfer(
            name=pool.name,
            keys=None if pool.source == PoolName.KV else own[str(pool.source)].keys,
            hit_policy=pool.policy,
            indices_from_pool=pool.source,
        )
        for pool in pools[1:]
        if pool.source is not None
    ]
    return [*own.values(), *derived]


def trailing_window(hashes: list[str], window_pages: int) -> list[str]:
    """The last pages of a prefix that a trailing pool needs; all of a shorter prefix."""
    return hashes[-max(1, window_pages) :]


def common_prefix(results: Sequence[PoolTransferResult], pages: int) -> int:
    """The longest prefix, in pages, that every rank can restore, or 0.

    SGLang reduces the ranks' restorable *bitmaps* by MIN (``_sync_prefetch_hit_query``); the
    minimum of their hits may be a prefix that a rank lacks. Without a list of restorable
    prefixes every one up to the hit counts as restorable.
    """
    common = set(range(1, pages + 1))
    for result in results:
        restorable = result.restorable_prefix_pages
        hit = range(1, result.kv_hit_pages + 1)
        common &= set(hit) if restorable is None else set(hit).intersection(restorable)
    return max(common, default=0)


class ReferenceController:
    """Drives one backend over one rank's host pools.

    Args:
        group: the rank's host pools.
        config: what the backend was made with; says which pools this rank writes.
        host_memory_mode: ``cache``: one operation a node, sidecars before the KV.
            ``buffer_only``: an operation for the KV and what derives from it, then one for
            each other pool (SGLang's ``--hicache-host-memory-mode``).
        interface_v1: False moves the KV as flat pages through ``batch_get`` and
            ``batch_set``, as SGLang does without ``"interface_v1": 1``.

    The three kinds of operation may run at the same time, and ``submit_*`` runs each kind
    on a thread of its own, in order. Attaching and closing belong to one thread.
    """

    def __init__(
        self,
        group: PoolGroup,
        config: HiCacheStorageConfig,
        *,
        host_memory_mode: HostMemoryMode = "cache",
        interface_v1: bool = True,
    ) -> None:
        self._group = group
        self._anchor = group.anchor_entry.host_pool
        self._page_slots: int = self._anchor.page_size
        self._writes_kv = writes_replicated_pools(config)
        self._host_memory_mode = host_memory_mode
        self._get_kv = self._get_v1 if interface_v1 else self._get_flat
        self._set_kv = self._set_v1 if interface_v1 else self._set_flat
        self._attached: HiCacheStorage | None = None
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- lifecycle ------------------------------------------------------------------------

    def attach(self, backend: HiCacheStorage, *, registered: bool = False) -> None:
        """Register the anchor, then every pool of the group (the anchor included) by name.

        Nothing is registered where all pools are ``registered`` already. What a backend raises
        comes through; :meth:`close` still closes it.

        Raises:
            HiCacheError: a backend is attached already.
        """
        if self._attached is not None:
            raise HiCacheError("a backend is attached already; close the controller first")
        self._attached = backend
        if not registered:
            backend.register_mem_pool_host(self._anchor)
            for entry in self._group.entries:
                backend.register_mem_host_pool_v2(entry.host_pool, entry.name)
            backend.on_host_pools_registered()
        self._threads = {kind: ThreadPoolExecutor(1, f"hicache-{kind}") for kind in _KINDS}

    def register_host_pool_entry(self, entry: PoolEntry) -> None:
        """Add a pool that comes late, such as a draft model's."""
        self._group.add_entry(entry)
        if self._attached is not None:
            self._attached.register_mem_host_pool_v2(entry.host_pool, entry.name)

    def close(self) -> None:
        """Finish what was submitted, then close the backend. Twice is fine."""
        threads, self._threads = self._threads, {}
        for thread in threads.values():
            thread.shutdown(wait=True)
        backend, self._attached = self._attached, None
        # SGLang's base class has no close, and its controller looks for one.
        close = getattr(backend, "close", None)
        if close is not None:
            close()

    @property
    def _backend(self) -> HiCacheStorage:
        if self._attached is None:
            raise HiCacheError("no backend is attached; call attach first")
        return self._attached

    # --- in flight ------------------------------------------------------------------------

    def submit_backup(self, operation: Operation) -> Future[BackupResult]:
        return self._thread("backup").submit(self.backup, operation)

    def submit_query(
        self,
        hashes: list[str],
        transfers: Sequence[PoolTransfer] = (),
        prefix_keys: list[str] | None = None,
    ) -> Future[PoolTransferResult]:
        return self._thread("query").submit(self.query, hashes, transfers, prefix_keys)

    def submit_prefetch(self, operation: Operation, hit: int) -> Future[int]:
        return self._thread("prefetch").submit(self.prefetch, operation, hit)

    def _thread(self, kind: str) -> ThreadPoolExecutor:
        if kind not in self._threads:
            raise HiCacheError("no backend is attached; call attach first")
        return self._threads[kind]

    # --- backup ---------------------------------------------------------------------------

    def backup(self, operation: Operation) -> BackupResult:
        """Write the pages of every pool that this rank writes."""
        if self._host_memory_mode == "cache":
            return self._backup(operation)
        results = [self._backup(part) for part in _split_by_pool(operation)]
        pool_pages = {name: n for result in results for name, n in result.pool_pages.items()}
        return BackupResult(results[0].kv_pages, pool_pages)

    def _backup(self, operation: Operation) -> BackupResult:
        resolved = resolve_derived(
            operation.transfers, kv_keys=operation.hashes, kv_indices=operation.kv_indices
        )
        transfers = [t for t in resolved if self._writes_kv or t.name == PoolName.MAMBA]
        answers: dict[str, list[bool]] = {}
        if transfers:
            for extra_info, group in _chain_groups(operation, operation.hashes, transfers):
                answers.update(self._backend.batch_set_v2(group, extra_info=extra_info))
        pool_pages = {name: _leading(answer) for name, answer in answers.items()}
        if self._writes_kv:
            return BackupResult(self._backup_kv(operation), pool_pages)
        whole = bool(transfers) and all(_is_whole(t, answers.get(t.name)) for t in transfers)
        return BackupResult(len(operation.hashes) if whole else 0, pool_pages)

    def _backup_kv(self, operation: Operation) -> int:
        written = 0
        for hashes, indices, extra_info in self._batches(operation, operation.hashes):
            if not self._set_kv(hashes, indices, extra_info):
                break
            written += len(hashes)
        return written

    # --- query ----------------------------------------------------------------------------

    def query(
        self,
        hashes: list[str],
        transfers: Sequence[PoolTransfer] = (),
        prefix_keys: list[str] | None = None,
    ) -> PoolTransferResult:
        """Which prefixes of a chain can be restored; the whole chain in one call.

        ``transfers`` may be those of a backup or prefetch: they are passed on as SGLang
        does it, without indices, with placeholders for the keys of a trailing pool (only
        their number counts) and no keys for a pool derived from the KV.
        """
        extra_info = HiCacheStorageExtraInfo(prefix_keys=list(prefix_keys) if prefix_keys else None)
        if not transfers:
            return PoolTransferResult(self._backend.batch_exists(hashes, extra_info), {})
        resolved = resolve_derived(transfers, kv_keys=None, kv_indices=())
        asked = [_without_pages(transfer) for transfer in resolved]
        return self._backend.batch_exists_v2(hashes, asked, extra_info)

    # --- prefetch -------------------------------------------------------------------------

    def prefetch(self, operation: Operation, hit: int) -> int:
        """Read the first ``hit`` pages; how many of them can be used.

        The KV and what derives from it are read batch by batch and cut at their common
        prefix. Once they are whole, the trailing pools are read for the pages that end at
        the hit: the slots of a trailing transfer are filled from their beginning. If the
        model has pools of that kind, any shortfall makes the whole prefetch count as 0.

        The caller keeps all slots; SGLang frees those that a short hit leaves over.
        """
        hashes = operation.hashes[:hit]
        if not hashes:
            return 0
        restored = self._read_kv(operation, hashes)
        whole = restored == len(hashes)
        trailing = [t for t in operation.transfers if t.indices_from_pool != PoolName.KV]
        if operation.transfers and whole:
            whole = self._read_trailing(operation, hashes, trailing)
        return 0 if trailing and not whole else restored

    def _read_kv(self, operation: Operation, hashes: list[str]) -> int:
        names = [t.name for t in operation.transfers if t.indices_from_pool == PoolName.KV]
        restored = 0
        for batch, indices, extra_info in self._batches(operation, hashes):
            hits = [self._get_kv(batch, indices, extra_info)]
            if names:
                # SGLang names neither source nor policy here, so ALL_PAGES is the default.
                transfers = [PoolTransfer(name, host_indices=indices, keys=batch) for name in names]
                answers = self._backend.batch_get_v2(transfers, extra_info=extra_info)
                hits += [_leading(answer) for answer in answers.values()]
            restored += min(hits)
            if min(hits) < len(batch):
                break
        return restored

    def _read_trailing(
        self, operation: Operation, hashes: list[str], trailing: Sequence[PoolTransfer]
    ) -> bool:
        aligned = [self._aligned(transfer, hashes) for transfer in trailing]
        transfers = resolve_derived(aligned, kv_keys=hashes, kv_indices=operation.kv_indices)
        answers: dict[str, list[bool]] = {}
        for extra_info, group in _chain_groups(operation, hashes, transfers):
            answers.update(self._backend.batch_get_v2(group, extra_info=extra_info))
        return all(
            t.keys is not None and _leading(answers.get(t.name, [])) == len(t.keys)
            for t in transfers
        )

    def _aligned(self, transfer: PoolTransfer, hashes: list[str]) -> PoolTransfer:
        """A trailing transfer moved to the window that ends at the hit."""
        derived = transfer.indices_from_pool is not None
        if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES or (
            derived and transfer.keys is None
        ):
            return transfer
        keys = trailing_window(hashes, len(transfer.keys or ()))
        if derived or transfer.host_indices is None:
            return replace(transfer, keys=keys)
        slots = len(keys) * self._group.get_pool(transfer.name).page_size
        return replace(transfer, keys=keys, host_indices=transfer.host_indices[:slots])

    # --- the KV, batch by batch -----------------------------------------------------------

    def _batches(
        self, operation: Operation, hashes: list[str]
    ) -> Iterator[tuple[list[str], Any, HiCacheStorageExtraInfo]]:
        prefix = operation.prefix_keys
        for start in range(0, len(hashes), STORAGE_BATCH_PAGES):
            batch = hashes[start : start + STORAGE_BATCH_PAGES]
            first = start * self._page_slots
            indices = operation.kv_indices[first : first + len(batch) * self._page_slots]
            yield batch, indices, HiCacheStorageExtraInfo(prefix_keys=prefix)
            if prefix is not None:
                prefix = prefix + batch

    def _get_v1(self, hashes: list[str], indices: Any, extra_info: HiCacheStorageExtraInfo) -> int:
        return _leading(self._backend.batch_get_v1(hashes, indices, extra_info)[: len(hashes)])

    def _set_v1(self, hashes: list[str], indices: Any, extra_info: HiCacheStorageExtraInfo) -> bool:
        return all(self._backend.batch_set_v1(hashes, indices, extra_info))

    def _get_flat(self, hashes: list[str], indices: Any, _: HiCacheStorageExtraInfo) -> int:
        targets = [self._anchor.get_dummy_flat_data_page() for _ in hashes]
        pages = self._backend.batch_get(hashes, targets)
        read = 0
        for page, index in zip(pages or (), indices[:: self._page_slots], strict=False):
            if page is None:
                break
            self._anchor.set_from_flat_data_page(index, page)
            read += 1
        return read

    def _set_flat(self, hashes: list[str], indices: Any, _: HiCacheStorageExtraInfo) -> bool:
        pages = [self._anchor.get_data_page(index) for index in indices[:: self._page_slots]]
        return self._backend.batch_set(hashes, pages)


def _chain_groups(
    operation: Operation, hashes: list[str], transfers: list[PoolTransfer]
) -> list[tuple[HiCacheStorageExtraInfo, list[PoolTransfer]]]:
    """One group a tail length, so that ``prefix_keys + keys`` is one chain in each."""
    prefix = operation.prefix_keys
    if prefix is None:
        return [(HiCacheStorageExtraInfo(prefix_keys=None), transfers)]
    groups: dict[int, list[PoolTransfer]] = {}
    for transfer in transfers:
        groups.setdefault(len(hashes) - len(transfer.keys or ()), []).append(transfer)
    return [
        (HiCacheStorageExtraInfo(prefix_keys=prefix + hashes[:covered]), group)
        for covered, group in groups.items()
    ]


def _split_by_pool(operation: Operation) -> list[Operation]:
    """The KV with what derives from it, then each other pool with its own, by name.

    An operation of another pool carries no KV pages, and its prefix ends where its keys
    begin (SGLang's ``buffer_mode/pipeline.py``).
    """
    kv = [t for t in operation.transfers if t.indices_from_pool == PoolName.KV]
    parts = [replace(operation, transfers=kv)]
    own = [t for t in operation.transfers if t.indices_from_pool is None]
    for source in sorted(own, key=lambda t: str(t.name)):
        riders = [t for t in operation.transfers if t.indices_from_pool == source.name]
        prefix = operation.prefix_keys
        if prefix is not None:
            prefix = prefix + operation.hashes[: len(operation.hashes) - len(source.keys or ())]
        parts.append(Operation([], operation.kv_indices[:0], [source, *riders], prefix))
    return parts


def _without_pages(transfer: PoolTransfer) -> PoolTransfer:
    keys = transfer.keys
    if keys is not None and transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        keys = ["__placeholder__"] * len(keys)
    return replace(transfer, keys=keys, host_indices=None, device_indices=None)


def _leading(answer: list[bool]) -> int:
    return answer.index(False) if False in answer else len(answer)


def _is_whole(transfer: PoolTransfer, answer: list[bool] | None) -> bool:
    expected = len(transfer.keys or ()) or len(transfer.host_indices)
    return isinstance(answer, (list, tuple)) and len(answer) == expected and all(answer)
