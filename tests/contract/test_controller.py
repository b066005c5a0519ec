"""The reference controller: the exact calls of SGLang's lifecycle, and what it makes of answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_shared.contract import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from hicache_shared.controller import (
    HostMemoryMode,
    Operation,
    ReferenceController,
    common_prefix,
    model_transfers,
    trailing_window,
)
from hicache_shared.errors import HiCacheError
from hicache_shared.fold import PoolPresence, fold
from hicache_shared.hostpool import (
    PRESETS,
    AssembledModel,
    HostPoolGroup,
    LogicalHostPool,
    PoolEntry,
    build,
    page_views,
    preset,
)
from hicache_shared.sidecar import allocate_transfers

Call = tuple[Any, ...]
V4_SIDECARS = [
    "swa",
    "deepseek_v4_c4",
    "deepseek_v4_c4_indexer",
    "deepseek_v4_c4_state",
    "deepseek_v4_c4_indexer_state",
    "deepseek_v4_c128",
]


class RecordingBackend(HiCacheStorage):
    """Keeps pages in a dict and writes down every call.

    ``refused`` (pool, key) pairs are answered False; ``gate`` is waited for in each call.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.raw: list[Any] = []
        self.pools: dict[str, Any] = {}
        self.pages: dict[tuple[str, str], bytes] = {}
        self.refused: set[tuple[str, str]] = set()
        self.gate: threading.Barrier | None = None
        self.kv_slots: list[Any] = []

    def note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.gate is not None:
            self.gate.wait(timeout=30)

    def take(self) -> list[Call]:
        calls, self.calls = self.calls, []
        return calls

    # lifecycle
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.note("register_mem_pool_host", mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.note("register_mem_host_pool_v2", host_pool, host_pool_name)
        self.pools[host_pool_name] = host_pool

    def on_host_pools_registered(self) -> None:
        self.note("on_host_pools_registered")

    def close(self) -> None:
        self.note("close")

    # v2
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        assert pool_transfers is not None
        assert extra_info is not None
        self.note("batch_exists_v2", len(keys), [str(t.name) for t in pool_transfers])
        self.raw = pool_transfers
        asked = [(t.name, t.hit_policy, len(t.keys or [1])) for t in pool_transfers]
        asked.insert(0, (PoolName.KV, PoolHitPolicy.ALL_PAGES, 1))
        return fold(
            len(keys),
            [
                PoolPresence(name, [(name, key) in self.pages for key in keys], policy, window)
                for name, policy, window in asked
            ],
        )

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        assert extra_info is not None
        self.note("batch_set_v2", [str(t.name) for t in transfers], extra_info.prefix_keys)
        return {t.name: self.write(t.name, t.keys, t.host_indices) for t in transfers}

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        assert extra_info is not None
        self.note("batch_get_v2", [str(t.name) for t in transfers], extra_info.prefix_keys)
        self.raw = transfers
        return {t.name: self.read(t.name, t.keys, t.host_indices) for t in transfers}

    # v1
    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        assert extra_info is not None
        self.note("batch_set_v1", len(keys), extra_info.prefix_keys)
        self.kv_slots.append(host_indices)
        return self.write("kv", keys, host_indices)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        assert extra_info is not None
        self.note("batch_get_v1", len(keys), extra_info.prefix_keys)
        self.kv_slots.append(host_indices)
        return self.read("kv", keys, host_indices)

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        self.note("batch_exists", len(keys))
        present = [("kv", key) in self.pages for key in keys]
        return present.index(False) if False in present else len(keys)

    # flat pages
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> Any:
        self.note("batch_get", len(keys))
        return [
            None
            if (found := self.pages.get(("kv", key))) is None
            else np.frombuffer(found, np.uint8).view(target.dtype)
            for key, target in zip(keys, target_locations, strict=True)
        ]

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        self.note("batch_set", len(keys))
        for key, value in zip(keys, values, strict=True):
            self.pages["kv", key] = value.tobytes()
        return True

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        raise NotImplementedError

    def exists(self, key: str) -> bool:
        raise NotImplementedError

    # pages
    def places(
        self, name: str, keys: list[str] | None, indices: Any
    ) -> Iterator[tuple[tuple[str, str], int]]:
        size = self.pools[name].page_size
        assert keys is not None
        assert len(indices) == len(keys) * size
        for key, index in zip(keys, indices[::size], strict=True):
            yield (str(name), key), int(index) // size

    def write(self, name: str, keys: list[str] | None, indices: Any) -> list[bool]:
        answer = []
        for place, page in self.places(name, keys, indices):
            answer.append(place not in self.refused)
            if answer[-1]:
                self.pages[place] = page_bytes(self.pools[name], page)
        return answer

    def read(self, name: str, keys: list[str] | None, indices: Any) -> list[bool]:
        answer = []
        for place, page in self.places(name, keys, indices):
            answer.append(place in self.pages and place not in self.refused)
            if answer[-1]:
                put_page(self.pools[name], page, self.pages[place])
        return answer


def page_bytes(pool: Any, page: int) -> bytes:
    if isinstance(pool, LogicalHostPool):
        return b""
    return b"".join(view.tobytes() for view in page_views(pool, page))


def put_page(pool: Any, page: int, data: bytes) -> None:
    if isinstance(pool, LogicalHostPool):
        return
    for view in page_views(pool, page):
        view[:] = np.frombuffer(data[: view.nbytes], np.uint8)
        data = data[view.nbytes :]


def rank_config(**rest: Any) -> HiCacheStorageConfig:
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": True,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "model",
    }
    return HiCacheStorageConfig(**(values | rest))


def logical_group(*names: str, pages: int = 600) -> HostPoolGroup:
    """Pools without memory, the first the anchor; Mamba has a slot a page, the others two."""
    return HostPoolGroup(
        PoolEntry(name, LogicalHostPool(pages=pages, page_size=1 if name == "mamba" else 2), i == 0)
        for i, name in enumerate(names)
    )


def attached(
    group: HostPoolGroup, config: HiCacheStorageConfig | None = None, **rest: Any
) -> tuple[ReferenceController, RecordingBackend]:
    controller = ReferenceController(group, config or rank_config(), **rest)
    backend = RecordingBackend()
    controller.attach(backend)
    backend.take()
    return controller, backend


def hashes(pages: int) -> list[str]:
    return [f"h{page}" for page in range(pages)]


def operation(model: AssembledModel, pages: int, prefix: list[str] | None = None) -> Operation:
    chain = hashes(pages)
    kv = model.group.alloc(pages * model.page_tokens)
    transfers = model_transfers(model.pools, chain)
    assert allocate_transfers(model.group, transfers, kv_indices=kv)
    return Operation(chain, kv, transfers, prefix)


def small(name: str, pages: int = 12) -> AssembledModel:
    return build(preset(name), layout="page_first", pages=pages, layers_div=64)


def trailing(name: str, keys: list[str], indices: Any = None, source: Any = None) -> PoolTransfer:
    return PoolTransfer(
        name,
        host_indices=indices,
        keys=keys,
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
        indices_from_pool=source,
    )


# --- lifecycle ---------------------------------------------------------------------------


def test_attach_registers_the_anchor_then_every_pool_the_kv_included_then_says_so() -> None:
    model = small("deepseek-v4-flash")
    backend = RecordingBackend()
    ReferenceController(model.group, rank_config()).attach(backend)
    entries = model.group.entries
    assert backend.take() == [
        ("register_mem_pool_host", entries[0].host_pool),
        *[("register_mem_host_pool_v2", e.host_pool, e.name) for e in entries],
        ("on_host_pools_registered",),
    ]
    assert entries[0].name == "kv"


def test_a_late_pool_is_registered_by_name_alone() -> None:
    group = logical_group("kv")
    controller, backend = attached(group)
    late = PoolEntry("draft", LogicalHostPool(pages=4, page_size=2))
    controller.register_host_pool_entry(late)
    assert backend.take() == [("register_mem_host_pool_v2", late.host_pool, "draft")]
    assert group.entry_map["draft"] is late


def test_close_finishes_what_was_submitted_before_it_closes_the_backend() -> None:
    controller, backend = attached(logical_group("kv"))
    with controller:
        writes = [controller.submit_backup(Operation(hashes(1), np.arange(2))) for _ in range(5)]
    assert [call[0] for call in backend.take()] == ["batch_set_v1"] * 5 + ["close"]
    assert all(write.done() for write in writes)
    controller.close()
    assert backend.take() == []


def test_calls_without_a_backend_or_a_second_attach_are_errors() -> None:
    controller = ReferenceController(logical_group("kv"), rank_config())
    with pytest.raises(HiCacheError, match="attach first"):
        controller.query(hashes(1))
    with pytest.raises(HiCacheError, match="attach first"):
        controller.submit_query(hashes(1))
    controller.attach(RecordingBackend())
    with pytest.raises(HiCacheError, match="attached already"):
        controller.attach(RecordingBackend())


def test_what_a_registration_raises_comes_through_and_close_still_closes() -> None:
    class Refusing(RecordingBackend):
        def register_mem_pool_host(self, mem_pool_host: Any) -> None:
            raise ValueError("refused")

    backend = Refusing()
    with (
        pytest.raises(ValueError, match="refused"),
        ReferenceController(logical_group("kv"), rank_config()) as controller,
    ):
        controller.attach(backend)
    assert backend.take() == [("close",)]


# --- backup ------------------------------------------------------------------------------


def test_backup_writes_all_sidecars_in_one_call_and_then_the_kv() -> None:
    model = small("deepseek-v4-flash")
    controller, backend = attached(model.group)
    result = controller.backup(operation(model, 8))
    assert backend.take() == [("batch_set_v2", V4_SIDECARS, None), ("batch_set_v1", 8, None)]
    assert result.kv_pages == 8
    assert result.pool_pages == {name: 1 if "state" in name or name == "swa" else 8
                                 for name in V4_SIDECARS}  # fmt: skip


def test_a_model_without_sidecars_writes_the_kv_alone() -> None:
    controller, backend = attached(logical_group("kv"))
    assert controller.backup(Operation(hashes(2), np.arange(4))).kv_pages == 2
    assert backend.take() == [("batch_set_v1", 2, None)]


def test_the_kv_is_written_in_batches_of_128_that_stop_at_the_first_false() -> None:
    controller, backend = attached(logical_group("kv"))
    pages = Operation(hashes(300), np.arange(600))
    assert controller.backup(pages).kv_pages == 300
    assert [call[1] for call in backend.take()] == [128, 128, 44]
    backend.refused = {("kv", "h130")}
    assert controller.backup(pages).kv_pages == 128
    assert [call[1] for call in backend.take()] == [128, 128]


def test_each_batch_comes_with_the_slots_of_its_own_pages() -> None:
    controller, backend = attached(logical_group("kv", "indexer"))
    slots = np.arange(1198, -2, -1).reshape(-1, 2)[:, ::-1].reshape(-1)[:600]
    pages = Operation(hashes(300), slots, [PoolTransfer("indexer", indices_from_pool="kv")])
    controller.backup(pages)
    assert [s.tolist() for s in backend.kv_slots] == [
        slots[i : i + 256].tolist() for i in (0, 256, 512)
    ]
    backend.kv_slots.clear()
    controller.prefetch(pages, 300)
    assert [s.tolist() for s in backend.kv_slots] == [
        slots[i : i + 256].tolist() for i in (0, 256, 512)
    ]


def test_a_false_from_the_sidecars_does_not_keep_the_kv_from_being_written() -> None:
    model = small("deepseek-v4-flash")
    controller, backend = attached(model.group)
    backend.refused = {("deepseek_v4_c4", "h2")}
    result = controller.backup(operation(model, 4))
    assert (result.kv_pages, result.pool_pages["deepseek_v4_c4"]) == (4, 2)


def test_prefix_keys_group_the_sidecars_by_tail_length_and_grow_with_the_batches() -> None:
    controller, backend = attached(logical_group("kv", "swa", "c4", "state"))
    span = hashes(130)
    transfers = [
        trailing("swa", span[-2:], np.arange(4)),
        PoolTransfer("c4", indices_from_pool="kv"),
        trailing("state", span[-2:], source="swa"),
    ]
    controller.backup(Operation(span, np.arange(260), transfers, ["p0"]))
    assert backend.take() == [
        ("batch_set_v2", ["swa", "state"], ["p0", *span[:128]]),
        ("batch_set_v2", ["c4"], ["p0"]),
        ("batch_set_v1", 128, ["p0"]),
        ("batch_set_v1", 2, ["p0", *span[:128]]),
    ]


def test_buffer_only_writes_the_kv_first_and_each_other_pool_as_its_own_operation() -> None:
    controller, backend = attached(
        logical_group("kv", "swa", "state", "mamba", "c4"), host_memory_mode="buffer_only"
    )
    span = hashes(6)
    transfers = [
        trailing("swa", span[-2:], np.arange(4)),
        trailing("mamba", span[-1:], np.arange(1)),
        PoolTransfer("c4", indices_from_pool="kv"),
        trailing("state", span[-2:], source="swa"),
    ]
    result = controller.backup(Operation(span, np.arange(12), transfers, ["p0"]))
    assert backend.take() == [
        ("batch_set_v2", ["c4"], ["p0"]),
        ("batch_set_v1", 6, ["p0"]),
        ("batch_set_v2", ["mamba"], ["p0", *span[:5]]),
        ("batch_set_v2", ["swa", "state"], ["p0", *span[:4]]),
    ]
    assert result.kv_pages == 6
    assert result.pool_pages == {"c4": 6, "mamba": 1, "swa": 2, "state": 2}


def test_a_rank_that_does_not_write_the_kv_writes_mamba_alone() -> None:
    config = rank_config(tp_rank=1, tp_size=2)
    controller, backend = attached(logical_group("kv", "mamba", "indexer"), config)
    span = hashes(4)
    transfers = [
        trailing("mamba", span[-1:], np.arange(1)),
        PoolTransfer("indexer", indices_from_pool="kv"),
    ]
    pages = Operation(span, np.arange(8), transfers)
    assert controller.backup(pages).kv_pages == 4
    assert backend.take() == [("batch_set_v2", ["mamba"], None)]
    backend.refused = {("mamba", "h3")}
    assert controller.backup(pages).kv_pages == 0
    backend.take()
    assert controller.backup(Operation(span, np.arange(8), transfers[1:])).kv_pages == 0
    assert backend.take() == []


def test_an_answer_of_the_wrong_length_is_not_a_whole_write() -> None:
    class Doubled(RecordingBackend):
        def batch_set_v2(
            self,
            transfers: list[PoolTransfer],
            extra_info: HiCacheStorageExtraInfo | None = None,
        ) -> dict[str, list[bool]]:
            return {t.name: [True] * 2 * len(t.keys or ()) for t in transfers}

    controller = ReferenceController(
        logical_group("kv", "mamba"), rank_config(tp_rank=1, tp_size=2)
    )
    controller.attach(Doubled())
    transfers = [trailing("mamba", ["h0"], np.arange(1))]
    assert controller.backup(Operation(hashes(1), np.arange(2), transfers)).kv_pages == 0


# --- query -------------------------------------------------------------------------------


def test_a_query_passes_the_whole_chain_with_placeholders_and_without_indices() -> None:
    model = small("deepseek-v4-flash")
    controller, backend = attached(model.group)
    pages = operation(model, 3)
    controller.backup(pages)
    backend.take()
    chain = [*pages.hashes, *(f"x{i}" for i in range(1000))]
    assert controller.query(chain, pages.transfers).restorable_prefix_pages == [3]
    assert backend.take() == [("batch_exists_v2", 1003, V4_SIDECARS)]
    for transfer in backend.raw:
        assert transfer.host_indices is None
        if transfer.indices_from_pool == "kv":
            assert transfer.keys is None
        else:
            assert transfer.keys == ["__placeholder__"]
            assert transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES


def test_the_number_of_placeholders_is_the_window_also_for_pools_derived_from_another() -> None:
    controller, backend = attached(logical_group("kv", "swa", "state"))
    swa, state = trailing("swa", ["a", "b", "c"]), trailing("state", [], source="swa")
    state.keys = None
    controller.query(hashes(9), [swa, state])
    assert [len(t.keys) for t in backend.raw] == [3, 3]


def test_a_model_without_sidecars_is_asked_by_batch_exists() -> None:
    controller, backend = attached(logical_group("kv"))
    controller.backup(Operation(hashes(2), np.arange(4)))
    backend.take()
    assert controller.query(hashes(200)) == PoolTransferResult(2, {})
    assert backend.take() == [("batch_exists", 200)]


# --- prefetch ----------------------------------------------------------------------------


def test_prefetch_reads_kv_and_derived_pools_batch_by_batch_and_then_the_trailing_ones() -> None:
    model = build(preset("deepseek-v4-flash"), layout="page_first", pages=140, layers_div=64)
    controller, backend = attached(model.group)
    pages = operation(model, 130, prefix=["p0"])
    controller.backup(pages)
    backend.take()
    derived = [n for n in V4_SIDECARS if n != "swa" and "state" not in n]
    trailing_pools = [n for n in V4_SIDECARS if n not in derived]
    seen: list[PoolTransfer] = []
    inner = backend.batch_get_v2

    def keep(transfers: list[PoolTransfer], **rest: Any) -> dict[str, list[bool]]:
        seen.extend(transfers)
        return inner(transfers, **rest)

    backend.batch_get_v2 = keep  # type: ignore[method-assign, assignment]
    assert controller.prefetch(pages, 130) == 130
    grown = ["p0", *pages.hashes[:128]]
    assert backend.take() == [
        ("batch_get_v1", 128, ["p0"]),
        ("batch_get_v2", derived, ["p0"]),
        ("batch_get_v1", 2, grown),
        ("batch_get_v2", derived, grown),
        ("batch_get_v2", trailing_pools, ["p0", *pages.hashes[:129]]),
    ]
    for transfer in seen:
        if transfer.name in derived:
            assert transfer.indices_from_pool is None
            assert transfer.hit_policy == PoolHitPolicy.ALL_PAGES


def test_derived_pools_alone_clamp_to_the_common_prefix() -> None:
    model = small("deepseek-v3.2")
    controller, backend = attached(model.group)
    pages = operation(model, 6)
    controller.backup(pages)
    backend.take()
    assert controller.prefetch(pages, 6) == 6
    kv_and_derived = [("batch_get_v1", 6, None), ("batch_get_v2", ["indexer"], None)]
    assert backend.take() == [*kv_and_derived, ("batch_get_v2", [], None)]
    backend.refused = {("indexer", "h4"), ("kv", "h5")}
    assert controller.prefetch(pages, 6) == 4
    assert backend.take() == kv_and_derived


def test_a_short_batch_is_the_last_one_that_is_read() -> None:
    controller, backend = attached(logical_group("kv"))
    controller.backup(Operation(hashes(300), np.arange(600)))
    backend.take()
    backend.refused = {("kv", "h130")}
    assert controller.prefetch(Operation(hashes(300), np.arange(600)), 300) == 130
    assert [call[1] for call in backend.take()] == [128, 128]


def test_the_trailing_window_ends_at_the_hit_and_fills_the_slots_from_their_beginning() -> None:
    controller, backend = attached(logical_group("kv", "swa", "state"))
    span = hashes(6)
    own = trailing("swa", span[-3:], np.arange(20, 26))
    state = trailing("state", span[-3:], source="swa")
    backend.pages = dict.fromkeys(product(["kv", "swa", "state"], span), b"")
    pages = Operation(span, np.arange(12), [own, state])
    assert controller.prefetch(pages, 2) == 2
    for transfer in backend.raw:
        assert transfer.keys == span[:2]
        assert transfer.host_indices.tolist() == [20, 21, 22, 23]
    assert controller.prefetch(pages, 5) == 5
    for transfer in backend.raw:
        assert transfer.keys == span[2:5]
        assert transfer.host_indices.tolist() == [20, 21, 22, 23, 24, 25]
    assert own.host_indices.tolist() == list(range(20, 26)), "the caller keeps its slots"


@pytest.mark.parametrize(
    "lost", [("swa", "h3"), ("deepseek_v4_c4_state", "h3"), ("deepseek_v4_c4", "h1")]
)
def test_with_trailing_pools_any_shortfall_discards_the_whole_prefetch(
    lost: tuple[str, str],
) -> None:
    model = small("deepseek-v4-flash")
    controller, backend = attached(model.group)
    pages = operation(model, 4)
    controller.backup(pages)
    backend.refused = {lost}
    assert controller.prefetch(pages, 4) == 0


def test_a_trailing_pool_that_is_left_out_of_the_answer_counts_as_absent() -> None:
    class Silent(RecordingBackend):
        def batch_get_v2(
            self,
            transfers: list[PoolTransfer],
            extra_info: HiCacheStorageExtraInfo | None = None,
        ) -> dict[str, list[bool]]:
            return {}

    backend = Silent()
    controller = ReferenceController(logical_group("kv", "mamba"), rank_config())
    controller.attach(backend)
    pages = Operation(hashes(2), np.arange(4), [trailing("mamba", ["h1"], np.arange(1))])
    controller.backup(pages)
    assert controller.prefetch(pages, 2) == 0


def test_answers_beyond_the_keys_restore_nothing_more() -> None:
    class Doubled(RecordingBackend):
        def batch_get_v1(
            self,
            keys: list[str],
            host_indices: Any,
            extra_info: HiCacheStorageExtraInfo | None = None,
        ) -> list[bool]:
            return [True] * 2 * len(keys)

    controller = ReferenceController(logical_group("kv"), rank_config())
    controller.attach(Doubled())
    assert controller.prefetch(Operation(hashes(2), np.arange(4)), 2) == 2


def test_flat_pages_are_used_up_to_the_first_that_is_missing() -> None:
    controller, backend = attached(small("mla").group, interface_v1=False)
    pages = Operation(hashes(3), np.arange(3 * 64))
    controller.backup(pages)
    del backend.pages["kv", "h1"]
    assert controller.prefetch(pages, 3) == 1
    assert backend.take() == [("batch_set", 3), ("batch_get", 3)]


def test_no_hit_makes_no_call() -> None:
    controller, backend = attached(logical_group("kv"))
    assert controller.prefetch(Operation(hashes(2), np.arange(4)), 0) == 0
    assert backend.take() == []


def test_what_a_backend_raises_reaches_the_caller() -> None:
    controller, _ = attached(logical_group("kv"))
    controller.backup(Operation(hashes(1), np.arange(2)))
    with pytest.raises(AssertionError):
        controller.prefetch(Operation(hashes(1), np.arange(1)), 1)
    with pytest.raises(AssertionError):
        controller.submit_prefetch(Operation(hashes(1), np.arange(1)), 1).result(timeout=30)


# --- in flight ---------------------------------------------------------------------------


def test_backup_query_and_prefetch_are_in_flight_together() -> None:
    controller, backend = attached(logical_group("kv"))
    pages = Operation(hashes(1), np.arange(2))
    controller.backup(pages)
    backend.gate = threading.Barrier(3)  # passes only while all three calls are running
    backup = controller.submit_backup(pages)
    query = controller.submit_query(pages.hashes)
    prefetch = controller.submit_prefetch(pages, 1)
    assert backup.result(timeout=60).kv_pages == 1
    assert query.result(timeout=60).kv_hit_pages == 1
    assert prefetch.result(timeout=60) == 1
    backend.gate = None
    controller.close()


# --- several ranks -----------------------------------------------------------------------


def test_ranks_agree_on_a_prefix_that_each_can_restore_and_not_on_the_smallest_hit() -> None:
    ranks = [PoolTransferResult(3, {}, [1, 3]), PoolTransferResult(2, {}, [1, 2])]
    assert common_prefix(ranks, 3) == 1


def test_without_a_list_every_prefix_up_to_the_hit_counts_and_none_beyond_it() -> None:
    assert (
        common_prefix([PoolTransferResult(3, {}, None), PoolTransferResult(4, {}, [2, 4])], 4) == 2
    )
    assert common_prefix([PoolTransferResult(2, {}, [1, 2, 3]), PoolTransferResult(9, {})], 9) == 2
    assert common_prefix([PoolTransferResult.empty(), PoolTransferResult(9, {})], 9) == 0


@given(st.lists(st.sets(st.integers(1, 8)), min_size=1, max_size=4))
def test_the_common_prefix_is_the_largest_member_of_the_intersection(
    ranks: list[set[int]],
) -> None:
    results = [PoolTransferResult(max(r, default=0), {}, sorted(r)) for r in ranks]
    assert common_prefix(results, 8) == max(set.intersection(*ranks), default=0)


# --- round trips -------------------------------------------------------------------------


def fill(pool: Any, page: int, seed: int) -> None:
    for part, view in enumerate(page_views(pool, page)):
        view[:] = np.random.default_rng([seed, page, part]).integers(0, 256, view.size, np.uint8)


def pages_of(model: AssembledModel, moved: Operation, hit: int) -> dict[tuple[str, str], bytes]:
    """The bytes of every page that a prefix of ``hit`` pages restores, by pool and key."""
    found = {}
    window = {str(pool.name): pool.window_pages for pool in model.pools}
    transfers = [PoolTransfer("kv", host_indices=moved.kv_indices), *moved.transfers]
    for transfer in transfers:
        name = str(transfer.name)
        pool = model.group.get_pool(name)
        keys = moved.hashes[:hit]
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            keys = trailing_window(keys, window[name])
        for key, index in zip(keys, transfer.host_indices[:: pool.page_size], strict=False):
            found[name, key] = page_bytes(pool, int(index) // pool.page_size)
    return found


KV_PATHS = [
    (name, interface_v1)
    for name in PRESETS
    for interface_v1 in (True, False)
    if interface_v1 or name != "mha-asymmetric"  # its pages have no flat form
]


@pytest.mark.parametrize("mode", ["cache", "buffer_only"])
@pytest.mark.parametrize(("name", "interface_v1"), KV_PATHS)
def test_every_model_comes_back_byte_for_byte_in_other_pages(
    name: str, interface_v1: bool, mode: HostMemoryMode
) -> None:
    model = small(name)
    controller, _ = attached(model.group, host_memory_mode=mode, interface_v1=interface_v1)
    written = operation(model, 5)
    for entry in model.group.entries:
        if not isinstance(entry.host_pool, LogicalHostPool):
            for page in range(entry.host_pool.size // entry.host_pool.page_size):
                fill(entry.host_pool, page, seed=1)
    expected = pages_of(model, written, 5)
    assert controller.backup(written).kv_pages == 5

    read = operation(model, 5)
    for entry in model.group.entries:
        if not isinstance(entry.host_pool, LogicalHostPool):
            for page in range(entry.host_pool.size // entry.host_pool.page_size):
                fill(entry.host_pool, page, seed=2)
    hit = controller.query(read.hashes, read.transfers).kv_hit_pages
    assert controller.prefetch(read, hit) == 5
    assert not set(written.kv_indices) & set(read.kv_indices)
    assert pages_of(model, read, 5) == expected
