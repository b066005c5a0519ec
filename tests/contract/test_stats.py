"""What is counted, in SGLang's shape."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache_shared.contract import StorageMetrics
from hicache_shared.hostpool import LogicalHostPool
from hicache_shared.stats import GIB, Moved, Stats
from hicache_shared.store import Code
from tests.contract.core_support import (
    DYNAMIC,
    PAGE,
    LoggedBackend,
    logged_backend,
    mha,
    mla,
    slots,
    transfer,
)

SIDECARS = [transfer("swa", ["a", "b"], [0, 1]), transfer("c4", ["a"], [0])]


@pytest.fixture
def backend() -> Iterator[LoggedBackend]:
    backend = logged_backend(
        ("kv", mha()), ("swa", mha()), ("c4", mla()), enable_storage_metrics=True
    )
    yield backend
    backend.close()


def drained(backend: LoggedBackend) -> StorageMetrics:
    metrics = backend.get_stats()
    assert metrics is not None
    return metrics


def test_v1_and_v2_calls_are_recorded_with_their_pages_and_bandwidth(
    backend: LoggedBackend,
) -> None:
    backend.batch_set_v1(["a", "b", "c"], slots([0, 1, 2]))
    backend.batch_set_v2(SIDECARS)
    backend.batch_get_v1(["a", "x"], slots([0, 1]))
    backend.batch_get_v2(SIDECARS)
    metrics = drained(backend)
    assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([3, 3], [1, 3])
    for rates in (metrics.backup_bandwidth, metrics.prefetch_bandwidth):
        assert len(rates) == 2
        assert all(type(rate) is float and rate > 0 for rate in rates)


def test_each_drain_is_a_fresh_object_of_what_came_since_the_last(backend: LoggedBackend) -> None:
    backend.batch_set_v1(["a"], slots([0]))
    first, second = drained(backend), drained(backend)
    assert first is not second
    assert (first.backup_pgs, second.backup_pgs) == ([1], [])
    first.prefetch_pgs.append(9)
    backend.batch_get_v1(["a"], slots([0]))
    assert drained(backend).prefetch_pgs == [1]


def test_calls_that_moved_nothing_leave_no_sample() -> None:
    backend = logged_backend(
        ("kv", LogicalHostPool(pages=8, page_size=PAGE)), enable_storage_metrics=True
    )
    backend.batch_set_v1(["a"], slots([0]))
    backend.batch_get_v2([])
    metrics = drained(backend)
    assert metrics.backup_pgs == metrics.prefetch_pgs == []
    backend.close()


def test_flat_pages_are_recorded_too() -> None:
    pool = mha()
    backend = logged_backend(("kv", pool), extra=DYNAMIC, enable_storage_metrics=True)
    backend.batch_set(["a", "b"], [pool.get_data_page(0), pool.get_data_page(PAGE)])
    backend.batch_get(["a", "x"])
    metrics = drained(backend)
    assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([2], [1])
    backend.close()


def test_nothing_is_kept_when_metrics_are_off() -> None:
    backend = logged_backend(("kv", mha()), enable_storage_metrics=False)
    backend.batch_set_v1(["a"], slots([0]))
    metrics = drained(backend)
    assert metrics.backup_pgs == metrics.backup_bandwidth == []
    backend.close()


def test_bandwidth_is_in_units_of_2_to_the_30_bytes_a_second() -> None:
    stats = Stats(keep_samples=True)
    stats.put(Moved(pages=4, nbytes=3 * GIB, seconds=2.0))
    stats.got(Moved(pages=1, nbytes=1, seconds=0.0))
    metrics = stats.drain()
    assert (metrics.backup_bandwidth, metrics.prefetch_bandwidth) == ([1.5], [0.0])


def test_refused_pages_are_counted_by_operation_pool_and_reason() -> None:
    stats = Stats(keep_samples=False)
    stats.refused("get", "kv", [0, Code.MISSING, 1, Code.TIMEOUT])
    stats.refused("get", "kv", [Code.MISSING])
    stats.refused("set", "kv", [Code.NO_SPACE, 77])
    assert stats.reasons() == {
        ("get", "kv", "missing"): 3,
        ("get", "kv", "timeout"): 1,
        ("set", "kv", "no_space"): 1,
        ("set", "kv", "code_77"): 1,
    }
