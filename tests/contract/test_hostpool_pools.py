"""Reference host pools: which bytes are where, against orders of axes written down here.

The oracle fills a pool's arrays from canonical ones (axes ``t`` K or V, ``l`` layer,
``p`` page, ``o`` slot in the page, ``h`` head, ``d`` element) and says from those which
bytes each component of a page must hold. The orders are those of SGLang 0.5.23's
``init_kv_buffer`` and ``get_page_buffer_meta``.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_shared.errors import LayoutError, TransferError
from hicache_shared.hostpool import (
    LEGAL_LAYOUTS,
    AsymmetricMHAHostPool,
    DSAIndexerGeometry,
    DSAIndexerHostPool,
    LogicalHostPool,
    MambaGeometry,
    MambaHostPool,
    MHAGeometry,
    MHAHostPool,
    MLAGeometry,
    MLAHostPool,
    V4Geometry,
    V4PagedHostPool,
    V4StateHostPool,
    aligned_bytes,
    dtype_of,
    page_views,
)
from hicache_shared.hostpool.memory import AnyArray
from hicache_shared.layout import MEMORY_LAYOUTS, Access, is_logical, layouts_of

PHYSICAL = [
    (kind, layout)
    for kind, layouts in LEGAL_LAYOUTS.items()
    if kind != "logical"
    for layout in layouts
]

MHA_AXES = {
    "layer_first": "tlpohd",
    "page_first": "tpolhd",
    "page_first_direct": "tplohd",
    "page_head": "tphold",
}
MLA_AXES = {"layer_first": "lpod", "page_first": "pold", "page_first_direct": "plod"}


@dataclass
class Filled:
    """A pool with known bytes: per page, its components, and its flat form if it has one."""

    pool: Any
    pages: int
    components: list[list[bytes]]
    flat: list[bytes] | None


def ordered(array: AnyArray, axes: str, wanted: str) -> AnyArray:
    return np.ascontiguousarray(np.einsum(f"{axes}->{wanted}", array))


def random_like(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> AnyArray:
    top = np.iinfo(dtype).max
    values: AnyArray = rng.integers(0, top, size=shape, dtype=dtype, endpoint=True)
    return values


def filled_mha(layout: str, draw: Any, rng: np.random.Generator, **sizes: int) -> Filled:
    geometry = MHAGeometry(
        layers=sizes["layers"],
        head_num=draw(st.integers(1, 4)),
        head_dim=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from(["bfloat16", "float8_e4m3fn", "float32"])),
    )
    pages, page_size = sizes["pages"], sizes["page_size"]
    pool = MHAHostPool(geometry, pages=pages, page_size=page_size, layout=layout)
    shape = (2, geometry.layers, pages, page_size, geometry.head_num, geometry.head_dim)
    canonical = random_like(rng, shape, pool.kv_buffer.dtype)
    axes = MHA_AXES[layout]
    pool.kv_buffer[...] = ordered(canonical, "tlpohd", axes).reshape(pool.kv_buffer.shape)
    page_axes = axes.replace("p", "")
    flat = [ordered(canonical[:, :, p], "tlohd", page_axes).tobytes() for p in range(pages)]
    if layout == "layer_first":
        parts = [(t, layer) for layer in range(geometry.layers) for t in (0, 1)]
        components = [
            [canonical[t, layer, p].tobytes() for t, layer in parts] for p in range(pages)
        ]
    else:
        half = len(flat[0]) // 2
        components = [[data[:half], data[half:]] for data in flat]
    return Filled(pool, pages, components, flat)


def filled_asymmetric(layout: str, draw: Any, rng: np.random.Generator, **sizes: int) -> Filled:
    head_dim = draw(st.integers(1, 4))
    geometry = MHAGeometry(
        layers=sizes["layers"],
        head_num=draw(st.integers(1, 4)),
        head_dim=head_dim,
        v_head_dim=head_dim + draw(st.integers(1, 3)),
    )
    pages, page_size = sizes["pages"], sizes["page_size"]
    pool = AsymmetricMHAHostPool(geometry, pages=pages, page_size=page_size, layout=layout)
    axes = {"page_first": "polhd", "page_first_direct": "plohd"}[layout]
    components: list[list[bytes]] = [[] for _ in range(pages)]
    for buffer, dim in zip(pool.kv_buffer, (head_dim, geometry.v_dim), strict=True):
        shape = (geometry.layers, pages, page_size, geometry.head_num, dim)
        canonical = random_like(rng, shape, buffer.dtype)
        buffer[...] = ordered(canonical, "lpohd", axes).reshape(buffer.shape)
        for p in range(pages):
            page = ordered(canonical[:, p], "lohd", axes.replace("p", ""))
            components[p].append(page.tobytes())
    return Filled(pool, pages, components, None)


def filled_mla(layout: str, draw: Any, rng: np.random.Generator, **sizes: int) -> Filled:
    geometry = MLAGeometry(
        layers=sizes["layers"],
        kv_lora_rank=draw(st.integers(1, 6)),
        qk_rope_head_dim=draw(st.integers(1, 3)),
    )
    pages, page_size = sizes["pages"], sizes["page_size"]
    pool = MLAHostPool(geometry, pages=pages, page_size=page_size, layout=layout)
    row = geometry.kv_lora_rank + geometry.qk_rope_head_dim
    canonical = random_like(rng, (geometry.layers, pages, page_size, row), pool.kv_buffer.dtype)
    axes = MLA_AXES[layout]
    pool.kv_buffer[...] = ordered(canonical, "lpod", axes).reshape(pool.kv_buffer.shape)
    page_axes = axes.replace("p", "")
    flat = [ordered(canonical[:, p], "lod", page_axes).tobytes() for p in range(pages)]
    if layout == "layer_first":
        components = [[layer[p].tobytes() for layer in canonical] for p in range(pages)]
    else:
        components = [[data] for data in flat]
    return Filled(pool, pages, components, flat)


def filled_dsa(layout: str, draw: Any, rng: np.random.Generator, **sizes: int) -> Filled:
    geometry = DSAIndexerGeometry(
        layers=sizes["layers"], index_head_dim=draw(st.sampled_from([4, 8])), quant_block_size=4
    )
    pages, page_size = sizes["pages"], sizes["page_size"]
    pool = DSAIndexerHostPool(geometry, pages=pages, page_size=page_size, layout=layout)
    row = page_size * (geometry.index_head_dim + geometry.index_head_dim // 4 * 4)
    canonical = random_like(rng, (pages, geometry.layers, 1, row), np.uint8)
    assert pool.index_k_with_scale_buffer is not None
    pool.index_k_with_scale_buffer[:pages] = canonical
    flat = [page.tobytes() for page in canonical]
    return Filled(pool, pages, [[data] for data in flat], flat)


def filled_mamba(layout: str, draw: Any, rng: np.random.Generator, **sizes: int) -> Filled:
    shapes = st.tuples(st.integers(1, 3), st.integers(1, 3))
    temporal = draw(st.one_of(shapes, st.just((0,))))
    geometry = MambaGeometry(
        layers=sizes["layers"],
        temporal_shape=temporal,
        conv_shapes=tuple(draw(st.lists(shapes, min_size=1, max_size=3))),
    )
    pages = sizes["pages"]
    pool = MambaHostPool(geometry, pages=pages, layout=layout)
    components: list[list[bytes]] = [[] for _ in range(pages)]
    for buffer in (pool.temporal_buffer, *pool.conv_buffer):
        buffer[...] = random_like(rng, buffer.shape, buffer.dtype)
        for p in range(pages if buffer.size else 0):
            components[p].append(buffer[p].tobytes())
    return Filled(pool, pages, components, [b"".join(parts) for parts in components])


def filled_v4(
    layout: str, draw: Any, rng: np.random.Generator, *, state: bool, **sizes: int
) -> Filled:
    row = draw(st.integers(1, 40))
    geometry = V4Geometry(layers=sizes["layers"], row_bytes=row, state=state)
    pages = sizes["pages"]
    pool_class = V4StateHostPool if state else V4PagedHostPool
    pool = pool_class(
        geometry, pages=pages, page_size=sizes["page_size"], layout=layout, label="v4"
    )
    canonical = random_like(rng, (geometry.layers, pages, row), np.uint8)
    if layout == "layer_first":
        for buffer, layer in zip(pool.kv_buffer, canonical, strict=True):
            buffer[...] = layer
        components = [[layer[p].tobytes() for layer in canonical] for p in range(pages)]
    else:
        pool.kv_buffer[...] = canonical.swapaxes(0, 1).reshape(pool.kv_buffer.shape)
        components = [[canonical[:, p].tobytes()] for p in range(pages)]
    return Filled(pool, pages, components, [b"".join(parts) for parts in components])


FILLERS: dict[str, Callable[..., Filled]] = {
    "mha": filled_mha,
    "mha_asymmetric": filled_asymmetric,
    "mla": filled_mla,
    "dsa_indexer": filled_dsa,
    "mamba": filled_mamba,
    "deepseek_v4_paged": partial(filled_v4, state=False),
    "deepseek_v4_state": partial(filled_v4, state=True),
}


def filled(data: st.DataObject, kind: str, layout: str, min_pages: int = 1) -> Filled:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    sizes = {
        "layers": data.draw(st.integers(1, 4), label="layers"),
        "pages": data.draw(st.integers(min_pages, 6), label="pages"),
        "page_size": data.draw(st.integers(1, 5), label="page size"),
    }
    return FILLERS[kind](layout, data.draw, rng, **sizes)


def slots_of(pool: Any, pages: list[int]) -> AnyArray:
    firsts = np.array(pages, dtype=np.int64)[:, None] * pool.page_size
    slots: AnyArray = (firsts + np.arange(pool.page_size)).reshape(-1)
    return slots


def spans_of(pool: Any, pages: list[int]) -> list[tuple[int, int]]:
    return list(zip(*pool.get_page_buffer_meta(slots_of(pool, pages)), strict=True))


def bytes_at(spans: list[tuple[int, int]]) -> list[bytes]:
    return [ctypes.string_at(address, nbytes) for address, nbytes in spans]


@pytest.mark.parametrize(("kind", "layout"), PHYSICAL)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_listed_addresses_hold_the_page_component_by_component(
    kind: str, layout: str, data: st.DataObject
) -> None:
    case = filled(data, kind, layout)
    order = data.draw(st.permutations(range(case.pages)), label="pages asked")
    expected = [part for page in order for part in case.components[page]]
    assert bytes_at(spans_of(case.pool, order)) == expected


@pytest.mark.parametrize(("kind", "layout"), PHYSICAL)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_layouts_are_affine_and_agree_with_the_pool(
    kind: str, layout: str, data: st.DataObject
) -> None:
    case = filled(data, kind, layout)
    (seen,) = layouts_of(kind, case.pool)
    assert seen.access is Access.AFFINE
    assert seen.pages == case.pages
    assert seen.component_bytes == tuple(map(len, case.components[0]))
    assert case.pool.get_page_buffer_element_size() == seen.component_bytes[0]
    order = list(reversed(range(case.pages)))
    computed = np.array(seen.addresses(order), dtype=np.uint64).reshape(-1)
    listed = [address for address, _ in spans_of(case.pool, order)]
    assert computed.tolist() == listed


@pytest.mark.parametrize(("kind", "layout"), PHYSICAL)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_pages_are_disjoint_and_inside_the_buffers(
    kind: str, layout: str, data: st.DataObject
) -> None:
    case = filled(data, kind, layout)
    spans = sorted(spans_of(case.pool, list(range(case.pages))))
    assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
    if hasattr(case.pool, "get_hybrid_pool_buffer"):
        buffers = case.pool.get_hybrid_pool_buffer()
    else:
        buffers = [case.pool.kv_buffer]
    ranges = [(b.ctypes.data, b.ctypes.data + b.nbytes) for b in buffers]
    assert all(any(low <= a and a + n <= high for low, high in ranges) for a, n in spans)


@pytest.mark.parametrize(
    ("kind", "layout"), [pair for pair in PHYSICAL if pair[0] != "mha_asymmetric"]
)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_flat_page_restores_into_another_page_and_touches_no_third(
    kind: str, layout: str, data: st.DataObject
) -> None:
    case = filled(data, kind, layout, min_pages=2)
    source, target = data.draw(st.permutations(range(case.pages)), label="source, target")[:2]
    pool, size = case.pool, case.pool.page_size
    flat = pool.get_data_page(source * size)
    assert case.flat is not None
    assert flat.tobytes() == case.flat[source]
    assert pool.get_dummy_flat_data_page().nbytes == flat.nbytes
    pool.set_from_flat_data_page(target * size, flat.copy())
    expected = list(case.components)
    expected[target] = case.components[source]
    everything = spans_of(pool, list(range(case.pages)))
    assert bytes_at(everything) == [part for page in expected for part in page]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_head_shards_are_k_then_v_of_each_group_of_heads(data: st.DataObject) -> None:
    case = filled(data, "mha", "page_head")
    pool = case.pool
    factors = [f for f in range(1, pool.head_num + 1) if pool.head_num % f == 0]
    factor = data.draw(st.sampled_from(factors), label="split factor")
    spans = list(
        zip(
            *pool.get_split_heads_page_buffer_meta(slots_of(pool, list(range(case.pages))), factor),
            strict=True,
        )
    )
    expected = []
    for k, v in case.components:
        step = len(k) // factor
        for start in range(0, len(k), step):
            expected += [k[start : start + step], v[start : start + step]]
    assert bytes_at(spans) == expected
    assert pool.get_page_buffer_element_size(factor) == len(expected[0])


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_head_shards_of_a_rank_are_affine_layouts_of_their_own(data: st.DataObject) -> None:
    case = filled(data, "mha", "page_head")
    pool = case.pool
    shards = layouts_of(
        "kv", pool, split_factor=pool.head_num, first_shard=0, shard_count=2 * pool.head_num
    )
    assert [shard.head_shard for shard in shards] == [
        (i, 2 * pool.head_num) for i in range(pool.head_num)
    ]
    assert {shard.access for shard in shards} == {Access.AFFINE}
    assert sum(shard.page_bytes for shard in shards) == sum(map(len, case.components[0]))


SHAPES = {
    ("mha", "layer_first"): [(2, 7, 15, 2, 4)],
    ("mha", "page_first"): [(2, 15, 7, 2, 4)],
    ("mha", "page_first_direct"): [(2, 5, 7, 3, 2, 4)],
    ("mha", "page_head"): [(2, 5, 2, 3, 7, 4)],
    ("mha_asymmetric", "page_first"): [(15, 7, 2, 4), (15, 7, 2, 6)],
    ("mha_asymmetric", "page_first_direct"): [(5, 7, 3, 2, 4), (5, 7, 3, 2, 6)],
    ("mla", "layer_first"): [(7, 15, 1, 9)],
    ("mla", "page_first"): [(15, 7, 1, 9)],
    ("mla", "page_first_direct"): [(5, 7, 3, 1, 9)],
    ("dsa_indexer", "page_first"): [(6, 7, 1, 3 * 132)],
    ("dsa_indexer", "page_first_direct"): [(6, 7, 1, 3 * 132)],
    ("mamba", "page_first"): [(5, 7, 1, 2, 3), (5, 7, 1, 4, 1), (5, 8)],
    ("mamba", "page_first_direct"): [(5, 7, 1, 2, 3), (5, 7, 1, 4, 1), (5, 8)],
    ("deepseek_v4_paged", "layer_first"): [(5, 11)] * 7,
    ("deepseek_v4_paged", "page_first"): [(5, 7, 11)],
    ("deepseek_v4_paged", "page_first_direct"): [(5, 7, 1, 11)],
    ("deepseek_v4_state", "layer_first"): [(5, 11)] * 7,
    ("deepseek_v4_state", "page_first"): [(5, 7, 11)],
    ("deepseek_v4_state", "page_first_direct"): [(5, 7, 1, 11)],
}
"""Array shapes of SGLang 0.5.23's own pools: 5 pages of 3 slots, 7 layers."""

SHAPED: dict[str, Any] = {
    "mha": MHAGeometry(layers=7, head_num=2, head_dim=4),
    "mha_asymmetric": MHAGeometry(layers=7, head_num=2, head_dim=4, v_head_dim=6),
    "mla": MLAGeometry(layers=7, kv_lora_rank=8, qk_rope_head_dim=1),
    "dsa_indexer": DSAIndexerGeometry(layers=7),
    "mamba": MambaGeometry(
        layers=7, temporal_shape=(2, 3), conv_shapes=((4, 1),), side_shapes=((8,),)
    ),
    "deepseek_v4_paged": V4Geometry(layers=7, row_bytes=11),
    "deepseek_v4_state": V4Geometry(layers=7, row_bytes=11, state=True),
}


@pytest.mark.parametrize(("kind", "layout"), PHYSICAL)
def test_arrays_have_the_shapes_of_sglangs(kind: str, layout: str) -> None:
    pool = SHAPED[kind].pool(
        label=kind,
        pages=5,
        page_size=1 if kind == "mamba" else 3,
        layout=layout,
        allocate=aligned_bytes,
    )
    if kind == "dsa_indexer":
        buffers = [pool.index_k_with_scale_buffer]
    elif isinstance(pool.kv_buffer, list | tuple):
        buffers = list(pool.kv_buffer)
    else:
        buffers = [pool.kv_buffer]
    assert [buffer.shape for buffer in buffers] == SHAPES[kind, layout]


@pytest.mark.parametrize("layout", LEGAL_LAYOUTS["mamba"])
@pytest.mark.parametrize("temporal", [(2, 3), (0,)])
def test_mamba_side_states_travel_in_the_flat_form_alone(
    layout: str, temporal: tuple[int, ...]
) -> None:
    geometry = MambaGeometry(
        layers=2, temporal_shape=temporal, conv_shapes=((3, 1),), side_shapes=((5,), (1, 2))
    )
    pool = MambaHostPool(geometry, pages=3, layout=layout)
    rng = np.random.default_rng(7)
    for page in range(3):
        for view in page_views(pool, page):
            view[:] = rng.integers(0, 256, view.size, dtype=np.uint8)
    with pytest.raises(NotImplementedError, match="side states"):
        pool.get_page_buffer_meta(np.array([0]))
    (seen,) = layouts_of("mamba", pool)
    assert seen.access is Access.STAGED
    assert seen.page_bytes == pool.size_per_token == pool.get_data_page(0).nbytes
    before = [pool.get_data_page(page).tobytes() for page in range(3)]
    pool.set_from_flat_data_page(2, pool.get_data_page(0))
    after = [pool.get_data_page(page).tobytes() for page in range(3)]
    assert after == [before[0], before[1], before[0]]
    assert pool.slot_state_buffers[1][2].tobytes() == pool.slot_state_buffers[1][0].tobytes()


def test_unequal_heads_have_no_flat_form() -> None:
    geometry = MHAGeometry(layers=1, head_num=1, head_dim=2, v_head_dim=1)
    pool = AsymmetricMHAHostPool(geometry, pages=2, page_size=2, layout="page_first")
    with pytest.raises(NotImplementedError):
        pool.get_data_page(0)
    with pytest.raises(NotImplementedError):
        pool.get_dummy_flat_data_page()
    with pytest.raises(NotImplementedError):
        pool.set_from_flat_data_page(0, np.zeros(12, dtype=np.uint8))
    with pytest.raises(NotImplementedError):
        pool.get_split_heads_page_buffer_meta(np.arange(2), 1)


def small_pool(kind: str, layout: str) -> Any:
    mha = MHAGeometry(layers=2, head_num=2, head_dim=2)
    if kind == "logical":
        return LogicalHostPool(pages=2, page_size=2, layout=layout)
    if kind == "mamba":
        states = MambaGeometry(layers=2, temporal_shape=(2,), conv_shapes=((2, 2),))
        return MambaHostPool(states, pages=2, layout=layout)
    kinds: dict[str, tuple[Any, Any]] = {
        "mha": (MHAHostPool, mha),
        "mha_asymmetric": (
            AsymmetricMHAHostPool,
            MHAGeometry(layers=2, head_num=2, head_dim=2, v_head_dim=1),
        ),
        "mla": (MLAHostPool, MLAGeometry(layers=2, kv_lora_rank=2, qk_rope_head_dim=1)),
        "dsa_indexer": (DSAIndexerHostPool, DSAIndexerGeometry(layers=2)),
        "deepseek_v4_paged": (V4PagedHostPool, V4Geometry(layers=2, row_bytes=8)),
        "deepseek_v4_state": (V4StateHostPool, V4Geometry(layers=2, row_bytes=8, state=True)),
    }
    pool_class, geometry = kinds[kind]
    return pool_class(geometry, pages=2, page_size=2, layout=layout, label=kind)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(k, m) for k, legal in LEGAL_LAYOUTS.items() for m in MEMORY_LAYOUTS if m not in legal],
)
def test_an_illegal_layout_names_pool_layout_and_the_legal_ones(kind: str, layout: str) -> None:
    with pytest.raises(LayoutError) as caught:
        small_pool(kind, layout)
    message = str(caught.value)
    assert kind in message
    assert repr(layout) in message
    assert all(legal in message for legal in LEGAL_LAYOUTS[kind])


LACKING = {
    "logical": {"page_num", "logical_page_size", "get_hybrid_pool_buffer", "head_num"},
    "mha": {"num_host_pages"},
    "mha_asymmetric": {"num_host_pages"},
    "mla": {"get_hybrid_pool_buffer", "get_split_heads_page_buffer_meta", "head_num"},
    "dsa_indexer": {"kv_buffer", "head_num"},
    "mamba": {"layer_num", "start_layer", "end_layer", "head_num"},
    "deepseek_v4_paged": {"page_num", "head_num"},
    "deepseek_v4_state": {"page_num", "head_num"},
}
"""What SGLang's pools do not have, so that no backend comes to rely on it here."""


@pytest.mark.parametrize("kind", LEGAL_LAYOUTS)
def test_pools_lack_what_sglangs_lack(kind: str) -> None:
    pool = small_pool(kind, "page_first")
    assert {name for name in LACKING[kind] if hasattr(pool, name)} == set()


@pytest.mark.parametrize("kind", LEGAL_LAYOUTS)
def test_only_the_logical_pool_is_logical_also_after_destroy(kind: str) -> None:
    pool = small_pool(kind, "page_first")
    assert is_logical(pool) is (kind == "logical")
    pool.destroy()
    pool.destroy()
    assert pool.kv_buffer is None
    assert is_logical(pool) is (kind == "logical")


@pytest.mark.parametrize("kind", [k for k in LEGAL_LAYOUTS if k not in ("logical", "mamba")])
def test_a_destroyed_pool_gives_no_addresses(kind: str) -> None:
    pool = small_pool(kind, "page_first")
    pool.destroy()
    with pytest.raises(LayoutError, match="destroyed"):
        pool.get_page_buffer_meta(np.arange(2))


@pytest.mark.parametrize(("kind", "layout"), PHYSICAL)
def test_a_layout_keeps_the_memory_of_a_destroyed_pool(kind: str, layout: str) -> None:
    pool = small_pool(kind, layout)
    for view in page_views(pool, 1):
        view[:] = 0x5A
    spans = spans_of(pool, [1])
    (seen,) = layouts_of(kind, pool)
    pool.destroy()
    del pool
    gc.collect()
    assert {byte for part in bytes_at(spans) for byte in part} == {0x5A}
    assert seen.pages == 2


@pytest.mark.parametrize(("kind", "layout"), PHYSICAL)
def test_misaligned_indices_and_flat_pages_of_another_size_are_refused(
    kind: str, layout: str
) -> None:
    pool = small_pool(kind, layout)
    if kind != "mamba":
        with pytest.raises(TransferError, match="whole pages of 2"):
            pool.get_page_buffer_meta(np.arange(3))
    if kind != "mha_asymmetric":
        page = pool.get_dummy_flat_data_page()
        with pytest.raises(TransferError, match=f"has {page.nbytes} bytes"):
            pool.set_from_flat_data_page(0, page[:-1])


@pytest.mark.parametrize(
    ("pool_class", "geometry"),
    [
        (MHAHostPool, SHAPED["mha_asymmetric"]),
        (AsymmetricMHAHostPool, SHAPED["mha"]),
        (V4PagedHostPool, SHAPED["deepseek_v4_state"]),
        (V4StateHostPool, SHAPED["deepseek_v4_paged"]),
    ],
)
def test_a_pool_refuses_the_geometry_of_another_kind(pool_class: Any, geometry: Any) -> None:
    with pytest.raises(LayoutError, match=pool_class.kind):
        pool_class(geometry, pages=1, page_size=1, layout="page_first", label="x")


def test_heads_split_in_page_head_alone_and_evenly() -> None:
    geometry = MHAGeometry(layers=1, head_num=4, head_dim=2)
    with pytest.raises(LayoutError, match="page_head only"):
        MHAHostPool(
            geometry, pages=1, page_size=1, layout="page_first"
        ).get_split_heads_page_buffer_meta(np.arange(1), 2)
    with pytest.raises(LayoutError, match="4 heads"):
        MHAHostPool(
            geometry, pages=1, page_size=1, layout="page_head"
        ).get_split_heads_page_buffer_meta(np.arange(1), 3)


def test_memory_comes_from_the_callers_allocator_buffer_by_buffer() -> None:
    asked: list[int] = []

    def allocate(nbytes: int) -> AnyArray:
        asked.append(nbytes)
        return np.zeros(nbytes, dtype=np.uint8)

    pool = V4PagedHostPool(
        V4Geometry(layers=3, row_bytes=8),
        pages=2,
        page_size=4,
        layout="layer_first",
        label="v4",
        allocate=allocate,
    )
    assert asked == [16, 16, 16]
    assert [buffer.nbytes for buffer in pool.kv_buffer] == asked


@pytest.mark.parametrize(
    "wrong",
    [
        lambda n: np.zeros(n - 1, dtype=np.uint8),
        lambda n: np.zeros(n, dtype=np.int8),
        lambda n: np.zeros(2 * n, dtype=np.uint8)[::2],
        lambda n: np.frombuffer(bytes(n), dtype=np.uint8),
    ],
    ids=["short", "dtype", "strided", "read-only"],
)
def test_an_allocator_that_gives_something_else_is_refused(wrong: Callable[[int], Any]) -> None:
    with pytest.raises(LayoutError, match=r"allocate\(24\)"):
        MLAHostPool(
            MLAGeometry(layers=1, kv_lora_rank=2, qk_rope_head_dim=1),
            pages=2,
            page_size=2,
            layout="page_first",
            allocate=wrong,
        )


def test_default_memory_is_aligned_for_direct_io() -> None:
    for layout in LEGAL_LAYOUTS["deepseek_v4_paged"]:
        pool = small_pool("deepseek_v4_paged", layout)
        assert all(b.ctypes.data % 4096 == 0 for b in pool.get_hybrid_pool_buffer())


def test_a_dtype_reads_as_its_name_and_an_unknown_one_is_refused() -> None:
    assert (str(dtype_of("bfloat16")), dtype_of("bfloat16").itemsize) == ("bfloat16", 2)
    assert dtype_of("float8_e4m3fn").storage == np.uint8
    with pytest.raises(LayoutError, match="'bf16'; known are bfloat16"):
        dtype_of("bf16")
