"""How many transfers are with the client at once: over TCP too many of them break it.

The client queues transfers a peer, one a component of a page, and refuses what finds the queue
full. Measured with 0.3.13.post1: after such a refusal a call may last 60 s, and the calls to that
peer that follow may fail until the process ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUEUE_VARIABLE = "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"
"""Read by the client in setup."""

CLIENTS_QUEUE = 1024
"""What the client takes where the variable has no number that it accepts."""

LONGEST_QUEUE = 65_535
"""The most that the client accepts; it costs memory only while transfers are in it."""

MOST_IN_A_CALL = 16_384
"""Transfers of one native call, so that calls of several threads find room beside each other.
Calls of this size take no longer a transfer than larger ones."""


def queue_length() -> int:
    """Transfers that a client may have in flight: the operator's, else :data:`LONGEST_QUEUE`."""
    told = os.environ.get(QUEUE_VARIABLE, str(LONGEST_QUEUE))
    return int(told) if told.isdecimal() and 0 < int(told) <= LONGEST_QUEUE else CLIENTS_QUEUE


class Room:
    """Room for so many transfers at once. Thread-safe.

    Attributes:
        most_in_a_call: transfers to ask room for at once.
    """

    def __init__(self, most: int) -> None:
        self.most_in_a_call = min(most, MOST_IN_A_CALL)
        self._most = most
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, transfers: int, until: float) -> Iterator[bool]:
        """Wait for room until a time of ``time.monotonic``, and hold it; False where none came.

        What is larger than the whole room gets it where it is alone.
        """
        most = max(self._most, transfers)
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._taken + transfers <= most, until - time.monotonic()
            )
            self._taken += transfers if free else 0
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._taken -= transfers
                    self._changed.notify_all()
