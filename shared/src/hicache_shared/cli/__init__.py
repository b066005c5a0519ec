"""The ``hicache`` command."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, else the process's; returns the exit code.

    Exit codes: 0 good; 1 a negative verdict; 2 usage or configuration; 3 the backend is not
    available; 130 and 143 ended by Ctrl-C and SIGTERM. For the main thread.
    """
    from hicache_shared.cli.app import run

    return run(arguments)
