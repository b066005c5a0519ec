"""``PageStore`` over Mooncake: one native call for all pools of a call."""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from hicache_mooncake.client import (
    BAD_ARGUMENT,
    MAYBE_WRONG_SIZE,
    REMOVED,
    TIMED_OUT,
    MooncakeClient,
    code_of,
)
from hicache_mooncake.health import Health
from hicache_mooncake.pages import Pages, keys_of, parts_of, repeats, split
from hicache_mooncake.room import Room
from hicache_shared.errors import BackendUnavailableError, ClearError, LayoutError
from hicache_shared.hostmem import Region, RegionSet, merged_huge_pages, rounded_to_huge_pages
from hicache_shared.store import Caps, Code, KeyBatch, PageBatch, Presence, StoredPool

logger = logging.getLogger(__name__)

EXISTS_KEYS = 4096
"""Keys of one native "exists". All pools of a call go in one up to this many; beyond, calls of
this size take the client no longer and this code half as long, as keys stay in the cache."""

LONGEST_PAUSE_S = 0.32

RACE_ROUNDS = 8
"""How often a page that another writer holds unfinished is tried: 1.3 s in all. A living
writer is done by then; the master gives up a dead one's page after 30 s."""

CLEAR_ROUNDS = 8

CLEAR_S = 10.0
"""After this long a clear begins no further round: SGLang's scheduler waits for it, and with a
master that does not answer each takes as long as a request may."""

_OK = int(Code.OK)
_NO_SPACE = int(Code.NO_SPACE)
_UNREADABLE = -1
"""The client said "stored" and the page cannot be read; becomes FAILED in the end."""


class MooncakeStore:
    """Pages in Mooncake, one object each, under ``pool.prefix + hash``.

    See :class:`hicache_shared.store.PageStore` for what holds of every method.
    """

    caps = Caps(max_components=None)

    def __init__(self, client: MooncakeClient, *, retry_start_s: float = 0.02) -> None:
        """Take over a connected client, which :meth:`close` closes."""
        self._client = client
        self._health = Health(client.healthy, client.master)
        self._room = Room(client.most_transfers)
        self._retry_start_s = retry_start_s
        self._regions = RegionSet()
        self._closing = threading.Event()

    def open(self, pools: Sequence[StoredPool]) -> None:
        regions = (region for pool in pools for region in pool.layout.regions)
        for region in merged_huge_pages(regions):
            self.register_memory(region.address, region.nbytes)

    def register(self, pool: StoredPool) -> None:
        """Register the pool's memory, each allocation once.

        Raises:
            LayoutError: the client refuses the memory.
            BackendUnavailableError: the client failed.
        """
        for region in pool.layout.regions:
            self.register_memory(region.address, region.nbytes)

    def register_memory(self, address: int, nbytes: int) -> None:
        region = self._regions.missing(rounded_to_huge_pages(Region(address, nbytes)))
        if region is None:
            return
        answer = self._client.register(region.address, region.nbytes)
        if answer == 0:
            self._regions.add(region)
            return
        text = f"Mooncake: registering host memory {region.address:#x}+{region.nbytes} gave"
        if answer == BAD_ARGUMENT:
            raise LayoutError(
                f"{text} {answer}: expected a range that is not empty and overlaps none "
                "registered before"
            )
        raise BackendUnavailableError(
            f"{text} {answer}; with rdma, check the locked-memory limit (ulimit -l) and the device"
        )

    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> list[Presence]:
        until = time.monotonic() + deadline_s
        answers: list[Presence] = []
        for part in parts_of(asks, EXISTS_KEYS):
            if self._health.up() and time.monotonic() < until:
                answers += self._exists(part)
            else:
                answers += [[False] * len(ask.hashes) for ask in part]
        return answers

    def _exists(self, asks: Sequence[KeyBatch]) -> Sequence[Presence]:
        keys = keys_of(asks)
        if not keys:
            return [[] for _ in asks]
        answers = self._client.exists(keys)
        if answers.count(1) == len(keys):
            return [np.ones(len(ask.hashes), dtype=np.bool_) for ask in asks]
        self._note("exists", answers)
        return split(asks, [answer == 1 for answer in answers])

    def get(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        """Read, and ask afterwards whether the objects are still there.

        A clear, here or on another machine, removes objects by force, also those that are
        being read, and their memory is given to other pages at once. So what is gone after the
        read may have come with another page's bytes.
        """
        until = time.monotonic() + deadline_s
        pages = Pages.of(batches)
        if not pages.keys or not self._health.up():
            return [[int(Code.UNAVAILABLE)] * len(batch.hashes) for batch in batches]
        read = self._read_again if repeats(batches) else self._read
        answers = read(pages, until)
        there = self._client.exists(pages.keys) if max(answers) >= 0 else answers
        if answers == pages.sizes and there.count(1) == len(there):
            return split(batches, [_OK] * len(answers))
        return split(batches, self._why_not_read(pages, answers, there))

    def _read(self, pages: Pages, until: float) -> list[int]:
        return self._moved("get", self._client.get, pages, until)

    def _moved(
        self, what: str, move: Callable[[Pages], list[int]], pages: Pages, until: float
    ) -> list[int]:
        """The client's answers for a get or put: of one native call, where there is room for it.

        Pages that time did not suffice for are ``TIMED_OUT``.
        """
        answers: list[int] = []
        for part in pages.cut(self._room.most_in_a_call):
            if answers and (time.monotonic() >= until or not self._health.up()):
                break
            with self._room.taken(part.transfers, until) as free:
                if not free:
                    break
                told = move(part)
            self._note(what, told)
            answers += told
        return answers + [TIMED_OUT] * (len(pages.keys) - len(answers))

    def _read_again(self, pages: Pages, until: float) -> list[int]:
        """The client's answers where a key comes several times.

        Of pages that name one key in one call the client fills one and reports all, so a key
        that comes again is read in a call of its own.
        """
        answers = [TIMED_OUT] * len(pages.keys)
        seen: Counter[str] = Counter()
        rounds: dict[int, list[int]] = {}
        for i, key in enumerate(pages.keys):
            rounds.setdefault(seen[key], []).append(i)
            seen[key] += 1
        for positions in rounds.values():
            if not self._health.up() or time.monotonic() >= until:
                break
            read = self._read(pages.subset(positions), until)
            for i, answer in zip(positions, read, strict=True):
                answers[i] = answer
        return answers

    def _why_not_read(self, pages: Pages, answers: list[int], there: list[int]) -> list[int]:
        """A code a page for a get that did not go all well."""
        codes = [
            _OK if got == size else int(Code.WRONG_SIZE if got >= 0 else code_of(got))
            for got, size in zip(answers, pages.sizes, strict=True)
        ]
        for i, answer in enumerate(there):
            if codes[i] == _OK and answer != 1:
                codes[i] = int(Code.MISSING if answer == 0 else code_of(answer))
        doubtful = [i for i, got in enumerate(answers) if got in MAYBE_WRONG_SIZE]
        for i in self._wrong_sized(pages, doubtful):
            codes[i] = int(Code.WRONG_SIZE)
        return codes

    def put(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        until = time.monotonic() + deadline_s
        pages = Pages.of(batches)
        if not pages.keys or not self._health.up():
            return [[int(Code.UNAVAILABLE)] * len(batch.hashes) for batch in batches]
        found = self._client.exists(pages.keys)
        self._note("exists", found)
        if not any(found):
            codes, absent = [_OK] * len(found), list(range(len(found)))
        else:
            codes = [_OK if answer >= 0 else int(code_of(answer)) for answer in found]
            absent = [i for i, answer in enumerate(found) if answer == 0]
            present = [i for i, answer in enumerate(found) if answer == 1]
            absent = sorted(absent + self._evict_wrong_sized(pages, present, codes))
        if absent:
            self._put_absent(pages, absent, codes, until)
        return split(batches, codes)

    def _evict_wrong_sized(self, pages: Pages, present: list[int], codes: list[int]) -> list[int]:
        """Remove the pages whose object has another size; the positions that are free now.

        A put would keep such an object, and no get accept it. The size is part of the key's
        digest, so it was damaged or planted, and nobody can have use of it.
        """
        wrong = self._wrong_sized(pages, present)
        if not wrong:
            return []
        logger.warning("Mooncake: %d stored pages of wrong size are replaced", len(wrong))
        for i, answer in zip(
            wrong, self._client.remove([pages.keys[i] for i in wrong]), strict=True
        ):
            if answer not in REMOVED:
                codes[i] = int(Code.WRONG_SIZE)
        return [i for i in wrong if codes[i] == _OK]

    def _wrong_sized(self, pages: Pages, positions: list[int]) -> list[int]:
        """Which of these pages have an object of another size."""
        if not positions:
            return []
        stored = self._client.sizes([pages.keys[i] for i in positions])
        return [
            i
            for i, size in zip(positions, stored, strict=True)
            if size is not None and size != pages.sizes[i]
        ]

    def _put_absent(self, pages: Pages, absent: list[int], codes: list[int], until: float) -> None:
        """Put pages until each can be read, has failed for good, or time is over.

        A key that comes twice is put once. ``codes`` holds OK at the absent positions, and what
        went otherwise is filled in.
        """
        keys = pages.keys if len(absent) == len(pages.keys) else [pages.keys[i] for i in absent]
        unique = len(set(keys)) == len(keys)
        todo = absent if unique else list(dict(zip(keys, absent, strict=True)).values())
        pause = self._retry_start_s
        for rounds in itertools.count(1):
            answers = self._put_once(pages, todo, until)
            if rounds == 1 and not any(answers):
                return  # all is well, as ``codes`` has it from the start
            for i, code in zip(todo, answers, strict=True):
                codes[i] = code
            todo = [
                i
                for i in todo
                if codes[i] == _NO_SPACE or (codes[i] == _UNREADABLE and rounds < RACE_ROUNDS)
            ]
            left = until - time.monotonic()
            if not todo or left <= 0 or self._closing.wait(min(pause, left)):
                break
            pause = min(2 * pause, LONGEST_PAUSE_S)
        for i in absent:
            if codes[i] == _UNREADABLE:
                codes[i] = int(Code.FAILED)
        if not unique:
            answer = dict(zip(keys, (codes[i] for i in absent), strict=True))
            for i, key in zip(absent, keys, strict=True):
                codes[i] = answer[key]

    def _put_once(self, pages: Pages, todo: list[int], until: float) -> list[int]:
        """One native put, then the question what of it can be read; a code a page.

        "Stored" is not believed, since the client also says so of a page that another writer
        has begun and not finished, or never will.
        """
        some = pages if len(todo) == len(pages.keys) else pages.subset(todo)
        answers = self._moved("put", self._client.put, some, until)
        if not any(answers):
            return self._readable(some.keys)
        codes = [int(code_of(answer)) for answer in answers]
        stored = [i for i, code in enumerate(codes) if code == _OK]
        if stored:
            readable = self._readable([some.keys[i] for i in stored])
            for i, code in zip(stored, readable, strict=True):
                codes[i] = code
        return codes

    def _readable(self, keys: list[str]) -> list[int]:
        """OK, ``_UNREADABLE`` or why it cannot be told, a key."""
        seen = self._client.exists(keys)
        self._note("exists", seen)
        if seen.count(1) == len(seen):
            return [_OK] * len(seen)
        named = {1: _OK, 0: _UNREADABLE}
        return [named[a] if a in named else int(code_of(a)) for a in seen]

    def _note(self, what: str, answers: list[int]) -> None:
        """Tell health and the log of native codes that a caller should not overlook."""
        if min(answers) >= 0:
            return
        failed = Counter(answer for answer in answers if answer < 0)
        for answer in failed:
            self._health.saw(code_of(answer))
        unnamed = {a: n for a, n in failed.items() if code_of(a) is Code.FAILED}
        if unnamed:
            text = ", ".join(f"{n} x {a}" for a, n in unnamed.items())
            logger.warning("Mooncake %s: %s of %d pages", what, text, len(answers))

    def clear(self, namespace: str) -> None:
        """Remove every page under ``namespace``, leased ones too.

        Raises:
            ClearError: the client failed, or pages keep coming.
        """
        if not self._health.up():
            raise ClearError(f"Mooncake cannot clear {namespace!r}: the master is down")
        until = time.monotonic() + CLEAR_S
        for _ in range(CLEAR_ROUNDS):
            if time.monotonic() >= until:
                break
            answer = self._client.remove_matching(f"^{_literally(namespace)}/")
            if answer == 0:
                return
            # A timeout is no failure yet: 400,000 pages take 2 s, and the master goes on.
            if answer < 0 and code_of(answer) is not Code.TIMEOUT:
                self._note("clear", [answer])
                raise ClearError(
                    f"Mooncake could not clear {namespace!r}: code {answer} "
                    f"({code_of(answer).name}); pages may remain, so clear again"
                )
        raise ClearError(
            f"{namespace!r} still had pages after {CLEAR_ROUNDS} removals or {CLEAR_S:.0f} s, or "
            "the master did not answer in time; if another deployment of this namespace is "
            "writing, stop it, and clear again"
        )

    def healthy(self) -> bool:
        return self._health.up()

    def close(self) -> None:
        """Unregister all memory and leave the cluster; takes about 2 s, 12 s without master."""
        self._closing.set()
        self._health.close()
        for region in self._regions.drain():
            self._client.unregister(region.address)
        self._client.close()


def _literally(text: str) -> str:
    """The text as an ECMAScript pattern, which is what Mooncake's master takes."""
    return re.sub(r"([\\^$.|?*+()\[\]{}])", r"\\\1", text)
