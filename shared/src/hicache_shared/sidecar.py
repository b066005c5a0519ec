"""Helpers for the pools beside the KV: whose indices they use, and slots for several at once.

A *derived* transfer (``indices_from_pool`` set) has no slots of its own: it uses those of
its source, which is the KV or another transfer of the same list. The rules are those of
SGLang 0.5.23 (``HybridCacheController``, ``HostPoolGroup``). Index arrays are int64 token
slots in numpy or torch; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from hicache_shared.contract import PoolName, PoolTransfer
from hicache_shared.errors import TransferError


class SlotGroup(Protocol):
    """As much of SGLang's ``HostPoolGroup`` as is needed to take and return slots."""

    def get_pool(self, name: Any) -> Any:
        """The host pool of that name, whose ``page_size`` is its index slots a page."""

    def alloc(self, need_size: int, *, pool: Any = None) -> Any:
        """``need_size`` slots of one pool, or None where it has too few."""

    def free(self, indices: Any, *, pool: Any = None) -> int:
        """Return slots; says how many."""


def resolve_derived(
    transfers: Sequence[PoolTransfer],
    *,
    kv_keys: list[str] | None,
    kv_indices: Any,
) -> list[PoolTransfer]:
    """The transfers in the same order, with every derived one given its source's indices.

    One derived from the KV takes the operation's keys as well, whatever it had; one derived
    from another pool takes that pool's keys only if it has none. The transfers passed in
    stay as they are; those that need nothing are returned themselves.

    Raises:
        TransferError: a source is neither the KV of the operation nor among the transfers.
    """
    return [
        transfer
        if transfer.indices_from_pool is None
        else _with_source(transfer, transfers, kv_keys, kv_indices)
        for transfer in transfers
    ]


def _with_source(
    transfer: PoolTransfer,
    transfers: Sequence[PoolTransfer],
    kv_keys: list[str] | None,
    kv_indices: Any,
) -> PoolTransfer:
    if transfer.indices_from_pool == PoolName.KV and kv_indices is not None:
        return replace(transfer, host_indices=kv_indices, keys=kv_keys)
    source = _source(transfer, transfers)
    keys = source.keys if transfer.keys is None else transfer.keys
    return replace(transfer, host_indices=source.host_indices, keys=keys)


def _source(transfer: PoolTransfer, transfers: Sequence[PoolTransfer]) -> PoolTransfer:
    """The transfer with slots of its own that a derived one takes its indices from."""
    for candidate in transfers:
        if candidate.indices_from_pool is None and candidate.name == transfer.indices_from_pool:
            return candidate
    raise TransferError(
        f"pool {str(transfer.name)!r} takes its indices from pool "
        f"{str(transfer.indices_from_pool)!r}, which has no indices of its own in this "
        f"operation; it holds {[str(t.name) for t in transfers]}"
    )


def merge_transfers(transfers: Sequence[PoolTransfer]) -> list[PoolTransfer]:
    """One transfer for each (name, source), in the order in which they first appear.

    Keys and host indices are concatenated in order; the indices become numpy int64. What
    concerns the device (``device_indices``, ``nodes_to_load``) is left out, since storage
    does not read it.

    Raises:
        TransferError: transfers of one pool differ in hit policy or block geometry, or only
            some of them have keys or indices, so that these would no longer match.
    """
    grouped: dict[tuple[str, str | None], list[PoolTransfer]] = {}
    for transfer in transfers:
        grouped.setdefault((transfer.name, transfer.indices_from_pool), []).append(transfer)
    return [_merged(group) for group in grouped.values()]


def _merged(group: Sequence[PoolTransfer]) -> PoolTransfer:
    first = group[0]
    for other in group[1:]:
        if _policy(other) != _policy(first):
            raise TransferError(
                f"transfers of pool {str(first.name)!r} cannot be merged: (hit_policy, "
                f"block_pages, group_pages) are {_policy(first)} and {_policy(other)}"
            )
    key_lists = _all_or_none(first.name, "keys", [t.keys for t in group])
    index_arrays = _all_or_none(first.name, "host_indices", [t.host_indices for t in group])
    return PoolTransfer(
        name=first.name,
        keys=None if key_lists is None else [key for keys in key_lists for key in keys],
        host_indices=None if index_arrays is None else _concatenated(index_arrays),
        hit_policy=first.hit_policy,
        indices_from_pool=first.indices_from_pool,
        block_pages=first.block_pages,
        group_pages=first.group_pages,
    )


def _policy(transfer: PoolTransfer) -> tuple[str, int, int]:
    return transfer.hit_policy.value, transfer.block_pages, transfer.group_pages


def _all_or_none(pool: str, field: str, values: Sequence[Any]) -> Sequence[Any] | None:
    given = [value for value in values if value is not None]
    if given and len(given) < len(values):
        raise TransferError(
            f"transfers of pool {str(pool)!r} cannot be merged: "
            f"{len(given)} of {len(values)} have {field}"
        )
    return given or None


def _concatenated(arrays: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    parts = [np.asarray(array).reshape(-1) for array in arrays]
    return np.concatenate(parts, dtype=np.int64, casting="same_kind")


def allocate_transfers(
    group: SlotGroup, transfers: Sequence[PoolTransfer], *, kv_indices: Any = None
) -> bool:
    """Take host slots for all transfers that have none, or for none of them.

    A transfer needs a page of slots a key. Pools are served in the order of their names, as
    SGLang does it, so that all ranks agree on who gets the last slots. Derived transfers get
    their source's indices; the KV's are ``kv_indices``. The transfers are changed in place.
    Not thread-safe.

    Returns:
        False if a pool had too few slots. Then, and when ``alloc`` raises, every slot taken
        here is back in its pool and every transfer as it was.

    Raises:
        TransferError: a transfer has neither slots nor keys, or a derived one no source.
            Nothing was taken then, nor where the group does not know a pool's name.
    """
    own = [t for t in transfers if t.indices_from_pool is None and t.host_indices is None]
    needed = [(t, _slots(group, t)) for t in sorted(own, key=lambda t: str(t.name))]
    derived = [t for t in transfers if t.indices_from_pool is not None]
    sources = [(t, _source(t, transfers)) for t in derived if t.indices_from_pool != PoolName.KV]

    complete = _allocate_all(group, needed)
    if complete:
        for transfer in derived:
            if transfer.indices_from_pool == PoolName.KV:
                transfer.host_indices = kv_indices
        for transfer, source in sources:
            transfer.host_indices = source.host_indices
    return complete


def _allocate_all(group: SlotGroup, needed: Sequence[tuple[PoolTransfer, int]]) -> bool:
    taken: list[PoolTransfer] = []
    complete = False
    try:
        for transfer, slots in needed:
            indices = group.alloc(slots, pool=transfer.name)
            if indices is None:
                return False
            transfer.host_indices = indices
            taken.append(transfer)
        complete = True
    finally:
        if not complete:
            release_transfers(group, taken)
    return True


def _slots(group: SlotGroup, transfer: PoolTransfer) -> int:
    if transfer.keys is None:
        raise TransferError(
            f"pool {str(transfer.name)!r}: expected keys, one a page to allocate, got None"
        )
    page_slots: int = group.get_pool(transfer.name).page_size
    return len(transfer.keys) * page_slots


def release_transfers(group: SlotGroup, transfers: Sequence[PoolTransfer]) -> int:
    """Return the transfers' slots to their pools; how many slots that were.

    Derived transfers share another's, so each slot is returned once. Afterwards no transfer
    has indices, so that a second call releases nothing. Not thread-safe.
    """
    released = 0
    for transfer in transfers:
        if transfer.indices_from_pool is None and transfer.host_indices is not None:
            released += group.free(transfer.host_indices, pool=transfer.name)
        transfer.host_indices = None
    return released
