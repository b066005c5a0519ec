"""The store over real clients: embedded, of a standalone server, and without ranges."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hicache_shared.errors import ClearError
from hicache_shared.hostmem import Region, aligned_bytes
from hicache_shared.store import Code
from hicache_umbp.pages import TRAILER_BYTES, Pages
from hicache_umbp.store import STALL_S, UmbpStore
from hicache_umbp.trailers import Trailers
from tests.pools import FILL, TestPool, hashes
from tests.umbp import umbp_stores
from tests.umbp.conftest import Opened
from tests.umbp.umbp_stores import DEADLINE_S, new_store

pytestmark = pytest.mark.backend("umbp")

N = 8
TARGETS = list(range(N, 2 * N))


def put(store: UmbpStore, *pools: TestPool, count: int = N) -> list[list[int]]:
    return umbp_stores.put(store, *pools, hashes=hashes(count))


def exists(store: UmbpStore, *pools: TestPool, count: int = N) -> list[list[bool]]:
    return umbp_stores.exists(store, *(pool.ask(hashes(count)) for pool in pools))


def get(store: UmbpStore, *pools: TestPool, names: list[str] | None = None) -> list[list[int]]:
    wanted = hashes(N) if names is None else names
    return store.get([pool.pages(wanted, TARGETS[: len(wanted)]) for pool in pools], DEADLINE_S)


class Counted:
    """Passes calls on to a client, and notes how many keys each had."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.calls: list[tuple[str, int]] = []
        self.depths: list[int] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def exists(self, keys: list[str]) -> list[bool]:
        self.calls.append(("exists", len(keys)))
        answers: list[bool] = self._client.exists(keys)
        return answers

    def get(self, pages: Pages) -> list[bool]:
        self.calls.append(("get", len(pages.keys)))
        answers: list[bool] = self._client.get(pages)
        return answers

    def put(self, pages: Pages, depths: list[int] | None = None) -> list[bool]:
        self.calls.append(("put", len(pages.keys)))
        self.depths = depths
        answers: list[bool] = self._client.put(pages, depths)
        return answers


def counted(store: UmbpStore) -> Counted:
    client: Any = Counted(store._session._client)
    store._session._client = client
    return client  # type: ignore[no-any-return]


@pytest.mark.parametrize("which", [[0], [2], [0, 1], [0, 1, 2]], ids=str)
def test_pages_of_all_pools_come_back_and_nothing_else_is_written(
    opened: Opened, which: list[int]
) -> None:
    store, used = opened.store, [opened.pools[i] for i in which]
    assert put(store, *used) == [[Code.OK] * N for _ in used]
    assert exists(store, *used, count=N + 1) == [[True] * N + [False] for _ in used]
    before = [pool.arrays.contents(list(range(N))) for pool in used]
    for pool in used:
        pool.arrays.wipe()
    assert get(store, *used) == [[Code.OK] * N for _ in used]
    assert [pool.arrays.contents(TARGETS) for pool in used] == before
    for pool in used:
        assert pool.arrays.gaps_untouched()
        size = len(pool.arrays.page(0))
        assert pool.arrays.contents(list(range(N))) == [bytes([FILL]) * size] * N


def test_all_pools_of_a_call_go_in_one_native_call(opened: Opened) -> None:
    """Six pools of one component, as DeepSeek V4 has them."""
    store, single = opened.store, [opened.pools[0], opened.pools[1]]
    client = counted(store)
    assert put(store, *single, *single[:1]) == [[Code.OK] * N] * 3
    assert client.calls == [("put", 2 * N), ("exists", 2 * N)]
    client.calls.clear()
    exists(store, *opened.pools)
    objects = 1 if opened.raw.ranged else 3
    assert client.calls == [("exists", (2 + objects) * N)]
    client.calls.clear()
    assert get(store, *single) == [[Code.OK] * N] * 2
    assert client.calls == [("get", 2 * N)]


def test_pages_of_one_and_of_several_components_take_one_native_call_each(opened: Opened) -> None:
    store = opened.store
    client = counted(store)
    assert put(store, *opened.pools) == [[Code.OK] * N] * 3
    puts = [("put", 2 * N), ("put", N)] if opened.raw.ranged else [("put", 5 * N)]
    assert [call for call in client.calls if call[0] == "put"] == puts
    client.calls.clear()
    assert get(store, *opened.pools) == [[Code.OK] * N] * 3
    assert client.calls == [("get", keys) for _, keys in puts]


def test_the_depth_of_pages_reaches_the_client(opened: Opened) -> None:
    store, pools = opened.store, opened.pools
    client = counted(store)
    batches = [pools[0].pages(hashes(3), depth=5), pools[1].pages(hashes(2), depth=0)]
    assert store.put(batches, DEADLINE_S) == [[Code.OK] * 3, [Code.OK] * 2]
    assert client.depths == [5, 6, 7, 0, 1]
    store.put([pools[0].pages(hashes(3), depth=5), pools[1].pages(hashes(2))], DEADLINE_S)
    assert client.depths is None
    store.put([pools[2].pages(hashes(2), depth=4)], DEADLINE_S)
    assert client.depths == (None if opened.raw.ranged else [4, 5] * 3)


def test_an_object_holds_the_components_in_order_and_shows_its_end(opened: Opened) -> None:
    put(opened.store, *opened.pools, count=2)
    for pool in opened.pools[:2]:
        assert opened.raw.raw_get(pool.key(hashes(2)[1])) == pool.arrays.page(1)
    pool = opened.pools[2]
    if opened.raw.ranged:
        assert opened.raw.raw_keys(pool.stored.prefix) == [pool.key(h) for h in hashes(2)]
        whole = opened.raw._whole(pool.key(hashes(2)[1]))
        assert whole == pool.arrays.page(1) + pool.stored.digest
    else:
        keys = [f"{pool.stored.prefix}{part}/{hashes(2)[1]}" for part in range(3)]
        parts = [opened.raw.raw_get(key) or b"" for key in keys]
        assert [len(part) for part in parts] == [3000, 17, 512]
        assert b"".join(parts) == pool.arrays.page(1)


def test_empty_batches_have_empty_answers(opened: Opened) -> None:
    store = opened.store
    empty = [pool.pages([]) for pool in opened.pools]
    assert store.put(empty, DEADLINE_S) == store.get(empty, DEADLINE_S) == [[], [], []]
    assert exists(store, *opened.pools, count=0) == [[], [], []]
    assert store.put([], DEADLINE_S) == store.get([], DEADLINE_S) == exists(store) == []
    pages = [opened.pools[0].pages([]), opened.pools[1].pages(hashes(2))]
    assert store.put(pages, DEADLINE_S) == store.get(pages, DEADLINE_S) == [[], [Code.OK] * 2]


def objects_of(opened: Opened, pool: TestPool, page_hash: str) -> list[str]:
    """The keys of a page's objects."""
    found = [key for key in opened.raw.raw_keys(pool.stored.prefix) if key.endswith(page_hash)]
    assert found
    return found


@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("change", [-2, -1, 1, TRAILER_BYTES, TRAILER_BYTES + 1, 5000])
def test_an_object_of_another_size_is_never_a_hit_and_leaves_its_neighbours(
    opened: Opened, which: int, change: int
) -> None:
    store, pool = opened.store, opened.pools[which]
    put(store, *opened.pools)
    key = objects_of(opened, pool, hashes(N)[3])[-1]
    value = opened.raw.raw_get(key)
    assert value is not None
    opened.raw.raw_put(key, value[:change] if change < 0 else value + bytes(change))
    before = pool.arrays.contents(list(range(N)))
    pool.arrays.wipe()
    codes = get(store, *opened.pools)
    assert codes[which] == [Code.OK] * 3 + [Code.WRONG_SIZE] + [Code.OK] * 4
    assert [c for i, c in enumerate(codes) if i != which] == [[Code.OK] * N] * 2
    after = pool.arrays.contents(TARGETS)
    assert after[:3] + after[4:] == before[:3] + before[4:]
    assert pool.arrays.gaps_untouched()


@pytest.mark.parametrize(("which", "part"), [(0, 0), (2, 0), (2, -1)])
def test_one_absent_object_makes_its_page_missing_and_no_other(
    opened: Opened, which: int, part: int
) -> None:
    store, pool = opened.store, opened.pools[which]
    put(store, *opened.pools)
    opened.raw.raw_delete(objects_of(opened, pool, hashes(N)[5])[part])
    before = pool.arrays.contents(list(range(N)))
    pool.arrays.wipe()
    there = exists(store, *opened.pools)
    assert there[which] == [True] * 5 + [False] + [True] * 2
    codes = get(store, *opened.pools)
    assert codes[which] == [Code.OK] * 5 + [Code.MISSING] + [Code.OK] * 2
    others = [i for i in range(3) if i != which]
    assert [there[i] for i in others] == [[True] * N] * 2
    assert [codes[i] for i in others] == [[Code.OK] * N] * 2
    after = pool.arrays.contents(TARGETS)
    assert after[:5] + after[6:] == before[:5] + before[6:]


def test_each_answer_belongs_to_its_pool_and_page(opened: Opened) -> None:
    store = opened.store
    put(store, *opened.pools)
    absent = [0, 7, 3]
    for pool, page in zip(opened.pools, absent, strict=True):
        for key in objects_of(opened, pool, hashes(N)[page]):
            opened.raw.raw_delete(key)
    expected = [[page != gone for page in range(N)] for gone in absent]
    assert exists(store, *opened.pools) == expected
    codes = get(store, *opened.pools)
    assert [[code == Code.OK for code in each] for each in codes] == expected


@pytest.mark.parametrize("which", [0, 2])
def test_a_key_that_comes_twice_is_put_once_and_answered_alike(opened: Opened, which: int) -> None:
    store, pool = opened.store, opened.pools[which]
    client = counted(store)
    first, second = hashes(2)
    batch = pool.pages([first, second, first], [0, 1, 0])
    for _ in range(2):
        assert store.put([batch, pool.pages([first])], DEADLINE_S) == [[Code.OK] * 3, [Code.OK]]
    objects = 3 if which == 2 and not opened.raw.ranged else 1
    assert [call for call in client.calls if call[0] == "put"] == [("put", 2 * objects)] * 2
    before = pool.arrays.contents([0, 1])
    assert store.get([pool.pages([first, second], [9, 10])], DEADLINE_S) == [[Code.OK] * 2]
    assert pool.arrays.contents([9, 10]) == before


@pytest.mark.parametrize("which", [0, 2])
def test_a_key_that_is_read_twice_fills_both_places(opened: Opened, which: int) -> None:
    store, pool = opened.store, opened.pools[which]
    put(store, pool, count=2)
    first, second = pool.arrays.contents([0, 1])
    pool.arrays.wipe()
    one, two = hashes(2)
    batch = pool.pages([one, two, one, "f" * 64, one], [4, 5, 6, 7, 8])
    codes = [Code.OK, Code.OK, Code.OK, Code.MISSING, Code.OK]
    assert store.get([batch], DEADLINE_S) == [codes]
    assert pool.arrays.contents([4, 5, 6, 8]) == [first, second, first, first]


def test_a_second_put_is_ok_and_keeps_the_bytes(opened: Opened) -> None:
    store = opened.store
    put(store, *opened.pools)
    before = [pool.arrays.contents(list(range(N))) for pool in opened.pools]
    for pool in opened.pools:
        pool.arrays.fill(99)
    assert put(store, *opened.pools) == [[Code.OK] * N] * 3
    assert get(store, *opened.pools) == [[Code.OK] * N] * 3
    assert [pool.arrays.contents(TARGETS) for pool in opened.pools] == before


class Liar:
    """A client that says "stored" of everything, and stores all but some keys."""

    ranged = takes_depth = False

    def __init__(self, refused: set[str], tries: int) -> None:
        self.refused = refused
        self.tries = tries
        self.there: set[str] = set()
        self.puts: list[list[str]] = []

    def exists(self, keys: list[str]) -> list[bool]:
        return [key in self.there for key in keys]

    def put(self, pages: Pages, depths: list[int] | None = None) -> list[bool]:
        self.puts.append(pages.keys)
        late = len(self.puts) >= self.tries
        self.there |= {key for key in pages.keys if late or key not in self.refused}
        return [True] * len(pages.keys)

    def register(self, address: int, nbytes: int) -> bool:
        return True


def lying_store(refused: set[str], tries: int = 1_000_000) -> tuple[UmbpStore, Liar, TestPool]:
    store, _ = new_store({})
    pool = TestPool.make("hc1/liar", "kv", 4, (100,))
    store.open([pool.stored])
    client: Any = Liar({pool.key(page) for page in refused}, tries)
    store._session._client = client
    return store, client, pool


def test_stored_is_what_is_there_and_not_what_the_client_says() -> None:
    one, two, three = hashes(3)
    store, client, pool = lying_store({two})
    codes = [Code.OK, Code.NO_SPACE, Code.OK]
    assert store.put([pool.pages([one, two, three])], 0.1) == [codes]
    assert client.puts[0] == [pool.key(page) for page in (one, two, three)]
    assert {tuple(keys) for keys in client.puts[1:]} == {(pool.key(two),)}


def test_a_page_that_found_no_space_is_tried_again_until_it_is_there() -> None:
    one, two, three = hashes(3)
    store, client, pool = lying_store({two}, tries=4)
    assert store.put([pool.pages([one, two, three])], DEADLINE_S) == [[Code.OK] * 3]
    assert len(client.puts) == 4


def test_waiting_for_space_ends_when_nothing_comes_in_and_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hicache_umbp.store.STALL_S", 0.05)
    store, client, pool = lying_store(set(hashes(2)))
    assert store.put([pool.pages(hashes(2))], 600.0) == [[Code.NO_SPACE] * 2]
    monkeypatch.setattr("hicache_umbp.store.STALL_S", 600.0)
    client.puts.clear()
    assert store.put([pool.pages(hashes(2))], 0.05) == [[Code.NO_SPACE] * 2]
    assert len(client.puts) < 10


class Slow(Liar):
    """Stores one key more in every second put."""

    def put(self, pages: Pages, depths: list[int] | None = None) -> list[bool]:
        self.puts.append(pages.keys)
        if len(self.puts) % 2 == 0:
            self.there.add(pages.keys[0])
        return [False] * len(pages.keys)


def test_waiting_for_space_goes_on_as_long_as_pages_come_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every look at the clock finds it a quarter of a stall later."""
    monkeypatch.setattr("hicache_umbp.store.time", Clock(STALL_S / 4))
    store, _, pool = lying_store(set())
    client: Any = Slow(set(), 1)
    store._session._client = client
    assert store.put([pool.pages(hashes(4))], 600.0) == [[Code.OK] * 4]


class Clock:
    """Time that passes by being looked at."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self.step_s = step_s

    def monotonic(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        pass


class Forgetful(Liar):
    """Keeps the last two keys."""

    def put(self, pages: Pages, depths: list[int] | None = None) -> list[bool]:
        self.puts.append(pages.keys)
        for key in pages.keys[:2]:
            self.order = [*getattr(self, "order", []), key][-2:]
        self.there = set(self.order)
        return [True] * len(pages.keys)


def test_a_batch_that_the_store_cannot_hold_is_not_put_round_and_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hicache_umbp.store.STALL_S", 0.1)
    store, _, pool = lying_store(set())
    client: Any = Forgetful(set(), 1)
    store._session._client = client
    (codes,) = store.put([pool.pages(hashes(4))], DEADLINE_S)
    there = umbp_stores.exists(store, pool.ask(hashes(4)))[0]
    assert [code == Code.OK for code in codes] == there
    assert sum(there) == 2
    assert len(client.puts) < 20


def test_clear_forgets_this_namespace_at_once_and_no_other(opened: Opened, namespace: str) -> None:
    store = opened.store
    other = TestPool.make(f"{namespace}b", "kv", 16, (4096,), opened.allocate)
    store.register(other.stored)
    other.arrays.fill(7)
    put(store, *opened.pools, other)
    get(store, *opened.pools)
    for seed in (40, 50):
        store.clear(namespace)
        assert exists(store, *opened.pools, other) == [[False] * N] * 3 + [[True] * N]
        assert get(store, *opened.pools) == [[Code.MISSING] * N] * 3
        for i, pool in enumerate(opened.pools):
            pool.arrays.fill(seed + i)
        before = [pool.arrays.contents(list(range(N))) for pool in opened.pools]
        assert put(store, *opened.pools) == [[Code.OK] * N] * 3
        assert get(store, *opened.pools) == [[Code.OK] * N] * 3
        assert [pool.arrays.contents(TARGETS) for pool in opened.pools] == before


def test_clearing_an_empty_namespace_is_fine(opened: Opened) -> None:
    opened.store.clear("hc1/never-written")


def test_views_of_one_storage_and_the_same_pool_are_registered_once(
    opened: Opened, namespace: str
) -> None:
    store = opened.store
    before = len(list(store._session._regions))
    late = TestPool.make(namespace, "late", 4, (777,), opened.allocate)
    for _ in range(2):
        store.register(late.stored)
    assert len(list(store._session._regions)) == before + 1
    late.arrays.fill(5)
    assert put(store, late, count=4) == [[Code.OK] * 4]
    memory = store.caps.allocate(8192)
    store.register_memory(memory.ctypes.data, memory.nbytes)
    store.register_memory(memory.ctypes.data + 100, 100)
    assert len(list(store._session._regions)) == before + 2


@pytest.mark.parametrize("late", [False, True])
def test_memory_is_registered_in_whole_huge_pages(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """In an embedded store, which takes any memory."""

    def rounded(region: Region) -> Region:
        start, end = region.address >> 21 << 21, -(-region.end >> 21) << 21
        return Region(start, end - start)

    monkeypatch.setattr("hicache_umbp.store.rounded_to_huge_pages", rounded)
    store, _ = new_store({"dram_capacity_bytes": "64mb"})
    pool = TestPool.make("hc1/huge", "kv", 2, (5000,))
    store.open([] if late else [pool.stored])
    if late:
        store.register(pool.stored)
    assert list(store._session._regions) == [rounded(r) for r in pool.stored.layout.regions]


def test_calls_of_many_threads_do_not_mix(opened: Opened, namespace: str) -> None:
    store = opened.store
    sizes = [(2000,), (2001,), (1500, 502), (2003,)]
    made = [TestPool.make(namespace, f"t{i}", 16, s, opened.allocate) for i, s in enumerate(sizes)]
    for pool in made:
        store.register(pool.stored)
    wrong: list[int] = []

    def work(i: int) -> None:
        pool = made[i]
        pool.arrays.fill(i)
        for start in range(0, 160, N):
            names = hashes(N, start)
            if store.put([pool.pages(names)], DEADLINE_S) != [[Code.OK] * N]:
                wrong.append(i)
            if store.get([pool.pages(names, TARGETS)], DEADLINE_S) != [[Code.OK] * N]:
                wrong.append(i)
            if pool.arrays.contents(list(range(N))) != pool.arrays.contents(TARGETS):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_more_pages_than_a_piece_of_trailers_holds_go_in_one_call(
    opened: Opened, namespace: str
) -> None:
    count = 600
    pool = TestPool.make(namespace, "many", count, (256, 32), opened.allocate)
    opened.store.register(pool.stored)
    pool.arrays.fill(3)
    before = pool.arrays.contents(list(range(count)))
    assert put(opened.store, pool, count=count) == [[Code.OK] * count]
    assert exists(opened.store, pool, count=count + 1) == [[True] * count + [False]]
    pool.arrays.wipe()
    assert opened.store.get([pool.pages(hashes(count))], DEADLINE_S) == [[Code.OK] * count]
    assert pool.arrays.contents(list(range(count))) == before


def test_trailers_are_lent_zeroed_and_to_one_call_at_a_time() -> None:
    told: list[tuple[int, int]] = []
    trailers = Trailers(aligned_bytes, lambda address, nbytes: told.append((address, nbytes)))
    with trailers.lend(3) as one, trailers.lend(300) as two:
        one.bytes[:] = two.bytes[:] = 7
        assert len(set(one.addresses + two.addresses)) == 303
    with trailers.lend(300) as again:
        assert not again.bytes.any()
        assert again.addresses == two.addresses
    assert len(told) == 2
    for lent, (address, nbytes) in zip((one, two), told, strict=True):
        assert lent.addresses[0] == address
        assert lent.addresses[-1] + TRAILER_BYTES <= address + nbytes


def test_a_full_store_takes_every_page_in_the_end_and_says_what_is_there() -> None:
    """Six times what the store holds, in batches of half of it."""
    store, _ = new_store({"dram_capacity_bytes": "16mb"})
    pool = TestPool.make("hc1/full", "kv", 8, (1 << 20,))
    store.open([pool.stored])
    pool.arrays.fill(1)
    for start in range(0, 96, 8):
        names = hashes(8, start)
        assert store.put([pool.pages(names)], DEADLINE_S) == [[Code.OK] * 8]
        assert umbp_stores.exists(store, pool.ask(names)) == [[True] * 8]


@pytest.mark.parametrize("components", [(1 << 20,), (700_000, 300_000)], ids=len)
def test_of_a_batch_larger_than_the_store_what_is_said_to_be_stored_can_be_read(
    components: tuple[int, ...],
) -> None:
    store, _ = new_store({"dram_capacity_bytes": "16mb"})
    pool = TestPool.make("hc1/large", "kv", 64, components)
    store.open([pool.stored])
    pool.arrays.fill(1)
    names = hashes(32)
    (codes,) = store.put([pool.pages(names)], DEADLINE_S)
    there = umbp_stores.exists(store, pool.ask(names))[0]
    assert [code == Code.OK for code in codes] == there
    assert sum(there) >= 8
    stored = [page for page, is_there in enumerate(there) if is_there]
    targets = list(range(32, 32 + len(stored)))
    batch = pool.pages([names[page] for page in stored], targets)
    assert store.get([batch], DEADLINE_S) == [[Code.OK] * len(stored)]
    assert pool.arrays.contents(targets) == pool.arrays.contents(stored)


def test_new_pages_find_space_where_all_others_were_just_read() -> None:
    """The client keeps what was read for 500 ms, and evicts the newest page in its place."""
    store, _ = new_store({"dram_capacity_bytes": "16mb"})
    pool = TestPool.make("hc1/read", "kv", 32, (1 << 20,))
    store.open([pool.stored])
    pool.arrays.fill(1)
    store.put([pool.pages(hashes(14))], DEADLINE_S)
    store.get([pool.pages(hashes(14), list(range(16, 30)))], DEADLINE_S)
    names = hashes(8, 100)
    assert store.put([pool.pages(names, list(range(8)))], DEADLINE_S) == [[Code.OK] * 8]
    before = pool.arrays.contents(list(range(8)))
    assert store.get([pool.pages(names, list(range(16, 24)))], DEADLINE_S) == [[Code.OK] * 8]
    assert pool.arrays.contents(list(range(16, 24))) == before


V4_FLASH = (6_439_680, 786_240, 177_408, 1_376_256, 344_064)
"""Bytes of a page of DeepSeek V4 Flash's pools but C128, whose pages have 34,560."""


@pytest.mark.parametrize(
    ("others", "capacity_mb", "least"), [((), 64, 0.95), (V4_FLASH, 512, 0.92)], ids=str
)
def test_memory_holds_small_objects_within_5_percent_of_what_their_bytes_allow(
    others: tuple[int, ...], capacity_mb: int, least: float
) -> None:
    """Also a store that was made for larger pages too, within 4 % more: only C128 is put."""
    store, _ = new_store({"dram_capacity_bytes": f"{capacity_mb}mb"})
    pools = [TestPool.make("hc1/c128", f"p{n}", 1, (n,)) for n in others]
    c128 = TestPool.make("hc1/c128", "c128", 128, (34_560,))
    store.open([pool.stored for pool in [*pools, c128]])
    c128.arrays.fill(1)
    allowed = (capacity_mb << 20) // 34_560
    held: list[int] = []
    for start in range(0, 5 * allowed // 4, 128):
        assert store.put([c128.pages(hashes(128, start))], DEADLINE_S) == [[Code.OK] * 128]
        asked = [c128.ask(hashes(start + 128))]
        held.append(int(np.count_nonzero(store.exists(asked, DEADLINE_S)[0])))
    full = [count for put, count in enumerate(held, 1) if 128 * put > allowed]
    assert min(full) >= least * allowed


def test_a_closed_store_answers_and_does_not_touch_the_client(
    opened: Opened, namespace: str
) -> None:
    store = opened.store
    put(store, *opened.pools)
    store.close()
    assert put(store, *opened.pools) == [[Code.UNAVAILABLE] * N] * 3
    assert get(store, *opened.pools) == [[Code.UNAVAILABLE] * N] * 3
    assert exists(store, *opened.pools) == [[False] * N] * 3
    assert not store.healthy()
    with pytest.raises(ClearError):
        store.clear(namespace)
