"""``PageStore`` over UMBP: one native call for all pools of a call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from hicache_shared.errors import ClearError
from hicache_shared.hostmem import Region, aligned_bytes, merged_huge_pages, rounded_to_huge_pages
from hicache_shared.store import Caps, Code, KeyBatch, PageBatch, Presence, StoredPool
from hicache_umbp.client import UmbpClient
from hicache_umbp.epoch import Epochs
from hicache_umbp.pages import (
    Batches,
    Pages,
    keys_of,
    plain_pages,
    ranged_pages,
    split,
    widths_of,
)
from hicache_umbp.session import Session
from hicache_umbp.trailers import Trailers

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 0.32

TOGETHER = 512
"""A call of a standalone server takes some 110 us, and 1 us a key."""

STALL_S = 1.0
"""A put that found no space gives up after this long without a page more. Pages that were read
are kept for 500 ms by the client, so what can come free has come free by then."""

_OK = int(Code.OK)


class UmbpStore:
    """Pages in UMBP, under ``pool.prefix + epoch + hash``.

    A page of one component is one object. A page of several is one object with a trailer
    where the client can move ranges, and else an object a component, which count together.
    See :class:`hicache_shared.store.PageStore` for what holds of every method.

    Args:
        session: the client's life; :meth:`close` closes it.
        epochs: what a clear changes.
        allocate: gives host memory that the client can use, for staging and trailers.
        retry_start_s: first pause, in seconds, before a page without space is tried again.
    """

    def __init__(
        self,
        session: Session,
        epochs: Epochs,
        *,
        allocate: Callable[[int], npt.NDArray[np.uint8]] = aligned_bytes,
        retry_start_s: float = 0.02,
    ) -> None:
        self.caps = Caps(max_components=None, allocate=allocate, together=TOGETHER)
        self._session = session
        self._epochs = epochs
        self._retry_start_s = retry_start_s
        # Not by a method of this object: a cycle would keep the client until a garbage collection.
        self._trailers = Trailers(allocate, partial(_register, session))

    # -- host memory ----------------------------------------------------------------------

    def open(self, pools: Sequence[StoredPool]) -> None:
        """Make the client, which wants to know the sizes of pages, and register memory.

        Raises:
            BackendUnavailableError: there is no server.
            LayoutError: the client refuses the memory, and there is no other path.
        """
        self._session.open([pool.layout.component_bytes for pool in pools])
        regions = (region for pool in pools for region in pool.layout.regions)
        for region in merged_huge_pages(regions):
            self.register_memory(region.address, region.nbytes)

    def register(self, pool: StoredPool) -> None:
        """Register the pool's memory, each allocation once; raises as :meth:`open`."""
        for region in pool.layout.regions:
            self.register_memory(region.address, region.nbytes)

    def register_memory(self, address: int, nbytes: int) -> None:
        _register(self._session, address, nbytes)

    @property
    def unregistered_bytes(self) -> int:
        """Host memory that the client refused, whose pages it copies once more."""
        return sum(region.nbytes for region in self._session.unregistered)

    # -- exists ---------------------------------------------------------------------------

    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> list[Presence]:
        client = self._session.client()
        epochs = self._epochs_of(asks)
        if client is None or epochs is None:
            return [[False] * len(ask.hashes) for ask in asks]
        answers = self._exists(client, keys_of(asks, epochs, ranged=client.ranged))
        flags, start = np.array(answers, dtype=np.bool_), 0
        masks: list[Presence] = []
        for pages, objects in widths_of(asks, ranged=client.ranged):
            end = start + pages * objects
            mask = flags[start:end]
            masks.append(mask if objects == 1 else mask.reshape(objects, pages).all(axis=0))
            start = end
        return masks

    def _exists(self, client: UmbpClient, keys: list[str]) -> list[bool]:
        if not keys:
            return []
        answers = client.exists(keys)
        self._note(client, answers)
        return answers

    def _note(self, client: UmbpClient, answers: list[bool]) -> bool:
        """Tell the session how a call went; whether the server is away."""
        if True in answers:
            self._session.heard(client)
            return False
        return self._session.suspect(client)

    # -- get ------------------------------------------------------------------------------

    def get(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        return self._move(batches, self._get_plain, self._get_ranged)

    def _get_plain(
        self, client: UmbpClient, batches: Sequence[PageBatch], epochs: Sequence[str]
    ) -> list[int]:
        pages, _ = plain_pages(batches, epochs, ranged=client.ranged)
        answers = client.get(pages)
        if False not in answers:
            self._session.heard(client)
            return [_OK] * len(answers)
        return self._why_not_read(client, pages, answers, answers)

    def _get_ranged(
        self, client: UmbpClient, batches: Sequence[PageBatch], epochs: Sequence[str]
    ) -> list[int]:
        """As :meth:`_get_plain`. An object that is longer than its page has another trailer."""
        with self._trailers.lend(sum(len(batch.hashes) for batch in batches)) as lent:
            pages = ranged_pages(batches, epochs, lent.addresses)
            answers = client.get(pages)
            right = [a and b for a, b in zip(answers, lent.right(batches), strict=True)]
        if False not in right:
            self._session.heard(client)
            return [_OK] * len(answers)
        return self._why_not_read(client, pages, answers, right)

    def _why_not_read(
        self, client: UmbpClient, pages: Pages, answers: list[bool], right: list[bool]
    ) -> list[int]:
        """A code an object for a get that did not go all well."""
        codes = [_OK if good else int(Code.MISSING) for good in right]
        if self._note(client, answers):
            return [int(Code.UNAVAILABLE)] * len(codes)
        there_and_not_read = Code.FAILED if self._session.mode.remote else Code.WRONG_SIZE
        failed = [i for i, good in enumerate(right) if not good]
        there = client.exists([pages.keys[i] for i in failed])
        for i, is_there in zip(failed, there, strict=True):
            if is_there:
                codes[i] = int(there_and_not_read)
        return codes

    # -- put ------------------------------------------------------------------------------

    def put(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        """Store pages; OK only if the page is there when all are put.

        Where a page of that key is there, it stays: same key, same bytes.
        """
        until = time.monotonic() + deadline_s

        def put_plain(
            client: UmbpClient, batches: Sequence[PageBatch], epochs: Sequence[str]
        ) -> list[int]:
            pages, depths = plain_pages(batches, epochs, ranged=client.ranged)
            return self._put(client, pages, depths, until)

        def put_ranged(
            client: UmbpClient, batches: Sequence[PageBatch], epochs: Sequence[str]
        ) -> list[int]:
            with self._trailers.lend(sum(len(batch.hashes) for batch in batches)) as lent:
                lent.write(batches)
                pages = ranged_pages(batches, epochs, lent.addresses)
                return self._put(client, pages, None, until)

        return self._move(batches, put_plain, put_ranged)

    def _put(
        self, client: UmbpClient, pages: Pages, depths: list[int] | None, until: float
    ) -> list[int]:
        """Put objects until each is there, no more come in, or time is over; a code each."""
        first: dict[str, int] = {}
        for i, key in enumerate(pages.keys):
            first.setdefault(key, i)
        todo = list(first.values())
        codes = [int(Code.NO_SPACE)] * len(pages.keys)
        pause, stalled = self._retry_start_s, time.monotonic() + STALL_S
        stored: list[int] = []
        most = 0
        while True:
            stored = self._put_once(client, pages, depths, todo, stored)
            if client is not self._session.client():
                return [int(Code.UNAVAILABLE)] * len(codes)
            now = time.monotonic()
            if len(stored) == len(first) or now >= until:
                break
            if len(stored) > most:
                # The client makes space at the end of a put that found none.
                most, pause, stalled = len(stored), self._retry_start_s, now + STALL_S
            elif now >= stalled:
                break
            else:
                time.sleep(min(pause, until - now))
                pause = min(2 * pause, LONGEST_PAUSE_S)
            taken = set(stored)
            todo = [i for i in first.values() if i not in taken]
        for i in stored:
            codes[i] = _OK
        return codes if len(first) == len(codes) else [codes[first[key]] for key in pages.keys]

    def _put_once(
        self,
        client: UmbpClient,
        pages: Pages,
        depths: list[int] | None,
        todo: list[int],
        stored: list[int],
    ) -> list[int]:
        """One native put of ``todo``, then the question what is there.

        Neither answer of a put is believed: True is also said of what is evicted at once,
        and False of a page that another thread is storing.

        Returns:
            What is there of ``todo``, and of ``stored`` by earlier puts of the call, which a
            later one may evict.
        """
        whole = len(todo) == len(pages.keys)
        some = pages if whole else pages.subset(todo)
        deep = depths if depths is None or whole else [depths[i] for i in todo]
        client.put(some, deep)
        asked = stored + todo
        there = self._exists(client, some.keys if whole else [pages.keys[i] for i in asked])
        if False not in there:
            return asked
        return [i for i, is_there in zip(asked, there, strict=True) if is_there]

    # -- one call ---------------------------------------------------------------------------

    def _move(
        self,
        batches: Sequence[PageBatch],
        plain: Callable[[UmbpClient, Sequence[PageBatch], Sequence[str]], list[int]],
        ranged: Callable[[UmbpClient, Sequence[PageBatch], Sequence[str]], list[int]],
    ) -> list[list[int]]:
        """One native call for all batches; one more where only some have several components.

        A call of ranges cannot tell that an object of one component is too long.
        """
        client = self._session.client()
        epochs = self._epochs_of(batches)
        if client is None or epochs is None:
            return [[int(Code.UNAVAILABLE)] * len(batch.hashes) for batch in batches]
        several = [i for i, batch in enumerate(batches) if _goes_in_ranges(client, batch)]
        single = [i for i in range(len(batches)) if i not in several]
        answers: list[list[int]] = [[] for _ in batches]
        for chosen, call in ((single, plain), (several, ranged)):
            part = [batches[i] for i in chosen]
            if not any(batch.hashes for batch in part):
                continue
            codes = call(client, part, [epochs[i] for i in chosen])
            widths = widths_of(part, ranged=client.ranged)
            for i, of_batch in zip(chosen, split(codes, widths, max), strict=True):
                answers[i] = of_batch
        return answers

    def _epochs_of(self, batches: Batches) -> list[str] | None:
        """The epoch of each batch's namespace; None if it cannot be told."""
        known: dict[str, str] = {}
        try:
            for batch in batches:
                if batch.pool.namespace not in known:
                    known[batch.pool.namespace] = self._epochs.of(batch.pool.namespace)
        except OSError as error:
            logger.error("UMBP: whether pages were cleared cannot be told: %s", error)
            return None
        return [known[batch.pool.namespace] for batch in batches]

    # -- the rest -----------------------------------------------------------------------------

    def clear(self, namespace: str) -> None:
        """Begin a new epoch of the namespace's keys; what was stored is evicted in time.

        Raises:
            ClearError: the server is away, or the epoch cannot be shared with its clients.
        """
        client = self._session.client() if self._session.healthy() else None
        if client is None:
            raise ClearError(f"UMBP cannot clear {namespace!r}: its server is away")
        client.exists([namespace])  # a client that is broken is heard of now
        self._epochs.advance(namespace)

    def healthy(self) -> bool:
        return self._session.healthy()

    def close(self) -> None:
        """Let go of the client, and with it of the memory's registrations."""
        self._session.close()


def _register(session: Session, address: int, nbytes: int) -> None:
    session.register(rounded_to_huge_pages(Region(address, nbytes)))


def _goes_in_ranges(client: UmbpClient, batch: PageBatch) -> bool:
    return client.ranged and len(batch.pool.layout.component_bytes) > 1
