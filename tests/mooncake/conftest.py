"""A real master and real clients. Their absence is a failure, not a skip."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from mooncake_pools import TestPool

from hicache_mooncake.client import connect
from hicache_mooncake.config import MooncakeConfig
from hicache_mooncake.server import MooncakeMaster
from hicache_mooncake.store import MooncakeStore
from hicache_mooncake.testing import RawMooncake

Connect = Callable[..., MooncakeStore]
_numbers = itertools.count()


def connected(master: MooncakeMaster, segment_bytes: int, **settings: object) -> MooncakeStore:
    """A store over a client of its own."""
    config = MooncakeConfig.model_validate(
        {
            "master_server_address": master.address,
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            **settings,
        }
    )
    return MooncakeStore(connect(config, segment_bytes=segment_bytes))


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


def forget(store: MooncakeStore, pools: list[TestPool]) -> None:
    """Take the pools' memory out of a store that outlives it."""
    ours = {region for pool in pools for region in pool.stored.layout.regions}
    for region in store._regions.drain():
        if region in ours:
            store._client.unregister(region.address)
        else:
            store._regions.add(region)
