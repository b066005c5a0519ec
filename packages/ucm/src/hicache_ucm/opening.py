"""From a pool that registers to its folder and its native store, or the reason why not."""

from __future__ import annotations

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

GIB = 1 << 30

DIRECT_BLOCK = 4096
"""Bytes that addresses and sizes must be whole multiples of to go past the page cache."""

_SMALLEST = re.compile(r"Minimum recommended: (\d+)GB")


class Opener:
    """Opens the pools of one deployment. Not thread-safe: registrations take turns.

    Pools of one name and block size (head shards) share a folder and its native store.
    """

    def __init__(self, module: NativeModule, config: UcmConfig) -> None:
        self._module = module
        self._config = config
        self._page_bytes: dict[str, int] = {}
        self._natives: dict[Path, NativeStore] = {}

    def open(self, pools: Sequence[StoredPool]) -> list[PoolStore]:
        """Open pools that came together.

        Raises:
            ConfigError: a setting does not fit a pool.
            BackendUnavailableError: UCM refuses, or the folder cannot be made.
        """
        for pool in pools:
            # Head shards are several objects a page and have a folder together.
            known = self._page_bytes.get(pool.name, 0) if pool.layout.head_shard else 0
            self._page_bytes[pool.name] = known + pool.layout.page_bytes
        capacities = self._config.capacities(self._page_bytes)
        return [self._open(pool, capacities[pool.name]) for pool in pools]

    def natives(self) -> list[NativeStore]:
        return list(self._natives.values())

    def folder_of(self, pool: StoredPool) -> Path:
        """``<root>/<namespace>/<pool>_<bytes of a part>x<parts>``."""
        name = BlockShape.of(pool.layout).folder_name(pool.name)
        return Path(self._config.root) / pool.namespace / name

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
        settings = {**self._settings(), **self._removal(pool.name, capacity)}
        try:
            return self._module.open(
                path, tensor_bytes=shape.part_bytes, tensors=shape.parts, settings=settings
            )
        except NativeError as error:
            smallest = _SMALLEST.search(str(error))
            if smallest is None:
                raise BackendUnavailableError(
                    f"pool {pool.name!r}: UCM does not open {path}: {error}; UCM_LOG_LEVEL=info "
                    "has it say more. Processes on one root need the same data_dir_shard_bytes "
                    "and the same capacity"
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

    def _removal(self, name: str, capacity: int) -> dict[str, Any]:
        config = self._config
        if not capacity:
            return {}
        if capacity < GIB:
            raise ConfigError(
                f"capacity: pool {name!r} would have {capacity:,} bytes, and UCM counts in whole "
                "GiB; raise capacity, or give the pool 1gb or more in pool_capacity"
            )
        return {
            "posix_capacity_gb": capacity // GIB,
            "posix_gc_trigger_threshold_ratio": config.posix_gc_trigger_threshold_ratio,
            "posix_gc_recycle_percent": config.posix_gc_recycle_percent,
            "posix_gc_check_interval_sec": config.posix_gc_check_interval_sec,
        }

    def _too_small(self, pool: StoredPool, capacity: int, smallest_gib: int) -> ConfigError:
        digits, name = self._config.data_dir_shard_bytes, pool.name
        if name in self._config.pool_capacity:
            raised = f"raise pool_capacity[{name!r}] to {smallest_gib}gb"
        else:
            share = self._page_bytes[name] / sum(
                n
                for other, n in self._page_bytes.items()
                if other not in self._config.pool_capacity
            )
            raised = f"raise capacity to {-(-smallest_gib // share):.0f}gb"
        fewer = f", or lower data_dir_shard_bytes from {digits}" if digits else ""
        return ConfigError(
            f"capacity: pool {name!r} has {capacity // GIB} GiB for pages of "
            f"{pool.layout.page_bytes:,} bytes in {16**digits} folders. UCM removes whole pages "
            f"folder by folder and needs {smallest_gib} GiB for that; {raised}{fewer}"
        )

    def _check(self, layout: PoolLayout) -> None:
        shape, config = BlockShape.of(layout), self._config
        if config.posix_io_engine == "aio" and shape.parts > 1:
            raise ConfigError(
                f"posix_io_engine: with 'aio' UCM takes all of a page from behind its first "
                f"buffer, and pages of pool {layout.name!r} have {shape.parts}; use 'psync'"
                + _one_buffer(layout)
            )
        if (config.io_direct or config.posix_io_engine == "aio") and not _aligned(layout, shape):
            setting = "io_direct" if config.io_direct else "posix_io_engine='aio'"
            raise ConfigError(
                f"{setting}: pages of pool {layout.name!r} are of {shape.parts} x "
                f"{shape.part_bytes:,} bytes and lie where the pool has them; past the page cache "
                f"goes only what is whole blocks of {DIRECT_BLOCK} bytes; leave {setting} out"
            )


def _one_buffer(layout: PoolLayout) -> str:
    return ", or --hicache-mem-layout page_first" if layout.memory_layout == "layer_first" else ""


def _aligned(layout: PoolLayout, shape: BlockShape) -> bool:
    """Whether every part of every page is whole blocks, at addresses of whole blocks."""
    places: Mapping[str, Sequence[int]] = {
        "sizes": (shape.part_bytes,),
        "bases": layout.bases,
        "strides": layout.strides,
    }
    known = layout.access in (Access.AFFINE, Access.STAGED)
    return known and not any(n % DIRECT_BLOCK for numbers in places.values() for n in numbers)
