"""Stores over real clients, opened by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.hostmem import aligned_bytes
from hicache_shared.store import KeyBatch
from hicache_shared.testing.harness import storage_config
from hicache_umbp.backend import epochs_of
from hicache_umbp.client import UmbpClient
from hicache_umbp.config import UmbpConfig
from hicache_umbp.memory import shared_bytes
from hicache_umbp.modes import mode_of
from hicache_umbp.session import Session
from hicache_umbp.store import UmbpStore
from hicache_umbp.testing import RawUmbp
from tests.pools import TestPool

DEADLINE_S = 5.0
ALONE = storage_config(is_mla_model=False)
SMALL = {"dram_capacity_bytes": "64mb"}
"""An embedded client takes all of its memory at once, and by default that is 4 GB."""


def new_store(
    settings: dict[str, Any], rank: HiCacheStorageConfig = ALONE, *, ranged: bool = True
) -> tuple[UmbpStore, list[RawUmbp]]:
    """A store that was not opened, and the client that it will make, for looking behind it.

    Args:
        settings: the adapter's settings; a store without a server is ``SMALL`` unless they say.
        rank: this rank's place.
        ranged: whether its clients may make one object of several buffers.
    """
    small = {} if "standalone_address" in settings else SMALL
    config = UmbpConfig.model_validate({**small, **settings})
    allocate = shared_bytes if config.standalone_address else aligned_bytes
    mode = mode_of(config, rank)
    made: list[RawUmbp] = []

    def connect(pages: Sequence[tuple[int, ...]]) -> UmbpClient:
        client = mode.connect(pages)
        client.ranged = client.ranged and ranged
        made.append(RawUmbp(client, allocate=allocate))
        return cast(UmbpClient, made[-1])

    session = Session(replace(mode, connect=connect))
    return UmbpStore(session, epochs_of(config), allocate=allocate), made


def exists(store: UmbpStore, *asks: KeyBatch) -> list[list[bool]]:
    """What the store answers about pages, as lists: it may answer masks."""
    return [list(map(bool, answers)) for answers in store.exists(asks, DEADLINE_S)]


def put(store: UmbpStore, *pools: TestPool, hashes: list[str]) -> list[list[int]]:
    return store.put([pool.pages(hashes) for pool in pools], DEADLINE_S)
