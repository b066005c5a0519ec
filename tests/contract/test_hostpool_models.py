"""Models: which pools, how large a page, whose slots, which policy, how many host pages."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_shared.contract import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    SidecarPoolSpec,
)
from hicache_shared.errors import ConfigError, LayoutError, UnknownPoolError
from hicache_shared.hostpool import (
    PRESETS,
    DeepSeekV4Model,
    LogicalHostPool,
    MHAGeometry,
    MLAGeometry,
    PlainModel,
    PoolSpec,
    V4Geometry,
    build,
    legal_layouts,
    page_views,
    preset,
    with_draft,
)
from hicache_shared.identity import is_rank_sharded
from hicache_shared.layout import Access, layouts_of

ALL, TRAILING = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES

# name -> pool -> (layers, bytes of a page and layer, source, policy, window in pages)
GEOMETRY: dict[str, dict[str, tuple[int, int, str | None, PoolHitPolicy, int]]] = {
    "deepseek-v4-flash": {
        "swa": (44, 149_760, None, TRAILING, 1),
        "deepseek_v4_c4": (21, 37_440, "kv", ALL, 0),
        "deepseek_v4_c4_indexer": (21, 8_448, "kv", ALL, 0),
        "deepseek_v4_c4_state": (21, 131_072, "swa", TRAILING, 1),
        "deepseek_v4_c4_indexer_state": (21, 32_768, "swa", TRAILING, 1),
        "deepseek_v4_c128": (20, 1_728, "kv", ALL, 0),
    },
    "deepseek-v3.2": {
        "kv": (61, 64 * 576 * 2, None, ALL, 0),
        "indexer": (61, 64 * 132, "kv", ALL, 0),
    },
    "mamba": {
        "kv": (12, 64 * 2 * 256 * 2 * 2, None, ALL, 0),
        "mamba": (36, 32 * 128 * 128 * 4 + 8192 * 3 * 2, None, TRAILING, 1),
    },
    "swa": {
        "kv": (12, 64 * 8 * 64 * 2 * 2, None, ALL, 0),
        "swa": (12, 64 * 8 * 64 * 2 * 2, None, TRAILING, 2),
    },
    "mha": {"kv": (32, 64 * 8 * 128 * 2 * 2, None, ALL, 0)},
    "mla": {"kv": (27, 64 * 576 * 2, None, ALL, 0)},
    "mha-asymmetric": {"kv": (9, 64 * 4 * (192 + 128) * 2, None, ALL, 0)},
}

LAYOUTS = {
    "deepseek-v4-flash": {"page_first", "page_first_direct", "layer_first"},
    "deepseek-v3.2": {"page_first", "page_first_direct"},
    "mamba": {"page_first", "page_first_direct"},
    "swa": {"page_first", "page_first_direct", "page_head", "layer_first"},
    "mha": {"page_first", "page_first_direct", "page_head", "layer_first"},
    "mla": {"page_first", "page_first_direct", "layer_first"},
    "mha-asymmetric": {"page_first", "page_first_direct"},
}

PAIRS = [(name, layout) for name in PRESETS for layout in sorted(LAYOUTS[name])]


def test_every_preset_is_described_here() -> None:
    assert set(PRESETS) == set(GEOMETRY) == set(LAYOUTS)


@pytest.mark.parametrize("name", PRESETS)
def test_legal_layouts_are_those_of_all_pools(name: str) -> None:
    assert set(legal_layouts(preset(name))) == LAYOUTS[name]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_a_presets_pages_have_the_published_bytes(name: str, layout: str) -> None:
    model = build(preset(name), pages=2, layout=layout)
    physical = [
        entry for entry in model.group.entries if not isinstance(entry.host_pool, LogicalHostPool)
    ]
    assert {str(entry.name) for entry in physical} == set(GEOMETRY[name])
    for entry in physical:
        layers, layer_bytes, source, policy, window = GEOMETRY[name][str(entry.name)]
        (seen,) = layouts_of(str(entry.name), entry.host_pool)
        assert seen.access is Access.AFFINE
        assert seen.page_bytes == layers * layer_bytes
        assert seen.pages == 2
        spec = model.spec_of(entry.name)
        assert (spec.source, spec.policy, spec.window_pages) == (source, policy, window)
    assert model.layout == model.group.layout == layout
    model.destroy()


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_pages_of_a_preset_are_written_and_listed_alike(name: str, layout: str) -> None:
    model = build(preset(name), pages=2, layout=layout, layers_div=8)
    for entry in model.group.entries:
        pool = entry.host_pool
        if isinstance(pool, LogicalHostPool):
            continue
        rng = np.random.default_rng(3)
        for page in (0, 1):
            for view in page_views(pool, page):
                view[:] = rng.integers(0, 256, view.size, dtype=np.uint8)
        pointers, sizes = pool.get_page_buffer_meta(np.arange(pool.page_size) + pool.page_size)
        listed = [ctypes.string_at(a, n) for a, n in zip(pointers, sizes, strict=True)]
        assert listed == [view.tobytes() for view in page_views(pool, 1)]


@pytest.mark.parametrize("name", PRESETS)
def test_an_illegal_layout_is_refused_before_memory_is_taken(name: str) -> None:
    def allocate(nbytes: int) -> npt.NDArray[np.uint8]:
        raise AssertionError("asked for memory")

    for layout in {"page_first", "page_head", "layer_first", "page_unified"} - LAYOUTS[name]:
        with pytest.raises(LayoutError, match=f"'{layout}'; legal are page_first"):
            build(preset(name), pages=1, layout=layout, allocate=allocate)


def test_v4_sidecars_are_described_as_sglangs_assembler_does() -> None:
    model = build(preset("deepseek-v4-flash"), pages=1, layout="page_first", layers_div=100)
    assert model.specs == (
        SidecarPoolSpec(PoolName.DEEPSEEK_V4_C4, PoolName.KV),
        SidecarPoolSpec(PoolName.DEEPSEEK_V4_C4_INDEXER, PoolName.KV),
        SidecarPoolSpec(PoolName.DEEPSEEK_V4_C4_STATE, PoolName.SWA, TRAILING),
        SidecarPoolSpec(PoolName.DEEPSEEK_V4_C4_INDEXER_STATE, PoolName.SWA, TRAILING),
        SidecarPoolSpec(PoolName.DEEPSEEK_V4_C128, PoolName.KV),
    )
    assert model.is_mla_model
    assert model.group.anchor_entry.name == "kv"
    assert model.group.kv_buffer is None
    assert model.group.size_per_token == 0
    assert model.group.get_page_buffer_element_size() is None


def v4_geometry(pool: PoolSpec) -> V4Geometry:
    assert isinstance(pool.geometry, V4Geometry)
    return pool.geometry


def test_v4_without_a_draft_has_shorter_state_rings_and_one_window_layer_less() -> None:
    spec = DeepSeekV4Model(
        name="v4",
        compression_ratios=(0, 0, *(4, 128) * 20, 4),
        page_tokens=256,
        window_tokens=128,
        device_tokens=256,
        swa_device_tokens=256,
    ).spec()
    geometries = {str(pool.name): v4_geometry(pool) for pool in spec.pools[1:]}
    rows = {name: (each.layers, each.row_bytes) for name, each in geometries.items()}
    assert rows["swa"] == (43, 149_760)
    assert rows["deepseek_v4_c4_state"] == (21, 65_536)
    assert rows["deepseek_v4_c4_indexer_state"] == (21, 16_384)


def test_v4_pools_follow_the_compression_ratios() -> None:
    spec = DeepSeekV4Model(
        name="v4",
        compression_ratios=(0, 128),
        page_tokens=128,
        window_tokens=300,
        device_tokens=128,
        swa_device_tokens=128,
    ).spec()
    assert [str(pool.name) for pool in spec.pools] == ["kv", "swa", "deepseek_v4_c128"]
    assert spec.pools[1].window_pages == 3


@pytest.mark.parametrize(
    ("page", "swa_row"), [(128, 74_880), (256, 149_760), (512, 299_520), (1024, 598_464)]
)
def test_v4_rows_are_584_bytes_a_token_padded_to_576(page: int, swa_row: int) -> None:
    model = v4_with_page_of(page)
    assert v4_geometry(model.spec().pools[1]).row_bytes == swa_row == -(-page * 584 // 576) * 576


def v4_with_page_of(page: int) -> DeepSeekV4Model:
    return DeepSeekV4Model(
        name="v4",
        compression_ratios=(0, 4),
        page_tokens=page,
        window_tokens=128,
        device_tokens=page,
        swa_device_tokens=page,
    )


@pytest.mark.parametrize(("ratios", "page"), [((4, 8), 256), ((0, 128), 64), ((), 256)])
def test_v4_ratios_must_be_known_and_divide_the_page(ratios: tuple[int, ...], page: int) -> None:
    with pytest.raises(LayoutError, match="compression ratios"):
        DeepSeekV4Model(
            name="v4",
            compression_ratios=ratios,
            page_tokens=page,
            window_tokens=128,
            device_tokens=256,
            swa_device_tokens=256,
        )


@pytest.mark.parametrize("name", PRESETS)
def test_dividing_layers_keeps_the_structure(name: str) -> None:
    spec = preset(name)
    whole = build(spec, pages=1, layout="page_first")
    small = build(spec, pages=1, layout="page_first", layers_div=1000)
    assert [p.name for p in small.pools] == [p.name for p in whole.pools]
    assert small.specs == whole.specs
    for pool, full in zip(small.pools, whole.pools, strict=True):
        assert pool.geometry.layers == min(1, full.geometry.layers)
        if full.geometry.layers:
            layout, full_layout = (
                layouts_of(str(pool.name), model.group.get_pool(pool.name))[0]
                for model in (small, whole)
            )
            expected = tuple(n // full.geometry.layers for n in full_layout.component_bytes)
            assert layout.component_bytes == expected


def test_ranks_split_heads_and_states_but_not_latent_kv() -> None:
    def page_bytes(name: str, pool: str, tp_size: int) -> int:
        model = build(preset(name), pages=1, layout="page_first", layers_div=12, tp_size=tp_size)
        return layouts_of(pool, model.group.get_pool(pool))[0].page_bytes

    assert page_bytes("mha", "kv", 1) == 4 * page_bytes("mha", "kv", 4)
    assert page_bytes("mamba", "mamba", 1) == 4 * page_bytes("mamba", "mamba", 4)
    assert page_bytes("mamba", "kv", 2) == page_bytes("mamba", "kv", 4)
    for pool in ("kv", "indexer"):
        assert page_bytes("deepseek-v3.2", pool, 1) == page_bytes("deepseek-v3.2", pool, 8)
    with pytest.raises(LayoutError, match="8 KV heads do not split over TP size 3"):
        build(preset("mha"), pages=1, layout="page_first", tp_size=3)


def sized(name: str, **slots: int) -> dict[str, int]:
    """Host slots of each pool of a preset with other device slots and ratio 1.5."""
    spec = preset(name)
    pools = tuple(
        replace(pool, device_slots=slots[str(pool.name)]) if str(pool.name) in slots else pool
        for pool in spec.pools
    )
    spec = replace(spec, pools=pools, host_to_device_ratio=1.5)
    model = build(spec, layout="page_first", layers_div=100)
    return {str(entry.name): entry.host_pool.size for entry in model.group.entries}


def test_v4_host_pages_are_device_pages_rounded_up_times_the_ratio() -> None:
    sizes = sized("deepseek-v4-flash", kv=7 * 256 + 1, swa=3 * 256)
    assert sizes["kv"] == sizes["deepseek_v4_c4"] == sizes["deepseek_v4_c128"] == 12 * 256
    assert sizes["swa"] == sizes["deepseek_v4_c4_state"] == 4 * 256


def test_other_host_pages_are_tokens_times_the_ratio_and_a_spare_page() -> None:
    assert sized("mha", kv=1000) == {"kv": (1500 // 64 + 1) * 64}
    assert sized("deepseek-v3.2", kv=128) == {"kv": 4 * 64, "indexer": 4 * 64}
    assert sized("mamba", kv=64, mamba=5) == {"kv": 2 * 64, "mamba": 8}


@given(tokens=st.integers(1, 10_000), page=st.integers(1, 300), ratio=st.floats(0.1, 4))
def test_host_sizes_are_whole_pages_that_cover_the_ratio(
    tokens: int, page: int, ratio: float
) -> None:
    spec = PlainModel(
        name="m",
        kv=MLAGeometry(layers=1, kv_lora_rank=1, qk_rope_head_dim=1),
        page_tokens=page,
        device_tokens=tokens,
        host_to_device_ratio=ratio,
    ).spec()
    size = build(spec, layout="page_first").group.size
    assert size % page == 0
    assert int(tokens * ratio) < size <= int(tokens * ratio) + page


def test_a_device_pool_too_small_for_a_host_page_is_refused() -> None:
    spec = replace(preset("deepseek-v4-flash"), host_to_device_ratio=0.01)
    with pytest.raises(LayoutError, match="'kv' gets no host page"):
        build(spec, layout="page_first", layers_div=100)


@pytest.mark.parametrize("arguments", [{"pages": 0}, {"pages": 1, "layers_div": 0}])
def test_nothing_is_built_of_nothing(arguments: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        build(preset("mla"), layout="page_first", **arguments)


@pytest.mark.parametrize("name", ["mha", "mla", "deepseek-v3.2"])
def test_an_mha_draft_uses_the_kv_slots_of_its_target(name: str) -> None:
    spec = with_draft(preset(name), MHAGeometry(layers=1, head_num=4, head_dim=8))
    assert set(legal_layouts(spec)) == LAYOUTS[name] & LAYOUTS["mha"]
    model = build(spec, pages=3, layout="page_first", layers_div=100)
    assert model.specs[-1] == SidecarPoolSpec(PoolName.DRAFT, PoolName.KV)
    draft = model.group.get_pool("draft")
    assert (draft.size, draft.page_size) == (model.group.size, model.page_tokens)
    (seen,) = layouts_of("draft", draft)
    config = HiCacheStorageConfig(0, 2, 0, 1, 0, 1, model.is_mla_model, False, True, "m")
    assert is_rank_sharded(seen, config)


def test_a_pool_cannot_take_slots_from_one_that_has_none() -> None:
    spec = preset("deepseek-v3.2")
    stray = replace(spec.pools[1], name="stray", source=PoolName.INDEXER)
    with pytest.raises(LayoutError, match=r"'stray' takes slots from 'indexer'.*sources are kv"):
        replace(spec, pools=(*spec.pools, stray))
    with pytest.raises(LayoutError, match="anchor first"):
        replace(spec, pools=spec.pools[1:])


def test_an_unknown_preset_or_pool_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown model 'gpt'; known are deepseek-v4-flash"):
        preset("gpt")
    model = build(preset("mha"), pages=1, layout="page_first", layers_div=32)
    with pytest.raises(UnknownPoolError, match="no pool 'swa'; it has kv"):
        model.spec_of("swa")
