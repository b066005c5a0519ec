"""A close gives the client's memory back at once, without a garbage collection."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from hicache_shared.hostmem import aligned_bytes
from hicache_shared.store import Code
from hicache_shared.testing.harness import storage_config
from hicache_umbp import UmbpBackend
from hicache_umbp.memory import shared_bytes
from hicache_umbp.server import UmbpServer
from hicache_umbp.store import UmbpStore
from tests.pools import TestPool, hashes
from tests.umbp.umbp_stores import SMALL

pytestmark = pytest.mark.backend("umbp")

N = 4


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["embedded", "standalone"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "embedded":
        return SMALL
    server: UmbpServer = request.getfixturevalue("server")
    return {"standalone_address": server.address}


@dataclass
class Opened:
    """A backend, its store and its pools; of the client a reference that keeps nothing."""

    backend: UmbpBackend
    store: UmbpStore
    pools: list[TestPool]
    native: weakref.ref[object]


def opened(settings: dict[str, Any]) -> Opened:
    """With pages put and got, of one object and of several buffers with a trailer."""
    backend = UmbpBackend(storage_config(is_mla_model=False, extra=settings), {})
    store = backend._store
    assert isinstance(store, UmbpStore)
    allocate = shared_bytes if "standalone_address" in settings else aligned_bytes
    pools = [
        TestPool.make("hc1/release", "kv", N, (1000,), allocate),
        TestPool.make("hc1/release", "mamba", N, (900, 24), allocate),
    ]
    store.open([pool.stored for pool in pools])
    move(store, pools)
    return Opened(backend, store, pools, native_of(store))


def move(store: UmbpStore, pools: list[TestPool]) -> None:
    batches = [pool.pages(hashes(N)) for pool in pools]
    assert store.put(batches, 5.0) == store.get(batches, 5.0) == [[Code.OK] * N] * 2


def native_of(store: UmbpStore) -> weakref.ref[object]:
    client = store._session._client
    assert client is not None
    return weakref.ref(client._native)


@pytest.mark.parametrize("what", ["backend", "store"])
def test_a_close_ends_the_client(settings: dict[str, Any], what: str) -> None:
    made = opened(settings)
    assert made.native() is not None
    getattr(made, what).close()
    assert made.native() is None


def test_a_backend_that_nothing_uses_ends_its_client_and_leaves_no_store(
    settings: dict[str, Any],
) -> None:
    made = opened(settings)
    native, store = made.native, weakref.ref(made.store)
    del made
    assert native() is None
    assert store() is None


def test_the_client_of_a_server_that_was_started_again_ends_when_there_is_a_new_one() -> None:
    with UmbpServer(capacity_bytes=64 << 20) as server:
        made = opened({"standalone_address": server.address})
        server.kill()
        server.restart()
        move(made.store, made.pools)
        assert made.native() is None
        made.backend.close()
