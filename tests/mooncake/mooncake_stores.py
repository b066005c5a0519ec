"""Stores over real clients, opened and rid of pools by hand."""

from __future__ import annotations

from hicache_mooncake.client import connect
from hicache_mooncake.config import MooncakeConfig
from hicache_mooncake.server import MooncakeMaster
from hicache_mooncake.store import MooncakeStore
from tests.mooncake.mooncake_pools import TestPool


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


def forget(store: MooncakeStore, pools: list[TestPool]) -> None:
    """Take the pools' memory out of a store that outlives it."""
    ours = {region for pool in pools for region in pool.stored.layout.regions}
    for region in store._regions.drain():
        if region in ours:
            store._client.unregister(region.address)
        else:
            store._regions.add(region)
