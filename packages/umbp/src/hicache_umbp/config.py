"""Settings of the UMBP adapter, under the names SGLang's in-tree adapter uses.

Names are those of SGLang 0.5.23 (``mem_cache/storage/umbp``), variables those of it and of the
native client, so that a takeover changes nothing. What this adapter does not do is refused
with the reason; what the client ignores in a mode is a warning at start. Nothing is ignored
in silence.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hicache_shared.config import (
    ByteSize,
    CommonConfig,
    Count,
    Number,
    PositiveByteSize,
    setting,
)
from hicache_shared.errors import ConfigError

MOST_PORT = 65_535
UNIX = "unix://"

_ENDPOINT = re.compile(
    r"(?:[^\s:/,;\[\]]+|\[[0-9a-f:.]+\]):([1-9]\d{0,4})", re.ASCII | re.IGNORECASE
)
"""``host:port`` or ``[IPv6]:port``; the group is the port."""


class Medium(enum.StrEnum):
    """Where an embedded or a distributed client keeps pages."""

    DRAM = "dram"
    SSD = "ssd"


def _master(value: str) -> str:
    found = _ENDPOINT.fullmatch(value)
    if value and (found is None or int(found[1]) > MOST_PORT):
        raise ValueError(f"expected host:port with a port of 1 to {MOST_PORT}")
    return value


def _socket(value: str) -> str:
    if value and not re.fullmatch(r"unix:///[^\0]+", value):
        raise ValueError(
            "expected unix:// and the absolute path of the server's socket; a standalone server "
            "shares memory, so it is on this machine"
        )
    return value


def _each_rank(value: object) -> object:
    """One value, or one a rank: a list, JSON of one, or text with commas."""
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"expected a value, or one a rank with commas: {error}") from error
    if isinstance(value, str) and "," in value:
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError("expected a value, or one a rank with commas; got none")
        return list(value)
    return value


def _tags(value: object) -> object:
    if isinstance(value, str):
        return [tag.strip() for tag in value.split(",") if tag.strip()]
    return value


Part = Annotated[Number, Field(gt=0, le=1)]
Port = Annotated[Count, Field(ge=1, le=MOST_PORT)]
RankText = Annotated[str | list[str] | None, BeforeValidator(_each_rank)]
RankPort = Annotated[Port | list[Port] | None, BeforeValidator(_each_rank)]
Tags = Annotated[list[str] | None, BeforeValidator(_tags)]

_SPDK = "Refused when given: this adapter keeps pages in files, not by SPDK."
_EVENTS = "Refused when given: this adapter does not follow SGLang's KV events."
_OLD = "Has an effect with the embedded client of 1.2.2 only; else a warning says so."


class UmbpConfig(CommonConfig):
    """Settings of the UMBP adapter."""

    config_file_env: ClassVar[str | None] = "SGLANG_HICACHE_UMBP_CONFIG_PATH"

    # -- which mode -------------------------------------------------------------------------

    standalone_address: Annotated[str, AfterValidator(_socket)] = setting(
        "",
        env="UMBP_STANDALONE_ADDRESS",
        example="unix:///run/umbp/umbp.sock",
        description="Socket of an umbp_standalone_server on this machine, which then keeps the "
        "pages. Host memory must come from the client's own allocator.",
    )
    master_address: Annotated[str, AfterValidator(_master)] = setting(
        "",
        env="UMBP_MASTER_ADDRESS",
        example="10.0.0.1:50051",
        description="Where umbp_master answers, for a store over several machines. Without it "
        "and without standalone_address the store is embedded: private to each rank.",
    )
    medium: Medium = setting(
        Medium.DRAM,
        env="HICACHE_UMBP_MEDIUM",
        example="ssd",
        description="Where this process keeps pages: dram or ssd (1.2.4). What is on the SSD "
        "does not outlive the process.",
    )

    # -- memory -----------------------------------------------------------------------------

    dram_capacity_bytes: PositiveByteSize = setting(
        4 * 2**30,
        env="UMBP_DRAM_CAPACITY",
        example="4gb",
        description="Memory that each rank gives to the store. A standalone server has its own.",
    )
    dram_page_size: ByteSize = setting(
        0,
        env="UMBP_DISTRIBUTED_DRAM_PAGE_SIZE",
        example=34_560,
        description="Bytes that the store gives out at once; 0 derives them from the pools, so "
        "that no pool's objects waste more than 4 %.",
    )
    dram_high_watermark: Part | None = setting(
        None,
        env="UMBP_DRAM_HIGH_WM",
        example=0.97,
        description="The part of memory above which the client evicts. Where not given, 0.97, "
        "or less where the largest object would not fit above it.",
    )
    dram_low_watermark: Part | None = setting(
        None,
        env="UMBP_DRAM_LOW_WM",
        example=0.96,
        description="The part down to which it evicts; 0.01 below the high one where not given.",
    )
    disable_zero_copy_register: bool = setting(
        False,
        env="UMBP_DISABLE_ZERO_COPY_REGISTER",
        example=False,
        description="Distributed: register no host memory, for RDMA devices that cannot "
        "register as much at once. Pages are then copied once more; a warning says so.",
    )

    # -- SSD --------------------------------------------------------------------------------

    ssd_enabled: bool | None = setting(
        None,
        env="UMBP_SSD_ENABLED",
        example=False,
        description="An SSD below memory, with the embedded client of 1.2.2. That of 1.2.4 "
        "ignores it and keeps pages in memory alone, which a warning says; see medium.",
    )
    ssd_storage_dir: str = setting(
        "/tmp/umbp_ssd",
        env="UMBP_SSD_DIR",
        example="/var/lib/umbp",
        description="Folder for it; each rank uses a folder of its own in it.",
        min_length=1,
    )
    ssd_capacity_bytes: PositiveByteSize = setting(
        32 * 2**30,
        env="UMBP_SSD_CAPACITY",
        example="32gb",
        description="Bytes of SSD that each rank gives to the store.",
    )
    ssd_staging_buffer_slots: Count | None = setting(
        None,
        env="HICACHE_UMBP_SSD_STAGING_SLOTS",
        example=4096,
        description="Pages of dram_page_size between memory and SSD; calls that need more at "
        "once are split. Where not given, 64 MB, and four of the largest object at least.",
        ge=1,
        le=1 << 20,
    )
    ssd_staging_buffer_size: PositiveByteSize | None = setting(
        None,
        env="HICACHE_UMBP_SSD_STAGING_BYTES",
        example="256mb",
        description="Distributed: bytes of the client's buffer between memory and SSD.",
    )
    ssd_segment_size_bytes: PositiveByteSize | None = setting(
        None,
        env="HICACHE_UMBP_SSD_SEGMENT_BYTES",
        example="256mb",
        description="Bytes of each file on the SSD.",
    )
    ssd_queue_depth: Count | None = setting(
        None,
        env="HICACHE_UMBP_SSD_QUEUE_DEPTH",
        example=4096,
        description="Requests to the SSD that are under way at once.",
        ge=1,
    )
    ssd_io_backend: Literal["posix", "io_uring"] | None = setting(
        None,
        env="HICACHE_UMBP_SSD_IO_BACKEND",
        example="posix",
        description="How the SSD is read and written: posix or io_uring.",
    )
    ssd_durability_mode: Literal["strict", "sync", "relaxed", "async"] | None = setting(
        None,
        env="UMBP_SSD_DURABILITY",
        example="relaxed",
        description="strict (or sync) waits for the device; relaxed (or async) does not.",
    )
    ssd_backend: Literal["file"] = setting(
        "file",
        env="UMBP_SSD_BACKEND",
        example="file",
        description="How pages lie on the SSD; SPDK is not supported.",
    )
    ssd_high_watermark: Part | None = setting(
        None,
        env="UMBP_SSD_HIGH_WM",
        example=0.9,
        description="The part of the SSD above which the client evicts.",
    )
    ssd_low_watermark: Part | None = setting(
        None,
        env="UMBP_SSD_LOW_WM",
        example=0.7,
        description="The part of the SSD down to which it evicts.",
    )
    ssd_copy_async: bool | None = setting(
        None, env="HICACHE_UMBP_SSD_COPY_ASYNC", example=True, description=_OLD
    )
    ssd_copy_queue_depth: Count | None = setting(
        None, env="HICACHE_UMBP_SSD_COPY_QUEUE_DEPTH", example=4096, description=_OLD, ge=1
    )
    ssd_copy_worker_threads: Count | None = setting(
        None, env="HICACHE_UMBP_SSD_COPY_THREADS", example=2, description=_OLD, ge=1
    )
    ssd_copy_batch_max_ops: Count | None = setting(
        None, env="HICACHE_UMBP_SSD_COPY_BATCH_OPS", example=128, description=_OLD, ge=1
    )

    # -- eviction ---------------------------------------------------------------------------

    eviction_policy: str | None = setting(
        None, env="UMBP_EVICTION_POLICY", example="lru", description=_OLD, min_length=1
    )
    eviction_candidate_window: Count | None = setting(
        None, env="HICACHE_UMBP_EVICTION_WINDOW", example=16, description=_OLD, ge=1
    )
    auto_promote_on_read: bool | None = setting(
        None, env="HICACHE_UMBP_AUTO_PROMOTE", example=True, description=_OLD
    )

    # -- a standalone server ----------------------------------------------------------------

    standalone_auto_start: bool = setting(
        False,
        env="UMBP_STANDALONE_AUTO_START",
        example=False,
        description="Refused when true: the client leaves a server that starts slowly behind "
        "as an orphan. Start umbp_standalone_server yourself.",
    )
    standalone_startup_timeout_ms: Count = setting(
        30_000,
        env="UMBP_STANDALONE_STARTUP_TIMEOUT_MS",
        example=30_000,
        description="Milliseconds in which a server that accepts connections must be ready.",
        ge=1,
        le=600_000,
    )

    # -- several machines -------------------------------------------------------------------

    node_address: RankText = setting(
        None,
        env="UMBP_NODE_ADDRESS",
        example="10.0.0.2",
        description="This node's address as others reach it, or one a rank with commas; what "
        "the host name resolves to where not given.",
        per_node=True,
    )
    node_id: RankText = setting(
        None,
        env="UMBP_NODE_ID",
        example="node2",
        description="This rank's name at the master, or one a rank with commas; the address "
        "and the rank's place where not given.",
        per_node=True,
    )
    node_tags: Tags = setting(
        None,
        env="UMBP_NODE_TAGS",
        example="rack7,zone2",
        description="Tags of this node at the master, with commas.",
        per_node=True,
    )
    tags: Tags = setting(
        None,
        env="HICACHE_UMBP_TAGS",
        example="rack7,zone2",
        description="The in-tree adapter's other word for node_tags; give one of the two.",
    )
    auto_heartbeat: bool = setting(
        True,
        env="HICACHE_UMBP_AUTO_HEARTBEAT",
        example=True,
        description="Whether the client tells the master by itself that it lives.",
    )
    io_engine_host: RankText = setting(
        None,
        env="UMBP_IO_ENGINE_HOST",
        example="10.0.0.2",
        description="Address of the RDMA engine, or one a rank with commas; node_address where "
        "not given. Empty runs without one: pages are then read on the node that put them.",
        per_node=True,
    )
    io_engine_port: RankPort = setting(
        None,
        env="UMBP_IO_ENGINE_PORT",
        example=9500,
        description="Its port: the first rank's, which others count up from, or one a rank.",
        per_node=True,
    )
    peer_service_port: RankPort = setting(
        None,
        env="UMBP_PEER_SERVICE_PORT",
        example=9600,
        description="Port on which other nodes reach this rank's memory, on all interfaces; as "
        "io_engine_port.",
        per_node=True,
    )
    staging_buffer_size: PositiveByteSize | None = setting(
        None,
        env="HICACHE_UMBP_STAGING_BYTES",
        example="64mb",
        description="Distributed: bytes of the buffer for memory that is not registered.",
    )
    ranged_scratch_size: PositiveByteSize | None = setting(
        None,
        env="HICACHE_UMBP_RANGED_SCRATCH_BYTES",
        example="64mb",
        description="Distributed: bytes of the buffer for remote objects of several buffers.",
    )
    cache_remote_fetches: bool | None = setting(
        None,
        env="UMBP_CACHE_REMOTE_FETCHES",
        example=True,
        description="Distributed: keep a copy of what was read from another node.",
    )

    # -- of this adapter --------------------------------------------------------------------

    retry_start_ms: Number = setting(
        20.0,
        env="HICACHE_UMBP_RETRY_START_MS",
        example=20,
        description="First pause before a page that found no space is tried again; doubled "
        "each time up to 320 ms, until deadline_s is over or nothing came in for a second.",
        ge=1,
        le=1000,
    )
    extra_backend_tag: str = setting(
        "",
        env="HICACHE_UMBP_BACKEND_TAG",
        example="team-a",
        description="The in-tree adapter's word for namespace; give one of the two.",
    )

    # -- refused ----------------------------------------------------------------------------

    kv_events_subscriber: bool = setting(
        False, env="HICACHE_UMBP_KV_EVENTS", example=False, description=_EVENTS
    )
    kv_events_endpoint: str | None = setting(
        None, env="HICACHE_UMBP_KV_EVENTS_ENDPOINT", example=None, description=_EVENTS
    )
    kv_events_topic: str | None = setting(
        None, env="HICACHE_UMBP_KV_EVENTS_TOPIC", example=None, description=_EVENTS
    )
    spdk_nvme_pci_addr: Any = setting(
        None, env="UMBP_SPDK_NVME_PCI", example=None, description=_SPDK
    )
    spdk_proxy_shm_name: Any = setting(
        None, env="UMBP_SPDK_PROXY_SHM", example=None, description=_SPDK
    )
    spdk_proxy_startup_timeout_ms: Any = setting(
        None, env="HICACHE_UMBP_SPDK_STARTUP_MS", example=None, description=_SPDK
    )
    spdk_proxy_bin: Any = setting(
        None, env="HICACHE_UMBP_SPDK_PROXY_BIN", example=None, description=_SPDK
    )
    spdk_proxy_tenant_id: Any = setting(
        None, env="UMBP_SPDK_PROXY_TENANT_ID", example=None, description=_SPDK
    )
    spdk_proxy_tenant_id_base: Any = setting(
        None, env="UMBP_SPDK_PROXY_TENANT_ID_BASE", example=None, description=_SPDK
    )
    spdk_proxy_tenant_quota_bytes: Any = setting(
        None, env="UMBP_SPDK_PROXY_TENANT_QUOTA_BYTES", example=None, description=_SPDK
    )
    spdk_proxy_max_channels: Any = setting(
        None, env="UMBP_SPDK_PROXY_MAX_CHANNELS", example=None, description=_SPDK
    )
    spdk_proxy_data_per_channel_mb: Any = setting(
        None, env="UMBP_SPDK_PROXY_DATA_PER_CHANNEL_MB", example=None, description=_SPDK
    )
    spdk_proxy_auto_start: Any = setting(
        None, env="UMBP_SPDK_PROXY_AUTO_START", example=None, description=_SPDK
    )
    spdk_proxy_idle_exit_timeout_ms: Any = setting(
        None, env="UMBP_SPDK_PROXY_IDLE_EXIT_TIMEOUT_MS", example=None, description=_SPDK
    )
    spdk_proxy_allow_borrow: Any = setting(
        None, env="UMBP_SPDK_PROXY_ALLOW_BORROW", example=None, description=_SPDK
    )
    spdk_proxy_reserved_shared_bytes: Any = setting(
        None, env="UMBP_SPDK_PROXY_RESERVED_SHARED_BYTES", example=None, description=_SPDK
    )
    spdk_passthrough: Any = setting(
        None, env="HICACHE_UMBP_SPDK_PASSTHROUGH", example=None, description=_SPDK
    )

    @model_validator(mode="after")
    def _only_what_works(self) -> Self:
        problems = list(self._problems())
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        if self.master_address and self.standalone_address:
            yield (
                "master_address and standalone_address: two modes; leave one out, a standalone "
                "server joins a master by its own settings"
            )
        if self.standalone_auto_start:
            yield (
                "standalone_auto_start: not supported, since a server that starts slowly stays "
                "behind as an orphan; start umbp_standalone_server yourself and leave it out"
            )
        given = [n for n in type(self).model_fields if n.startswith("spdk_") and self.given(n)]
        if given:
            yield f"{', '.join(given)}: not supported; pages are kept in files; leave them out"
        if self.kv_events_subscriber or self.kv_events_endpoint or self.kv_events_topic:
            yield "kv_events_subscriber, _endpoint, _topic: not supported; leave them out"
        if self.standalone_address and self.medium is Medium.SSD:
            yield (
                "medium: a standalone server has its own; start it with UMBP_SSD_ENABLED=1 and "
                "leave medium out"
            )
        if self.extra_backend_tag and self.namespace not in ("", self.extra_backend_tag):
            yield (
                f"namespace {self.namespace!r} and extra_backend_tag {self.extra_backend_tag!r} "
                "mean the same thing and differ; leave one out"
            )
        if self.node_tags is not None and self.tags is not None and self.node_tags != self.tags:
            yield "node_tags and tags mean the same thing and differ; leave one out"
        high, low = self.dram_high_watermark, self.dram_low_watermark
        if low is not None and low >= (high or 0.97):
            yield "dram_low_watermark must be below dram_high_watermark (0.97 where not given)"

    def given(self, name: str) -> bool:
        """Whether the operator gave a value to this setting."""
        return name in self.model_fields_set and getattr(self, name) is not None

    @model_validator(mode="before")
    @classmethod
    def _tag_is_namespace(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("namespace"):
            tag = values.get("extra_backend_tag")
            if isinstance(tag, str) and tag:
                return {**values, "namespace": tag}
        return values

    def node_address_for(self, rank: int) -> str | None:
        return _of_rank("node_address", self.node_address, rank)

    def node_id_for(self, rank: int) -> str | None:
        return _of_rank("node_id", self.node_id, rank)

    def io_engine_host_for(self, rank: int) -> str | None:
        return _of_rank("io_engine_host", self.io_engine_host, rank)

    def io_engine_port_for(self, rank: int) -> int | None:
        return _port_of_rank("io_engine_port", self.io_engine_port, rank)

    def peer_service_port_for(self, rank: int) -> int | None:
        return _port_of_rank("peer_service_port", self.peer_service_port, rank)

    def tags_or_none(self) -> list[str] | None:
        return self.node_tags if self.node_tags is not None else self.tags


V = TypeVar("V", str, int)


def _of_rank(name: str, value: V | list[V] | None, rank: int) -> V | None:
    if not isinstance(value, list):
        return value
    if rank >= len(value):
        raise ConfigError(
            f"{name}: no value for rank {rank}; it has {len(value)}: give one, or one a rank"
        )
    return value[rank]


def _port_of_rank(name: str, value: int | list[int] | None, rank: int) -> int | None:
    """A single port is the first rank's, as in tree."""
    port = _of_rank(name, value, rank)
    if port is None or isinstance(value, list):
        return port
    if port + rank > MOST_PORT:
        raise ConfigError(f"{name}: {port} for the first rank leaves none for rank {rank}")
    return port + rank


__all__ = ["UNIX", "Medium", "UmbpConfig"]
