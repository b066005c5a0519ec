"""Signals that end a command early, as an exception that lets everything be cleaned up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal asked the command to end. No Exception, so that nobody takes it for a fault.

    Attributes:
        code: the exit code, 128 and the signal's number, as shells have it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name} before there was a verdict")
        self.code = 128 + number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """While the context lasts the first signal raises :class:`Interrupted`; more do nothing.

    A signal that the process was started to ignore stays ignored. For the main thread.
    """
    found = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: of for number, of in found.items() if of not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_no_more() -> None:
    """Let what comes now be finished, whatever signal arrives."""
    for number in SIGNALS:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, _: FrameType | None) -> None:
    interrupt_no_more()
    raise Interrupted(number)
