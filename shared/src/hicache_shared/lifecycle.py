"""Closing safely: native clients crash when a call meets a close."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CallGate:
    """Counts running calls and, once closed, lets no new one in. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running = 0
        self._closed = False

    @contextmanager
    def call(self) -> Iterator[bool]:
        """Whether the call may touch the client; ``close`` waits until the block ends."""
        with self._condition:
            entered = not self._closed
            self._running += entered
        try:
            yield entered
        finally:
            if entered:
                with self._condition:
                    self._running -= 1
                    self._condition.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for the running ones; whether all of them ended."""
        with self._condition:
            self._closed = True
            return self._condition.wait_for(lambda: self._running == 0, timeout_s)
