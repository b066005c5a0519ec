"""Real clients and servers; ``tests.backends`` says when their absence is a skip."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from hicache_shared.hostmem import aligned_bytes
from hicache_umbp.memory import shared_bytes
from hicache_umbp.server import UmbpServer
from hicache_umbp.store import UmbpStore
from hicache_umbp.testing import RawUmbp
from tests.pools import Allocate, TestPool
from tests.umbp.umbp_stores import new_store

_numbers = itertools.count()

CAPACITY = 128 << 20


@dataclass
class Opened:
    """A store, a way behind it, and pools of two single buffers and one of three components."""

    store: UmbpStore
    raw: RawUmbp
    pools: list[TestPool]
    allocate: Allocate


@pytest.fixture(scope="session")
def server() -> Iterator[UmbpServer]:
    with UmbpServer(capacity_bytes=CAPACITY, page_bytes=4096) as running:
        yield running


@pytest.fixture
def namespace() -> str:
    """One that no other test uses."""
    return f"hc1/test.{next(_numbers)}-0123456789abcdef"


@pytest.fixture(params=["embedded", "standalone", "no ranges"])
def opened(request: pytest.FixtureRequest, namespace: str) -> Iterator[Opened]:
    """An embedded client, one of a standalone server, and one as old as 1.2.2."""
    allocate: Allocate = aligned_bytes
    settings: dict[str, object] = {"dram_capacity_bytes": CAPACITY}
    if request.param == "standalone":
        settings = {"standalone_address": request.getfixturevalue("server").address}
        allocate = shared_bytes
    store, made = new_store(settings, ranged=request.param != "no ranges")
    pools = [
        TestPool.make(namespace, "kv", 16, (4096,), allocate),
        TestPool.make(namespace, "indexer", 16, (1000,), allocate),
        TestPool.make(namespace, "mamba", 16, (3000, 17, 512), allocate),
    ]
    store.open([pool.stored for pool in pools])
    for seed, pool in enumerate(pools):
        pool.arrays.fill(seed)
    yield Opened(store, made[0], pools, allocate)
    store.close()
