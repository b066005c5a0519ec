"""A server of one's own: started, restarted, and ended with all its processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.e2e.client import Client, EngineError

STOP_S = 60.0


def wait_until_ready(client: Client, deadline_s: float, process: OwnEngine | None = None) -> None:
    """Wait until a server answers.

    Args:
        process: the server, where it is one's own; that it ends is an error.

    Raises:
        EngineError: it does not answer in time, or ends.
    """
    until = time.monotonic() + deadline_s
    probe = Client(client.url, timeout_s=5.0, api_key=client.api_key)
    while True:
        try:
            probe.info()
        except EngineError as error:
            if time.monotonic() > until:
                raise EngineError(f"not ready within {deadline_s:.0f} s: {error}") from error
            if process is not None and process.ends_within(0.5):
                raise EngineError(f"ended at start: {process.last_lines()}") from error
            if process is None:
                threading.Event().wait(0.5)
        else:
            return


class OwnEngine:
    """A server process while the context lasts.

    Args:
        command: what starts it.
        client: reaches it.
        log: takes what it prints.
        environment: variables beside those of this process.
        start_s: how long a start may take.

    Attributes:
        command, client, environment: as given.
    """

    def __init__(
        self,
        command: Sequence[str],
        client: Client,
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        start_s: float = 1800.0,
    ) -> None:
        self.client = client
        self.command = list(command)
        self._log = log
        self.environment = dict(environment or {})
        self._start_s = start_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            EngineError: it does not.
        """
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_ending_with_parent(), *self.command],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            wait_until_ready(self.client, self._start_s, self)
        except BaseException:
            self.stop()
            raise

    def restart(self) -> None:
        """End it, and start it anew.

        Raises:
            EngineError: it does not answer.
        """
        self.stop()
        self.start()

    def stop(self) -> None:
        """End it and all processes that it started; harmless where it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        # Whatever is left of its session: ranks outlive a server that was killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def ends_within(self, seconds: float) -> bool:
        """Whether the process ends in this time."""
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_lines(self, count: int = 30) -> str:
        """The end of what it printed."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-count:])


def _ending_with_parent() -> list[str]:
    """A prefix with which the kernel ends the server when this process is killed."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []
