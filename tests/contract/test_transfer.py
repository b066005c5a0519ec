"""What stores may do wrong, and what SGLang is told then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from hicache_shared import transfer as transfer_module
from hicache_shared.contract import HiCacheStorageExtraInfo, PoolTransfer
from hicache_shared.errors import TransferError
from hicache_shared.hostpool import MambaGeometry, MambaHostPool
from hicache_shared.store import Code
from tests.contract.core_support import (
    DYNAMIC,
    PAGE,
    LoggedBackend,
    config,
    fill,
    logged_backend,
    mha,
    mla,
    slots,
    transfer,
)

KEYS = ["a", "b", "c"]
Answer = Callable[[str, list[list[Any]]], Any]


def staged_states() -> MambaHostPool:
    geometry = MambaGeometry(
        layers=1, temporal_shape=(2,), conv_shapes=((3, 2),), side_shapes=((4,),)
    )
    return MambaHostPool(geometry, pages=8, layout="page_first")


@pytest.fixture
def backend() -> Any:
    backend = logged_backend(("kv", mha()), ("swa", mha()), ("mamba", staged_states()))
    yield backend
    backend.close()


def every_call(backend: LoggedBackend) -> list[bool]:
    """One call of each kind; all answers of pages, which must be lists of bools."""
    pools = [
        transfer("swa", KEYS, [0, 1, 2]),
        transfer("mamba", KEYS, [0, 1, 2], 1),
        transfer("kv", KEYS, [3, 4, 5]),
    ]
    answers = [
        backend.batch_set_v1(KEYS, slots([0, 1, 2])),
        backend.batch_get_v1(KEYS, slots([3, 4, 5])),
        *backend.batch_set_v2(pools).values(),
        *backend.batch_get_v2(pools).values(),
    ]
    hit = backend.batch_exists_v2(KEYS, [PoolTransfer("swa"), PoolTransfer("mamba")])
    assert hit.restorable_prefix_pages in ([], [1, 2, 3])
    assert all(type(answer) is list and len(answer) == 3 for answer in answers)
    pages = [page for answer in answers for page in answer]
    pages += [hit.kv_hit_pages == 3, backend.batch_exists(KEYS) == 3, backend.exists("a")]
    assert all(type(page) is bool for page in pages)
    return pages


def raising(error: Exception) -> Answer:
    def answer(call: str, answers: list[list[Any]]) -> Any:
        raise error

    return answer


def on_calls(change: Callable[[list[list[Any]]], Any]) -> Answer:
    return lambda call, answers: answers if call == "open" else change(answers)


FAULTS: dict[str, Answer] = {
    "2n": on_calls(lambda answers: [answer * 2 for answer in answers]),
    "n-1": on_calls(lambda answers: [answer[:-1] for answer in answers]),
    "one pool less": on_calls(lambda answers: answers[:-1]),
    "one pool more": on_calls(lambda answers: [*answers, answers[0]]),
    "none": on_calls(lambda answers: None),
    "none a pool": on_calls(lambda answers: [None] * len(answers)),
    "none a page": on_calls(lambda answers: [[None] * len(answer) for answer in answers]),
    "a number": on_calls(lambda answers: 0),
    "text": on_calls(lambda answers: [[""] * len(answer) for answer in answers]),
    "connection": raising(ConnectionError("gone")),
    "key": raising(KeyError("x")),
    "assertion": raising(AssertionError()),
    "memory": raising(MemoryError()),
    "stop": raising(StopIteration()),
    "type": raising(TypeError("x")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_raises_or_misanswers_is_false_for_every_key_and_raises_nothing(
    backend: LoggedBackend, fault: str
) -> None:
    assert all(every_call(backend))
    backend.logged.answer = FAULTS[fault]
    assert not any(every_call(backend))
    backend.logged.answer = lambda call, answers: answers
    assert all(every_call(backend)), "it works again when the store does"


def test_a_store_that_says_false_for_failure_is_not_taken_for_success(
    backend: LoggedBackend,
) -> None:
    """False equals 0, which is the code of success."""
    backend.logged.answer = lambda call, answers: (
        answers if call in ("open", "exists") else [[False] * len(answer) for answer in answers]
    )
    assert backend.batch_set_v1(KEYS, slots([0, 1, 2])) == [False] * 3
    assert backend.batch_get_v1(KEYS, slots([0, 1, 2])) == [False] * 3


def test_a_store_that_cannot_open_is_false_for_every_key_until_it_can(
    backend: LoggedBackend,
) -> None:
    backend.logged.answer = raising(RuntimeError("no memory to register"))
    assert not any(every_call(backend))
    backend.logged.answer = lambda call, answers: answers
    assert all(every_call(backend))


def test_a_staged_pool_alone_opens_the_store_at_the_first_call(backend: LoggedBackend) -> None:
    states = [transfer("mamba", KEYS, [0, 1, 2], 1)]
    assert backend.batch_set_v2(states) == {"mamba": [True] * 3}
    assert backend.batch_get_v2(states) == {"mamba": [True] * 3}


@pytest.mark.parametrize("fault", ["connection", "2n"])
def test_a_fault_is_logged_once_for_each_operation_until_it_works_again(
    backend: LoggedBackend, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hicache_shared.transfer")
    every_call(backend)
    for _ in range(2):
        caplog.clear()
        backend.logged.answer = lambda call, answers: FAULTS[fault](call, answers)
        for _ in range(3):
            every_call(backend)
        failed = [r.message for r in caplog.records if "failed" in r.message]
        assert sorted(message.split()[1] for message in failed) == ["exists", "get", "set"]
        caplog.clear()
        backend.logged.answer = lambda call, answers: answers
        for _ in range(3):
            every_call(backend)
        works = [r.message for r in caplog.records if "works again" in r.message]
        assert sorted(message.split()[1] for message in works) == ["exists", "get", "set"]


def test_every_code_but_ok_is_false_and_counted_by_its_reason(backend: LoggedBackend) -> None:
    codes = [*(code for code in Code if code is not Code.OK), 99]
    keys = [str(code) for code in codes]
    backend.logged.answer = lambda call, answers: (
        [codes[: len(answer)] for answer in answers] if call == "put" else answers
    )
    swa = transfer("swa", keys, range(len(keys)))
    assert backend.batch_set_v2([swa])["swa"] == [False] * len(keys)
    names = [code.name.lower() for code in Code if code is not Code.OK] + ["code_99"]
    assert backend.stats.reasons() == {("set", "swa", name): 1 for name in names}
    assert backend.batch_get_v1(["x", "y"], slots([0, 1])) == [False, False]
    assert backend.stats.reasons()["get", "kv", "missing"] == 2


def test_several_pools_are_one_store_call() -> None:
    backend = logged_backend(("kv", mha()), ("swa", mha()), ("c4", mla()))
    pools = [transfer("swa", ["a"], [0]), transfer("c4", ["a", "b"], [0, 1])]
    backend.batch_set_v2(pools)
    backend.batch_get_v2(pools)
    assert backend.logged.named("put") == [[("swa", 1), ("c4", 2)]]
    assert backend.logged.named("get") == [[("swa", 1), ("c4", 2)]]
    backend.batch_set_v1(KEYS, slots([0, 1, 2]))
    backend.batch_exists_v2(KEYS, [PoolTransfer("swa"), PoolTransfer("c4")])
    assert backend.logged.named("exists") == [[("kv", 3)], [("swa", 3), ("c4", 3)]]
    backend.close()


def test_no_transfer_and_transfers_of_nothing_make_no_difference(backend: LoggedBackend) -> None:
    assert backend.batch_get_v2([]) == {}
    assert backend.batch_set_v2([]) == {}
    nothing = [PoolTransfer("swa"), PoolTransfer("mamba", keys=[])]
    assert backend.batch_get_v2(nothing) == {"swa": [], "mamba": []}
    assert backend.batch_set_v2(nothing) == {"swa": [], "mamba": []}


def test_a_pool_that_comes_twice_has_its_answers_in_order(backend: LoggedBackend) -> None:
    backend.batch_set_v2([transfer("swa", ["a", "c"], [0, 2])])
    twice = [
        transfer("swa", ["a", "x"], [0, 1]),
        transfer("kv", ["a"], [0]),
        transfer("swa", ["c", "a"], [2, 3]),
    ]
    answers = backend.batch_get_v2(twice)
    assert answers == {"swa": [True, False, True, True], "kv": [False]}
    assert list(answers) == ["swa", "kv"]


def test_a_host_page_named_by_two_transfers_of_one_get_is_an_error_and_moves_nothing(
    backend: LoggedBackend,
) -> None:
    with pytest.raises(TransferError, match=r"'swa'.*twice"):
        backend.batch_get_v2([transfer("swa", ["a"], [1]), transfer("swa", ["b"], [1])])
    with pytest.raises(TransferError, match="two keys"):
        backend.batch_set_v2([transfer("swa", ["a"], [1]), transfer("swa", ["b"], [1])])
    assert backend.logged.named("get") == backend.logged.named("put") == []


def test_one_wrong_transfer_keeps_the_others_from_moving(backend: LoggedBackend) -> None:
    with pytest.raises(TransferError, match="'swa'"):
        backend.batch_set_v2([transfer("kv", ["a"], [0]), transfer("swa", ["a"], [99])])
    assert backend.logged.named("put") == []


# -- deadlines -----------------------------------------------------------------------------


class Clock:
    """Stands still unless the store moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(transfer_module, "time", clock)
    return clock


def slow(clock: Clock, seconds: float) -> Answer:
    def answer(call: str, answers: Any) -> Any:
        clock.now += seconds if call != "open" else 0
        return answers

    return answer


def test_the_store_calls_of_one_call_share_its_deadline(
    backend: LoggedBackend, clock: Clock
) -> None:
    backend.logged.answer = slow(clock, 3.0)
    pools = [transfer("swa", KEYS, [0, 1, 2]), transfer("mamba", KEYS, [0, 1, 2], 1)]
    assert backend.batch_set_v2(pools) == {"swa": [True] * 3, "mamba": [True] * 3}
    assert backend.logged.deadlines == [5.0, 2.0]
    backend.logged.answer = slow(clock, 5.0)
    assert backend.batch_get_v2(pools) == {"swa": [True] * 3, "mamba": [False] * 3}
    assert backend.logged.deadlines[2:] == [5.0]
    assert backend.stats.reasons() == {("get", "mamba", "timeout"): 3}


def test_a_hit_query_asks_no_more_once_its_deadline_is_over(
    backend: LoggedBackend, clock: Clock
) -> None:
    backend.batch_set_v1(KEYS, slots([0, 1, 2]))
    backend.logged.deadlines.clear()
    backend.logged.answer = slow(clock, 5.0)
    assert backend.batch_exists(KEYS) == 3
    result = backend.batch_exists_v2(KEYS, [PoolTransfer("swa")])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])
    assert backend.logged.deadlines == [5.0, 5.0]


def test_flat_pages_that_need_several_store_calls_share_one_deadline(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_shared.staging.STAGING_BYTES", 1)
    pool = mla()
    backend = logged_backend(("kv", pool), extra=DYNAMIC)
    backend.logged.answer = slow(clock, 3.0)
    fill(pool.kv_buffer, 1)
    pages = [pool.get_data_page(page * PAGE) for page in range(3)]
    assert backend.batch_set(KEYS, pages) is False
    assert backend.logged.deadlines == [5.0, 2.0]
    assert backend.stats.reasons() == {("set", "kv", "timeout"): 1}
    backend.close()


class DepthBackend(LoggedBackend):
    """Notes the depth of each batch that is put."""

    def open_store(self, config: Any, storage_config: Any) -> Any:
        self.depths: list[int | None] = []
        store = super().open_store(config, storage_config)
        put = store.put

        def noted(batches: Any, deadline_s: float) -> Any:
            self.depths += [batch.depth for batch in batches]
            return put(batches, deadline_s)

        store.put = noted  # type: ignore[method-assign]
        return store


def test_a_put_is_told_how_deep_in_its_chain_a_page_lies_where_sglang_says_so() -> None:
    backend = DepthBackend(config({}), {})
    backend.register_mem_pool_host(mha())
    backend.register_mem_host_pool_v2(mha(), "swa")
    swa = transfer("swa", KEYS, [0, 1, 2])
    backend.batch_set_v1(KEYS, slots([0, 1, 2]))
    backend.batch_set_v1(KEYS, slots([0, 1, 2]), HiCacheStorageExtraInfo())
    backend.batch_set_v1(KEYS, slots([0, 1, 2]), HiCacheStorageExtraInfo(prefix_keys=[]))
    backend.batch_set_v2([swa], HiCacheStorageExtraInfo(prefix_keys=["x", "y"]))
    assert backend.depths == [None, None, 0, 2]
    backend.close()
