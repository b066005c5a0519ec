"""Backends that are wrong about which prefixes can be restored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hicache_shared.contract import BLOCK_GROUPS, PoolTransfer, PoolTransferResult
from hicache_shared.errors import UnknownPoolError
from hicache_shared.memory import MemoryStore
from hicache_shared.memory_backend import MemoryBackend
from hicache_shared.store import KeyBatch
from tests.suite.breaking import broken

V4 = "deepseek-v4-flash-page_first"
MLA = "mla-page_first"

Keys = list[str]
Asked = list[PoolTransfer] | None


def up_to(pages: int) -> PoolTransferResult:
    return PoolTransferResult(pages, {}, list(range(1, pages + 1)))


@broken(
    "The hit is the smallest of the pools' longest prefixes.",
    killed_by=f"test_case_01_the_minimum_of_maxima_is_not_the_answer[{V4}]",
)
class MinimumFold(MemoryBackend):
    def batch_exists_v2(
        self, keys: Keys, pool_transfers: Asked = None, extra_info: Any = None
    ) -> PoolTransferResult:
        alone = [super(MinimumFold, self).batch_exists_v2(keys, [t]) for t in pool_transfers or ()]
        longest = [result.kv_hit_pages for result in alone]
        return up_to(min(longest or [super().batch_exists_v2(keys).kv_hit_pages]))


@broken(
    "Each pool is asked about what the one before it can serve, and the last one's hit is taken.",
    killed_by=f"test_case_01_prefixes_are_intersected_over_pools[{V4}]",
)
class SequentialFold(MemoryBackend):
    def batch_exists_v2(
        self, keys: Keys, pool_transfers: Asked = None, extra_info: Any = None
    ) -> PoolTransferResult:
        result = super().batch_exists_v2(keys, None, extra_info)
        for transfer in pool_transfers or ():
            result = super().batch_exists_v2(keys, [transfer], extra_info)
            keys = keys[: result.kv_hit_pages]
        return result


@broken(
    "A prefix whose first and last page are there counts as whole.",
    killed_by=f"test_case_01_prefixes_are_intersected_over_pools[{MLA}]",
)
class PrefixOnlyLookup(MemoryStore):
    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> list[list[bool]]:
        return [
            [True] * len(present) if present and present[0] and present[-1] else present
            for present in super().exists(asks, deadline_s)
        ]


@broken(
    "The end of the prefix is looked for by halving, as if there were no holes.",
    killed_by=f"test_case_01_prefixes_are_intersected_over_pools[{MLA}]",
)
class HitByHalving(MemoryStore):
    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> list[list[bool]]:
        return [_halved(present) for present in super().exists(asks, deadline_s)]


def _halved(present: list[bool]) -> list[bool]:
    low, high = 0, len(present)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if present[middle] else (low, middle)
    return [page < low for page in range(len(present))]


@broken(
    "All pages that are there are counted, also those behind a hole.",
    killed_by=f"test_case_16_a_hole_at_the_start_is_no_hit[{MLA}]",
)
class HoleNotSeen(MemoryStore):
    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> list[list[bool]]:
        return [sorted(present, reverse=True) for present in super().exists(asks, deadline_s)]


@broken(
    "A hit is a page longer than what is stored.",
    killed_by=f"test_a_chain_longer_than_what_is_stored_hits_what_is_stored[{MLA}]",
)
class HitOnePageTooLong(MemoryBackend):
    def batch_exists_v2(
        self, keys: Keys, pool_transfers: Asked = None, extra_info: Any = None
    ) -> PoolTransferResult:
        hit = super().batch_exists_v2(keys, pool_transfers, extra_info).kv_hit_pages
        return up_to(min(hit + 1, len(keys)) if hit else 0)


@broken(
    "A pool that needs a window of pages is asked about a prefix's last page alone.",
    killed_by="test_case_01_prefixes_are_intersected_over_pools[swa-page_first]",
)
class WindowOfOnePage(MemoryBackend):
    def batch_exists_v2(
        self, keys: Keys, pool_transfers: Asked = None, extra_info: Any = None
    ) -> PoolTransferResult:
        narrow = [replace(t, keys=(t.keys or [])[:1] or None) for t in pool_transfers or ()]
        return super().batch_exists_v2(keys, narrow, extra_info)


@broken(
    "The placeholders of a window are taken for keys, and not found.",
    killed_by="test_of_a_trailing_pools_keys_only_the_number_counts[swa-page_first]",
)
class PlaceholdersTakenForKeys(MemoryBackend):
    def batch_exists_v2(
        self, keys: Keys, pool_transfers: Asked = None, extra_info: Any = None
    ) -> PoolTransferResult:
        named = {key for transfer in pool_transfers or () for key in transfer.keys or ()}
        if not named <= set(keys):
            return up_to(0)
        return super().batch_exists_v2(keys, pool_transfers, extra_info)


@broken(
    "A sidecar that holds nothing of a chain is left out of the answer.",
    killed_by=f"test_case_06_a_sidecar_that_was_never_stored_is_no_hit[{V4}]",
)
class MissingSidecarCountedAsHit(MemoryBackend):
    def batch_exists_v2(
        self, keys: Keys, pool_transfers: Asked = None, extra_info: Any = None
    ) -> PoolTransferResult:
        verdict = super().batch_exists_v2(keys, pool_transfers, extra_info).extra_pool_hit_pages
        held = [t for t in pool_transfers or () if verdict.get(str(t.name)) != 0]
        return super().batch_exists_v2(keys, held, extra_info)


@broken(
    "A logical anchor, asked about alone, has every page.",
    killed_by=f"test_case_07_a_logical_anchor_moves_nothing_and_the_sidecars_decide[{V4}]",
)
class LogicalAnchorHitsOnAnEmptyStore(MemoryBackend):
    def batch_exists(self, keys: Keys, extra_info: Any = None) -> int:
        return len(keys) if self._pools.kv.logical else super().batch_exists(keys, extra_info)


@broken(
    "A hit query about a pool that was never registered leaves that pool out.",
    killed_by=f"test_case_06_an_unregistered_pool_is_an_error_that_names_it[{MLA}]",
)
class UnknownPoolIgnored(MemoryBackend):
    def batch_exists_v2(
        self, keys: Keys, pool_transfers: Asked = None, extra_info: Any = None
    ) -> PoolTransferResult:
        known = [transfer for transfer in pool_transfers or () if self._knows(transfer)]
        return super().batch_exists_v2(keys, known, extra_info)

    def _knows(self, transfer: PoolTransfer) -> bool:
        try:
            self._pools[transfer.name]
        except UnknownPoolError:
            return False
        return True


@broken(
    "The list of restorable prefixes is None, which SGLang reads as all up to the hit.",
    killed_by=f"test_case_01_prefixes_are_intersected_over_pools[{V4}]",
)
class RestorableNone(MemoryBackend):
    def batch_exists_v2(
        self, keys: Keys, pool_transfers: Asked = None, extra_info: Any = None
    ) -> PoolTransferResult:
        result = super().batch_exists_v2(keys, pool_transfers, extra_info)
        result.restorable_prefix_pages = None
        return result


@broken(
    "A pool of BLOCK_GROUPS cuts the hit to the pages that its groups cover.",
    killed_by="test_block_groups_never_gate_the_hit[swa-page_first]",
)
class BlockGroupsGateTheHit(MemoryBackend):
    def batch_exists_v2(
        self, keys: Keys, pool_transfers: Asked = None, extra_info: Any = None
    ) -> PoolTransferResult:
        result = super().batch_exists_v2(keys, pool_transfers, extra_info)
        groups = [str(t.name) for t in pool_transfers or () if t.hit_policy == BLOCK_GROUPS]
        covered = [result.extra_pool_hit_pages.get(name, 0) for name in groups]
        return up_to(min([result.kv_hit_pages, *covered]))


@broken(
    "The restorable prefixes are a numpy array.",
    killed_by=f"test_answers_are_plain_lists_ints_and_dicts[{MLA}]",
)
class RestorableAnArray(MemoryBackend):
    def batch_exists_v2(
        self, keys: Keys, pool_transfers: Asked = None, extra_info: Any = None
    ) -> PoolTransferResult:
        result = super().batch_exists_v2(keys, pool_transfers, extra_info)
        result.restorable_prefix_pages = np.array(result.restorable_prefix_pages)  # type: ignore[assignment]
        return result
