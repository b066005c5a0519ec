"""Writing pages: one writer a page at a time, and "stored" only of what can be read."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hicache_shared.store import Code
from hicache_ucm.client import NativeError
from hicache_ucm.flight import Flight, Task
from hicache_ucm.folder import Claims
from hicache_ucm.health import Health
from hicache_ucm.pool import Part, PoolStore

FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.08

SPACE_WAIT_S = 1.0
"""How long a full disk is tried: what frees space looks for it every 30 s, and meanwhile
SGLang keeps the pages of a backup from being used otherwise."""

_OK, _FAILED, _NO_SPACE = int(Code.OK), int(Code.FAILED), int(Code.NO_SPACE)
_TIMEOUT = int(Code.TIMEOUT)
_CLAIMED = -1
"""Another process or thread is writing the page; becomes TIMEOUT in the end."""


class _Work:
    """Pages of one pool to store, and how far they are."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.codes = [_CLAIMED] * len(part)
        self.keys = part.keys()
        first = {key: i for i, key in reversed(list(enumerate(self.keys)))}
        whole = len(first) == len(self.keys)
        self._first_of = None if whole else [first[key] for key in self.keys]
        """Position of the first page of the same key, where one comes twice."""
        self.todo = sorted(first.values())

    def answer(self) -> list[int]:
        codes = [_TIMEOUT if code == _CLAIMED else code for code in self.codes]
        return codes if self._first_of is None else [codes[i] for i in self._first_of]


class Writer:
    """Stores pages. Thread-safe.

    Args:
        health: told how it goes.
        closing: set when the store closes; ends every pause.
        private_lock: where claims are kept if the root is one rank's own; None for the
            pools' folders.
    """

    def __init__(
        self, health: Health, closing: threading.Event, *, private_lock: Path | None
    ) -> None:
        self._health = health
        self._closing = closing
        self._private_lock = private_lock

    def write(self, parts: Sequence[Part], until: float) -> list[list[int]]:
        """Store a part of each pool, all at once; a code a page.

        Pages that another writer holds, or that find no space, are tried again until the
        time is over.
        """
        works = [_Work(part) for part in parts]
        space_until = min(until, time.monotonic() + SPACE_WAIT_S)
        pause = FIRST_PAUSE_S
        failures: list[str] = []
        tried = False
        while True:
            tried |= self._try([work for work in works if work.todo], failures)
            now = time.monotonic()
            again = {_CLAIMED} if now >= space_until else {_CLAIMED, _NO_SPACE}
            for work in works:
                work.todo = [i for i in work.todo if work.codes[i] in again]
            left = until - now
            if not any(work.todo for work in works) or left <= 0:
                break
            if self._closing.wait(min(pause, left)):
                break
            pause = min(2 * pause, LONGEST_PAUSE_S)
        if tried or failures:
            lost = any(code in (_FAILED, _NO_SPACE) for work in works for code in work.codes)
            self._health.saw("writing", failures[0] if lost else None)
        return [work.answer() for work in works]

    def _try(self, works: Sequence[_Work], failures: list[str]) -> bool:
        """One attempt at what is to do; pages that others write are left as they are.

        Returns:
            Whether there was anything to write. What failed is added to ``failures``.
        """
        with ExitStack() as held, Flight(self._health) as flight:
            started: list[tuple[_Work, list[int], Part, Task]] = []
            for work in works:
                mine = self._claim(work, held, failures)
                absent = _settle_present(work, mine)
                part = work.part.subset(absent)
                started.append((work, absent, part, flight.dump(part)))
            for work, absent, part, task in started:
                errors: Sequence[NativeError | None] = [None] * len(part)
                if task.wait() is not None:
                    errors = flight.one_by_one(part, flight.dump)
                for i, code in zip(absent, _codes(errors, part.pool), strict=True):
                    work.codes[i] = code
                failures += _failures(part, errors)
                failures += _take_back(work, absent)
        return any(len(part) for _, _, part, _ in started)

    def _claim(self, work: _Work, held: ExitStack, failures: list[str]) -> list[int]:
        """Positions of the pages that nobody else is writing, and nobody will until the end."""
        lock = self._private_lock or work.part.pool.folder.lock
        try:
            claims = held.enter_context(Claims(lock))
            return [i for i in work.todo if claims.claim(work.keys[i])]
        except OSError as error:
            failures.append(f"{lock}: {error.strerror}")
            for i in work.todo:
                work.codes[i] = _FAILED
            return []


def _settle_present(work: _Work, mine: list[int]) -> list[int]:
    """Note which of these pages are there, whole; the positions of the others."""
    pool = work.part.pool
    absent = []
    for i, nbytes in zip(mine, pool.folder.sizes(work.part.subset(mine).ids), strict=True):
        if nbytes == pool.page_bytes:
            work.codes[i] = _OK
        else:
            absent.append(i)
    return absent


def _take_back(work: _Work, chosen: Sequence[int]) -> list[str]:
    """Note which pages UCM says are stored and are not: it does where naming a file failed."""
    pool = work.part.pool
    stored = [i for i in chosen if work.codes[i] == _OK]
    sizes = pool.folder.sizes(work.part.subset(stored).ids)
    wrong = [i for i, nbytes in zip(stored, sizes, strict=True) if nbytes != pool.page_bytes]
    for i in wrong:
        work.codes[i] = _FAILED
    if not wrong:
        return []
    (path,) = pool.folder.blocks(work.part.subset(wrong[:1]).ids)
    return [f"UCM said that {len(wrong)} pages are stored; {path} is not there"]


def _failures(part: Part, errors: Sequence[NativeError | None]) -> list[str]:
    failed = [error for error in errors if error is not None]
    return [f"pool {part.pool.name!r}, {len(failed)} pages: {failed[0]}"] if failed else []


def _codes(errors: Sequence[NativeError | None], pool: PoolStore) -> list[int]:
    """A code a page. UCM does not say that the disk is full: what could not fit did not."""
    failed = len(errors) - errors.count(None)
    if not failed:
        return [_OK] * len(errors)
    full = pool.folder.free_bytes() < failed * pool.page_bytes
    return [_OK if error is None else _NO_SPACE if full else _FAILED for error in errors]
