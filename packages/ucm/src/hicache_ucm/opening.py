"""From a pool that registers to its folder and its native store, or the reason why not."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hicache_shared.errors import BackendUnavailableError, ConfigError
from hicache_shared.layout import Access, PoolLayout
from hicache_shared.store import StoredPool
from hicache_ucm.client import NativeError, NativeModule, NativeStore
from hicache_ucm.config import UcmConfig
from hicache_ucm.folder import Folder
from hicache_ucm.pool import BlockShape, PoolStore

logger = logging.getLogger(__name__)

GIB = 1 << 30

DIRECT_BLOCK = 4096
"""Bytes that addresses and sizes must be whole multiples of to go past the page cache."""

_SYSTEM_ERROR = re.compile(r"-50002, (\d+)")
_SMALLEST = re.compile(r"Minimum recommended: (\d+)GB")


class Opener:
    """Opens the pools of one deployment. Not thread-safe: registrations take turns.

    Pools of one name and block size (head shards) share a folder and its native store.
    """

    def __init__(self, module: NativeModule, config: UcmConfig) -> None:
        self._module = module
        self._config = config
        self._known: dict[bytes, StoredPool] = {}
        self._natives: dict[Path, NativeStore] = {}

    def open(self, pools: Sequence[StoredPool]) -> list[PoolStore]:
        """Open pools that came together.

        Raises:
            ConfigError: a setting does not fit a pool.
            BackendUnavailableError: UCM refuses, or the folder cannot be made.
        """
        self._known.update((pool.digest, pool) for pool in pools)
        page_bytes = self._page_bytes()
        unknown = sorted(set(self._config.pool_capacity).difference(page_bytes))
        if unknown:
            logger.warning(
                "UCM: pool_capacity names %s; the pools are %s", unknown, sorted(page_bytes)
            )
        capacities = self._config.capacities(page_bytes)
        self._check_capacities(capacities)
        return [self._open(pool, capacities[pool.name]) for pool in pools]

    def natives(self) -> list[NativeStore]:
        return list(self._natives.values())

    def folder_of(self, pool: StoredPool) -> Path:
        """``<root>/<namespace>/<pool>_<bytes of a part>x<parts>``."""
        name = BlockShape.of(pool.layout).folder_name(pool.name)
        return Path(self._config.root) / pool.namespace / name

    def _page_bytes(self) -> dict[str, int]:
        """Bytes of a page of each pool; head shards are several objects a page, in one folder."""
        total: dict[str, int] = {}
        for pool in self._known.values():
            total[pool.name] = total.get(pool.name, 0) + pool.layout.page_bytes
        return total

    def _open(self, pool: StoredPool, capacity: int) -> PoolStore:
        path = self.folder_of(pool)
        native = self._natives.get(path)
        if native is None:
            self._check(pool.layout)
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BackendUnavailableError(
                    f"pool {pool.name!r}: folder {path} cannot be made ({error.strerror})"
                ) from error
            native = self._native(pool, path, capacity)
            self._natives[path] = native
        folder = Folder(path, self._config.data_dir_shard_bytes)
        return PoolStore(pool, folder, native, removes=capacity > 0)

    def _native(self, pool: StoredPool, path: Path, capacity: int) -> NativeStore:
        shape = BlockShape.of(pool.layout)
        settings = {**self._settings(), **self._removal(capacity)}
        try:
            return self._module.open(
                path, tensor_bytes=shape.part_bytes, tensors=shape.parts, settings=settings
            )
        except NativeError as error:
            smallest = _SMALLEST.search(str(error))
            if smallest is None:
                raise BackendUnavailableError(
                    f"pool {pool.name!r}: UCM does not open {path}: {_reason(error)}"
                ) from error
            raise self._too_small(pool, capacity, int(smallest[1])) from error

    def _settings(self) -> dict[str, Any]:
        config = self._config
        return {
            "posix_io_engine": config.posix_io_engine,
            "io_direct": config.io_direct,
            "posix_data_trans_concurrency": config.threads,
            "posix_lookup_concurrency": 1,  # a lookup runs in the calling thread
            "data_dir_shard_bytes": config.data_dir_shard_bytes,
        }

    def _removal(self, capacity: int) -> dict[str, Any]:
        config = self._config
        if not capacity:
            return {}
        return {
            "posix_capacity_gb": capacity // GIB,
            "posix_gc_trigger_threshold_ratio": config.posix_gc_trigger_threshold_ratio,
            "posix_gc_recycle_percent": config.posix_gc_recycle_percent,
            "posix_gc_check_interval_sec": config.posix_gc_check_interval_sec,
        }

    def _check_capacities(self, capacities: Mapping[str, int]) -> None:
        small = sorted(n for n, nbytes in capacities.items() if 0 < nbytes < GIB)
        if small:
            name = min(small, key=lambda each: capacities[each])
            raise ConfigError(
                f"capacity: {', '.join(small)} would have less than 1 GiB (pool {name!r} "
                f"{capacities[name]:,} bytes), and UCM counts in whole GiB; {self._raised(name, 1)}"
            )

    def _too_small(self, pool: StoredPool, capacity: int, smallest_gib: int) -> ConfigError:
        digits, name = self._config.data_dir_shard_bytes, pool.name
        raised = self._raised(name, smallest_gib)
        fewer = f", or lower data_dir_shard_bytes from {digits}" if digits else ""
        return ConfigError(
            f"capacity: pool {name!r} has {capacity // GIB} GiB for pages of "
            f"{pool.layout.page_bytes:,} bytes in {16**digits} folders. UCM removes whole pages "
            f"folder by folder and needs {smallest_gib} GiB for that; {raised}{fewer}"
        )

    def _raised(self, name: str, gib: int) -> str:
        """What to set for a pool to have so many GiB."""
        own = self._config.pool_capacity
        if name in own:
            return f"raise pool_capacity[{name!r}] to {gib}gb"
        page_bytes = self._page_bytes()
        sharing = sum(nbytes for other, nbytes in page_bytes.items() if other not in own)
        whole = -(-gib * sharing // page_bytes[name])
        return f"raise capacity to {whole}gb, or set pool_capacity[{name!r}] to {gib}gb"

    def _check(self, layout: PoolLayout) -> None:
        shape = BlockShape.of(layout)
        if self._config.io_direct and not _aligned(layout, shape):
            raise ConfigError(
                f"io_direct: pages of pool {layout.name!r} are of {shape.parts} x "
                f"{shape.part_bytes:,} bytes and lie where the pool has them; past the page cache "
                f"goes only what is whole blocks of {DIRECT_BLOCK} bytes; leave io_direct out"
            )


def _reason(error: NativeError) -> str:
    """Why a folder does not open, and what to change."""
    found = _SYSTEM_ERROR.match(str(error))
    if found is not None:
        return (
            f"{os.strerror(int(found[1]))}; the folder and all that is in it must be writable for "
            "the user that this runs as"
        )
    return (
        f"{error}; UCM_LOG_LEVEL=info has it say more. All processes of a deployment need one "
        "data_dir_shard_bytes and one capacity, a killed one counts for another minute, and where "
        "they do not have the same pools (pipeline parallelism) that takes pool_capacity"
    )


def _aligned(layout: PoolLayout, shape: BlockShape) -> bool:
    """Whether every part of every page is whole blocks, at addresses of whole blocks."""
    known = layout.access in (Access.AFFINE, Access.STAGED)
    numbers = (shape.part_bytes, *layout.bases, *layout.strides)
    return known and not any(number % DIRECT_BLOCK for number in numbers)
