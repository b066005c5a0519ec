"""Reading pages: exactly theirs, or not at all."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_shared.store import Code
from hicache_ucm.client import NOT_FOUND, NativeError
from hicache_ucm.flight import Flight
from hicache_ucm.folder import ABSENT
from hicache_ucm.health import Health
from hicache_ucm.pool import Part

_OK = int(Code.OK)


def read(parts: Sequence[Part], health: Health) -> list[list[int]]:
    """Load a part of each pool, all at once; a code a page.

    UCM reads a block that is too long without a word, and a page that fails fails its task
    and those behind it. So sizes are looked at first, while the pools before are being
    read; a block of right size is only ever replaced by another of that size.
    """
    answers = []
    failures: list[str] = []
    with Flight(health) as flight:
        started = []
        for part in parts:
            codes = _by_size(part)
            good = [i for i, code in enumerate(codes) if code == _OK]
            chosen = part.subset(good)
            started.append((codes, good, chosen, flight.load(chosen)))
        for codes, good, chosen, task in started:
            if task.wait() is not None:
                errors = flight.one_by_one(chosen, flight.load)
                for i, error in zip(good, errors, strict=True):
                    codes[i] = _code_of(error)
                failures += _failures(chosen, errors)
            answers.append(codes)
        for part, codes in zip(parts, answers, strict=True):
            if part.pool.removes:
                came = part.subset([i for i, code in enumerate(codes) if code == _OK])
                part.pool.folder.touch(came.ids)
    if failures or any(_OK in codes for codes in answers):
        health.saw("reading", failures[0] if failures else None)
    return answers


def _by_size(part: Part) -> list[int]:
    """OK for each page whose block has the right size."""
    named = {part.pool.page_bytes: _OK, ABSENT: int(Code.MISSING)}
    return [named.get(n, int(Code.WRONG_SIZE)) for n in part.pool.folder.sizes(part.ids)]


def _code_of(error: NativeError | None) -> int:
    if error is None:
        return _OK
    return int(Code.MISSING if error.code == NOT_FOUND else Code.FAILED)


def _failures(part: Part, errors: Sequence[NativeError | None]) -> list[str]:
    """What failed, save for pages that were removed meanwhile."""
    worst = [str(e) for e in errors if e is not None and e.code != NOT_FOUND]
    return [f"pool {part.pool.name!r}, {len(worst)} pages: {worst[0]}"] if worst else []
