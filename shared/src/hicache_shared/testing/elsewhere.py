"""A rank in a process of its own: ``python -m hicache_shared.testing.elsewhere``.

It takes one JSON object a line on its standard input, and answers each with one line: first
what to make, then steps. It closes its backend and ends when its input does. See
:class:`hicache_shared.testing.other_process.Elsewhere`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from hicache_shared.contract import HiCacheStorage, HiCacheStorageConfig
from hicache_shared.testing.harness import Capabilities, ElsewhereSpec, Harness
from hicache_shared.testing.rank import Rank, digest


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
