"""Over TCP the client breaks when it has too many transfers at once; the store keeps it whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.pages import Pages
from hicache_mooncake.room import (
    CLIENTS_QUEUE,
    LONGEST_QUEUE,
    MOST_IN_A_CALL,
    QUEUE_VARIABLE,
    Room,
    queue_length,
)
from hicache_mooncake.server import MooncakeMaster
from hicache_mooncake.store import MooncakeStore
from hicache_shared.store import Code
from tests.mooncake.mooncake_stores import connected, forget
from tests.pools import TestPool, hashes

pytestmark = pytest.mark.backend("mooncake")

PATIENCE_S = 60.0

LAYERS = 61
K_AND_V_OF_EVERY_LAYER = (1024,) * 2 * LAYERS
"""A page of MHA in SGLang's default memory layout, layer_first."""


@pytest.mark.parametrize(
    ("pages", "component_bytes"),
    [
        pytest.param(4096, (1024,), id="a node's sidecar of 4096 pages"),
        pytest.param(128, K_AND_V_OF_EVERY_LAYER, id="128 pages in layer_first"),
        pytest.param(3000, (64,) * 24, id="more transfers than the longest queue takes"),
    ],
)
def test_a_call_of_any_size_moves_every_page_and_leaves_the_client_whole(
    store: MooncakeStore,
    other_store: MooncakeStore,
    namespace: str,
    pages: int,
    component_bytes: tuple[int, ...],
) -> None:
    """The client's own queue takes 1,024 transfers a peer, and as many again for a second."""
    pool = TestPool.make(namespace, "kv", pages, component_bytes)
    other_store.open([pool.stored])
    pool.arrays.fill(1)
    before = pool.arrays.contents([*range(pages)])
    assert other_store.put([pool.pages(hashes(pages))], PATIENCE_S) == [[Code.OK] * pages]
    pool.arrays.wipe()
    assert other_store.get([pool.pages(hashes(pages))], PATIENCE_S) == [[Code.OK] * pages]
    assert pool.arrays.contents([*range(pages)]) == before
    forget(other_store, [pool])
    store.clear(namespace)


@pytest.fixture
def narrow_store(
    master: MooncakeMaster, store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MooncakeStore]:
    """A client without memory of its own, which takes few transfers at once."""
    monkeypatch.setenv(QUEUE_VARIABLE, "64")
    opened = connected(master, 0)
    yield opened
    opened.close()


def test_calls_of_many_threads_share_the_clients_queue(
    store: MooncakeStore, narrow_store: MooncakeStore, namespace: str
) -> None:
    threads, pages = 6, 300
    pools = [TestPool.make(namespace, f"p{i}", pages, (512,)) for i in range(threads)]
    narrow_store.open([pool.stored for pool in pools])
    together = threading.Barrier(threads)

    def work(pool: TestPool) -> list[list[int]]:
        pool.arrays.fill(2)
        together.wait()
        stored = narrow_store.put([pool.pages(hashes(pages))], PATIENCE_S)
        return stored + narrow_store.get([pool.pages(hashes(pages))], PATIENCE_S)

    with ThreadPoolExecutor(threads) as running:
        assert list(chain(*running.map(work, pools))) == [[Code.OK] * pages] * 2 * threads
    forget(narrow_store, pools)
    store.clear(namespace)


class Slow:
    """A client that takes its time, and its pages."""

    master = "slow"
    most_transfers = 2

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def healthy(self) -> bool:
        return True

    def exists(self, keys: list[str]) -> list[int]:
        return [0] * len(keys)

    def put(self, pages: Pages) -> list[int]:
        self.calls.append(pages.keys)
        time.sleep(0.05)
        return [0] * len(pages.keys)


def test_a_call_in_parts_stops_at_its_deadline() -> None:
    client, pool = Slow(), TestPool.make("hc1/slow", "kv", 6, (8,))
    store = MooncakeStore(client)  # type: ignore[arg-type]
    codes = store.put([pool.pages(hashes(6))], 0.01)[0]
    assert [len(keys) for keys in client.calls] == [2]
    assert codes[2:] == [Code.TIMEOUT] * 4
    assert store.healthy()  # the time was short; nothing is known of the master


def test_room_is_given_when_it_comes_free_and_not_after_the_deadline() -> None:
    room = Room(10)
    now = time.monotonic()
    with room.taken(6, now) as first, room.taken(4, now) as second:
        assert first
        assert second
        with room.taken(1, now) as third:
            assert not third
    with room.taken(10, now) as all_of_it:
        assert all_of_it


def test_room_is_waited_for() -> None:
    room = Room(1)
    held, given_up = threading.Event(), threading.Event()

    def hold() -> None:
        with room.taken(1, time.monotonic()):
            held.set()
            given_up.wait(PATIENCE_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(PATIENCE_S)
    threading.Timer(0.05, given_up.set).start()
    with room.taken(1, time.monotonic() + PATIENCE_S) as free:
        assert free
        assert given_up.is_set()
    holder.join()


def test_what_is_larger_than_the_room_gets_it_alone() -> None:
    room = Room(4)
    now = time.monotonic()
    with room.taken(9, now) as large, room.taken(1, now) as beside:
        assert large
        assert not beside
    with room.taken(1, now), room.taken(9, now) as large:
        assert not large


@pytest.mark.parametrize(
    ("told", "length"),
    [
        (None, LONGEST_QUEUE),
        ("2048", 2048),
        ("1", 1),
        ("65535", 65_535),
        ("65536", CLIENTS_QUEUE),
        ("0", CLIENTS_QUEUE),
        ("many", CLIENTS_QUEUE),
        ("", CLIENTS_QUEUE),
    ],
)
def test_the_operators_queue_goes_before_ours(
    monkeypatch: pytest.MonkeyPatch, told: str | None, length: int
) -> None:
    monkeypatch.delenv(QUEUE_VARIABLE, raising=False)
    if told is not None:
        monkeypatch.setenv(QUEUE_VARIABLE, told)
    assert queue_length() == length
    assert Room(length).most_in_a_call == min(length, MOST_IN_A_CALL)


@given(
    components=st.lists(st.integers(1, 5), min_size=1, max_size=30),
    one_buffer=st.booleans(),
    most=st.integers(1, 12),
)
def test_cut_pages_are_all_pages_in_order_and_no_part_is_too_large(
    components: list[int], one_buffer: bool, most: int
) -> None:
    keys = [f"k{i}" for i in range(len(components))]
    parts = None if one_buffer else [[1] * n for n in components]
    pages = Pages(keys, [*components], [[i] for i in range(len(keys))], parts)
    cut = [*pages.cut(most)]
    assert [key for part in cut for key in part.keys] == keys
    assert [size for part in cut for size in part.sizes] == pages.sizes
    assert [address for part in cut for address in part.addresses] == pages.addresses
    assert sum(part.transfers for part in cut) == pages.transfers
    assert all(part.transfers <= most or len(part.keys) == 1 for part in cut)
    for part, after in pairwise(cut):
        first = 1 if after.parts is None else len(after.parts[0])
        assert part.transfers + first > most, "one native call more than is needed"
