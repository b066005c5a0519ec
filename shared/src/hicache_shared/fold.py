"""Hit policies to legal prefixes: which prefixes of a chain can be restored.

A chain is a row of pages, each hashed over all before it. A prefix is restorable if every
gating pool can serve it, so the answer is the *intersection* of the pools' legal prefixes
and its maximum. The minimum of the pools' longest prefixes is wrong: a sliding-window pool
has holes in what it can serve, and that minimum may be one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_shared.contract import BLOCK_GROUPS, PoolHitPolicy, PoolTransferResult
from hicache_shared.errors import TransferError

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class PoolPresence:
    """What one pool holds of a chain.

    Attributes:
        name: the pool's name, returned as given.
        present: one bool a page, from the start of the chain. It may be shorter than the
            chain: pages beyond it were not asked about and count as absent.
        policy: which pages a prefix needs.
        window: for TRAILING_PAGES, how many last pages of a prefix are needed; SGLang gives
            it as the number of placeholder keys, ``max(1, len(transfer.keys or [1]))``.
        block_pages: for BLOCK_GROUPS, pages a block.
        group_pages: for BLOCK_GROUPS, pages a block's group.
    """

    name: str
    present: Sequence[bool] | Mask
    policy: PoolHitPolicy
    window: int = 1
    block_pages: int = 0
    group_pages: int = 0


def fold(pages: int, pools: Sequence[PoolPresence]) -> PoolTransferResult:
    """The answer to a hit query about a chain of ``pages`` pages. Pure and thread-safe.

    - ALL_PAGES: every prefix of the leading run of present pages is legal.
    - TRAILING_PAGES with window N: prefix p is legal iff pages ``[max(0, p - N), p)`` are
      all present.
    - BLOCK_GROUPS: reports the pages that its leading complete groups cover; it neither
      gates the other pools nor is cut by them.

    A physical KV pool is one of ``pools``, with ALL_PAGES. With no gating pool there is
    nothing to restore. The definitions are those of SGLang's v2 contract (0.5.19 for
    ``restorable_prefix_pages``, 0.5.22 for BLOCK_GROUPS).

    Returns:
        ``restorable_prefix_pages``: the sorted intersection over the gating pools, from 1;
        ``kv_hit_pages``: its maximum, or 0; ``extra_pool_hit_pages``: each pool's own
        longest prefix, and the smaller one where a name comes twice. Plain Python values.

    Raises:
        TransferError: a pool answers for more pages than the chain has, or its window or
            block geometry is impossible.
    """
    boundaries: dict[str, int] = {}
    limit = pages if any(p.policy != BLOCK_GROUPS for p in pools) else 0
    trailing: list[Mask] = []
    for pool in pools:
        present = _presence(pool, pages)
        if pool.policy == PoolHitPolicy.ALL_PAGES:
            boundary = _leading_run(present)
            limit = min(limit, boundary)
        elif pool.policy == PoolHitPolicy.TRAILING_PAGES:
            legal = _trailing_legal(pool, present)
            boundary = _last_true(legal)
            limit = min(limit, boundary)
            if boundary < legal.size or not legal.all():
                trailing.append(legal)
        elif pool.policy == BLOCK_GROUPS:
            boundary = _covered_by_groups(pool, present)
        else:
            raise TransferError(
                f"pool {pool.name!r}: expected a hit policy of {[p.value for p in PoolHitPolicy]}, "
                f"got {pool.policy!r}"
            )
        boundaries[pool.name] = min(boundary, boundaries.get(pool.name, boundary))
    restorable = _restorable(limit, trailing)
    return PoolTransferResult(restorable[-1] if restorable else 0, boundaries, restorable)


def _presence(pool: PoolPresence, pages: int) -> Mask:
    """``present`` as an array, where nothing but True (or 1) counts as present.

    Lists go through bytes: measured three times as fast as ``np.array(present, dtype=bool)``.
    """
    present = pool.present
    if len(present) > pages:
        raise TransferError(
            f"pool {pool.name!r}: expected presence of at most {pages} pages, got {len(present)}"
        )
    flags = present if isinstance(present, np.ndarray) else np.frombuffer(bytes(present), np.uint8)
    mask: Mask = flags == 1
    return mask


def _leading_run(present: Mask) -> int:
    return present.size if present.all() else int(np.argmin(present))


def _trailing_legal(pool: PoolPresence, present: Mask) -> Mask:
    """Whether prefix p is legal, at index p - 1."""
    window = pool.window
    if window < 1:
        raise TransferError(f"pool {pool.name!r}: expected a window of 1 page or more: {window}")
    if present.all():
        return present
    holes = np.cumsum(~present, dtype=np.int32)
    legal: Mask = holes == 0
    legal[window:] = holes[window:] == holes[:-window]
    return legal


def _last_true(mask: Mask) -> int:
    """One more than the last true index, 0 if there is none."""
    return mask.size - _leading_run(~mask[::-1])


def _covered_by_groups(pool: PoolPresence, present: Mask) -> int:
    """Pages covered by leading complete groups; an incomplete last block covers nothing.

    Block b is pages ``[b * block_pages, (b + 1) * block_pages)`` of the span, and its group
    the last ``group_pages`` of them, since a chained hash at a block's end names the whole
    block. That is our reading: SGLang 0.5.22 defines the policy without a producer in tree.
    """
    block, group = pool.block_pages, pool.group_pages
    if block < 1 or not 1 <= group <= block:
        raise TransferError(
            f"pool {pool.name!r}: expected block_pages >= 1 and group_pages in "
            f"1..block_pages, got {block} and {group}"
        )
    whole = present.size // block * block
    groups = present[:whole].reshape(-1, block)[:, block - group :]
    return _leading_run(groups.all(axis=1)) * block


def _restorable(limit: int, trailing: Sequence[Mask]) -> list[int]:
    if not trailing:
        return list(range(1, limit + 1))
    legal = trailing[0][:limit].copy()
    for mask in trailing[1:]:
        legal &= mask[:limit]
    prefixes: list[int] = (np.flatnonzero(legal) + 1).tolist()
    return prefixes
