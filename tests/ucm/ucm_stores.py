"""Stores over the real UCM, and roots to keep them in."""

from __future__ import annotations

from pathlib import Path

from hicache_shared.store import KeyBatch
from hicache_ucm.client import native_module
from hicache_ucm.config import UcmConfig
from hicache_ucm.store import UcmStore
from tests.pools import TestPool, hashes

DEADLINE_S = 5.0
NAMESPACE = "hc1/test-0123456789abcdef"

SHAPES = {
    "kv": (4096,),
    "indexer": (1000,),
    "layers": (512, 512, 512),
    "mamba": (3000, 200, 600),
}
"""Pools of one buffer, of equal ones, and of such as have 200 for their greatest divisor."""


def opened(root: Path, **settings: object) -> UcmStore:
    config = UcmConfig.model_validate({"root": str(root), "deadline_s": DEADLINE_S, **settings})
    return UcmStore(native_module(), config)


def make_pools(pages: int = 16, namespace: str = NAMESPACE) -> dict[str, TestPool]:
    pools = {name: TestPool.make(namespace, name, pages, shape) for name, shape in SHAPES.items()}
    for seed, pool in enumerate(pools.values()):
        pool.arrays.fill(seed)
    return pools


KEYS = hashes(8)


def put(store: UcmStore, *pools: TestPool, keys: list[str] = KEYS) -> list[list[int]]:
    return store.put([pool.pages(keys) for pool in pools], DEADLINE_S)


def get(store: UcmStore, *pools: TestPool, keys: list[str] = KEYS) -> list[list[int]]:
    return store.get([pool.pages(keys) for pool in pools], DEADLINE_S)


def exists(store: UcmStore, *asks: KeyBatch) -> list[list[bool]]:
    return [list(map(bool, answers)) for answers in store.exists(asks, DEADLINE_S)]


def block_of(root: Path, pool: TestPool, page_hash: str) -> Path:
    """The file of a page, found by its key: two digits name its folder."""
    from hicache_ucm.keys import block_ids

    name = block_ids(pool.stored.digest, [page_hash]).hex()
    (path,) = (root / pool.stored.namespace).glob(f"{pool.stored.name}_*/{name[:2]}/{name}")
    return path
