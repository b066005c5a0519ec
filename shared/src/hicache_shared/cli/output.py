"""Standard output that is the command's alone, exit codes, and failures as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, TextIO

from hicache_shared.cli.interrupt import interrupt_no_more
from hicache_shared.errors import BackendUnavailableError


class ExitCode(IntEnum):
    """What every verb ends with."""

    GOOD = 0
    NEGATIVE = 1
    USAGE = 2
    UNAVAILABLE = 3


@contextlib.contextmanager
def own_stdout(*, give_back: bool = True) -> Iterator[TextIO]:
    """Standard output for the command's own text; everybody else's goes to standard error.

    Native clients and servers may write to file descriptor 1, and libraries print: while the
    context lasts both reach standard error. Not thread-safe; for the main thread.

    Args:
        give_back: whether they get it back in the end. Not in a process that ends with the
            command: a native thread that logs late would write behind the command's text.
    """
    sys.stdout.flush()
    descriptor = os.dup(1)
    with (
        open(descriptor, "w", encoding=sys.stdout.encoding or "utf-8") as out,  # noqa: PTH123
        contextlib.redirect_stdout(out),
    ):
        os.dup2(2, 1)
        try:
            yield out
        finally:
            out.flush()
            if give_back:
                os.dup2(descriptor, 1)


def code_of(error: Exception) -> ExitCode:
    """The exit code of an error that ends a command."""
    return ExitCode.UNAVAILABLE if isinstance(error, BackendUnavailableError) else ExitCode.USAGE


def print_json(value: Any) -> None:
    """One JSON object on standard output; the command's last word, so no signal cuts it short."""
    interrupt_no_more()
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def failure(kind: str, message: str) -> dict[str, str]:
    """The ``error`` of a command's JSON."""
    return {"kind": kind, "message": message}
