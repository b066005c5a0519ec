"""The SGLang boundary: start, warnings, and the end of a backend."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import pytest

from hicache_shared.contract import HiCacheStorage
from hicache_shared.errors import ClearError, ConfigError
from hicache_shared.hostpool import LogicalHostPool
from hicache_shared.memory_backend import MemoryBackend
from tests.contract.core_support import (
    DYNAMIC,
    PAGE,
    LoggedBackend,
    config,
    fill,
    logged_backend,
    mha,
    slots,
    transfer,
)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


# -- start ---------------------------------------------------------------------------------


def test_it_is_a_subclass_of_the_class_that_sglang_requires() -> None:
    assert issubclass(MemoryBackend, HiCacheStorage)


@pytest.mark.parametrize("name", [None, ""])
def test_a_model_without_a_name_is_an_error_that_names_the_setting(name: str | None) -> None:
    with pytest.raises(ConfigError, match="model_id"):
        MemoryBackend(config({"model_id": None}, deployment=name), {})


def test_the_warning_at_start_names_what_is_missing_and_what_could_collide(
    caplog: pytest.LogCaptureFixture,
) -> None:
    MemoryBackend(config({"revision": None, "kv_cache_dtype": None}), {}).close()
    (warning,) = warnings(caplog)
    assert "revision, kv_cache_dtype" in warning
    assert "two revisions" in warning
    assert "model_id" not in warning


def test_a_complete_identity_starts_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    MemoryBackend(config({**DYNAMIC, "interface_v1": 1}), {}).close()
    MemoryBackend(config(), {}).close()
    assert warnings(caplog) == []


@pytest.mark.parametrize("value", [None, 0, False])
def test_a_missing_interface_v1_warns_once_with_the_line_to_add(
    caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    backend = MemoryBackend(config({**DYNAMIC, "interface_v1": value}), {})
    backend.register_mem_pool_host(mha())
    backend.on_host_pools_registered()
    (warning,) = warnings(caplog)
    assert '"interface_v1": 1' in warning
    assert "--hicache-storage-backend-extra-config" in warning
    backend.close()


# -- the end -------------------------------------------------------------------------------


def test_calls_after_close_answer_false_and_touch_no_store() -> None:
    backend = logged_backend(("kv", mha()), ("swa", mha()))
    backend.batch_set_v1(["a"], slots([0]))
    backend.close()
    before = list(backend.logged.calls)
    swa = transfer("swa", ["a", "b"], [0, 1])
    assert backend.batch_set_v1(["a"], slots([0])) == [False]
    assert backend.batch_get_v1(["a"], slots([0])) == [False]
    assert backend.batch_set_v2([swa]) == {"swa": [False, False]}
    assert backend.batch_get_v2([swa]) == {"swa": [False, False]}
    result = backend.batch_exists_v2(["a"], [swa])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])
    assert backend.batch_exists(["a"]) == 0
    assert backend.exists("a") is False
    assert backend.batch_set(["a"], [None]) is False
    assert backend.set("a", None) is False
    assert backend.batch_get(["a", "b"], None) == [None, None]
    assert backend.get("a") is None
    assert backend.get_stats() is not None
    with pytest.raises(ClearError, match="after close"):
        backend.clear()
    assert backend.logged.calls == before


def test_a_closed_backend_takes_no_pool_and_does_not_open_its_store() -> None:
    backend = logged_backend(("kv", mha()))
    backend.close()
    backend.register_mem_pool_host(mha())
    backend.register_mem_host_pool_v2(mha(), "late")
    backend.on_host_pools_registered()
    assert backend.logged.calls == []
    assert backend.logged.closes == 1


def test_a_logical_anchor_after_close_answers_false() -> None:
    backend = logged_backend(("kv", LogicalHostPool(pages=8, page_size=PAGE)))
    backend.close()
    assert backend.batch_set_v1(["a"], slots([0])) == [False]


def test_closing_twice_closes_the_store_once() -> None:
    backend = logged_backend(("kv", mha()))
    backend.close()
    backend.close()
    assert backend.logged.closes == 1


class Held:
    """A store call that stays inside until it is let go."""

    def __init__(self, backend: LoggedBackend) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.closed_while_inside: bool | None = None
        self._backend = backend
        backend.logged.answer = self._answer
        self._thread = threading.Thread(target=backend.batch_exists, args=(["a"],), daemon=True)
        self._thread.start()
        assert self.inside.wait(10)

    def _answer(self, call: str, answers: Any) -> Any:
        if call == "exists":
            self.inside.set()
            assert self.leave.wait(20)
            self.closed_while_inside = self._backend.logged.closes > 0
        return answers

    def let_go(self) -> None:
        self.leave.set()
        self._thread.join(10)


def test_a_call_that_never_ends_bounds_close_and_the_store_is_not_closed_under_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = mha()
    backend = logged_backend(("kv", pool), extra={"drain_s": 0.01})
    held, alive = Held(backend), weakref.ref(pool)
    del pool
    backend.close()
    assert backend.logged.closes == 0
    assert "calls still run" in caplog.text
    assert backend.batch_exists(["a"]) == 0
    gc.collect()
    assert alive() is not None, "the client may still write to the pool's memory"
    held.let_go()
    assert held.closed_while_inside is False


def test_close_waits_for_a_running_call_and_a_second_thread_waits_with_it() -> None:
    backend = logged_backend(("kv", mha()), extra={"drain_s": 20})
    held = Held(backend)
    closed: list[int] = []

    def close() -> None:
        backend.close()
        closed.append(backend.logged.closes)

    closers = [threading.Thread(target=close) for _ in range(2)]
    for closer in closers:
        closer.start()
    while not backend._gate.closed:
        closers[0].join(0.001)
    closers[1].join(0.05)
    assert closed == []
    held.let_go()
    for closer in closers:
        closer.join(10)
    assert held.closed_while_inside is False
    assert closed == [1, 1]


def test_a_backend_that_is_dropped_closes_its_store() -> None:
    backend = logged_backend(("kv", mha()))
    store = backend.logged
    backend.batch_set_v1(["a"], slots([0]))
    del backend
    gc.collect()
    assert store.closes == 1


@pytest.mark.parametrize("extra", [{}, DYNAMIC], ids=["paged", "flat"])
def test_no_pool_is_kept_after_close(extra: dict[str, Any]) -> None:
    pools = {"kv": mha(), "swa": mha()}
    backend = logged_backend(*pools.items(), extra=extra)
    backend.batch_set_v1(["a"], slots([0]))
    backend.batch_get_v2([transfer("swa", ["a"], [0])])
    alive = [weakref.ref(pool) for pool in pools.values()]
    memory = weakref.ref(pools["kv"].kv_buffer)
    backend.close()
    pools.clear()
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    assert memory() is None


AT_EXIT = """
    import threading
    import time
    import numpy as np
    from hicache_shared.memory import MemoryStore
    from hicache_shared.memory_backend import MemoryBackend
    from hicache_shared.testing.harness import storage_config
    from hicache_shared.hostpool import MHAGeometry, MHAHostPool

    inside = threading.Event()

    class Store(MemoryStore):
        held = False

        def exists(self, asks, deadline_s):
            if Store.held:
                inside.set()
                while not ({ends} and backend._gate.closed):
                    time.sleep(0.01)
                print("call ended", flush=True)
            return super().exists(asks, deadline_s)

        def close(self):
            super().close()
            print("store closed", flush=True)

    class Backend(MemoryBackend):
        def open_store(self, config, storage_config):
            return Store()

    extra = {{"drain_s": {drain_s}}}
    backend = Backend(storage_config(is_mla_model=False, extra=extra), {{}})
    geometry = MHAGeometry(layers=1, head_num=1, head_dim=4)
    pool = MHAHostPool(geometry, pages=4, page_size=4, layout="page_first")
    backend.register_mem_pool_host(pool)
    backend.batch_set_v1(["a"], np.arange(4))
    if {running}:
        Store.held = True
        threading.Thread(target=backend.batch_exists, args=(["a"],), daemon=True).start()
        inside.wait(10)
    print("leaving", flush=True)
"""


def run(**settings: Any) -> tuple[list[str], str]:
    code = textwrap.dedent(AT_EXIT).format(**settings)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines(), done.stderr


def test_the_store_is_closed_at_interpreter_exit() -> None:
    lines, errors = run(ends=True, drain_s=8, running=False)
    assert (lines, errors) == (["leaving", "store closed"], "")


def test_interpreter_exit_waits_for_a_running_call_before_it_closes_the_store() -> None:
    lines, _ = run(ends=True, drain_s=20, running=True)
    assert lines == ["leaving", "call ended", "store closed"]


def test_interpreter_exit_leaves_the_store_open_under_a_call_that_never_ends() -> None:
    lines, errors = run(ends=False, drain_s=0.05, running=True)
    assert lines == ["leaving"]
    assert "calls still run" in errors


# -- the rest ------------------------------------------------------------------------------


def test_clear_is_scoped_to_the_namespace_and_its_fault_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = logged_backend(("kv", mha()))
    cleared: list[str] = []
    monkeypatch.setattr(backend.logged, "clear", cleared.append)
    backend.clear()
    assert cleared == [backend.namespace]

    def fail(namespace: str) -> None:
        raise ClearError("the server is gone")

    monkeypatch.setattr(backend.logged, "clear", fail)
    with pytest.raises(ClearError, match="gone"):
        backend.clear()
    backend.close()


def test_a_pool_may_be_overwritten_while_no_call_runs() -> None:
    pool = mha()
    backend = logged_backend(("kv", pool))
    fill(pool.kv_buffer, 1)
    before = pool.kv_buffer[:, :PAGE].copy()
    backend.batch_set_v1(["a"], slots([0]))
    fill(pool.kv_buffer, 2)
    assert backend.batch_get_v1(["a"], slots([3])) == [True]
    assert (pool.kv_buffer[:, 3 * PAGE : 4 * PAGE] == before).all()
    backend.close()
