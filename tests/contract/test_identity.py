"""Keys carry everything that must match for bytes to be interchangeable."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_shared.identity import MAX_KEY_CHARS, ModelIdentity, PoolIdentity

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
