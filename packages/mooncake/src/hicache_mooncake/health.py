"""Whether it is worth asking: an unreachable master costs seconds a call."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from hicache_shared.store import Code

logger = logging.getLogger(__name__)

HOLD_S = 6.0
"""Seconds of not asking after a call found the master gone. The client's own health turns
5.3 s after the master died; until then each call would block as long as a request may."""

_UNREACHABLE = frozenset({Code.UNAVAILABLE, Code.TIMEOUT})


class Health:
    """Follows the client's heartbeat and the answers of calls; logs each change once.

    Thread-safe.
    """

    def __init__(self, heartbeat: Callable[[], bool], master: str) -> None:
        self._heartbeat = heartbeat
        self._master = master
        self._lock = threading.Lock()
        self._hold_until = 0.0
        self._was_up = True
        self._closed = False

    def up(self) -> bool:
        """Whether calls should be made now; about a microsecond."""
        if self._closed:
            return False
        now_up = time.monotonic() >= self._hold_until and self._heartbeat()
        if now_up is not self._was_up:
            self._change(now_up, "its heartbeat fails" if not now_up else "it answers")
        return now_up

    def saw(self, code: Code) -> None:
        """Take note of a failure that a call met."""
        if code in _UNREACHABLE:
            self._hold_until = time.monotonic() + HOLD_S
            self._change(False, f"a call gave {code.name}")

    def close(self) -> None:
        """Answer "down" from now on, so that no call reaches a closed client."""
        self._closed = True

    def _change(self, now_up: bool, why: str) -> None:
        with self._lock:
            if now_up is self._was_up:
                return
            self._was_up = now_up
        if now_up:
            logger.warning("Mooncake master %s is back: %s", self._master, why)
        else:
            logger.error(
                "Mooncake master %s is down: %s; pages count as missing until it is back",
                self._master,
                why,
            )
