"""Keys carry everything that must match for bytes to be interchangeable."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_shared.contract import rank_config
from hicache_shared.hostpool import MHAGeometry, MLAGeometry, aligned_bytes
from hicache_shared.identity import MAX_KEY_CHARS, ModelIdentity, PoolIdentity, pool_identity
from hicache_shared.layout import Access, PoolLayout, layouts_of

MODEL = ModelIdentity(
    namespace="prod", model="deepseek-ai/DeepSeek-V4-Flash", revision="main", kv_cache_dtype="fp8"
)
POOL = PoolIdentity(
    model=MODEL,
    pool="deepseek_v4_c4_indexer_state",
    form="pages",
    memory_layout="page_first",
    dtype="uint8",
    format_tag=None,
    page_tokens=256,
    page_slots=256,
    component_bytes=(688_128,),
    layers=(0, 21),
    tp=None,
    head_shard=None,
    pp=(0, 1),
    cp=(0, 1),
    dcp=(0, 1),
    draft_model="",
)

OTHER: dict[str, Any] = {
    "pool": "swa",
    "form": "flat",
    "memory_layout": "page_first_direct",
    "dtype": "float8_e4m3fn",
    "format_tag": "unified-token-major",
    "page_tokens": 128,
    "page_slots": 1,
    "component_bytes": (344_064, 344_064),
    "layers": (0, 22),
    "tp": (0, 1),
    "head_shard": (0, 4),
    "pp": (0, 2),
    "cp": (0, 2),
    "dcp": (0, 2),
    "draft_model": "other",
}

# A change here makes every stored page of every deployment a miss. Raise SCHEMA with it.
GOLDEN = (
    "hc1/prod.deepseek-ai_deepseek-v4-fla-6867fbafaa2b8b7b/"
    "deepseek_v4_c4_indexer_state-9db2a92f793b15f38db34f87c1b64590/"
)


def test_the_key_prefix_is_stable_over_releases() -> None:
    assert POOL.prefix() == GOLDEN


def test_the_key_prefix_of_a_sharded_pool_is_stable_over_releases() -> None:
    sharded = dataclasses.replace(POOL, pool="kv", tp=(3, 8), component_bytes=(65_536, 65_536))
    assert sharded.digest().hex() == "ce5051c8ee072cdf0b27204234b963ae"


def test_every_field_of_a_pool_identity_is_in_the_digest() -> None:
    fields = {field.name for field in dataclasses.fields(PoolIdentity)} - {"model"}
    assert fields == set(OTHER), "a new field needs a value here"
    changed = [dataclasses.replace(POOL, **{name: value}) for name, value in OTHER.items()]
    assert len({POOL.digest(), *(pool.digest() for pool in changed)}) == len(OTHER) + 1


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ModelIdentity)])
def test_every_field_of_the_model_separates_namespaces_and_pools(field: str) -> None:
    other = dataclasses.replace(MODEL, **{field: "other"})
    assert other.text() != MODEL.text()
    assert dataclasses.replace(POOL, model=other).digest() != POOL.digest()


@pytest.mark.parametrize("ranks", ["tp", "head_shard", "pp", "cp", "dcp"])
def test_rank_and_size_both_count(ranks: str) -> None:
    changes: list[dict[str, Any]] = [{ranks: place} for place in ((0, 2), (1, 2), (1, 4))]
    digests = {dataclasses.replace(POOL, **change).digest() for change in changes}
    assert len(digests) == 3


@given(model=st.text(max_size=200), namespace=st.text(max_size=200), pool=st.text(max_size=100))
def test_keys_are_bounded_and_printable_whatever_the_names(
    model: str, namespace: str, pool: str
) -> None:
    identity = dataclasses.replace(
        POOL, pool=pool, model=dataclasses.replace(MODEL, model=model, namespace=namespace)
    )
    key = identity.prefix() + "f" * 64
    assert len(key) <= MAX_KEY_CHARS
    assert re.fullmatch(r"hc1/[a-z0-9._-]*-[0-9a-f]{16}/[a-z0-9._-]*-[0-9a-f]{32}/f{64}", key)


def test_names_that_look_alike_when_shortened_stay_apart() -> None:
    one, two = (dataclasses.replace(MODEL, model="x" * 60 + tail) for tail in "ab")
    assert one.text() != two.text()
    assert one.text()[:35] == two.text()[:35]


def look(geometry: MHAGeometry | MLAGeometry, layout: str = "page_first") -> PoolLayout:
    """The layout of a small host pool, as a registration sees it."""
    pool = geometry.pool(label="kv", pages=2, page_size=4, layout=layout, allocate=aligned_bytes)
    (seen,) = layouts_of("kv", pool)
    return seen


MHA = look(MHAGeometry(layers=2, head_num=2, head_dim=8))
MLA = look(MLAGeometry(layers=2, kv_lora_rank=16, qk_rope_head_dim=8))

OF_LAYOUT: dict[str, Any] = {
    "name": "swa",
    "memory_layout": "page_first_direct",
    "dtype": "float16",
    "format_tag": "unified-token-major",
    "page_slots": 8,
    "component_bytes": (128, 384),
    "layers": (2, 4),
    "head_shard": (0, 4),
    "access": Access.STAGED,
}
OF_CONFIG: dict[str, Any] = {
    "tp_rank": 1,
    "tp_size": 8,
    "pp_rank": 1,
    "pp_size": 4,
    "attn_cp_rank": 1,
    "attn_cp_size": 4,
}
TP = ("tp_rank", "tp_size")
SEVERAL: dict[str, Any] = {
    "tp_rank": 0,
    "tp_size": 4,
    "pp_rank": 0,
    "pp_size": 2,
    "attn_cp_rank": 0,
    "attn_cp_size": 2,
}


def prefix_of(
    layout: PoolLayout, *, is_mla_model: bool = False, page_tokens: int = 4, **changes: Any
) -> str:
    """The key prefix on the first rank of several in every way, with some of that changed."""
    config = rank_config(
        "model", is_mla_model=is_mla_model, extra_config={}, **{**SEVERAL, **changes}
    )
    identity = pool_identity(layout, model=MODEL, config=config, page_tokens=page_tokens)
    return identity.prefix()


def test_whatever_is_seen_of_a_pool_or_a_rank_is_in_its_prefix() -> None:
    prefixes = [
        prefix_of(MHA),
        prefix_of(MHA, page_tokens=8),
        *(prefix_of(dataclasses.replace(MHA, **{f: value})) for f, value in OF_LAYOUT.items()),
        *(prefix_of(MHA, **{f: value}) for f, value in OF_CONFIG.items()),
    ]
    assert len(set(prefixes)) == 2 + len(OF_LAYOUT) + len(OF_CONFIG)


def test_the_same_pool_elsewhere_in_memory_and_of_another_size_has_the_same_prefix() -> None:
    """What differs between two runs of one deployment is not in the key."""
    pool = MHAGeometry(layers=2, head_num=2, head_dim=8).pool(
        label="kv", pages=5, page_size=4, layout="page_first", allocate=aligned_bytes
    )
    (other,) = layouts_of("kv", pool)
    assert other.bases != MHA.bases
    assert prefix_of(other) == prefix_of(MHA)


@pytest.mark.parametrize(
    "geometry",
    [
        MHAGeometry(layers=3, head_num=2, head_dim=8),
        MHAGeometry(layers=2, head_num=4, head_dim=8),
        MHAGeometry(layers=2, head_num=2, head_dim=16),
        MHAGeometry(layers=2, head_num=2, head_dim=8, v_head_dim=4),
        MHAGeometry(layers=2, head_num=2, head_dim=8, dtype="float16"),
    ],
    ids=str,
)
def test_another_geometry_is_another_prefix(geometry: MHAGeometry) -> None:
    assert prefix_of(look(geometry)) != prefix_of(MHA)


@pytest.mark.parametrize("layout", ["page_first_direct", "page_head", "layer_first"])
def test_another_memory_layout_is_another_prefix(layout: str) -> None:
    other = look(MHAGeometry(layers=2, head_num=2, head_dim=8), layout)
    assert prefix_of(other) != prefix_of(MHA)


def test_every_place_but_the_tensor_parallel_is_in_the_prefix_of_replicated_kv() -> None:
    own = prefix_of(MLA, is_mla_model=True)
    for field, value in OF_CONFIG.items():
        other = prefix_of(MLA, is_mla_model=True, **{field: value})
        assert (other == own) is (field in TP), field


def test_the_place_in_decode_context_parallelism_is_in_the_prefix() -> None:
    """SGLang has it for MLA alone, in groups of neighbouring tensor-parallel ranks."""
    places = [(0, 1), (0, 2), (1, 2), (0, 4), (1, 4)]
    prefixes = {
        prefix_of(
            MLA,
            is_mla_model=True,
            logical_page_size=8,
            tp_rank=rank,
            dcp_rank=rank,
            dcp_size=size,
        )
        for rank, size in places
    }
    assert len(prefixes) == len(places)


@pytest.mark.parametrize("field", TP)
def test_states_are_sharded_over_ranks_beside_replicated_kv(field: str) -> None:
    states = dataclasses.replace(MLA, name="mamba")
    other = prefix_of(states, is_mla_model=True, **{field: OF_CONFIG[field]})
    assert other != prefix_of(states, is_mla_model=True)


def test_head_shards_are_named_in_the_place_of_the_rank() -> None:
    shard = dataclasses.replace(MHA, head_shard=(1, 4))
    assert prefix_of(shard, tp_rank=0) == prefix_of(shard, tp_rank=1, tp_size=4)
    assert prefix_of(shard) != prefix_of(dataclasses.replace(MHA, head_shard=(2, 4)))
