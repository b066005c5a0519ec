"""A real master and real clients; ``tests.backends`` says when their absence is a skip."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from hicache_mooncake.server import MooncakeMaster
from hicache_mooncake.store import MooncakeStore
from hicache_mooncake.testing import RawMooncake
from tests.mooncake.mooncake_stores import connected, forget
from tests.pools import TestPool

_numbers = itertools.count()


@pytest.fixture(scope="session")
def master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster() as running:
        yield running


@pytest.fixture(scope="session")
def store(master: MooncakeMaster) -> Iterator[MooncakeStore]:
    opened = connected(master, 256 << 20)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def other_store(master: MooncakeMaster, store: MooncakeStore) -> Iterator[MooncakeStore]:
    """A second client, which gives no memory: all it stores is remote."""
    opened = connected(master, 0)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def raw(master: MooncakeMaster, store: MooncakeStore) -> Iterator[RawMooncake]:
    with RawMooncake(master.address, master.admin_address) as client:
        yield client


@pytest.fixture
def namespace() -> str:
    """One that no other test uses."""
    return f"hc1/test.{next(_numbers)}-0123456789abcdef"


@pytest.fixture
def pools(namespace: str, store: MooncakeStore) -> Iterator[list[TestPool]]:
    """Single buffers of two sizes, and a pool of three unequal components; 16 pages each."""
    made = [
        TestPool.make(namespace, "kv", 16, (4096,)),
        TestPool.make(namespace, "indexer", 16, (1000,)),
        TestPool.make(namespace, "mamba", 16, (3000, 17, 512)),
    ]
    store.open([pool.stored for pool in made])
    for seed, pool in enumerate(made):
        pool.arrays.fill(seed)
    yield made
    forget(store, made)
    store.clear(namespace)
