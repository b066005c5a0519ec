"""Pages in host memory of the in-tree names' own allocators, through the real stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeHostTensorAllocator
from sglang.srt.mem_cache.storage.umbp.umbp_host_allocator import UMBPHostTensorAllocator

from hicache_shared.contract import PoolTransfer
from hicache_shared.errors import LayoutError
from hicache_shared.hostpool import MHAGeometry, MHAHostPool
from tests.sglang.takeover.pools import (
    KEYS,
    PAGE,
    PAGES,
    Start,
    attached,
    config,
    fill,
    mla_pool,
    pages,
    slots,
)


@pytest.mark.backend("mooncake")
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_pages_in_mooncakes_own_host_memory_come_back_byte_exact(
    start: Start, master: dict[str, Any], layout: str
) -> None:
    """SGLang allocates with MooncakeHostMemAllocator under this name, with the in-tree's keys."""
    start("mooncake")
    pool = mla_pool(layout, "mooncake")
    assert isinstance(pool.allocator, MooncakeHostTensorAllocator)
    backend = attached("mooncake", pool, config(extra_backend_tag=layout, **master))
    assert type(backend).__module__ == "hicache_mooncake.backend"
    fill(pool, 1)
    stored = pages(pool, range(3))
    assert backend.batch_set_v1(KEYS, slots(pool, range(3))) == [True] * 3
    fill(pool, 2)
    assert backend.batch_exists(KEYS) == 3
    assert backend.batch_get_v1(KEYS, slots(pool, range(3, 6))) == [True] * 3
    assert all(map(torch.equal, pages(pool, range(3, 6)), stored))
    backend.clear()
    backend.close()


@pytest.mark.backend("mooncake")
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_under_dcp_each_rank_restores_its_own_shard_by_logical_slots(
    start: Start, master: dict[str, Any], layout: str
) -> None:
    """SGLang passes ``logical_page_size`` slots a key; TP rank 2 is a replica of DCP rank 0."""
    start("mooncake")
    places = [(0, 0), (1, 1), (2, 0)]
    backends, pools = [], []
    for tp_rank, dcp_rank in places:
        pool = mla_pool(layout, "mooncake", (dcp_rank, 2))
        place = config((tp_rank, 4), namespace=f"dcp {layout}", **master)
        place.dcp_rank, place.dcp_size, place.logical_page_size = dcp_rank, 2, 2 * PAGE
        fill(pool, dcp_rank)
        pools.append(pool)
        backends.append(attached("mooncake", pool, place))
    stored = [pages(pool, range(3)) for pool in pools]
    assert len(slots(pools[0], range(3))) == 3 * 2 * PAGE
    assert backends[0].batch_set_v1(KEYS, slots(pools[0], range(3))) == [True] * 3
    assert [backend.batch_exists(KEYS) for backend in backends] == [3, 0, 3]
    assert backends[1].batch_set_v1(KEYS, slots(pools[1], range(3))) == [True] * 3
    for backend, pool, expected in zip(backends, pools, stored, strict=True):
        fill(pool, 9)
        assert backend.batch_get_v1(KEYS, slots(pool, range(3, 6))) == [True] * 3
        assert all(map(torch.equal, pages(pool, range(3, 6)), expected))
    for backend in backends:
        backend.close()


@pytest.mark.backend("mooncake")
def test_another_dcp_size_shares_no_page(start: Start, master: dict[str, Any]) -> None:
    start("mooncake")
    hits = []
    for dcp_size in (2, 4, 1):
        pool = mla_pool("page_first", "mooncake", (0, dcp_size))
        place = config((0, 4), namespace="dcp sizes", **master)
        if dcp_size > 1:
            place.dcp_size, place.logical_page_size = dcp_size, dcp_size * PAGE
        backend = attached("mooncake", pool, place)
        hits.append(backend.batch_exists(KEYS))
        assert backend.batch_set_v1(KEYS, slots(pool, range(3))) == [True] * 3
        backend.close()
    assert hits == [0, 0, 0]


@pytest.mark.backend("mooncake")
def test_mooncake_takes_a_draft_of_attention_heads_beside_mla_which_dynamic_refuses(
    start: Start, master: dict[str, Any]
) -> None:
    """SGLang backs it up on every rank for this name, each with its own heads."""
    start("mooncake")
    for rank in (0, 1):
        pool = mla_pool("page_first", "mooncake")
        backend = attached("mooncake", pool, config((rank, 2), namespace="draft", **master))
        draft = mla_pool("page_first", "mooncake")
        draft.head_num = 1
        backend.register_mem_host_pool_v2(draft, "draft")
        fill(draft, rank)
        stored = pages(draft, range(3))
        move = PoolTransfer("draft", host_indices=slots(draft, range(3)), keys=KEYS)
        assert backend.batch_set_v2([move]) == {"draft": [True] * 3}
        fill(draft, 9)
        assert backend.batch_get_v2([move]) == {"draft": [True] * 3}
        assert all(map(torch.equal, pages(draft, range(3)), stored))
        backend.close()


@pytest.mark.backend("umbp")
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_in_moris_own_host_memory_go_through_a_standalone_server(
    start: Start, own_memory: str, layout: str
) -> None:
    """Which no ``dynamic`` backend gets: SGLang gives that memory to the name ``mori`` alone."""
    start("mori")
    pool = mla_pool(layout, "mori")
    assert isinstance(pool.allocator, UMBPHostTensorAllocator)
    ranks = [attached("mori", pool, config((rank, 2), namespace=layout)) for rank in (0, 1)]
    assert type(ranks[0]).__module__ == "hicache_umbp.in_tree"
    fill(pool, 1)
    stored = pages(pool, range(3))
    assert ranks[0].batch_set_v1(KEYS, slots(pool, range(3))) == [True] * 3
    fill(pool, 2)
    assert ranks[1].batch_exists(KEYS) == 3
    assert ranks[1].batch_get_v1(KEYS, slots(pool, range(3, 6))) == [True] * 3
    assert all(map(torch.equal, pages(pool, range(3, 6)), stored))
    for backend in ranks:
        backend.close()


@pytest.mark.backend("umbp")
def test_mori_refuses_a_draft_of_attention_heads_beside_mla_that_rank_0_alone_would_write(
    start: Start, own_memory: str
) -> None:
    start("mori")
    pool = mla_pool("page_first", "mori")
    backend = attached("mori", pool, config((1, 2), namespace="draft"))
    draft = MHAHostPool(
        MHAGeometry(layers=1, head_num=2, head_dim=8),
        pages=PAGES,
        page_size=PAGE,
        layout="page_first",
    )
    with pytest.raises(LayoutError, match=r"'draft' holds attention heads.*rank 0 alone"):
        backend.register_mem_host_pool_v2(draft, "draft")
    backend.close()
