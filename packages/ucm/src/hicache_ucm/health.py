"""Whether the file system answers: what it refuses, and what it does not come back from."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

logger = logging.getLogger(__name__)

Operation = Literal["reading", "writing", "lookup"]
"""A full disk can be read."""


class Health:
    """Follows the calls of one store; logs each change once. Thread-safe.

    Args:
        root: the folder, for messages.
        patience_s: seconds after which a call that has not come back means that the file
            system hangs.
    """

    def __init__(self, root: str, patience_s: float) -> None:
        self._root = root
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._running: dict[int, float] = {}
        self._hangs = False
        self._failing: set[Operation] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around native tasks."""
        number = next(self._numbers)
        with self._lock:
            self._running[number] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._running[number]

    def hangs(self) -> bool:
        """Whether a call has been in the file system for longer than is patient."""
        with self._lock:
            oldest = min(self._running.values(), default=None)
            hangs = oldest is not None and time.monotonic() - oldest > self._patience_s
            changed, self._hangs = hangs is not self._hangs, hangs
        if changed and hangs:
            logger.error(
                "UCM: %s does not come back; pages count as missing until it does, and the call "
                "that is in it waits, since it may still write to its host pages",
                self._root,
            )
        elif changed:
            logger.warning("UCM: %s comes back", self._root)
        return hangs

    def saw(self, operation: Operation, failure: str | None) -> None:
        """Take note of how an operation went: why it failed, None where it did not."""
        fails = failure is not None
        with self._lock:
            if fails is (operation in self._failing):
                return
            self._failing ^= {operation}
        if fails:
            logger.error("UCM: %s on %s fails: %s", operation, self._root, failure)
        else:
            logger.warning("UCM: %s on %s works again", operation, self._root)

    def good(self) -> bool:
        return not self.hangs() and not self._failing
