"""A process that gives memory to a store, so that pages go over TCP and not to the caller's own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hicache_mooncake.server import MooncakeMaster

PROGRAM = """
import sys
from types import SimpleNamespace
from tests.mooncake.mooncake_stores import connected
store = connected(SimpleNamespace(address=sys.argv[1]), int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
store.close()
"""


@contextmanager
def holder(master: MooncakeMaster, segment_bytes: int) -> Iterator[subprocess.Popen[str]]:
    """The process, which may be stopped and killed."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, master.address, str(segment_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        try:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError("a process that holds pages did not start")
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()
