"""Backends that do not stand a fault, a full store, a clear or a close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from hicache_shared import memory
from hicache_shared.errors import ClearError
from hicache_shared.memory import Kept, MemoryStore, Shelf, Spans
from hicache_shared.memory_backend import MemoryBackend
from hicache_shared.store import Code, KeyBatch, StoredPool
from hicache_shared.transfer import Transfers
from tests.suite.breaking import broken, broken_core

MLA = "mla-page_first"
FAULT = "test_case_09_a_fault_of_the_store_is_an_answer"
CLEAR = "test_case_11_clear_empties_this_namespace_at_once_and_nothing_else"
FULL = "test_case_12_a_full_store_takes_what_fits_and_says_what_it_took"
CLOSE = "test_case_15_no_interleaving_of_close_and_calls_crashes"


def _unguarded(operation: str) -> AbstractContextManager[object]:
    """One operation lets what the store raises through to SGLang."""
    guarded = Transfers._attempt

    def attempt(self: Transfers, name: str, call: Callable[[], Any]) -> Any:
        return call() if name == operation else guarded(self, name, call)

    return patch.object(Transfers, "_attempt", attempt)


@broken_core(
    "What the store raises in a hit query goes on to SGLang.",
    killed_by=f"{FAULT}[{MLA}]",
    raises=ConnectionError,
)
def exception_raised_out_of_exists() -> AbstractContextManager[object]:
    return _unguarded("exists")


@broken_core(
    "What the store raises in a get goes on to SGLang.",
    killed_by=f"{FAULT}[{MLA}]",
    raises=ConnectionError,
)
def exception_raised_out_of_get() -> AbstractContextManager[object]:
    return _unguarded("get")


@broken_core(
    "What the store raises in a set goes on to SGLang.",
    killed_by=f"{FAULT}[{MLA}]",
    raises=ConnectionError,
)
def exception_raised_out_of_set() -> AbstractContextManager[object]:
    return _unguarded("set")


@broken(
    "After the first fault the backend is off for good.",
    killed_by=f"{FAULT}[{MLA}]",
)
class OffAfterAFault(MemoryStore):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.off = False

    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> list[list[bool]]:
        self.off = self.off or self._shelf.broken
        if self.off:
            return [[False] * len(ask.hashes) for ask in asks]
        return super().exists(asks, deadline_s)


@broken(
    "A clear empties the whole store.",
    killed_by=f"{CLEAR}[{MLA}]",
)
class ClearOfEverything(MemoryStore):
    def clear(self, namespace: str) -> None:
        self._objects().clear()


@broken(
    "A clear does nothing.",
    killed_by=f"{CLEAR}[{MLA}]",
)
class ClearOfNothing(MemoryStore):
    def clear(self, namespace: str) -> None:
        pass


@broken(
    "A clear takes the pages that this rank stored, and leaves those of the others.",
    killed_by="test_case_11_clear_takes_the_pages_of_every_rank[mha-page_first]",
)
class ClearOfOneRank(MemoryStore):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.own: set[str] = set()

    def _put(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        self.own.add(key)
        return super()._put(pool, key, spans)

    def clear(self, namespace: str) -> None:
        for key in self.own:
            self._objects().pop(key, None)


@broken(
    "A client remembers which pages it saw, also when another one has cleared them.",
    killed_by=f"{CLEAR}[{MLA}]",
)
class StaleAfterClear(MemoryStore):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.seen: set[str] = set()

    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> list[list[bool]]:
        answers = super().exists(asks, deadline_s)
        for ask, present in zip(asks, answers, strict=True):
            keys = [ask.pool.prefix + key for key in ask.hashes]
            self.seen.update(key for key, there in zip(keys, present, strict=True) if there)
            present[:] = [key in self.seen for key in keys]
        return answers

    def clear(self, namespace: str) -> None:
        self.seen.clear()
        super().clear(namespace)


@broken(
    "What a lookup saw counts as loaded, also when it has gone since.",
    killed_by=f"test_pages_that_go_between_lookup_and_load_are_a_miss_and_no_others[{MLA}]",
)
class GetTrustsTheLookup(MemoryStore):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.seen: set[str] = set()

    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> list[list[bool]]:
        answers = super().exists(asks, deadline_s)
        for ask, present in zip(asks, answers, strict=True):
            found = [key for key, there in zip(ask.hashes, present, strict=True) if there]
            self.seen.update(ask.pool.prefix + key for key in found)
        return answers

    def _get(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        code = super()._get(pool, key, spans)
        return Code.OK if code is Code.MISSING and key in self.seen else code


@broken(
    "A client keeps the pages that it read, also when they were cleared or lost.",
    killed_by=f"{CLEAR}[{MLA}]",
)
class PagesKeptByTheClient(MemoryStore):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.read: dict[str, Kept] = {}

    def _get(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        self._objects().update({key: self.read[key]} if key in self.read else {})
        code = super()._get(pool, key, spans)
        if code is Code.OK:
            self.read[key] = self._objects()[key]
        return code


@broken(
    "A put of a page that was cleared brings back the bytes that it had before.",
    killed_by=f"test_case_11_what_is_stored_after_a_clear_has_its_new_bytes[{MLA}]",
)
class ClearedBytesComeBack(MemoryStore):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.cleared: dict[str, Kept] = {}

    def _put(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        if key in self.cleared:
            self._objects().setdefault(key, self.cleared[key])
        return super()._put(pool, key, spans)

    def clear(self, namespace: str) -> None:
        self.cleared.update(self._objects())
        super().clear(namespace)


@broken(
    "The store is emptied when a backend is closed.",
    killed_by="test_pages_outlive_every_backend_that_stored_them[mla-page_first]",
)
class StoreEmptiedByClose(MemoryStore):
    def close(self) -> None:
        self._shelf.objects.clear()
        super().close()


@broken(
    "A clear that failed looks like one that worked.",
    killed_by=f"test_case_11_a_clear_that_fails_raises[{MLA}]",
)
class FailedClearHidden(MemoryStore):
    def clear(self, namespace: str) -> None:
        if not self._shelf.broken:
            super().clear(namespace)


@broken(
    "A put that found no space says that the page is stored.",
    killed_by=f"{FULL}[{MLA}]",
)
class PutSaysStoredWhenFull(MemoryStore):
    def _put(self, pool: StoredPool, key: str, spans: Spans) -> Code:
        code = super()._put(pool, key, spans)
        return Code.OK if code is Code.NO_SPACE else code


@broken_core(
    "A put that found no space is dropped at once.",
    killed_by=f"test_case_12_a_put_takes_the_space_that_comes_free_meanwhile[{MLA}]",
)
def put_dropped_at_once_when_full() -> AbstractContextManager[object]:
    return patch.object(memory, "FULL_PAUSES_S", ())


@broken(
    "A call after close raises.",
    killed_by=f"{CLOSE}[{MLA}]",
    raises=ClearError,
)
class CallAfterCloseRaises(MemoryBackend):
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        if self._gate.closed:
            raise ClearError("closed")
        return super().batch_exists(keys, extra_info)


@broken(
    "Close takes the client away under the calls that run.",
    killed_by=f"test_case_15_close_waits_for_the_call_that_is_in_the_store[get-{MLA}]",
    raises=ConnectionError,
)
class CloseCrash(MemoryBackend):
    def close(self) -> None:
        if self._gate._running:
            self._gate.close(0)
            raise ConnectionError("the client is in use")
        super().close()


@broken(
    "Close returns while a call is in the store.",
    killed_by=f"test_case_15_close_waits_for_the_call_that_is_in_the_store[get-{MLA}]",
)
class CloseDoesNotWait(MemoryBackend):
    def close(self) -> None:
        self._gate.close(0)


@broken(
    "Each backend has a store of its own, so that nothing is shared.",
    killed_by=f"{CLEAR}[{MLA}]",
)
class NothingShared(MemoryStore):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__(Shelf())
