"""Plans to answers: one store call for all pools of a SGLang call, and the fault boundary."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from hicache_shared.hostmem import byte_view
from hicache_shared.layout import Access
from hicache_shared.plan import PagePlan, RegisteredPool
from hicache_shared.registry import PoolRegistry
from hicache_shared.stats import Moved, Stats
from hicache_shared.store import Code, KeyBatch, PageBatch, PageStore, StoredPool

log = logging.getLogger(__name__)

Operation = Literal["get", "set"]


class Transfers:
    """Moves pages between host pools and a store. Thread-safe.

    Args:
        store: the adapter's store.
        pools: opened here at the first call, if SGLang (before 0.5.23) has no hook for it.
        stats: where pages, bytes and reasons are counted.
        deadline_s: bound on every store call, in seconds.
    """

    def __init__(
        self, store: PageStore, pools: PoolRegistry, stats: Stats, deadline_s: float
    ) -> None:
        self._store = store
        self._pools = pools
        self._stats = stats
        self._deadline_s = deadline_s
        self._faulty = False
        self._slow_paths: set[str] = set()

    def present(self, asks: list[tuple[RegisteredPool, Sequence[str]]]) -> list[list[bool]]:
        """Whether each page is stored whole: in all its head shards. Unknown is no."""
        batches = [KeyBatch(stored, keys) for pool, keys in asks for stored in pool.stored]
        answers = iter(self._guarded("exists", self._store.exists, batches, False))
        return [_all_of([next(answers) for _ in pool.stored]) for pool, _ in asks]

    def move(self, operation: Operation, plans: Sequence[PagePlan]) -> list[list[bool]]:
        """One answer a key of each plan. A logical anchor's pages are always there."""
        started = time.perf_counter()
        batches = [
            PageBatch(stored, plan.keys, stored.layout.addresses(plan.pages))
            for plan in plans
            for stored in plan.pool.stored
            if stored.layout.access is not Access.STAGED
        ]
        direct = iter(self.move_batches(operation, batches))
        answers = []
        for plan in plans:
            codes = [
                self._staged(operation, plan, stored)
                if stored.layout.access is Access.STAGED
                else next(direct)
                for stored in plan.pool.stored
            ]
            answers.append(self._answers(operation, plan, codes))
        self._sample(operation, plans, answers, time.perf_counter() - started)
        return answers

    def move_batches(self, operation: Operation, batches: list[PageBatch]) -> list[list[int]]:
        """One store call; a code a page. Never raises for a fault of the store."""
        call = self._store.get if operation == "get" else self._store.put
        return self._guarded(operation, call, batches, int(Code.FAILED))

    def note_slow_path(self, what: str, pages: int) -> None:
        """Count pages that are copied, and say so once."""
        self._stats.slow_path(what, pages)
        if what not in self._slow_paths:
            self._slow_paths.add(what)
            log.warning("slower path: %s", what)

    def _staged(self, operation: Operation, plan: PagePlan, stored: StoredPool) -> list[int]:
        self.note_slow_path(f"pool {plan.pool.name!r} is copied in flat form", len(plan.keys))
        area, pool = self._pools.staging(stored), plan.pool.pool
        slots = [page * plan.pool.page_slots for page in plan.pages]

        def move(batch: PageBatch) -> list[int]:
            return self.move_batches(operation, [batch])[0]

        def restore(i: int, page: memoryview) -> None:
            flat = pool.get_dummy_flat_data_page()
            byte_view(flat)[:] = page
            pool.set_from_flat_data_page(slots[i], flat)

        if operation == "set":
            return area.put(plan.keys, lambda i: pool.get_data_page(slots[i]), move)
        return area.get(plan.keys, restore, move)

    def _answers(self, operation: Operation, plan: PagePlan, codes: list[list[int]]) -> list[bool]:
        if not any(map(any, codes)):
            return [True] * len(plan.keys)
        for per_shard in codes:
            self._stats.refused(operation, plan.pool.name, per_shard)
        return [not any(shards) for shards in zip(*codes, strict=True)]

    def _sample(
        self,
        operation: Operation,
        plans: Sequence[PagePlan],
        answers: list[list[bool]],
        seconds: float,
    ) -> None:
        counts = [
            (sum(moved), plan.pool.page_bytes)
            for plan, moved in zip(plans, answers, strict=True)
            if not plan.pool.logical
        ]
        moved = Moved(sum(n for n, _ in counts), sum(n * size for n, size in counts), seconds)
        if operation == "get":
            self._stats.got(moved)
        else:
            self._stats.put(moved)

    def _guarded(
        self,
        operation: str,
        call: Callable[[list[Any], float], list[list[Any]]],
        batches: list[Any],
        otherwise: Any,
    ) -> list[list[Any]]:
        """The store's answers; ``otherwise`` a page if it raised or answered in another shape.

        An exception that escaped here would end SGLang's storage thread.
        """
        if not batches:
            return []
        try:
            self._pools.open()
            answers = call(batches, self._deadline_s)
        except Exception:
            if not self._faulty:
                log.exception("storage %s failed; its pages count as missing", operation)
            self._faulty = True
            return [[otherwise] * len(batch.hashes) for batch in batches]
        if [len(answer) for answer in answers] != [len(batch.hashes) for batch in batches]:
            log.error("storage %s gave another number of answers than pages", operation)
            return [[otherwise] * len(batch.hashes) for batch in batches]
        if self._faulty:
            log.info("storage %s works again", operation)
        self._faulty = False
        return answers


def _all_of(shards: list[list[bool]]) -> list[bool]:
    if len(shards) == 1:
        return shards[0]
    return [all(page) for page in zip(*shards, strict=True)]
