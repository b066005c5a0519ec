"""Plans to answers: one store call for all pools of a SGLang call, and the fault boundary."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from hicache_shared.errors import LayoutError
from hicache_shared.fold import Mask
from hicache_shared.hostmem import byte_view
from hicache_shared.layout import Access
from hicache_shared.plan import Operation, PagePlan, RegisteredPool
from hicache_shared.registry import PoolRegistry
from hicache_shared.staging import Move, StagingArea
from hicache_shared.stats import Moved, Stats
from hicache_shared.store import Code, KeyBatch, PageBatch, PageStore, Presence, StoredPool

log = logging.getLogger(__name__)

T = TypeVar("T")


class Transfers:
    """Moves pages between host pools and a store. Thread-safe.

    Args:
        store: the adapter's store.
        pools: opened here at the first call, if SGLang (before 0.5.23) has no hook for it.
        stats: where pages, bytes and reasons are counted.
        deadline_s: bound on the store calls of one call of SGLang's together, in seconds.
    """

    def __init__(
        self, store: PageStore, pools: PoolRegistry, stats: Stats, deadline_s: float
    ) -> None:
        self._store = store
        self._pools = pools
        self._stats = stats
        self._deadline_s = deadline_s
        self._faulty: set[str] = set()
        self._slow_paths: set[str] = set()

    def open(self) -> bool:
        """Whether the store is ready; opened now if it was not. Never raises for its faults."""
        return self._pools.opened or self._attempt("open", self._open) is not None

    def until(self) -> float:
        """When a call of SGLang's that begins now must end, by ``time.monotonic``."""
        return time.monotonic() + self._deadline_s

    def present(self, until: float, asks: list[tuple[RegisteredPool, Sequence[str]]]) -> list[Mask]:
        """Whether each page is stored whole: in all its head shards. Unknown is no."""
        batches = [KeyBatch(stored, keys) for pool, keys in asks for stored in pool.stored]
        masks = iter(self._exists(batches, until))
        return [_all_of([next(masks) for _ in pool.stored]) for pool, _ in asks]

    def move(
        self, operation: Operation, plans: Sequence[PagePlan], depth: int | None = None
    ) -> list[list[bool]]:
        """One answer a key of each plan. A logical anchor's pages are always there.

        ``depth`` is the number of pages before each plan's first in its chain, if known.
        """
        started, until = time.perf_counter(), self.until()
        batches = [
            PageBatch(stored, plan.keys, stored.layout.addresses(plan.pages), depth)
            for plan in plans
            for stored in plan.pool.stored
            if stored.layout.access is not Access.STAGED
        ]
        direct = iter(self.move_batches(operation, batches, until))
        answers = []
        for plan in plans:
            codes = [
                self._staged(operation, plan, stored, until)
                if stored.layout.access is Access.STAGED
                else next(direct)
                for stored in plan.pool.stored
            ]
            answers.append(self._answers(operation, plan, codes))
        if self._stats.sampling:
            self._sample(operation, plans, answers, time.perf_counter() - started)
        return answers

    def move_batches(
        self, operation: Operation, batches: list[PageBatch], until: float
    ) -> list[list[int]]:
        """One store call; a code a page. Never raises for a fault of the store."""
        if not batches:
            return []
        if not self.open():
            return _everywhere(int(Code.FAILED), batches)
        left = until - time.monotonic()
        if left <= 0:
            return _everywhere(int(Code.TIMEOUT), batches)
        call = self._store.get if operation == "get" else self._store.put
        answers = self._attempt(operation, lambda: _codes(call(batches, left), batches))
        return _everywhere(int(Code.FAILED), batches) if answers is None else answers

    def note_flat(
        self, operation: Operation, stored: StoredPool, codes: list[int], seconds: float
    ) -> None:
        """Count pages that came as flat tensors: what moved, and why the rest did not."""
        self._stats.refused(operation, stored.name, codes)
        pages = codes.count(Code.OK)
        self._record(operation, Moved(pages, pages * stored.layout.page_bytes, seconds))

    def note_slow_path(self, what: str, pages: int) -> None:
        """Count pages that are copied, and say so once."""
        self._stats.slow_path(what, pages)
        if what not in self._slow_paths:
            self._slow_paths.add(what)
            log.warning("slower path: %s", what)

    def staged(
        self,
        operation: Operation,
        stored: StoredPool,
        pages: int,
        work: Callable[[StagingArea, Move], list[int]],
        until: float,
    ) -> list[int]:
        """A code a page of ``work``, which is given the staging area and how to move a batch."""
        if not self.open():
            return [int(Code.FAILED)] * pages
        return work(
            self._pools.staging(stored, operation),
            lambda batch: self.move_batches(operation, [batch], until)[0],
        )

    def _staged(
        self, operation: Operation, plan: PagePlan, stored: StoredPool, until: float
    ) -> list[int]:
        pool = plan.pool.pool
        slots = [page * plan.pool.page_slots for page in plan.pages]

        def restore(i: int, page: memoryview) -> None:
            flat = pool.get_dummy_flat_data_page()
            if flat.nbytes != page.nbytes:
                raise LayoutError(f"pool {stored.name!r} changed its page size after registration")
            byte_view(flat)[:] = page
            pool.set_from_flat_data_page(slots[i], flat)

        def work(area: StagingArea, move: Move) -> list[int]:
            self.note_slow_path(f"pool {plan.pool.name!r} is copied in flat form", len(plan.keys))
            if operation == "set":
                return area.put(plan.keys, lambda i: pool.get_data_page(slots[i]), move)
            return area.get(plan.keys, restore, move)

        return self.staged(operation, stored, len(plan.keys), work, until)

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
        self._record(operation, moved)

    def _record(self, operation: Operation, moved: Moved) -> None:
        if operation == "get":
            self._stats.got(moved)
        else:
            self._stats.put(moved)

    def _exists(self, batches: list[KeyBatch], until: float) -> list[Mask]:
        masks = None
        if batches and self.open() and (left := until - time.monotonic()) > 0:
            masks = self._attempt(
                "exists", lambda: _masks(self._store.exists(batches, left), batches)
            )
        if masks is None:
            return [np.zeros(len(batch.hashes), dtype=np.bool_) for batch in batches]
        return masks

    def _open(self) -> bool:
        self._pools.open()
        return True

    def _attempt(self, operation: str, call: Callable[[], T]) -> T | None:
        """What the call gives, None if it raised: an exception would end SGLang's thread.

        A fault is logged once for each operation, until the operation works again.
        """
        try:
            result = call()
        except Exception:
            if operation not in self._faulty:
                self._faulty.add(operation)
                log.exception("storage %s failed; its pages count as missing", operation)
            return None
        if operation in self._faulty:
            self._faulty.discard(operation)
            log.info("storage %s works again", operation)
        return result


_CODE_TYPES = frozenset({int, Code})


def _all_of(shards: list[Mask]) -> Mask:
    whole = shards[0]
    for shard in shards[1:]:
        whole = whole & shard
    return whole


def _masks(answers: Sequence[Presence], batches: Sequence[KeyBatch]) -> list[Mask]:
    """The answers as masks, if there is one a page."""
    _check_counts(answers, batches)
    return [_mask(answer) for answer in answers]


def _mask(answer: Presence) -> Mask:
    """Only True counts as present; what is no bool raises or is absent.

    Lists go through bytes, which takes a tenth of looking at the type of each answer.
    """
    if isinstance(answer, np.ndarray) and answer.dtype == np.bool_:
        return answer
    flags = answer if isinstance(answer, np.ndarray) else np.frombuffer(bytes(answer), np.uint8)
    mask: Mask = flags == 1
    return mask


def _codes(answers: list[list[int]], batches: Sequence[PageBatch]) -> list[list[int]]:
    """The answers, if there is a code a page.

    A store that answers True for success, or None for failure, must not be taken for one
    that gives codes, of which 0 is success.
    """
    _check_counts(answers, batches)
    for answer in answers:
        if not _CODE_TYPES.issuperset(map(type, answer)):
            raise TypeError(f"expected a code a page, got {_types(answer)}")
    return answers


def _check_counts(
    answers: Sequence[Sequence[object] | Mask], batches: Sequence[KeyBatch | PageBatch]
) -> None:
    wanted = [len(batch.hashes) for batch in batches]
    if [len(answer) for answer in answers] != wanted:
        raise TypeError(f"expected {wanted} answers, got {[len(answer) for answer in answers]}")


def _types(answer: Sequence[object]) -> str:
    return ", ".join(sorted({type(page).__name__ for page in answer}))


def _everywhere(value: T, batches: Sequence[KeyBatch | PageBatch]) -> list[list[T]]:
    return [[value] * len(batch.hashes) for batch in batches]
