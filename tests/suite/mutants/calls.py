"""Backends that answer in another form than SGLang reads, or mix up what one call is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hicache_shared.contract import PoolTransfer, StorageMetrics
from hicache_shared.errors import LayoutError
from hicache_shared.memory import MemoryStore
from hicache_shared.memory_backend import MemoryBackend
from hicache_shared.store import KeyBatch
from tests.suite.breaking import broken

MLA = "mla-page_first"
V4 = "deepseek-v4-flash-page_first"
ONE_ANSWER = "test_case_08_every_key_has_one_answer_in_order"
LATE = "test_a_pool_that_is_registered_late_works_like_the_others"

Keys = list[str]
Answers = dict[str, list[bool]]


@broken(
    "A get gives two answers a key, one for K and one for V.",
    killed_by=f"{ONE_ANSWER}[{MLA}]",
)
class TwoAnswersAKey(MemoryBackend):
    def batch_get_v1(self, keys: Keys, host_indices: Any, extra_info: Any = None) -> list[bool]:
        answers = super().batch_get_v1(keys, host_indices, extra_info)
        return [answer for answer in answers for _ in ("k", "v")]


@broken(
    "Answers are numpy's bools.",
    killed_by=f"{ONE_ANSWER}[{MLA}]",
)
class NumpyBools(MemoryBackend):
    def batch_set_v1(self, keys: Keys, host_indices: Any, extra_info: Any = None) -> list[bool]:
        return [np.bool_(a) for a in super().batch_set_v1(keys, host_indices)]  # type: ignore[misc]


@broken(
    "Answers of a get are a numpy array.",
    killed_by=f"test_answers_are_plain_lists_ints_and_dicts[{MLA}]",
)
class AnswersAnArray(MemoryBackend):
    def batch_get_v1(self, keys: Keys, host_indices: Any, extra_info: Any = None) -> list[bool]:
        return np.array(super().batch_get_v1(keys, host_indices))  # type: ignore[return-value]


@broken(
    "Answers about absent pages come after those about pages that are there.",
    killed_by=f"{ONE_ANSWER}[{MLA}]",
)
class AnswersOutOfOrder(MemoryBackend):
    def batch_get_v1(self, keys: Keys, host_indices: Any, extra_info: Any = None) -> list[bool]:
        return sorted(super().batch_get_v1(keys, host_indices, extra_info), reverse=True)


@broken(
    "The answers about the pools of one call are handed out in another order than the pools.",
    killed_by=f"test_each_pool_of_one_call_has_its_own_answers[{V4}]",
)
class PoolsOfOneCallMixedUp(MemoryBackend):
    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> Answers:
        answers = super().batch_get_v2(transfers, extra_info)
        return dict(zip(answers, reversed(list(answers.values())), strict=True))


@broken(
    "Of a pool that is named twice in one call, the last answers stand for all.",
    killed_by=f"test_a_pool_twice_in_one_call_has_its_answers_in_order[{V4}]",
)
class LastAnswersOfAPool(MemoryBackend):
    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> Answers:
        super().batch_set_v2(transfers, extra_info)
        return {t.name: [True] * len(t.keys or ()) for t in transfers}


@broken(
    "A pool that is registered after the others has no place in an answer.",
    killed_by=f"{LATE}[{MLA}]",
)
class LatePoolIgnored(MemoryBackend):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.late: set[str] = set()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if self._pools.opened:
            self.late.add(host_pool_name)
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> Answers:
        return super().batch_set_v2([t for t in transfers if t.name not in self.late], extra_info)


@broken(
    "Registering a storage again is an error.",
    killed_by=f"test_case_18_registering_the_same_storage_again_changes_nothing[{MLA}]",
    raises=LayoutError,
)
class SecondRegistrationIsFatal(MemoryBackend):
    def on_host_pools_registered(self) -> None:
        if self._pools.opened:
            raise LayoutError("this storage is registered already")
        super().on_host_pools_registered()


@broken(
    "Flat pages that are absent are left out of the answer, and the others move up.",
    killed_by=f"test_an_absent_flat_page_is_none_and_its_neighbours_come[{MLA}]",
)
class FlatPagesMoveUp(MemoryBackend):
    def batch_get(self, keys: Keys, target_locations: Any = None, target_sizes: Any = None) -> Any:
        pages = super().batch_get(keys, target_locations, target_sizes)
        there = [page for page in pages if page is not None]
        return there + [None] * (len(keys) - len(there))


@broken(
    "Statistics are given out and not emptied, so that each page is counted many times.",
    killed_by=f"test_get_stats_tells_the_pages_of_each_call_once[{MLA}]",
)
class StatsNotDrained(MemoryBackend):
    def get_stats(self) -> StorageMetrics | None:
        stats = self._stats
        samples = stats._prefetched, stats._backed_up
        metrics = super().get_stats()
        stats._prefetched, stats._backed_up = samples
        return metrics


@broken(
    "A query answers for the first 128 keys, the most that SGLang moves in a call.",
    killed_by=f"test_a_chain_longer_than_the_host_pools_moves_in_several_calls[{MLA}]",
)
class NoHitBeyond128Pages(MemoryStore):
    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> list[list[bool]]:
        return [
            present[:128] + [False] * (len(present) - 128)
            for present in super().exists(asks, deadline_s)
        ]


@broken(
    "A call about no page at all raises.",
    killed_by=f"test_an_empty_batch_has_an_empty_answer[{MLA}]",
    raises=ValueError,
)
class EmptyBatchRaises(MemoryBackend):
    def batch_get_v1(self, keys: Keys, host_indices: Any, extra_info: Any = None) -> list[bool]:
        if not keys:
            raise ValueError("no keys")
        return super().batch_get_v1(keys, host_indices, extra_info)


@broken(
    "The pages of the prefix, where SGLang tells it, are counted as hit.",
    killed_by=f"test_what_sglang_says_of_the_prefix_changes_no_answer[deep-{MLA}]",
)
class PrefixCountedAsHit(MemoryBackend):
    def batch_exists(self, keys: Keys, extra_info: Any = None) -> int:
        before = extra_info.prefix_keys if extra_info is not None else None
        return super().batch_exists(keys, extra_info) + len(before or ())
