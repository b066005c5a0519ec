"""KV as flat pages: a backend loaded by its path without ``"interface_v1": 1``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache_shared import staging
from hicache_shared.errors import TransferError
from hicache_shared.hostpool import HostPool, LogicalHostPool
from tests.contract.core_support import (
    DYNAMIC,
    PAGE,
    fill,
    logged_backend,
    memory_backend,
    mha,
    mla,
    slots,
    transfer,
)

V1 = {**DYNAMIC, "interface_v1": 1}
KEYS = [f"k{i}" for i in range(6)]
POOLS = [
    ("mha", layout) for layout in ("page_first", "page_first_direct", "page_head", "layer_first")
] + [("mla", layout) for layout in ("page_first", "page_first_direct", "layer_first")]


def make(kind: str, layout: str, seed: int) -> Any:
    makers: dict[str, Callable[[str], Any]] = {"mha": mha, "mla": mla}
    pool = makers[kind](layout)
    fill(pool.kv_buffer, seed)
    return pool


def flat(pool: HostPool, page: int) -> Any:
    return np.array(pool.get_data_page(page * PAGE))


@pytest.mark.parametrize("held", [1, 2, 128])
@pytest.mark.parametrize(("kind", "layout"), POOLS)
def test_flat_pages_come_back_byte_exact_also_where_the_area_holds_fewer(
    kind: str, layout: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make(kind, layout, 1)
    monkeypatch.setattr(staging, "STAGING_BYTES", held * flat(pool, 0).nbytes)
    backend = memory_backend(pool, extra=DYNAMIC)
    pages = [flat(pool, page) for page in range(6)]
    assert backend.batch_set(KEYS, pages) is True
    assert backend.batch_exists([*KEYS, "x"]) == 6
    assert backend.exists("k5") is True
    assert backend.exists("x") is False
    order = ["k4", "x", "k0", "k0", "k5"]
    targets = [pool.get_dummy_flat_data_page() for _ in order]
    got = backend.batch_get(order, targets)
    assert [page is target for page, target in zip(got, targets, strict=True)] == [
        True,
        False,
        True,
        True,
        True,
    ]
    assert got[1] is None
    for key, page in zip(order, got, strict=True):
        assert page is None or np.array_equal(page, pages[int(key[1])])
    pool.set_from_flat_data_page(7 * PAGE, got[0])
    assert np.array_equal(flat(pool, 7), pages[4])
    backend.close()


def test_single_pages_and_fresh_targets_work_too() -> None:
    pool = make("mha", "page_first", 2)
    backend = memory_backend(pool, extra=DYNAMIC)
    assert backend.set("a", flat(pool, 3)) is True
    assert np.array_equal(backend.get("a"), flat(pool, 3))
    target = pool.get_dummy_flat_data_page()
    assert backend.get("a", target) is target
    assert backend.get("x") is None
    assert [page is None for page in backend.batch_get(["x", "a"])] == [True, False]
    backend.close()


def test_a_logical_anchor_has_empty_pages_that_are_always_there() -> None:
    pool = LogicalHostPool(pages=8, page_size=PAGE)
    backend = logged_backend(("kv", pool), extra=DYNAMIC)
    pages = [pool.get_data_page(0) for _ in KEYS]
    assert backend.batch_set(KEYS, pages) is True
    got = backend.batch_get(KEYS, pages)
    assert [page is target for page, target in zip(got, pages, strict=True)] == [True] * 6
    assert backend.batch_exists(KEYS) == 0
    assert backend.logged.named("put") == []
    backend.close()


def test_a_tensor_of_another_size_is_not_stored_not_filled_and_counted() -> None:
    pool = make("mha", "page_first", 3)
    backend = memory_backend(pool, extra=DYNAMIC)
    good = flat(pool, 0)
    assert backend.batch_set(["a", "b", "c"], [good, good[:-1], good]) is False
    assert backend.batch_exists(["a", "b"]) == 1
    assert backend.exists("c") is True, "the others are stored"
    short = np.full(good.size - 1, 7, good.dtype)
    right = pool.get_dummy_flat_data_page()
    got = backend.batch_get(["a", "c", "b"], [short, right, pool.get_dummy_flat_data_page()])
    assert [page is None for page in got] == [True, False, True]
    assert (short == 7).all()
    assert np.array_equal(got[1], good)
    assert backend.stats.reasons() == {
        ("set", "kv", "wrong_size"): 1,
        ("get", "kv", "wrong_size"): 1,
        ("get", "kv", "missing"): 1,
    }
    backend.close()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_tensors_than_keys_is_an_error(count: int) -> None:
    pool = make("mla", "page_first", 4)
    backend = memory_backend(pool, extra=DYNAMIC)
    pages = [flat(pool, 0)] * count
    with pytest.raises(TransferError, match=rf"2 keys with {count} flat pages"):
        backend.batch_set(["a", "b"], pages)
    with pytest.raises(TransferError, match=rf"2 keys with {count} targets"):
        backend.batch_get(["a", "b"], pages)
    with pytest.raises(TransferError, match="0 flat pages"):
        backend.batch_set(["a", "b"], None)
    assert backend.batch_set([], []) is True
    assert backend.batch_get([], []) == []
    backend.close()


@pytest.mark.parametrize(("kind", "layout"), POOLS)
def test_v1_on_a_flat_backend_shares_the_same_objects(kind: str, layout: str) -> None:
    pool = make(kind, layout, 5)
    backend = memory_backend(pool, extra=DYNAMIC)
    pages = [flat(pool, page) for page in range(3)]
    assert backend.batch_set(["a"], pages[:1]) is True
    assert backend.batch_set_v1(["b", "c"], slots([1, 2])) == [True, True]
    fill(pool.kv_buffer, 6)
    untouched = flat(pool, 7)
    assert backend.batch_get_v1(["c", "a", "x"], slots([4, 6, 7])) == [True, True, False]
    assert np.array_equal(flat(pool, 4), pages[2])
    assert np.array_equal(flat(pool, 6), pages[0])
    assert np.array_equal(flat(pool, 7), untouched)
    assert np.array_equal(backend.get("b"), pages[1])
    backend.close()


@pytest.mark.parametrize(("kind", "layout"), POOLS)
def test_flat_and_page_forms_never_share_keys(
    kind: str, layout: str, request: pytest.FixtureRequest
) -> None:
    pool = make(kind, layout, 7)
    shelf = request.node.nodeid
    flat_kv = memory_backend(pool, shelf, extra=DYNAMIC)
    paged = memory_backend(pool, shelf, extra=V1)
    assert flat_kv.batch_set_v1(["a"], slots([0])) == [True]
    assert paged.batch_exists(["a"]) == 0
    assert paged.batch_set_v1(["b"], slots([1])) == [True]
    assert flat_kv.batch_exists(["b"]) == 0
    assert flat_kv.get("b") is None
    paged.close()
    flat_kv.close()


def test_only_kv_is_flat_and_sidecars_stay_zero_copy() -> None:
    backend = logged_backend(("kv", mha()), ("swa", mha()), extra=DYNAMIC)
    swa = transfer("swa", ["a"], [0])
    assert backend.batch_set_v2([swa]) == {"swa": [True]}
    assert backend.stats.slow_paths() == {}
    backend.close()


@pytest.mark.parametrize("extra", [V1, {}])
def test_flat_pages_on_a_v1_backend_are_an_error_that_says_why(extra: dict[str, Any]) -> None:
    pool = make("mha", "page_first", 8)
    backend = memory_backend(pool, extra=extra)
    with pytest.raises(TransferError, match=r"\"interface_v1\": 1.*batch_set_v1"):
        backend.batch_set(["a"], [flat(pool, 0)])
    with pytest.raises(TransferError, match="interface_v1"):
        backend.batch_get(["a"], [flat(pool, 0)])
    with pytest.raises(TransferError, match="interface_v1"):
        backend.set("a", flat(pool, 0))
    backend.close()


def test_a_store_that_fails_is_false_and_none_and_raises_nothing() -> None:
    def broken(call: str, answers: Any) -> Any:
        raise ConnectionError(call)

    pool = make("mha", "page_first", 9)
    backend = logged_backend(("kv", pool), extra=DYNAMIC)
    backend.logged.answer = broken
    for _ in range(2):
        assert backend.batch_set(["a", "b"], [flat(pool, 0)] * 2) is False
        assert backend.batch_get(["a", "b"]) == [None, None]
        assert backend.get("a") is None
        backend.logged.answer = lambda call, answers: answers if call == "open" else broken("", 0)
    assert backend.stats.reasons() == {("set", "kv", "failed"): 4, ("get", "kv", "failed"): 6}
    backend.close()


def test_flat_pages_are_counted_as_a_slower_path_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = make("mla", "page_first", 10)
    backend = memory_backend(pool, extra=DYNAMIC)
    backend.batch_set(["a", "b"], [flat(pool, 0), flat(pool, 1)])
    backend.get("a")
    assert backend.stats.slow_paths() == {"KV is copied in flat form": 3}
    assert len([r for r in caplog.records if "slower path" in r.message]) == 1
    backend.close()
