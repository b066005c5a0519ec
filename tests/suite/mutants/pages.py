"""Backends that move other bytes than a page's, or answer otherwise than they moved."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from hicache_shared import plan
from hicache_shared.memory import Kept, MemoryStore, Shelf, Spans
from hicache_shared.plan import RegisteredPool
from hicache_shared.store import Code, PageBatch, StoredPool
from tests.suite.breaking import broken, broken_core

MLA = "mla-page_first"
MHA = "mha-page_first"
BYTES = "test_pages_come_back_byte_exact_and_nothing_else_changes"
SIZES = "test_case_02_an_object_of_another_size_is_a_miss"
INDICES = "test_indices_that_do_not_fit_are_refused_and_move_nothing"


@broken(
    "A get takes an object that is shorter than the page, and fills what there is.",
    killed_by=f"{SIZES}[{MLA}]",
)
class ShortReadAccepted(MemoryStore):
    def _get(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        return _any_size(super()._get(pool, key, spans), self._shelf.objects.get(key), spans, -1)


@broken(
    "A get takes the beginning of an object that is longer than the page.",
    killed_by=f"{SIZES}[{MLA}]",
)
class LongObjectAccepted(MemoryStore):
    def _get(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        return _any_size(super()._get(pool, key, spans), self._shelf.objects.get(key), spans, 1)


def _any_size(code: Code, kept: Kept | None, spans: Spans, sign: int) -> Code:
    """Whatever fits of an object that is too short (-1) or too long (1)."""
    wanted = sum(nbytes for _, nbytes in spans)
    if kept is None or (len(kept.page) - wanted) * sign <= 0:
        return code
    page, offset = kept.page, 0
    for address, nbytes in spans:
        part = page[offset : offset + nbytes]
        ctypes.memmove(address, part, len(part))
        offset += nbytes
    return Code.OK


@broken(
    "Bytes that changed in the store are served.",
    killed_by=f"test_changed_bytes_are_a_miss[{MLA}]",
)
class CorruptBytesServed(MemoryStore):
    def _get(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        kept = self._objects().get(key)
        if kept is not None:
            self._objects()[key] = Kept.of(kept.page)
        return super()._get(pool, key, spans)


@broken(
    "A get fills all components of a page but the last.",
    killed_by=f"{BYTES}[{MHA}]",
)
class OneComponentDropped(MemoryStore):
    def _get(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        address, nbytes = spans[-1]
        before = ctypes.string_at(address, nbytes)
        code = super()._get(pool, key, spans)
        ctypes.memmove(address, before, nbytes)
        return code


@broken(
    "A put stores the first component of a page, and anything for the rest.",
    killed_by="test_no_order_of_calls_and_losses_gives_other_bytes_or_a_false_hit[swa]",
)
class OneComponentStored(MemoryStore):
    def _put(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        (address, nbytes), *rest = spans
        return super()._put(pool, key, [(address, nbytes), *((address, n) for _, n in rest)])


@broken(
    "A get fills the components of a page in reversed order.",
    killed_by=f"{BYTES}[{MHA}]",
)
class ComponentsSwapped(MemoryStore):
    def _get(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        return super()._get(pool, key, spans[::-1])


@broken(
    "Put and get agree on an order of components that is not the pool's.",
    killed_by=f"test_case_10_an_object_is_exactly_the_page_that_the_pool_describes[{MHA}]",
)
class OrderSwapped(MemoryStore):
    def _put(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        return super()._put(pool, key, spans[::-1])

    def _get(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        return super()._get(pool, key, spans[::-1])


@broken(
    "A get writes a byte past the end of the page.",
    killed_by=f"{BYTES}[{MLA}]",
)
class NeighbourOverwritten(MemoryStore):
    def _get(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        code = super()._get(pool, key, spans)
        address, nbytes = spans[-1]
        ctypes.memset(address + nbytes, 0, 1)
        return code


@broken(
    "A get that misses writes a byte before the page that it was to fill.",
    killed_by=f"test_a_get_with_misses_changes_its_own_pages_alone[{MLA}]",
)
class MissWritesBeforeThePage(MemoryStore):
    def _get(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        code = super()._get(pool, key, spans)
        if code is Code.MISSING:
            ctypes.memset(spans[0][0] - 1, 0, 1)
        return code


@broken(
    "A put clears the host page that it stored.",
    killed_by=f"test_sets_and_hit_queries_change_no_host_memory[{MLA}]",
)
class PutClearsTheHostPage(MemoryStore):
    def _put(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        code = super()._put(pool, key, spans)
        for address, nbytes in spans:
            ctypes.memset(address, 0, nbytes)
        return code


@broken(
    "A get fills the host page after the one that it was given.",
    killed_by=f"{BYTES}[{MLA}]",
)
class OffByOnePage(MemoryStore):
    def _get(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        return super()._get(pool, key, [(address + nbytes, nbytes) for address, nbytes in spans])


@broken(
    "A put keeps the address of the host page and reads its bytes when they are asked for.",
    killed_by=f"test_no_reference_to_host_memory_is_kept_after_a_set[{MLA}]",
)
class CallersBufferKept(MemoryStore):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.where: dict[str, Spans] = {}

    def _put(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        self.where.setdefault(key, spans)
        return super()._put(pool, key, spans)

    def _get(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        page = b"".join(ctypes.string_at(*span) for span in self.where.get(key, ()))
        if page:
            self._objects()[key] = Kept.of(page)
        return super()._get(pool, key, spans)


@broken(
    "A second put of a key replaces its bytes.",
    killed_by=f"test_case_14_a_key_keeps_the_bytes_it_was_stored_with[{MLA}]",
)
class SecondPutOverwrites(MemoryStore):
    def _put(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        self._objects().pop(key, None)
        return super()._put(pool, key, spans)


@broken(
    "A put says that it stored a page, and stores the first of each call.",
    killed_by=f"{BYTES}[{MLA}]",
)
class OnlyTheFirstPageStored(MemoryStore):
    def put(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        firsts = [
            replace(batch, hashes=batch.hashes[:1], addresses=batch.addresses[:1])
            for batch in batches
        ]
        super().put(firsts, deadline_s)
        return [[int(Code.OK)] * len(batch.hashes) for batch in batches]


@broken(
    "Of one call 2,048 components are stored, as many as the client queues, and the rest refused.",
    killed_by="test_a_call_of_pages_with_many_components_comes_back_byte_exact[deep-layer_first]",
)
class QueueOverrun(MemoryStore):
    def put(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        codes = []
        for batch in batches:
            room = 2048 // len(batch.pool.layout.component_bytes)
            some = replace(batch, hashes=batch.hashes[:room], addresses=batch.addresses[:room])
            stored = super().put([some], deadline_s)[0]
            codes.append(stored + [int(Code.FAILED)] * (len(batch.hashes) - len(stored)))
        return codes


@broken(
    "One absent page fails every page of its call.",
    killed_by=f"test_case_13_one_absent_page_leaves_its_neighbours_whole[{MLA}]",
)
class OneAbsentPageFailsItsNeighbours(MemoryStore):
    def get(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        codes = super().get(batches, deadline_s)
        return [[max(answer)] * len(answer) if answer else answer for answer in codes]


@broken(
    "Of two host pages that are to hold one key, the first is filled and both are reported.",
    killed_by=f"test_a_page_stored_twice_in_one_call_is_stored_once[{MLA}]",
)
class DuplicateKeysGetOneFilled(MemoryStore):
    def get(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        answers = []
        for batch in batches:
            first = {key: i for i, key in reversed(list(enumerate(batch.hashes)))}
            once = replace(
                batch,
                hashes=list(first),
                addresses=[batch.addresses[i] for i in first.values()],  # type: ignore[arg-type]
            )
            codes = dict(zip(first, super().get([once], deadline_s)[0], strict=True))
            answers.append([codes[key] for key in batch.hashes])
        return answers


def _numbers(change: Callable[[RegisteredPool, int, Any], Any]) -> AbstractContextManager[object]:
    """The checks on indices look at changed ones."""
    strict = plan.page_numbers

    def lenient(pool: RegisteredPool, count: int, host_indices: Any) -> list[int]:
        return strict(pool, count, change(pool, count, np.asarray(host_indices)))

    return patch.object(plan, "page_numbers", lenient)


@broken_core(
    "An index outside the pool wraps around to a page inside.",
    killed_by=f"{INDICES}[{MLA}]",
)
def out_of_range_index_accepted() -> AbstractContextManager[object]:
    return _numbers(lambda pool, count, slots: slots % (pool.pages * pool.page_slots))


@broken_core(
    "An index inside a page is rounded down to the page's start.",
    killed_by=f"{INDICES}[{MLA}]",
)
def misaligned_index_rounded() -> AbstractContextManager[object]:
    return _numbers(lambda pool, count, slots: slots - slots[:1] % pool.page_slots)


@broken_core(
    "Indices for more pages than there are keys are taken, and the rest left out.",
    killed_by=f"{INDICES}[{MLA}]",
)
def surplus_indices_left_out() -> AbstractContextManager[object]:
    return _numbers(lambda pool, count, slots: slots[: count * pool.page_slots])
