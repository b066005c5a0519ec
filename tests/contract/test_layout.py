"""From host pools to frozen layouts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_shared.errors import HiCacheError, LayoutError
from hicache_shared.hostpool import (
    PRESETS,
    HostPool,
    HostPoolGroup,
    LogicalHostPool,
    MambaGeometry,
    MambaHostPool,
    PoolEntry,
    V4Geometry,
    V4PagedHostPool,
    build,
    legal_layouts,
    page_views,
    preset,
)
from hicache_shared.layout import (
    Access,
    PoolLayout,
    flat_layout,
    is_logical,
    layouts_of,
)
from hicache_shared.memory import MemoryStore
from hicache_shared.memory_backend import MemoryBackend
from hicache_shared.store import Caps
from tests.contract.core_support import (
    PAGE,
    FakeTensor,
    config,
    fill,
    indexer,
    logged_backend,
    memory_backend,
    mha,
    mla,
    slots,
    transfer,
)

PAGES = 8
LEGAL = [(model, layout) for model in PRESETS for layout in legal_layouts(preset(model))]


@cache
def preset_layouts(model: str, layout: str) -> list[tuple[Any, PoolLayout]]:
    div = 36 if model == "mamba" else 20
    built = build(preset(model), pages=PAGES, layout=layout, layers_div=div)
    pools = [(str(e.name), e.host_pool) for e in built.group.entries if not is_logical(e.host_pool)]
    return [(pool, layouts_of(name, pool)[0]) for name, pool in pools]


def own_list(pool: Any, pages: Sequence[int], width: int) -> tuple[list[int], list[int]]:
    addresses, sizes = pool.get_page_buffer_meta(slots(pages, width))
    return addresses, sizes


def flattened(addresses: list[int] | list[list[int]]) -> list[int]:
    return [a for page in addresses for a in (page if isinstance(page, list) else [page])]


@pytest.mark.parametrize(("model", "layout"), LEGAL)
@given(pages=st.lists(st.integers(0, PAGES - 1), max_size=2 * PAGES))
def test_every_preset_is_affine_and_computes_the_pools_own_addresses(
    model: str, layout: str, pages: list[int]
) -> None:
    for pool, seen in preset_layouts(model, layout):
        assert seen.access is Access.AFFINE
        addresses, sizes = own_list(pool, pages, seen.page_slots)
        assert flattened(seen.addresses(pages)) == addresses
        assert list(seen.component_bytes) * len(pages) == sizes


@pytest.mark.parametrize(("model", "layout"), LEGAL)
def test_components_are_the_bytes_of_the_page_and_of_no_other(model: str, layout: str) -> None:
    for pool, seen in preset_layouts(model, layout):
        for page in (0, 3, PAGES - 1):
            views = page_views(pool, page)
            assert [view.ctypes.data for view in views] == flattened(seen.addresses([page]))
            assert tuple(view.nbytes for view in views) == seen.component_bytes


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_a_pool_of_few_pages_is_affine_too(pages: int) -> None:
    for pool in (mha(pages=pages), mla("layer_first", pages=pages), indexer(pages=pages)):
        (seen,) = layouts_of("kv", pool)
        every = list(range(pages))
        assert seen.access is Access.AFFINE
        assert flattened(seen.addresses(every)) == own_list(pool, every, PAGE)[0]


# -- pools that must be asked --------------------------------------------------------------


class ScatteredPool:
    """One component a page, wherever ``places`` says (in pages of its buffer)."""

    layout = "page_first"
    page_size = 2
    page_bytes = 16
    dtype = "uint8"
    shared_allocation_domain: Any = None

    def __init__(self, places: list[int], room: int = 16) -> None:
        self.places = places
        self.size = len(places) * self.page_size
        self.kv_buffer: Any = np.zeros(room * self.page_bytes, np.uint8)
        self.asked = 0

    def get_page_buffer_meta(self, indices: Any) -> Any:
        self.asked += 1
        pages = [int(i) // self.page_size for i in np.asarray(indices)[:: self.page_size]]
        base = self.kv_buffer.ctypes.data
        return [base + self.places[p] * self.page_bytes for p in pages], [self.page_bytes] * len(
            pages
        )

    def view(self, place: int) -> Any:
        return self.kv_buffer[place * self.page_bytes : (place + 1) * self.page_bytes]


def shared_pool(places: list[int]) -> ScatteredPool:
    pool = ScatteredPool(places)
    pool.shared_allocation_domain = object()
    return pool


def offsets(seen: PoolLayout, pool: ScatteredPool, pages: list[int]) -> list[int]:
    base = pool.kv_buffer.ctypes.data
    return [(a - base) // pool.page_bytes for a in flattened(seen.addresses(pages))]


def test_a_pool_whose_pages_are_not_evenly_spaced_is_asked() -> None:
    pool = ScatteredPool([0, 1, 2, 3, 9, 5])
    (seen,) = layouts_of("kv", pool)
    assert seen.access is Access.ASKED
    assert offsets(seen, pool, [4, 0, 5]) == [9, 0, 5]


def test_in_a_large_pool_pages_all_over_it_are_compared() -> None:
    places = list(range(3000))
    places[1500:] = range(1510, 3010)
    assert layouts_of("kv", ScatteredPool(places, 4000))[0].access is Access.ASKED
    assert layouts_of("kv", ScatteredPool(list(range(3000)), 4000))[0].access is Access.AFFINE


def test_a_pool_of_a_shared_allocation_is_asked_in_each_call_and_moved_pages_are_followed() -> None:
    pool = shared_pool([0, 1, 2, 3])
    (seen,) = layouts_of("kv", pool)
    assert seen.access is Access.ASKED
    before = pool.asked
    assert offsets(seen, pool, [1, 3]) == [1, 3]
    pool.places = [4, 7, 2, 0]
    assert offsets(seen, pool, [1, 3]) == [7, 0]
    assert pool.asked == before + 2


def test_moved_pages_are_restored_to_where_they_are_now() -> None:
    pool = shared_pool([0, 1, 2, 3])
    backend = logged_backend(("kv", pool))
    pool.view(1)[:] = 11
    assert backend.batch_set_v1(["a"], slots([1], 2)) == [True]
    pool.places = [0, 9, 2, 3]
    assert backend.batch_get_v1(["a"], slots([1], 2)) == [True]
    assert (pool.view(9) == 11).all()
    backend.close()


def test_no_page_of_a_pool_that_is_asked_is_no_address() -> None:
    pool = shared_pool([0, 1, 2, 3])
    (seen,) = layouts_of("kv", pool)
    assert seen.addresses([]) == []
    backend = logged_backend(("kv", pool))
    assert backend.batch_set_v1([], slots([], 2)) == []
    backend.close()


def test_page_sizes_that_change_after_registration_are_an_error() -> None:
    pool = shared_pool([0, 1, 2, 3])
    (seen,) = layouts_of("kv", pool)
    pool.page_bytes = 8
    with pytest.raises(LayoutError, match=r"'kv' changed its page sizes"):
        seen.addresses([1])


def test_an_address_outside_the_buffers_is_an_error_at_registration_and_later() -> None:
    with pytest.raises(LayoutError, match=r"'kv' lists addresses outside"):
        layouts_of("kv", ScatteredPool([0, 1, 2, 99]))
    pool = shared_pool([0, 1, 2, 3])
    (seen,) = layouts_of("kv", pool)
    pool.places = [0, 1, 16, 3]
    with pytest.raises(LayoutError, match=r"'kv' gave an address outside"):
        seen.addresses([2])


def test_pages_that_overlap_in_memory_are_an_error() -> None:
    with pytest.raises(LayoutError, match=r"'kv' lists pages that overlap"):
        layouts_of("kv", ScatteredPool([3, 3, 3, 3]))


def test_a_pool_over_tensors_is_asked_with_tensors() -> None:
    """SGLang's DeepSeek V4 state pools call ``numel`` on their indices."""

    class TensorPool(ScatteredPool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            assert indices.numel() % self.page_size == 0
            return super().get_page_buffer_meta(indices.data)

    pool = TensorPool([0, 1, 2, 3])
    array = pool.kv_buffer
    pool.kv_buffer = SimpleNamespace(ctypes=array.ctypes)
    pool.get_hybrid_pool_buffer = lambda: [FakeTensor(array)]  # type: ignore[attr-defined]
    (seen,) = layouts_of("kv", pool)
    assert seen.access is Access.AFFINE


# -- what cannot be stored -----------------------------------------------------------------


def described(**changes: Any) -> ScatteredPool:
    pool = ScatteredPool([0, 1, 2, 3])
    for name, value in changes.items():
        setattr(pool, name, value)
    return pool


def buffers_of_nothing() -> list[Any]:
    """As pools that were destroyed, which iterate over their missing buffers."""
    raise TypeError("'NoneType' object is not iterable")


def listing(answer: Any) -> Any:
    def get_page_buffer_meta(indices: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return get_page_buffer_meta


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        (described(layout="page_unified"), "'page_unified'.*supported are page_first"),
        (described(layout="page_first_kv_split"), "'page_first_kv_split'.*--hicache-mem-layout"),
        (described(size=1), "holds no page"),
        (described(kv_buffer=None), "no host memory.*destroyed"),
        (described(kv_buffer=np.empty(0, np.uint8)), "no host memory"),
        (described(get_hybrid_pool_buffer=buffers_of_nothing), "no host memory.*destroyed"),
        (described(get_page_buffer_meta=listing(None)), "lists no page addresses"),
        (described(get_page_buffer_meta=listing(([], []))), "lists 0 addresses"),
        (described(get_page_buffer_meta=listing(([1] * 3, [1] * 3))), "3 addresses.*4 pages"),
        (described(get_page_buffer_meta=listing(([1] * 4, [1] * 3))), "4 addresses and 3 sizes"),
        (described(get_page_buffer_meta=listing(([1] * 4, [0] * 4))), "empty component"),
        (described(get_page_buffer_meta=listing(([1] * 4, [1, 2, 1, 1]))), "different sizes"),
        (described(get_page_buffer_meta=listing(AssertionError("page 3"))), "failed.*page 3"),
        (described(get_page_buffer_meta=listing(TypeError("NoneType"))), "failed.*NoneType"),
        (
            described(layout="layer_first", get_page_buffer_meta=listing(ValueError("no"))),
            "'layer_first'.*use --hicache-mem-layout page_first",
        ),
        (
            described(
                get_page_buffer_meta=listing(NotImplementedError("scales")),
                get_dummy_flat_data_page=lambda: listing(NotImplementedError("scales"))(0),
            ),
            "no flat pages.*scales",
        ),
        (
            described(
                get_page_buffer_meta=listing(NotImplementedError("scales")),
                get_dummy_flat_data_page=lambda: np.empty(0, np.uint8),
            ),
            "empty component",
        ),
    ],
)
def test_a_pool_that_cannot_be_stored_is_an_error_that_names_it(pool: Any, says: str) -> None:
    with pytest.raises(LayoutError, match=rf"(?s)pool 'the_pool'.*{says}"):
        layouts_of("the_pool", pool)


def test_a_pool_without_flat_pages_is_refused_as_flat_kv_with_the_setting_to_add() -> None:
    pool = build(preset("mha-asymmetric"), pages=2, layout="page_first", layers_div=9)
    with pytest.raises(LayoutError, match=r"'kv' has no flat pages.*\"interface_v1\": 1"):
        flat_layout("kv", pool.group.anchor_entry.host_pool)


# -- logical anchors -----------------------------------------------------------------------


def test_only_a_pool_without_bytes_from_the_start_is_a_logical_anchor() -> None:
    assert is_logical(LogicalHostPool(pages=4, page_size=PAGE))
    for pool in (mha(), mla(), indexer(), state_pool()):
        assert not is_logical(pool)
        pool.destroy()
        assert not is_logical(pool), "a destroyed pool also has no kv_buffer"


def test_a_destroyed_logical_anchor_is_still_logical() -> None:
    pool = LogicalHostPool(pages=4, page_size=PAGE)
    pool.destroy()
    assert is_logical(pool)


@pytest.mark.parametrize("pool", [mha(), mla(), indexer()], ids=["mha", "mla", "indexer"])
def test_a_destroyed_pool_is_refused_and_not_taken_for_an_anchor(pool: HostPool) -> None:
    pool.destroy()
    backend = MemoryBackend(config(), {})
    with pytest.raises(LayoutError, match=r"'(kv|indexer)'.*destroyed"):
        backend.register_mem_pool_host(pool)
    backend.close()


# -- memory outlives the pool --------------------------------------------------------------


def test_bytes_can_be_restored_after_the_pools_are_destroyed() -> None:
    kv, swa = mha(), mla()
    group = HostPoolGroup([PoolEntry("kv", kv, True), PoolEntry("swa", swa)])
    backend = logged_backend(("kv", kv), ("swa", swa))
    buffers = {"kv": kv.kv_buffer, "swa": swa.kv_buffer}
    for seed, buffer in enumerate(buffers.values()):
        fill(buffer, seed)
    pages = {"kv": buffers["kv"][:, :PAGE].copy(), "swa": buffers["swa"][:PAGE].copy()}
    assert backend.batch_set_v1(["a"], slots([0])) == [True]
    assert backend.batch_set_v2([transfer("swa", ["a"], [0])]) == {"swa": [True]}
    group.destroy()
    del buffers["swa"]
    assert backend.batch_get_v1(["a"], slots([5])) == [True]
    assert np.array_equal(buffers["kv"][:, 5 * PAGE : 6 * PAGE], pages["kv"])
    assert backend.batch_get_v2([transfer("swa", ["a"], [5])]) == {"swa": [True]}
    backend.close()


def test_every_buffer_of_a_destroyed_pool_lives_until_close() -> None:
    geometry = V4Geometry(layers=3, row_bytes=16)
    pool = V4PagedHostPool(geometry, pages=4, page_size=PAGE, layout="layer_first", label="c4")
    backend = logged_backend(("kv", mha()), ("c4", pool))
    alive = [weakref.ref(buffer) for buffer in pool.kv_buffer]
    pool.destroy()
    gc.collect()
    assert all(ref() is not None for ref in alive)
    backend.close()
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


# -- recurrent states ----------------------------------------------------------------------


def state_pool(side: bool = False, temporal: tuple[int, ...] = (2, 3, 4)) -> MambaHostPool:
    geometry = MambaGeometry(
        layers=2,
        temporal_shape=temporal,
        conv_shapes=((6, 3), (5, 2)),
        side_shapes=((7,),) if side else (),
    )
    return MambaHostPool(geometry, pages=8, layout="page_first")


def slot_bytes(pool: MambaHostPool, slot: int) -> list[bytes]:
    return [buffer[slot].tobytes() for buffer in pool.get_hybrid_pool_buffer()]


@pytest.mark.parametrize(
    ("pool", "access"),
    [
        (state_pool(), Access.AFFINE),
        (state_pool(temporal=(0,)), Access.AFFINE),
        (state_pool(side=True), Access.STAGED),
        (state_pool(side=True, temporal=(0,)), Access.STAGED),
    ],
    ids=["states", "conv-only", "side", "conv-only-side"],
)
def test_states_of_every_kind_come_back_byte_exact_and_leave_the_others_alone(
    pool: MambaHostPool, access: Access
) -> None:
    assert layouts_of("mamba", pool)[0].access is access
    backend = logged_backend(("kv", mha()), ("mamba", pool))
    for seed, buffer in enumerate(pool.get_hybrid_pool_buffer()):
        fill(buffer, seed)
    stored = [slot_bytes(pool, slot) for slot in range(3)]
    assert all(backend.batch_set_v2([transfer("mamba", ["a", "b", "c"], [0, 1, 2], 1)])["mamba"])
    for seed, buffer in enumerate(pool.get_hybrid_pool_buffer()):
        fill(buffer, 100 + seed)
    others = {slot: slot_bytes(pool, slot) for slot in (0, 1, 2, 4, 7)}
    answers = backend.batch_get_v2([transfer("mamba", ["c", "x", "a", "b"], [5, 4, 6, 3], 1)])
    assert answers == {"mamba": [True, False, True, True]}
    assert [slot_bytes(pool, slot) for slot in (6, 3, 5)] == stored
    assert {slot: slot_bytes(pool, slot) for slot in others} == others
    backend.close()


def test_staged_states_are_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    backend = logged_backend(("kv", mha()), ("mamba", state_pool(side=True)))
    for _ in range(2):
        backend.batch_set_v2([transfer("mamba", ["a", "b"], [0, 1], 1)])
    backend.batch_get_v2([transfer("mamba", ["a"], [0], 1)])
    lines = [record for record in caplog.records if "slower path" in record.message]
    assert len(lines) == 1
    assert "'mamba'" in lines[0].message
    assert sum(backend.stats.slow_paths().values()) == 5
    backend.close()


def test_a_staged_pool_that_changed_its_page_size_is_an_error() -> None:
    pool = state_pool(side=True)
    backend = logged_backend(("kv", mha()), ("mamba", pool))
    backend.batch_set_v2([transfer("mamba", ["a"], [0], 1)])
    pool.size_per_token += 4
    with pytest.raises(LayoutError, match=r"'mamba' changed its page size"):
        backend.batch_get_v2([transfer("mamba", ["a"], [0], 1)])
    backend.close()


# -- heads split over objects --------------------------------------------------------------

HEADS = 8


def of_rank(rank: int, size: int, seed: int | None = None) -> Any:
    """The heads of one rank out of the same full tensor, in ``page_head``."""
    pool = mha("page_head", heads=HEADS // size)
    if seed is not None:
        full = mha("page_head", heads=HEADS)
        fill(full.kv_buffer, seed)
        width = HEADS // size
        pool.kv_buffer[...] = full.kv_buffer[:, :, rank * width : (rank + 1) * width]
    return pool


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 2), (1, 4), (4, 1), (2, 2)])
def test_ranks_of_one_tp_size_read_what_ranks_of_another_wrote(
    writers: int, readers: int, request: pytest.FixtureRequest
) -> None:
    shelf = request.node.nodeid

    def ranks(size: int, seed: int | None) -> list[tuple[Any, MemoryBackend]]:
        pools = [of_rank(rank, size, seed) for rank in range(size)]
        settings: dict[str, Any] = {"tp_size": size, "tp_lcm_size": 4, "shelf": shelf}
        return [(p, memory_backend(p, tp_rank=r, **settings)) for r, p in enumerate(pools)]

    for _, backend in ranks(writers, 1):
        assert backend.batch_set_v1(["a", "b"], slots([2, 3])) == [True, True]
    for rank, (pool, backend) in enumerate(ranks(readers, None)):
        assert backend.batch_exists(["a", "b", "c"]) == 2
        assert backend.batch_get_v1(["b", "a", "c"], slots([0, 5, 6])) == [True, True, False]
        expected = of_rank(rank, readers, 1).kv_buffer
        assert np.array_equal(pool.kv_buffer[:, 0], expected[:, 3])
        assert np.array_equal(pool.kv_buffer[:, 5], expected[:, 2])
        assert not pool.kv_buffer[:, [1, 2, 3, 4, 7]].any()


def test_a_page_counts_only_with_all_head_shards() -> None:
    backend = memory_backend(of_rank(0, 2, 1), tp_rank=0, tp_size=2, tp_lcm_size=8)
    assert backend.batch_set_v1(["a"], slots([0])) == [True]
    shelf = backend._store._shelf  # type: ignore[attr-defined]
    assert len(shelf.objects) == 4
    for key in list(shelf.objects):
        value = shelf.objects.pop(key)
        assert backend.batch_exists(["a"]) == 0
        assert backend.batch_get_v1(["a"], slots([1])) == [False]
        shelf.objects[key] = value
    assert backend.batch_exists(["a"]) == 1


def test_keys_name_the_head_shard_and_not_the_rank() -> None:
    def shards(rank: int, size: int, lcm: int) -> list[tuple[int, int] | None]:
        backend = memory_backend(of_rank(rank, size), tp_rank=rank, tp_size=size, tp_lcm_size=lcm)
        return [stored.layout.head_shard for stored in backend._pools.kv.stored]

    assert shards(1, 2, 4) == [(2, 4), (3, 4)]
    assert shards(2, 4, 4) == [(2, 4)]
    assert shards(1, 2, 8) == [(4, 8), (5, 8), (6, 8), (7, 8)]

    def prefixes(rank: int, size: int, lcm: int | None) -> set[str]:
        backend = memory_backend(of_rank(rank, size), tp_rank=rank, tp_size=size, tp_lcm_size=lcm)
        return {stored.prefix for stored in backend._pools.kv.stored}

    assert prefixes(1, 2, 4) == prefixes(2, 4, 4) | prefixes(3, 4, 4)
    assert prefixes(0, 2, 4).isdisjoint(prefixes(1, 2, 4))
    assert prefixes(0, 2, 4).isdisjoint(prefixes(0, 2, 8))
    assert prefixes(0, 2, None).isdisjoint(prefixes(0, 2, 4))


def test_a_head_shard_out_of_another_number_is_another_object() -> None:
    """With more ranks than heads, shard 1 of 8 holds other heads of the same size than 1 of 4."""
    backends = [
        memory_backend(mha("page_head", heads=1), tp_rank=1, tp_size=size, tp_lcm_size=size)
        for size in (4, 8)
    ]
    four, eight = (backend._pools.kv.stored[0] for backend in backends)
    assert four.layout.component_bytes == eight.layout.component_bytes
    assert four.prefix != eight.prefix


def test_a_tp_lcm_size_that_is_no_multiple_of_the_tp_size_is_an_error() -> None:
    with pytest.raises(LayoutError, match=r"tp_lcm_size 6 is no multiple of the TP size 4"):
        memory_backend(of_rank(0, 4), tp_size=4, tp_lcm_size=6)


def test_heads_that_do_not_split_are_an_error_that_names_the_pool() -> None:
    with pytest.raises(HiCacheError, match="'kv'"):
        memory_backend(mha("page_head", heads=3), tp_size=2, tp_lcm_size=4)


def test_heads_are_split_in_page_head_alone() -> None:
    backend = memory_backend(mha("page_first", heads=4), tp_size=2, tp_lcm_size=4)
    assert [stored.layout.head_shard for stored in backend._pools.kv.stored] == [None]


# -- stores of one buffer an object --------------------------------------------------------


class OneBufferStore(MemoryStore):
    @property
    def caps(self) -> Caps:
        return Caps(max_components=1)


class OneBufferBackend(MemoryBackend):
    def open_store(self, config: Any, storage_config: Any) -> MemoryStore:
        return OneBufferStore()


def test_a_store_of_one_buffer_refuses_layer_first_whole_and_takes_page_first_afterwards() -> None:
    backend = OneBufferBackend(config(is_mla_model=True), {})
    with pytest.raises(LayoutError, match=r"'kv'.*3 buffers.*--hicache-mem-layout page_first"):
        backend.register_mem_pool_host(mla("layer_first"))
    with pytest.raises(LayoutError, match="before the anchor"):
        backend.register_mem_host_pool_v2(indexer(), "indexer")
    backend.register_mem_pool_host(mla("page_first"))
    backend.register_mem_host_pool_v2(indexer(), "indexer")
    assert backend.batch_set_v1(["a"], slots([0])) == [True]
    with pytest.raises(LayoutError, match="'late'"):
        backend.register_mem_host_pool_v2(mla("layer_first"), "late")
    with pytest.raises(HiCacheError, match="'late' is not registered; registered: indexer, kv"):
        backend.batch_set_v2([transfer("late", ["a"], [0])])
    backend.close()
