"""Which pools a backend takes, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_shared.errors import LayoutError, UnknownPoolError
from hicache_shared.hostpool import HostPoolGroup, LogicalHostPool, PoolEntry
from hicache_shared.memory_backend import MemoryBackend
from tests.contract.core_support import (
    DYNAMIC,
    LoggedBackend,
    config,
    indexer,
    logged_backend,
    mha,
    mla,
    slots,
    transfer,
)

V1 = {**DYNAMIC, "interface_v1": 1}


def test_a_sidecar_before_the_anchor_is_an_error_that_names_it() -> None:
    backend = MemoryBackend(config(), {})
    with pytest.raises(LayoutError, match=r"'swa' came before the anchor"):
        backend.register_mem_host_pool_v2(mha(), "swa")
    with pytest.raises(UnknownPoolError, match="'kv' is not registered; registered: none"):
        backend.batch_exists(["a"])
    backend.close()


def test_an_anchor_that_was_refused_leaves_no_half_registration() -> None:
    backend = MemoryBackend(config(), {})
    wrong, swa = mha(), mha()
    wrong.layout = "page_unified"
    with pytest.raises(LayoutError, match="page_unified"):
        backend.register_mem_pool_host(wrong)
    with pytest.raises(LayoutError, match=r"'swa' came before the anchor"):
        backend.register_mem_host_pool_v2(swa, "swa")
    backend.register_mem_pool_host(mha())
    backend.register_mem_host_pool_v2(swa, "swa")
    backend.close()


@pytest.mark.parametrize("name", ["kv", "swa"])
def test_the_same_name_with_other_memory_is_an_error(name: str) -> None:
    backend = logged_backend(("kv", mha()), ("swa", mha()))
    with pytest.raises(LayoutError, match=rf"'{name}' is already registered with other memory"):
        backend.register_mem_host_pool_v2(mha(), name)
    if name == "kv":
        with pytest.raises(LayoutError, match="other memory"):
            backend.register_mem_pool_host(mha())
    backend.close()


def test_a_group_as_anchor_is_unwrapped_and_is_the_pool_that_comes_as_kv() -> None:
    kv = mla()
    group = HostPoolGroup([PoolEntry("indexer", indexer()), PoolEntry("kv", kv, True)])
    backend = LoggedBackend(config(is_mla_model=True), {})
    backend.register_mem_pool_host(group)
    backend.register_mem_host_pool_v2(kv, "kv")
    assert backend.batch_set_v1(["a"], slots([0])) == [True]
    assert backend.logged.named("put") == [[("kv", 1)]]
    backend.close()


def test_without_the_hook_of_0_5_23_the_first_call_opens_the_store_once() -> None:
    backend = logged_backend(("kv", mha()), ("swa", mha()))
    assert backend.logged.named("open") == []
    assert backend.batch_exists(["a"]) == 0
    backend.batch_set_v1(["a"], slots([0]))
    backend.on_host_pools_registered()
    assert backend.logged.named("open") == [[("kv", 0), ("swa", 0)]]
    backend.close()


def test_a_pool_that_comes_after_the_first_call_is_registered_with_the_store() -> None:
    backend = logged_backend(("kv", mha()))
    backend.on_host_pools_registered()
    backend.register_mem_host_pool_v2(mha(), "late")
    assert backend.batch_set_v2([transfer("late", ["a"], [7])]) == {"late": [True]}
    assert backend.batch_get_v2([transfer("late", ["a"], [0])]) == {"late": [True]}
    backend.close()


def test_an_unknown_pool_is_an_error_that_names_those_there_are() -> None:
    backend = logged_backend(("kv", mha()), ("swa", mha()))
    with pytest.raises(UnknownPoolError, match="'ghost' is not registered; registered: kv, swa"):
        backend.batch_set_v2([transfer("ghost", ["a"], [0])])
    backend.close()


# -- draft models --------------------------------------------------------------------------


def with_draft(draft: Any, *, mla_target: bool, **changes: Any) -> LoggedBackend:
    target = mla() if mla_target else mha()
    return logged_backend(("kv", target), ("draft", draft), is_mla_model=mla_target, **changes)


def draft_prefix(backend: LoggedBackend) -> Any:
    """What the keys of this rank's draft pages begin with."""
    return backend._pools["draft"].stored[0].prefix


def test_an_mha_draft_beside_an_mla_target_is_refused_by_name_at_tp_2_with_dynamic() -> None:
    with pytest.raises(LayoutError, match=r"'draft' holds attention heads beside an MLA target"):
        with_draft(mha(), mla_target=True, tp_size=2, extra=V1)


def test_an_mha_draft_beside_an_mla_target_is_refused_under_the_name_mori_and_not_mooncake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LoggedBackend, "in_tree_name", "mori")
    with pytest.raises(LayoutError, match=r"'draft' holds attention heads .* rank 0 .* mori"):
        with_draft(mha(), mla_target=True, tp_size=2)
    monkeypatch.setattr(LoggedBackend, "in_tree_name", "mooncake")
    with_draft(mha(), mla_target=True, tp_size=2).close()


def test_an_mha_draft_beside_an_mla_target_works_at_tp_1_with_dynamic() -> None:
    backend = with_draft(mha(), mla_target=True, tp_size=1, extra=V1)
    assert backend.batch_set_v2([transfer("draft", ["a"], [0])]) == {"draft": [True]}
    backend.close()


def test_an_mha_draft_beside_an_mla_target_is_sharded_where_every_rank_writes() -> None:
    ranks = [with_draft(mha(), mla_target=True, tp_rank=r, tp_size=2) for r in range(2)]
    assert draft_prefix(ranks[0]) != draft_prefix(ranks[1])
    assert ranks[0]._pools.kv.stored[0].prefix == ranks[1]._pools.kv.stored[0].prefix


def test_an_mla_draft_beside_an_mla_target_is_shared_by_ranks() -> None:
    ranks = [with_draft(mla(), mla_target=True, tp_rank=r, tp_size=2, extra=V1) for r in range(2)]
    assert draft_prefix(ranks[0]) == draft_prefix(ranks[1])


def test_a_draft_beside_an_mha_target_is_sharded_at_tp_2_with_dynamic() -> None:
    ranks = [with_draft(mha(), mla_target=False, tp_rank=r, tp_size=2, extra=V1) for r in range(2)]
    assert draft_prefix(ranks[0]) != draft_prefix(ranks[1])


def test_sharded_keys_hold_the_tp_size_as_well_as_the_rank() -> None:
    backends = [logged_backend(("kv", mha()), tp_rank=0, tp_size=size) for size in (1, 2, 4)]
    assert len({backend._pools.kv.stored[0].prefix for backend in backends}) == 3


# -- logical anchors -----------------------------------------------------------------------


def test_a_logical_anchor_opens_no_object_and_answers_v1_and_v2() -> None:
    backend = logged_backend(("kv", LogicalHostPool(pages=8, page_size=4)), ("swa", mha()))
    backend.on_host_pools_registered()
    assert backend.logged.named("open") == [[("swa", 0)]]
    both = [transfer("kv", ["a", "b"], [0, 1]), transfer("swa", ["a", "b"], [0, 1])]
    assert backend.batch_get_v2(both) == {"kv": [True, True], "swa": [False, False]}
    assert backend.batch_set_v2(both) == {"kv": [True, True], "swa": [True, True]}
    assert backend.batch_get_v2(both) == {"kv": [True, True], "swa": [True, True]}
    assert backend.logged.named("put") == [[("swa", 2)]]
    backend.close()


def test_a_pool_with_heads_beside_mla_is_refused_by_any_name_where_one_rank_writes() -> None:
    pools = (("kv", mla()), ("a_pool_of_tomorrow", mha()))
    with pytest.raises(LayoutError, match=r"'a_pool_of_tomorrow' holds attention heads"):
        logged_backend(*pools, is_mla_model=True, tp_size=2, extra=V1)


def test_a_pool_with_heads_beside_mla_is_sharded_by_any_name_where_every_rank_writes() -> None:
    pools = (("kv", mla()), ("a_pool_of_tomorrow", mha()))
    ranks = [logged_backend(*pools, is_mla_model=True, tp_rank=r, tp_size=2) for r in range(2)]
    prefixes = [rank._pools["a_pool_of_tomorrow"].stored[0].prefix for rank in ranks]
    assert prefixes[0] != prefixes[1]


def test_draft_pools_of_two_draft_models_share_no_keys(caplog: pytest.LogCaptureFixture) -> None:
    kv, draft = set(), set()
    for model in ("", "one", "two"):
        caplog.clear()
        extra = {"draft_model_id": model} if model else {}
        backend = with_draft(mha(), mla_target=False, extra=extra)
        kv.add(backend._pools["kv"].stored[0].prefix)
        draft.add(draft_prefix(backend))
        assert ("draft_model_id is not set" in caplog.text) is not bool(model)
    assert (len(kv), len(draft)) == (1, 3)
