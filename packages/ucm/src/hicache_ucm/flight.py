"""Native tasks under way: none is left behind, since its worker uses the caller's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from hicache_ucm.client import Addresses, NativeError
from hicache_ucm.health import Health
from hicache_ucm.pool import Part


class Task:
    """One native task, or the refusal to begin it; of no pages it is over at once."""

    def __init__(self, part: Part, begin: Callable[[bytes, Addresses], int]) -> None:
        self._native = part.pool.native
        self._number: int | None = None
        self._error: NativeError | None = None
        if not len(part):
            return  # an empty batch is an error to UCM
        try:
            self._number = begin(part.ids, part.addresses)
        except NativeError as error:
            self._error = error

    def wait(self) -> NativeError | None:
        """Why it failed; returns when nothing touches its memory any more."""
        if self._number is not None:
            number, self._number = self._number, None
            try:
                self._native.wait(number)
            except NativeError as error:
                self._error = error
        return self._error


class Flight:
    """The tasks of one call; a context that is left only when all of them are over."""

    def __init__(self, health: Health) -> None:
        self._running = health.running()
        self._tasks: list[Task] = []

    def __enter__(self) -> Self:
        self._running.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for task in self._tasks:
                task.wait()
        finally:
            self._running.__exit__(None, None, None)

    def load(self, part: Part) -> Task:
        return self._begin(part, part.pool.native.load)

    def dump(self, part: Part) -> Task:
        return self._begin(part, part.pool.native.dump)

    def one_by_one(self, part: Part, begin: Callable[[Part], Task]) -> list[NativeError | None]:
        """How each page fares in a task of its own, all of them at once.

        For a batch that failed: UCM does not say which page did, and leaves out pages behind.
        """
        tasks = [begin(part.subset([i])) for i in range(len(part))]
        return [task.wait() for task in tasks]

    def _begin(self, part: Part, call: Callable[[bytes, Addresses], int]) -> Task:
        task = Task(part, call)
        self._tasks.append(task)
        return task
