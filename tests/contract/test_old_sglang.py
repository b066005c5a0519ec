"""SGLang 0.5.21 and 0.5.22 lack fields that 0.5.23 has; backends work there all the same."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache_shared.contract import HiCacheStorageConfig, PoolHitPolicy, rank_config
from hicache_shared.controller import ReferenceController
from hicache_shared.hostpool import build, preset
from hicache_shared.memory_backend import MemoryBackend
from hicache_shared.testing.rank import chain

NEW_FIELDS = ("dcp_size", "dcp_rank", "logical_page_size")
"""Fields of HiCacheStorageConfig since 0.5.23."""


@dataclass
class OldTransfer:
    """``PoolTransfer`` of 0.5.21: without the geometry of block groups."""

    name: str
    host_indices: Any = None
    device_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: str | None = None


def old_config(shelf: str) -> Any:
    config: HiCacheStorageConfig = rank_config(
        "old", is_mla_model=True, extra_config={"shelf": shelf, "model_id": "old"}
    )
    return SimpleNamespace(**{k: v for k, v in vars(config).items() if k not in NEW_FIELDS})


def test_the_reference_controller_runs_with_the_configuration_of_older_releases() -> None:
    model = build(preset("mha"), layout="page_first", pages=2)
    for rank in (0, 1):
        config = old_config("old controller")
        config.tp_rank = rank
        with ReferenceController(model.group, config) as controller:
            assert controller._writes_kv is (rank == 0)


@pytest.mark.parametrize("hook", [True, False], ids=["with hook", "without hook"])
def test_a_v4_model_round_trips_with_the_types_of_older_releases(hook: bool) -> None:
    model = build(preset("deepseek-v4-flash"), layout="page_first", pages=8, layers_div=44)
    backend = MemoryBackend(old_config(f"old {hook}"), {})
    backend.register_mem_pool_host(model.group.anchor_entry.host_pool)
    for entry in model.group.entries:
        backend.register_mem_host_pool_v2(entry.host_pool, entry.name)
    if hook:
        backend.on_host_pools_registered()
    keys = chain(4, "old")
    transfers = [
        OldTransfer(
            str(pool.name),
            host_indices=np.arange(4 * model.group.get_pool(pool.name).page_size),
            keys=keys,
            hit_policy=pool.policy,
        )
        for pool in model.pools[1:]
    ]
    every: Any = transfers
    assert all(all(answer) for answer in backend.batch_set_v2(every).values())
    assert backend.batch_exists_v2(keys, every).kv_hit_pages == 4
    assert all(all(answer) for answer in backend.batch_get_v2(every).values())
    backend.close()
