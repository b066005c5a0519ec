"""The store over a real master and client."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hicache_mooncake.pages import Pages
from hicache_mooncake.store import MooncakeStore
from hicache_mooncake.testing import RawMooncake
from hicache_shared.errors import ClearError, LayoutError
from hicache_shared.layout import layouts_of
from hicache_shared.store import Code, StoredPool
from tests.mooncake import mooncake_stores
from tests.mooncake.mooncake_stores import forget
from tests.pools import FILL, ArrayPool, TestPool, hashes

pytestmark = pytest.mark.backend("mooncake")

DEADLINE = 5.0
N = 8


def put(store: MooncakeStore, *pools: TestPool, count: int = N) -> list[list[int]]:
    return store.put([pool.pages(hashes(count)) for pool in pools], DEADLINE)


def exists(store: MooncakeStore, *pools: TestPool, count: int = N) -> list[list[bool]]:
    return mooncake_stores.exists(store, *(pool.ask(hashes(count)) for pool in pools))


def contents(pools: list[TestPool], pages: list[int]) -> list[list[bytes]]:
    return [[pool.arrays.page(page) for page in pages] for pool in pools]


@pytest.mark.parametrize("chosen", [[0], [0, 1], [2], [0, 1, 2]])
def test_pages_come_back_byte_exact_into_other_places(
    store: MooncakeStore, pools: list[TestPool], chosen: list[int]
) -> None:
    used = [pools[i] for i in chosen]
    assert put(store, *used) == [[Code.OK] * N for _ in used]
    assert exists(store, *used) == [[True] * N for _ in used]
    before = contents(used, list(range(N)))
    for pool in used:
        pool.arrays.wipe()
    places = list(range(N, 2 * N))[::-1]
    batches = [pool.pages(hashes(N), places) for pool in used]
    assert store.get(batches, DEADLINE) == [[Code.OK] * N for _ in used]
    assert contents(used, places) == before
    assert all(pool.arrays.gaps_untouched() for pool in used)
    assert all(
        pool.arrays.page(p) == bytes([FILL]) * len(pool.arrays.page(p))
        for pool in used
        for p in range(N)
    )


def test_one_object_a_page_holds_its_components_in_order(
    store: MooncakeStore, raw: RawMooncake, pools: list[TestPool], namespace: str
) -> None:
    put(store, *pools, count=2)
    assert raw.raw_keys(namespace) == sorted(p.key(h) for p in pools for h in hashes(2))
    for pool in pools:
        assert raw.raw_get(pool.key(hashes(2)[1])) == pool.arrays.page(1)


def test_empty_batches_have_empty_answers(store: MooncakeStore, pools: list[TestPool]) -> None:
    empty = [pool.pages([]) for pool in pools]
    assert store.put(empty, DEADLINE) == store.get(empty, DEADLINE) == [[], [], []]
    assert exists(store, *pools, count=0) == [[], [], []]
    assert store.put([], DEADLINE) == store.get([], DEADLINE) == exists(store) == []


@pytest.mark.parametrize("mixed", [False, True], ids=["single", "multi"])
@pytest.mark.parametrize("wrong", [1, 4095, 4097, 9000])
def test_an_object_of_another_size_is_never_a_hit_and_leaves_its_neighbours(
    store: MooncakeStore, raw: RawMooncake, pools: list[TestPool], wrong: int, mixed: bool
) -> None:
    used = [pools[0], pools[2]] if mixed else [pools[0]]
    put(store, *used)
    raw.raw_put(pools[0].key(hashes(N)[3]), b"x" * wrong)
    before = contents(used, list(range(N)))
    for pool in used:
        pool.arrays.wipe()
    answers = store.get([pool.pages(hashes(N)) for pool in used], DEADLINE)
    assert answers[0] == [Code.OK] * 3 + [Code.WRONG_SIZE] + [Code.OK] * 4
    assert answers[1:] == [[Code.OK] * N] * (len(used) - 1)
    for pool, expected in zip(used, before, strict=True):
        for page in range(N):
            if (pool, page) != (pools[0], 3):
                assert pool.arrays.page(page) == expected[page]
    assert all(pool.arrays.gaps_untouched() for pool in used)


def test_a_component_of_wrong_size_makes_the_page_wrong(
    store: MooncakeStore, raw: RawMooncake, pools: list[TestPool]
) -> None:
    pool = pools[2]
    put(store, pool)
    for size in (1, 3000, 3528, 3530):
        raw.raw_put(pool.key(hashes(1)[0]), b"x" * size)
        assert store.get([pool.pages(hashes(2))], DEADLINE) == [[Code.WRONG_SIZE, Code.OK]]


@pytest.mark.parametrize("which", [0, 2])
def test_one_absent_page_of_eight_is_missing_and_the_others_are_exact(
    store: MooncakeStore, raw: RawMooncake, pools: list[TestPool], which: int
) -> None:
    pool = pools[which]
    put(store, pool)
    assert raw.raw_delete(pool.key(hashes(N)[5]))
    before = contents([pool], list(range(N)))[0]
    pool.arrays.wipe()
    assert exists(store, pool) == [[True] * 5 + [False] + [True] * 2]
    codes = store.get([pool.pages(hashes(N))], DEADLINE)[0]
    assert codes == [Code.OK] * 5 + [Code.MISSING] + [Code.OK] * 2
    after = contents([pool], list(range(N)))[0]
    assert after[5] == bytes([FILL]) * len(before[5])
    assert after[:5] + after[6:] == before[:5] + before[6:]


def test_each_answer_belongs_to_its_pool_and_page(
    store: MooncakeStore, raw: RawMooncake, pools: list[TestPool]
) -> None:
    put(store, *pools)
    absent = [0, 7, 3]
    for pool, page in zip(pools, absent, strict=True):
        raw.raw_delete(pool.key(hashes(N)[page]))
    expected = [[page != gone for page in range(N)] for gone in absent]
    assert exists(store, *pools) == expected
    codes = store.get([pool.pages(hashes(N)) for pool in pools], DEADLINE)
    assert [[code == Code.OK for code in each] for each in codes] == expected


class Scripted:
    """A client that refuses some keys, over a set of stored sizes."""

    master = "scripted"
    most_transfers = 1000

    def __init__(self, stored: dict[str, int], refused: str) -> None:
        self.stored = stored
        self.refused = refused
        self.puts: list[list[str]] = []

    def healthy(self) -> bool:
        return True

    def exists(self, keys: list[str]) -> list[int]:
        return [int(key in self.stored) for key in keys]

    def sizes(self, keys: list[str]) -> list[int | None]:
        return [self.stored.get(key) for key in keys]

    def remove(self, keys: list[str]) -> list[int]:
        return [0 if self.stored.pop(key, None) is not None else -704 for key in keys]

    def put(self, pages: Pages) -> list[int]:
        self.puts.append(pages.keys)
        answers = [-999 if key == self.refused else 0 for key in pages.keys]
        sizes = zip(pages.keys, pages.sizes, answers, strict=True)
        self.stored |= {key: size for key, size, answer in sizes if answer == 0}
        return answers


def test_a_refused_page_among_replaced_and_repeated_ones_is_the_one_that_failed() -> None:
    pool = TestPool.make("hc1/scripted", "kv", 4, (100,))
    wrong, refused, plain = hashes(3)
    client: Any = Scripted({pool.key(wrong): 7}, pool.key(refused))
    names = [wrong, refused, plain]
    assert MooncakeStore(client).put([pool.pages(names)], 1.0) == [[Code.OK, Code.FAILED, Code.OK]]
    client = Scripted({}, pool.key(refused))
    names = [refused, plain, refused, plain]
    assert MooncakeStore(client).put([pool.pages(names)], 1.0) == [
        [Code.FAILED, Code.OK, Code.FAILED, Code.OK]
    ]
    assert client.puts == [[pool.key(refused), pool.key(plain)]]


def test_a_key_that_comes_twice_is_put_once_and_answered_alike(
    store: MooncakeStore, pools: list[TestPool]
) -> None:
    first, second = hashes(2)
    for _ in range(2):
        batch = pools[0].pages([first, second, first], [0, 1, 0])
        assert store.put([batch, pools[0].pages([first])], DEADLINE) == [[Code.OK] * 3, [Code.OK]]
    before = pools[0].arrays.page(0)
    assert store.get([pools[0].pages([first], [9])], DEADLINE) == [[Code.OK]]
    assert pools[0].arrays.page(9) == before


@pytest.mark.parametrize("which", [0, 2])
def test_a_key_that_is_read_twice_fills_both_places(
    store: MooncakeStore, pools: list[TestPool], which: int
) -> None:
    pool = pools[which]
    put(store, pool, count=2)
    first, second = contents([pool], [0, 1])[0]
    pool.arrays.wipe()
    one, two = hashes(2)
    batch = pool.pages([one, two, one, "f" * 64, one], [4, 5, 6, 7, 8])
    codes = [Code.OK, Code.OK, Code.OK, Code.MISSING, Code.OK]
    assert store.get([batch], DEADLINE) == [codes]
    assert contents([pool], [4, 5, 6, 8]) == [[first, second, first, first]]


def test_a_second_put_is_ok_and_keeps_the_bytes(
    store: MooncakeStore, raw: RawMooncake, pools: list[TestPool]
) -> None:
    put(store, *pools)
    keys = [pool.key(page) for pool in pools for page in hashes(N)]
    before = [raw.raw_get(key) for key in keys]
    assert put(store, *pools) == [[Code.OK] * N] * 3
    assert [raw.raw_get(key) for key in keys] == before


def test_a_put_replaces_objects_of_wrong_size_among_absent_and_present_ones(
    store: MooncakeStore, raw: RawMooncake, pools: list[TestPool]
) -> None:
    pool = pools[1]
    put(store, pool)
    raw.raw_delete(pool.key(hashes(N)[1]))
    raw.raw_put(pool.key(hashes(N)[0]), b"short")
    raw.raw_put(pool.key(hashes(N)[6]), b"long" * 1000)
    assert put(store, pool) == [[Code.OK] * N]
    for page, page_hash in enumerate(hashes(N)):
        assert raw.raw_get(pool.key(page_hash)) == pool.arrays.page(page)


def test_all_wrong_or_absent_pages_are_put_under_their_own_keys(
    store: MooncakeStore, raw: RawMooncake, pools: list[TestPool]
) -> None:
    raw.raw_put(pools[0].key(hashes(2)[0]), b"short")
    assert put(store, pools[0], count=2) == [[Code.OK] * 2]
    for page, page_hash in enumerate(hashes(2)):
        assert raw.raw_get(pools[0].key(page_hash)) == pools[0].arrays.page(page)


def test_two_clients_racing_on_the_same_keys_believe_only_what_can_be_read(
    store: MooncakeStore, other_store: MooncakeStore, namespace: str
) -> None:
    count, stores = 128, [store, other_store]
    racing = [TestPool.make(namespace, "kv", count, (34560,)) for _ in stores]
    for one, pool in zip(stores, racing, strict=True):
        one.open([pool.stored])
        pool.arrays.fill(7)
    unreadable: list[str] = []
    for start in range(0, 10 * count, count):
        names = hashes(count, start)
        together = threading.Barrier(len(stores))

        def write(i: int, names: list[str] = names, together: threading.Barrier = together) -> None:
            together.wait()
            codes = stores[i].put([racing[i].pages(names)], DEADLINE)[0]
            seen = stores[i].exists([racing[i].ask(names)], DEADLINE)[0]
            pairs = zip(names, codes, seen, strict=True)
            unreadable.extend(n for n, code, there in pairs if code != Code.OK or not there)

        threads = [threading.Thread(target=write, args=(i,)) for i in range(len(stores))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert unreadable == []
    for one, pool in zip(stores, racing, strict=True):
        forget(one, [pool])
    store.clear(namespace)


def test_calls_of_many_threads_do_not_mix(store: MooncakeStore, namespace: str) -> None:
    made = [TestPool.make(namespace, f"t{i}", 16, (2000 + i,)) for i in range(4)]
    store.open([pool.stored for pool in made])
    wrong: list[int] = []

    def work(i: int) -> None:
        pool = made[i]
        pool.arrays.fill(i)
        for start in range(0, 160, N):
            names = hashes(N, start)
            if store.put([pool.pages(names)], DEADLINE) != [[Code.OK] * N]:
                wrong.append(i)
            if store.get([pool.pages(names, list(range(N, 2 * N)))], DEADLINE) != [[Code.OK] * N]:
                wrong.append(i)
            if contents([pool], list(range(N))) != contents([pool], list(range(N, 2 * N))):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    forget(store, made)
    store.clear(namespace)


def test_four_thousand_keys_go_in_one_call(store: MooncakeStore, namespace: str) -> None:
    count = 4096
    pool = TestPool.make(namespace, "many", count, (256,))
    store.open([pool.stored])
    pool.arrays.fill(3)
    before = contents([pool], list(range(count)))
    assert put(store, pool, count=count) == [[Code.OK] * count]
    assert exists(store, pool, count=count + 1) == [[True] * count + [False]]
    pool.arrays.wipe()
    assert store.get([pool.pages(hashes(count))], DEADLINE) == [[Code.OK] * count]
    assert contents([pool], list(range(count))) == before
    forget(store, [pool])
    store.clear(namespace)


def test_clear_forgets_recently_read_pages_and_no_other_namespace(
    store: MooncakeStore, raw: RawMooncake, pools: list[TestPool], namespace: str
) -> None:
    put(store, *pools)
    store.get([pool.pages(hashes(N)) for pool in pools], DEADLINE)
    neighbours = [f"{namespace}b/kv/1", f"x{namespace}/kv/1", namespace.replace(".", "x") + "/kv"]
    for key in neighbours:
        raw.raw_put(key, b"other")
    store.clear(namespace)
    assert exists(store, *pools) == [[False] * N] * 3
    assert [raw.raw_get(key) for key in neighbours] == [b"other"] * 3
    assert put(store, *pools) == [[Code.OK] * N] * 3
    for key in neighbours:
        raw.raw_delete(key)


@pytest.mark.parametrize("name", ["a.b+c", "a(b)[c]{2}", "^a$|b", "a\\d*?", "a-b_c d#e&~é"])
def test_a_namespace_is_taken_literally(store: MooncakeStore, raw: RawMooncake, name: str) -> None:
    raw.raw_put(f"{name}/1", b"1")
    raw.raw_put(f"z{name}/1", b"1")
    raw.raw_put("abbc/1", b"1")
    store.clear(name)
    assert raw.raw_get(f"{name}/1") is None
    assert raw.raw_delete(f"z{name}/1")
    assert raw.raw_delete("abbc/1")


def test_clearing_an_empty_namespace_is_fine(store: MooncakeStore) -> None:
    store.clear("hc1/never-written")


def test_a_clear_that_cannot_finish_raises(
    store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store._client, "remove_matching", lambda pattern: -1)
    with pytest.raises(ClearError, match="code -1"):
        store.clear("hc1/x")
    for answer in (1, -901):
        monkeypatch.setattr(store._client, "remove_matching", lambda pattern, answer=answer: answer)
        with pytest.raises(ClearError, match="still had pages"):
            store.clear("hc1/x")
    assert store.healthy()


def test_a_clear_that_takes_longer_than_a_request_goes_on(
    store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [-901, 7, 0]
    monkeypatch.setattr(store._client, "remove_matching", lambda pattern: answers.pop(0))
    store.clear("hc1/x")
    assert answers == []


def test_registration_is_idempotent_and_views_of_one_storage_count_once(
    store: MooncakeStore, namespace: str
) -> None:
    whole = np.full((8, 4096), FILL, dtype=np.uint8)
    views = []
    for i, part in enumerate((whole[:4], whole[4:])):
        arrays = ArrayPool(4, (4096 - 64,))
        arrays.kv_buffer = [part]
        (layout,) = layouts_of(f"v{i}", arrays)
        views.append(TestPool(arrays, StoredPool(layout, f"{namespace}/v{i}/", namespace, b"")))
    before = len(list(store._regions._regions))
    store.open([view.stored for view in views])
    for view in views:
        store.register(view.stored)
    assert len(store._regions._regions) == before + 1
    for view in views:
        view.arrays.fill(1)
    assert put(store, *views, count=2) == [[Code.OK] * 2] * 2
    forget(store, views)
    store.clear(namespace)


def test_a_late_pool_and_staging_memory_can_be_registered(
    store: MooncakeStore, pools: list[TestPool], namespace: str
) -> None:
    put(store, *pools)
    late = TestPool.make(namespace, "late", 4, (777,))
    store.register(late.stored)
    late.arrays.fill(5)
    assert put(store, late, count=4) == [[Code.OK] * 4]
    staging = np.zeros(4096, dtype=np.uint8)
    store.register_memory(staging.ctypes.data, staging.nbytes)
    store.register_memory(staging.ctypes.data + 100, 100)
    store._regions._regions.pop()
    store._client.unregister(staging.ctypes.data)
    forget(store, [late])


def test_memory_that_overlaps_registered_memory_is_refused(store: MooncakeStore) -> None:
    memory = np.zeros(8192, dtype=np.uint8)
    start = memory.ctypes.data
    assert store._client.register(start, 4096) == 0
    with pytest.raises(LayoutError, match="overlaps none registered before"):
        store.register_memory(start, 8192)
    store._client.unregister(start)


def test_pages_cleared_by_another_client_during_a_get_are_missing(
    store: MooncakeStore,
    other_store: MooncakeStore,
    pools: list[TestPool],
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their memory may hold another page's bytes by the time it is read."""
    assert put(store, *pools) == [[Code.OK] * N for _ in pools]
    read = store._client.get

    def cleared_meanwhile(pages: Pages) -> list[int]:
        answers = read(pages)
        other_store.clear(namespace)
        return answers

    monkeypatch.setattr(store._client, "get", cleared_meanwhile)
    batches = [pool.pages(hashes(N), list(range(N, 2 * N))) for pool in pools]
    assert store.get(batches, DEADLINE) == [[Code.MISSING] * N for _ in pools]


class Down:
    """A client whose master dies at the first call, which takes a while to find out."""

    master = "nowhere"
    most_transfers = 1000

    def __init__(self) -> None:
        self.calls: list[int] = []

    def healthy(self) -> bool:
        return True

    def exists(self, keys: list[str]) -> list[int]:
        self.calls.append(len(keys))
        return [-900] * len(keys)

    def get(self, pages: Pages) -> list[int]:
        self.calls.append(len(pages.keys))
        return [-900] * len(pages.keys)


def test_a_long_question_stops_at_the_first_sign_that_the_master_is_down(
    pools: list[TestPool],
) -> None:
    client: Any = Down()
    asks = [pool.ask(hashes(3000)) for pool in pools]
    assert mooncake_stores.exists(MooncakeStore(client), *asks) == [[False] * 3000 for _ in pools]
    assert client.calls == [3000]


def test_a_get_of_one_key_many_times_stops_at_the_first_sign_that_the_master_is_down(
    pools: list[TestPool],
) -> None:
    client: Any = Down()
    (codes,) = MooncakeStore(client).get([pools[0].pages(["a"] * 4)], DEADLINE)
    assert codes == [Code.UNAVAILABLE, *[Code.TIMEOUT] * 3]
    assert client.calls == [1]


def test_a_long_question_stops_at_its_deadline(pools: list[TestPool]) -> None:
    client: Any = Down()
    asks = [pool.ask(hashes(3000)) for pool in pools]
    answers = MooncakeStore(client).exists(asks, 0.0)
    assert [list(answer) for answer in answers] == [[False] * 3000 for _ in pools]
    assert client.calls == []
