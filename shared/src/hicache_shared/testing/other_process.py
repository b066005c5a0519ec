"""A rank of the same store in another process, from the side of the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from tempfile import TemporaryFile
from typing import Any, Self

from hicache_shared.errors import HiCacheError
from hicache_shared.testing.harness import Harness, storage_config
from hicache_shared.testing.models import spec_of

TIMEOUT_S = 120.0
"""A child that does not answer is killed after this."""


class ElsewhereError(HiCacheError, RuntimeError):
    """The other process ended, or did not answer."""


class Elsewhere:
    """A rank of the same store in a process of its own. Use as a context manager.

    Args:
        harness: whose store; it has the capability ``processes``.
        model, layout: the host pools.
        changes: as of :meth:`Rank.make`, plain JSON.

    Raises:
        ElsewhereError: from any call; with what the child wrote to its standard error.
    """

    def __init__(self, harness: Harness, model: str, layout: str, **changes: Any) -> None:
        self._first = what_to_make(harness, model, layout, changes)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._log = stack.enter_context(TemporaryFile())
            timer = threading.Timer(TIMEOUT_S, lambda: self._child.kill())
            stack.callback(timer.cancel)
            self._child = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "hicache_shared.testing.elsewhere"],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                )
            )
            timer.start()
            self.send(self._first)
            self.receive()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Let the child close its backend and end."""
        with self._stack:
            assert self._child.stdin is not None
            self._child.stdin.close()
            if self._child.wait() and kind is None:
                raise self._ended()

    def set(self, keys: Sequence[str], pages: Sequence[int]) -> dict[str, list[bool]]:
        """Write the :func:`content` of ``keys[i]`` to page ``pages[i]`` of every pool and store
        them; an answer a key of each pool."""
        self.send({"step": "set", "keys": list(keys), "pages": list(pages)})
        answers: dict[str, list[bool]] = self.receive()["answers"]
        return answers

    def get(
        self, keys: Sequence[str], pages: Sequence[int]
    ) -> tuple[dict[str, list[bool]], dict[str, list[str]]]:
        """Fill pages of every pool; the answers, and the SHA-256 of each page."""
        self.send({"step": "get", "keys": list(keys), "pages": list(pages)})
        answer = self.receive()
        return answer["answers"], answer["digests"]

    def hit(self, keys: Sequence[str]) -> int:
        self.send({"step": "hit", "keys": list(keys)})
        return int(self.receive()["hit"])

    def send(self, step: dict[str, Any]) -> None:
        """Let the child begin a step, without waiting for its answer."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(step).encode() + b"\n")
        except BrokenPipeError as error:
            raise self._ended() from error

    def receive(self) -> dict[str, Any]:
        """The answer to the earliest step that has had none yet."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> ElsewhereError:
        code = self._child.wait()
        self._log.seek(0)
        last = self._log.read().decode(errors="replace")[-4000:]
        return ElsewhereError(f"the other process ended with {code}; its last words:\n{last}")


def what_to_make(
    harness: Harness, model: str, layout: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """The child's first line."""
    config = storage_config(
        is_mla_model=spec_of(model).is_mla_model,
        identity=harness.capabilities.identity,
        **changes,
    )
    return {
        "spec": asdict(harness.elsewhere(config)),
        "zero_copy": harness.capabilities.zero_copy,
        "model": model,
        "layout": layout,
        "changes": {name: value for name, value in changes.items() if name != "extra"},
    }
