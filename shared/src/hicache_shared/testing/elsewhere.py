"""A rank in another process: ``python -m hicache_shared.testing.elsewhere``.

The child takes one JSON object a line on its standard input, and answers each with one line:
first what to make, then steps. It closes its backend and ends when its input does.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from tempfile import TemporaryFile
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from hicache_shared.contract import HiCacheStorage, HiCacheStorageConfig
from hicache_shared.errors import HiCacheError
from hicache_shared.testing.harness import (
    Capabilities,
    ElsewhereSpec,
    Harness,
    storage_config,
)
from hicache_shared.testing.models import spec_of
from hicache_shared.testing.rank import Rank

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
        self._log = TemporaryFile()  # noqa: SIM115 - closed when the child ends
        self._child = subprocess.Popen(
            [sys.executable, "-m", "hicache_shared.testing.elsewhere"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._timer = threading.Timer(TIMEOUT_S, self._child.kill)
        self._timer.start()
        self.send(what_to_make(harness, model, layout, changes))

    def __enter__(self) -> Self:
        self.receive()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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
            self._child.stdin.write(json.dumps(step) + "\n")
            self._child.stdin.flush()
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

    def close(self) -> None:
        """End the child; it closes its backend."""
        try:
            self._child.communicate(timeout=TIMEOUT_S)
        finally:
            self._timer.cancel()
            self._child.kill()
            self._child.wait()
        if self._child.returncode:
            raise self._ended()
        self._log.close()

    def _ended(self) -> ElsewhereError:
        self._child.kill()
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


def digest(page: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(page).hexdigest()


# -- in the child ------------------------------------------------------------------------------


def found(dotted: str) -> Any:
    """What ``package.module:name`` stands for."""
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)


def harness_of(spec: ElsewhereSpec, *, zero_copy: bool) -> Harness:
    """Makes backends as a harness in another process said."""

    class ElsewhereHarness(Harness):
        name = "elsewhere"
        capabilities = Capabilities(zero_copy=zero_copy)

        def make(self, config: HiCacheStorageConfig) -> HiCacheStorage:
            config.extra_config = dict(spec.extra_config)
            backend: HiCacheStorage = found(spec.backend)(config, {})
            return backend

        def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
            if not spec.allocate:
                return super().allocate(nbytes)
            memory: npt.NDArray[np.uint8] = found(spec.allocate)(nbytes)
            return memory

    return ElsewhereHarness()


def done(rank: Rank, step: dict[str, Any]) -> dict[str, Any]:
    """Do a step; its answer."""
    keys = step["keys"]
    if step["step"] == "hit":
        return {"hit": rank.hit(keys)}
    pages = step["pages"]
    if step["step"] == "get":
        answers = {name: rank.get(name, keys, pages) for name in rank.pools}
        digests = {name: [digest(rank.page(name, page)) for page in pages] for name in rank.pools}
        return {"answers": answers, "digests": digests}
    rank.write(keys, pages)
    rank.set_anchor(keys)
    return {"answers": {name: rank.set(name, keys, pages) for name in rank.pools}}


def main(steps: IO[str], answers: IO[str]) -> None:
    """Make a rank, and do steps until there are no more."""
    first = json.loads(next(steps))
    harness = harness_of(ElsewhereSpec(**first["spec"]), zero_copy=first["zero_copy"])
    rank = Rank.make(harness, first["model"], first["layout"], **first["changes"])
    print("{}", file=answers, flush=True)
    try:
        for line in steps:
            print(json.dumps(done(rank, json.loads(line))), file=answers, flush=True)
    finally:
        rank.backend.close()


if __name__ == "__main__":
    # A native client may print what it likes; answers have a way of their own.
    with os.fdopen(os.dup(1), "w") as own:
        os.dup2(2, 1)
        main(sys.stdin, own)
