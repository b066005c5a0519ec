"""A process that gives memory to a store, so that pages go over TCP and not to the caller's own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

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


class Holder:
    """Runs until it is left, or killed.

    Attributes:
        process: for faults; it may be stopped and killed.
    """

    def __init__(self, master: MooncakeMaster, segment_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, master.address, str(segment_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def __enter__(self) -> Self:
        if self.process.stdout is None or self.process.stdout.readline() != "ready\n":
            self.__exit__(None, None, None)
            raise RuntimeError(f"a holder of pages did not start: {self.process.wait()}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        with self.process:
            pass
