"""Every form of a call, what it answers when all is well and when all is amiss, and in time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hicache_shared.testing.page_bytes import bytes_of
from hicache_shared.testing.rank import KV, Rank, chain, same

BOUND_S = 15.0
"""Longest that a call may last: the 5 s that it has by default (``deadline_s``), and the 10 s
for which SGLang 0.5.23 joins its storage threads before it raises."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Form:
    """One form of call.

    Attributes:
        name: of the contract's method.
        call: makes it and gives its answer.
        whole: the answer where all pages are stored and the store takes more.
        miss: the answer where the store serves nothing and takes nothing.
    """

    name: str
    call: Callable[[], object]
    whole: object
    miss: object


def forms(
    rank: Rank, keys: list[str], sources: Sequence[int], targets: Sequence[int]
) -> list[Form]:
    """The forms of call that move pages of pools, by v1 and v2, and of questions.

    Args:
        rank: its backend answers.
        keys: pages that are stored in every pool.
        sources: host pages that fresh pages are put from, one a key.
        targets: host pages that gets fill, one a key.
    """
    n, numbers, backend = len(keys), itertools.count(), rank.backend
    sidecars = rank.sidecars

    def fresh() -> list[str]:
        return chain(n, f"{keys[0]}/fresh/{next(numbers)}")

    def set_v2() -> object:
        hashes = fresh()
        return backend.batch_set_v2([rank.transfer(name, hashes, sources) for name in sidecars])

    def get_v2() -> object:
        return backend.batch_get_v2([rank.transfer(name, keys, targets) for name in sidecars])

    every, none = [True] * n, [False] * n
    made = [Form("batch_exists_v2", lambda: rank.hit(keys), n, 0)]
    if KV in rank.pools:
        made += [
            Form("exists", lambda: backend.exists(keys[0]), True, False),
            Form("batch_exists", lambda: backend.batch_exists(keys), n, 0),
            Form("batch_get_v1", lambda: rank.get(KV, keys, targets), every, none),
            Form("batch_set_v1", lambda: rank.set(KV, fresh(), sources), every, none),
        ]
    if sidecars:
        whole, miss = dict.fromkeys(sidecars, every), dict.fromkeys(sidecars, none)
        made += [
            Form("batch_get_v2", get_v2, whole, miss),
            Form("batch_set_v2", set_v2, whole, miss),
        ]
    return made


def flat_forms(rank: Rank, keys: list[str], pages: Sequence[Any]) -> list[Form]:
    """The forms of call that move flat pages of KV; ``pages`` are those stored under ``keys``."""
    n, numbers, backend = len(keys), itertools.count(), rank.backend
    empty = rank.pools[KV].get_dummy_flat_data_page

    def fresh() -> list[str]:
        return chain(n, f"{keys[0]}/fresh/{next(numbers)}")

    def batch_get() -> object:
        return [plain(page) for page in backend.batch_get(keys, [empty() for _ in keys])]

    values = [plain(page) for page in pages]
    return [
        Form("exists", lambda: backend.exists(keys[0]), True, False),
        Form("batch_exists", lambda: backend.batch_exists(keys), n, 0),
        Form("get", lambda: plain(backend.get(keys[0], empty())), values[0], None),
        Form("set", lambda: backend.set(fresh()[0], pages[0]), True, False),
        Form("batch_get", batch_get, values, [None] * n),
        Form("batch_set", lambda: backend.batch_set(fresh(), pages), True, False),
    ]


def plain(page: Any) -> bytes | None:
    """The bytes of a flat page; None stays None."""
    return None if page is None else bytes_of(page)


class TooLongError(AssertionError):
    """A call has not ended within its bound."""


class Call(threading.Thread):
    """A call in a thread of its own, which is given up if it lasts too long."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._future: Future[Any] = Future()
        self.start()

    def run(self) -> None:
        try:
            self._future.set_result(self._call())
        except BaseException as error:  # noqa: BLE001 - handed on to who waits
            self._future.set_exception(error)

    def answer(self, bound_s: float = BOUND_S) -> Any:
        """What it answered.

        Raises:
            TooLongError: it lasts longer than the bound, in seconds from now.
            BaseException: what the call raised.
        """
        self._wait(bound_s)
        return self._future.result()

    def error(self, bound_s: float = BOUND_S) -> BaseException | None:
        """What it raised, or None; raises TooLongError as :meth:`answer` does."""
        self._wait(bound_s)
        return self._future.exception()

    def _wait(self, bound_s: float) -> None:
        self.join(bound_s)
        if not self._future.done():
            raise TooLongError(f"a call lasts longer than {bound_s:.0f} s")


def in_time(call: Callable[[], Answer]) -> Answer:
    """What a call answers, which it has to do within :data:`BOUND_S`."""
    answer: Answer = Call(call).answer()
    return answer


def assert_memory(rank: Rank, memory: list[npt.NDArray[np.uint8]]) -> None:
    """Every byte of the pools and of the guard areas is as it was in an earlier image."""
    is_same = same(memory, rank.image())
    assert is_same, "a call wrote to host memory that it should have left alone"


def assert_loaded(
    rank: Rank, name: str, keys: list[str], expected: Sequence[bytes | None], targets: Sequence[int]
) -> None:
    """Load pages of a pool: each comes with its bytes, or where None is expected is a miss.

    Nothing but the target pages changes, and they are put back as they were.
    """
    kept = [rank.page(name, target) for target in targets]
    memory = rank.image()
    answers = in_time(lambda: rank.get(name, keys, targets))
    assert answers == [value is not None for value in expected], f"pool {name}"
    for target, value in zip(targets, expected, strict=True):
        is_right = value is None or rank.page(name, target) == value
        assert is_right, f"pool {name}: other bytes"
    for target, value in zip(targets, kept, strict=True):
        rank.put_page(name, target, value)
    assert_memory(rank, memory)
