"""From settings and a rank's place to a mode: how clients are made, and what they can do."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.errors import BackendUnavailableError, ConfigError
from hicache_umbp import paging
from hicache_umbp.client import Staging, UmbpClient, native_module
from hicache_umbp.config import UNIX, Medium, UmbpConfig
from hicache_umbp.effects import without_effect
from hicache_umbp.pages import object_bytes
from hicache_umbp.peer import TcpPeer, UnixPeer
from hicache_umbp.session import Mode

logger = logging.getLogger(__name__)

Components = Sequence[tuple[int, ...]]
"""The component sizes in bytes of a page of each pool."""

RECONNECT_MS = 500
"""How long a client waits for a server that was seen to answer a moment ago."""

STAGING_BYTES = 64 << 20
DEFAULT_PAGE_BYTES = 64 << 10

SSD_READ_LEASE = ("UMBP_SSD_READ_LEASE_MS", "20")
"""A read of the SSD keeps a staging slot for so long; with the client's own value, batches
run out of slots."""


def mode_of(config: UmbpConfig, rank: HiCacheStorageConfig) -> Mode:
    """How this rank's clients are made.

    Raises:
        ConfigError: a setting does not work with the installed client or on this rank.
        BackendUnavailableError: no client is installed.
    """
    module = native_module()
    place = Place(rank)
    for warning in without_effect(config, newest=hasattr(module, "UMBPMedium")):
        logger.warning("UMBP: %s", warning)
    if config.standalone_address:
        return _standalone(module, config, place)
    if config.master_address:
        return _distributed(module, config, place)
    return _embedded(module, config, place)


class Place:
    """A rank's place, as the in-tree adapter numbers ranks."""

    def __init__(self, rank: HiCacheStorageConfig) -> None:
        self.rank = rank
        local = os.environ.get("LOCAL_RANK")
        dp_pp = rank.dp_rank * max(rank.pp_size, 1) + rank.pp_rank
        self.index = int(local) if local else dp_pp * max(rank.tp_size, 1) + rank.tp_rank

    def name(self, address: str) -> str:
        rank = self.rank
        return f"{address}:dp{rank.dp_rank}:pp{rank.pp_rank}:tp{rank.tp_rank}"

    def folder(self, base: str) -> str:
        """A folder of this rank's own; ranks that share one overwrite each other's files."""
        rank = self.rank
        return str(
            Path(base) / f"dp{rank.dp_rank}_pp{rank.pp_rank}_tp{rank.tp_rank}_cp{rank.attn_cp_rank}"
        )


def _embedded(module: Any, config: UmbpConfig, place: Place) -> Mode:
    if config.medium is Medium.SSD and not hasattr(module, "UMBPMedium"):
        raise ConfigError(
            "medium 'ssd' needs amd-mori 1.2.4; with 1.2.2 set ssd_enabled to true instead"
        )

    def connect(pages: Components) -> UmbpClient:
        native = _native_config(module, config, place)
        native.dram.capacity_bytes = config.dram_capacity_bytes
        distributed = module.UMBPDistributedConfig()
        page = _set_page_size(module, config, native, distributed, pages)
        staging = None
        if config.medium is Medium.SSD:
            staging = _use_ssd(module, config, native, distributed, pages)
        if hasattr(module, "UMBPMedium"):
            # Without a master this is the embedded mode too, and it takes the page size. The
            # assignment copies.
            native.distributed = distributed
        else:
            # 1.2.2 says of a batch larger than its memory that all of it is there.
            staging = Staging(1, config.dram_capacity_bytes // 2)
        logger.info(
            "UMBP embedded: %s of %d bytes, page %d bytes",
            config.medium.value,
            config.dram_capacity_bytes,
            page,
        )
        return _client(module, native, staging)

    return Mode("embedded", connect)


def _standalone(module: Any, config: UmbpConfig, place: Place) -> Mode:
    if not hasattr(module, "UMBPStandaloneProcessConfig"):
        raise ConfigError(
            "standalone_address: the installed amd-mori has no standalone mode; take 1.2.4"
        )
    started: list[bool] = []

    peer = UnixPeer(Path(config.standalone_address.removeprefix(UNIX)))

    def connect(pages: Components) -> UmbpClient:
        # The client names itself to the server by its process ID. Two clients of one name write
        # into each other's memory, and answer True.
        if not peer.counts_processes_as_here():
            raise BackendUnavailableError(
                f"UMBP's server at {peer.name} is in another PID namespace, where two containers' "
                "clients of one process ID would be given each other's pages; share the "
                "namespace (docker run --pid, Kubernetes shareProcessNamespace or hostPID)"
            )
        native = _native_config(module, config, place)
        standalone = module.UMBPStandaloneProcessConfig()
        standalone.address = config.standalone_address
        standalone.auto_start = False
        # The client waits holding the interpreter's lock, so not for long once it runs.
        wait = RECONNECT_MS if started else config.standalone_startup_timeout_ms
        standalone.startup_timeout_ms = wait
        address = config.node_address_for(place.index) or _own_address()
        standalone.worker_node_address = address
        standalone.worker_node_id = config.node_id_for(place.index) or place.name(address)
        standalone.tags = list(config.tags_or_none() or [])
        native.standalone_process = standalone
        client = _client(module, native)
        started.append(True)
        return client

    return Mode("standalone server", connect, peer=peer, reconnects=True, must_register=True)


def _distributed(module: Any, config: UmbpConfig, place: Place) -> Mode:
    def connect(pages: Components) -> UmbpClient:
        native = _native_config(module, config, place)
        native.dram.capacity_bytes = config.dram_capacity_bytes
        distributed = module.UMBPDistributedConfig()
        master = distributed.master_config
        address = config.node_address_for(place.index) or _own_address()
        master.master_address = config.master_address
        master.node_address = address
        master.node_id = config.node_id_for(place.index) or place.name(address)
        master.auto_heartbeat = config.auto_heartbeat
        _give(master, "tags", config.tags_or_none())
        host = config.io_engine_host_for(place.index)
        distributed.io_engine.host = address if host is None else host
        _give(distributed.io_engine, "port", config.io_engine_port_for(place.index))
        _give(distributed, "peer_service_port", config.peer_service_port_for(place.index))
        for name in (
            "staging_buffer_size",
            "ranged_scratch_size",
            "ssd_staging_buffer_size",
            "cache_remote_fetches",
        ):
            _give(distributed, name, getattr(config, name))
        _set_page_size(module, config, native, distributed, pages)
        staging = None
        if config.medium is Medium.SSD:
            staging = _use_ssd(module, config, native, distributed, pages)
        native.distributed = distributed
        return _client(module, native, staging)

    host, _, port = config.master_address.rpartition(":")
    return Mode(
        "distributed",
        connect,
        peer=TcpPeer(host.strip("[]"), int(port)),
        registers=not config.disable_zero_copy_register,
        remote=True,
    )


def _native_config(module: Any, config: UmbpConfig, place: Place) -> Any:
    """What all modes share: watermarks, SSD, eviction. Each rank is on its own."""
    native = module.UMBPConfig.from_environment()
    # The environment may make this rank a follower (LOCAL_RANK), which sees nothing here.
    native.role = module.UMBPRole.Standalone
    native.distributed = None
    native.ssd.enabled = bool(config.ssd_enabled)
    native.ssd.storage_dir = place.folder(config.ssd_storage_dir)
    native.ssd.capacity_bytes = config.ssd_capacity_bytes
    native.ssd.ssd_backend = "file"
    _give(native.ssd, "segment_size_bytes", config.ssd_segment_size_bytes)
    _give(native.ssd, "high_watermark", config.ssd_high_watermark)
    _give(native.ssd, "low_watermark", config.ssd_low_watermark)
    _give(native.ssd.io, "queue_depth", config.ssd_queue_depth)
    if config.ssd_io_backend is not None:
        kinds = module.UMBPIoBackend
        native.ssd.io.backend = kinds.Posix if config.ssd_io_backend == "posix" else kinds.IoUring
    if config.ssd_durability_mode is not None:
        modes = module.UMBPDurabilityMode
        strict = config.ssd_durability_mode in ("strict", "sync")
        native.ssd.durability.mode = modes.Strict if strict else modes.Relaxed
    _give(native.copy_pipeline, "async_enabled", config.ssd_copy_async)
    _give(native.copy_pipeline, "queue_depth", config.ssd_copy_queue_depth)
    _give(native.copy_pipeline, "worker_threads", config.ssd_copy_worker_threads)
    _give(native.copy_pipeline, "batch_max_ops", config.ssd_copy_batch_max_ops)
    _give(native.eviction, "policy", config.eviction_policy)
    _give(native.eviction, "candidate_window", config.eviction_candidate_window)
    _give(native.eviction, "auto_promote_on_read", config.auto_promote_on_read)
    return native


def _set_page_size(
    module: Any, config: UmbpConfig, native: Any, distributed: Any, pages: Components
) -> int:
    """Set page size and watermarks for these pages; the page size in bytes."""
    ranged = hasattr(module.UMBPClient, "batch_put_ranges_from_ptr")
    objects = [size for page in pages for size in object_bytes(page, ranged=ranged)]
    page = config.dram_page_size or paging.page_bytes(objects)
    distributed.dram_page_size = page
    capacity = config.dram_capacity_bytes
    largest = max(objects, default=0)
    if objects and (capacity < 2 * largest or capacity < 2 * page):
        raise ConfigError(
            f"dram_capacity_bytes: {capacity} bytes hold no two objects of {largest} in pages of "
            f"{page}; give the store more, for example dram_capacity_bytes='4gb'"
        )
    high, _ = paging.watermarks(capacity, page, objects)
    native.dram.high_watermark, native.dram.low_watermark = _watermarks(config, high, largest)
    return page


def _watermarks(config: UmbpConfig, fitting: float, largest: int) -> tuple[float, float]:
    """The high and the low watermark: what was given, else ``fitting`` and a step below.

    Raises:
        ConfigError: the low one is not below the high one; the client would never evict.
    """
    high = config.dram_high_watermark or fitting
    if high > fitting and fitting < paging.HIGHEST:
        logger.warning(
            "UMBP: dram_high_watermark %g leaves no room above it for an object of %d bytes, and "
            "the client evicts only above it: such puts may fail for good; leave it out, or give "
            "at most %.3f",
            high,
            largest,
            fitting,
        )
    low = config.dram_low_watermark or max(high / 2, high - paging.STEP)
    if low >= high:
        raise ConfigError(
            f"dram_low_watermark: {low:g} is not below the high one, which is {high:.3f} for "
            f"objects of {largest} bytes in this memory; leave it out, or give less"
        )
    return high, low


def _use_ssd(
    module: Any, config: UmbpConfig, native: Any, distributed: Any, pages: Components
) -> Staging:
    """Keep these pages on the SSD; what a call must fit into.

    Raises:
        ConfigError: an object of these pages does not.
    """
    distributed.medium = module.UMBPMedium.SSD
    native.ssd.enabled = True
    os.environ.setdefault(*SSD_READ_LEASE)
    page = distributed.dram_page_size or DEFAULT_PAGE_BYTES
    distributed.dram_page_size = page
    largest = max((-(-sum(sizes) // page) + 1 for sizes in pages), default=1)
    slots = config.ssd_staging_buffer_slots or max(STAGING_BYTES // page, 4 * largest)
    if slots < largest:
        raise ConfigError(
            f"ssd_staging_buffer_slots: {slots} of {page} bytes do not hold one page of a pool, "
            f"which takes {largest}; for example ssd_staging_buffer_slots={4 * largest}"
        )
    distributed.ssd_staging_buffer_slots = slots
    return Staging(page, slots)


def _client(module: Any, native: Any, staging: Staging | None = None) -> UmbpClient:
    try:
        return UmbpClient(module.UMBPClient(native), staging)
    except RuntimeError as error:
        raise BackendUnavailableError(f"UMBP's client cannot start: {error}") from error


def _give(target: Any, name: str, value: Any) -> None:
    """Set a field, unless no value was given."""
    if value is not None:
        setattr(target, name, value)


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
