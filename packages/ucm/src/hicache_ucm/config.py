"""Settings of the UCM adapter. Where one is UCM's own, it has UCM's name.

What cannot work is refused at start with the reason, never ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, model_validator

from hicache_shared.config import (
    ByteSize,
    CommonConfig,
    Count,
    Number,
    PositiveByteSize,
    setting,
)

MOST_THREADS = 16
"""More brought nothing on any page size that was measured; UCM's own default is 128 a pool."""

PoolCapacity = Mapping[str, PositiveByteSize]


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("expected an absolute path, since each process has its own current folder")
    return value


def _known_engine(value: str) -> str:
    if value == "aio":
        raise ValueError(
            "not supported: with several buffers a page UCM's aio engine writes over the memory "
            "behind the first, it says that a page is stored before it can be read, and closing "
            "may wait for ever"
        )
    if value != "psync":
        raise ValueError("expected 'psync'")
    return value


def _capacities(value: object) -> object:
    """JSON text, as an environment variable has it, becomes a mapping."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"expected JSON of pool name to size: {error}") from error
    return value


class UcmConfig(CommonConfig):
    """Settings of the UCM adapter."""

    config_file_env: ClassVar[str | None] = "HICACHE_UCM_CONFIG"

    root: Annotated[str, AfterValidator(_absolute)] = setting(
        env="HICACHE_UCM_ROOT",
        example="/mnt/kvcache",
        description="An existing folder for the pages, on a local disk or on a file system that "
        "all nodes share. Each deployment has a folder of its own in it.",
    )
    posix_data_trans_concurrency: Count | None = setting(
        None,
        env="HICACHE_UCM_THREADS",
        example=8,
        description="Threads a pool that load, and as many that store; as many as the machine "
        f"has cores where not given, at least 4 and at most {MOST_THREADS}.",
        ge=1,
        le=1024,
    )
    data_dir_shard_bytes: Count = setting(
        2,
        env="HICACHE_UCM_DATA_DIR_SHARD_BYTES",
        example=2,
        description="Hex digits of a page's key that name its folder: 2 gives 256 folders a "
        "pool. Pages stored under another number are not found.",
        ge=0,
        le=3,
    )
    io_direct: bool = setting(
        False,
        env="HICACHE_UCM_IO_DIRECT",
        example=False,
        description="Go past the page cache. Refused where a pool's pages are not made of whole "
        "4096-byte blocks, as most of DeepSeek V4's are not.",
    )
    posix_io_engine: Annotated[str, AfterValidator(_known_engine)] = setting(
        "psync",
        env="HICACHE_UCM_IO_ENGINE",
        example="psync",
        description="UCM's I/O engine. Its other one, aio, is refused: with several buffers a page "
        "it writes over the memory behind the first, it says that a page is stored before it can "
        "be read, and closing may wait for ever.",
    )
    shared: bool = setting(
        True,
        env="HICACHE_UCM_SHARED",
        example=True,
        description="Keep two processes from writing one page at the same time, which UCM does "
        "not. It needs file locks (fcntl) on the root; false is for a root that one rank has "
        "to itself.",
    )
    capacity: ByteSize = setting(
        0,
        env="HICACHE_UCM_CAPACITY",
        example="2tb",
        description="Bytes on disk of this deployment, divided over its pools by page size; "
        "when most of it is used the oldest pages go. 0 never removes a page.",
    )
    pool_capacity: Annotated[PoolCapacity, BeforeValidator(_capacities)] = setting(
        {},
        env="HICACHE_UCM_POOL_CAPACITY",
        example='{"swa": "500gb"}',
        description="The same for single pools, which then take no part in capacity.",
    )
    posix_gc_trigger_threshold_ratio: Number = setting(
        0.7,
        env="HICACHE_UCM_GC_TRIGGER",
        example=0.7,
        description="Share of a pool's capacity beyond which its oldest pages are removed.",
        gt=0,
        lt=1,
    )
    posix_gc_recycle_percent: Number = setting(
        0.1,
        env="HICACHE_UCM_GC_RECYCLE",
        example=0.1,
        description="Share of a pool's pages that one removal takes.",
        gt=0,
        le=1,
    )
    posix_gc_check_interval_sec: Count = setting(
        30,
        env="HICACHE_UCM_GC_INTERVAL",
        example=30,
        description="Seconds between two looks at how much is used.",
        ge=1,
        le=86_400,
    )

    @model_validator(mode="after")
    def _removal_is_on(self) -> Self:
        idle = sorted(name for name in self.model_fields_set if name.startswith("posix_gc_"))
        if idle and not self.capacity and not self.pool_capacity:
            raise ValueError(
                f"{', '.join(idle)}: no page is removed without capacity or pool_capacity; give "
                "one of them, or leave this out"
            )
        return self

    @property
    def threads(self) -> int:
        """Threads a pool and direction."""
        cores = len(os.sched_getaffinity(0))
        return self.posix_data_trans_concurrency or min(MOST_THREADS, max(4, cores))

    def capacities(self, page_bytes: Mapping[str, int]) -> dict[str, int]:
        """Bytes that each pool may take on disk; 0 is no limit.

        Args:
            page_bytes: of each pool, by its name. A pool with larger pages gets more, so
                that all hold as many pages.
        """
        sharing = {name: n for name, n in page_bytes.items() if name not in self.pool_capacity}
        whole = sum(sharing.values())
        return {
            name: self.pool_capacity.get(name) or self.capacity * nbytes // whole
            for name, nbytes in page_bytes.items()
        }
