"""A rank in another process does what it is told, and its end is an error that says why."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_shared.contract import HiCacheStorage, HiCacheStorageConfig
from hicache_shared.memory_backend import MemoryBackend
from hicache_shared.testing import Capabilities, ElsewhereSpec, Harness
from hicache_shared.testing.other_process import Elsewhere, ElsewhereError
from hicache_shared.testing.rank import Rank, chain, content, digest

PAIR = ("mla", "page_first")


class PrivateHarness(Harness):
    """The reference backend, whose memory is each process's own."""

    name = "private"
    capabilities = Capabilities(zero_copy=True, processes=True)
    backend = "hicache_shared.memory_backend:MemoryBackend"

    def make(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        return MemoryBackend(config, {})

    def elsewhere(self, config: HiCacheStorageConfig) -> ElsewhereSpec:
        return ElsewhereSpec(self.backend, config.extra_config or {})


class LostHarness(PrivateHarness):
    backend = "hicache_shared.no_such_module:Backend"


def test_pages_of_another_process_are_told_by_their_digests() -> None:
    rank, keys = Rank.make(PrivateHarness(), *PAIR), chain(3, "elsewhere")
    with Elsewhere(PrivateHarness(), *PAIR) as other:
        assert other.set(keys[:2], [0, 1]) == {"kv": [True, True]}
        assert other.hit(keys) == 2
        answers, digests = other.get(keys, [8, 9, 10])
    assert answers == {"kv": [True, True, False]}
    expected = [digest(content("kv", key, rank.page_bytes("kv"))) for key in keys]
    assert digests["kv"][:2] == expected[:2]
    assert digests["kv"][2] != expected[2]
    assert rank.hit(keys) == 0, "the memory is the other process's own"
    rank.backend.close()


def test_a_process_that_cannot_begin_says_why() -> None:
    with pytest.raises(ElsewhereError, match="no_such_module"):
        Elsewhere(LostHarness(), *PAIR).__enter__()


@pytest.mark.parametrize("step", [{"step": "hit"}, {"step": "get", "keys": [1], "pages": [99]}])
def test_a_process_that_fails_says_why_and_ends(step: dict[str, Any]) -> None:
    other = Elsewhere(PrivateHarness(), *PAIR).__enter__()
    other.send(step)
    with pytest.raises(ElsewhereError, match="Error"):
        other.receive()
    with pytest.raises(ElsewhereError, match="ended with"):
        other.__exit__(None)
