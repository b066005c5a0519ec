"""Stores over real clients, opened and rid of pools by hand."""

from __future__ import annotations

from hicache_mooncake.client import connect
from hicache_mooncake.config import MooncakeConfig
from hicache_mooncake.server import MooncakeMaster
from hicache_mooncake.store import MooncakeStore
from hicache_shared.store import KeyBatch
from tests.pools import TestPool

DEADLINE_S = 5.0


def connected(master: MooncakeMaster, segment_bytes: int, **settings: object) -> MooncakeStore:
    """A store over a client of its own."""
    config = MooncakeConfig.model_validate(
        {
            "master_server_address": master.address,
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            **settings,
        }
    )
    return MooncakeStore(connect(config, segment_bytes=segment_bytes))


def exists(store: MooncakeStore, *asks: KeyBatch) -> list[list[bool]]:
    """What the store answers about pages, as lists: it may answer masks."""
    return [list(map(bool, answers)) for answers in store.exists(asks, DEADLINE_S)]


def forget(store: MooncakeStore, pools: list[TestPool]) -> None:
    """Take the pools' memory out of a store that outlives it."""
    ours = {region for pool in pools for region in pool.stored.layout.regions}
    for region in store._regions.drain():
        if region in ours:
            store._client.unregister(region.address)
        else:
            store._regions.add(region)
