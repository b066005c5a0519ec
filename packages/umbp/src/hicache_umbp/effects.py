"""Which settings have an effect in which mode, and why not in the others."""

from __future__ import annotations

from collections.abc import Callable

from hicache_umbp.config import Medium, UmbpConfig

Where = Callable[[UmbpConfig, bool], bool]
"""Whether a setting has an effect with these settings, and the client of 1.2.4 or not."""


def without_effect(config: UmbpConfig, *, newest: bool) -> list[str]:
    """A warning for each setting that was given and has no effect in this mode.

    Args:
        config: the settings.
        newest: whether the client is 1.2.4 rather than 1.2.2.
    """
    return [
        f"{name} has no effect here: {why}"
        for name, (where, why) in _EFFECT.items()
        if config.given(name) and not where(config, newest)
    ]


def _embedded(config: UmbpConfig) -> bool:
    return not config.master_address and not config.standalone_address


def _in_old_embedded(config: UmbpConfig, newest: bool) -> bool:
    return _embedded(config) and not newest


def _with_ssd(config: UmbpConfig, newest: bool) -> bool:
    if config.standalone_address:
        return False
    return config.medium is Medium.SSD or (not newest and bool(config.ssd_enabled))


def _distributed(config: UmbpConfig, newest: bool) -> bool:
    return bool(config.master_address)


def _own_dram(config: UmbpConfig, newest: bool) -> bool:
    return not config.standalone_address


def _named_at_a_master(config: UmbpConfig, newest: bool) -> bool:
    return not _embedded(config)


def _standalone(config: UmbpConfig, newest: bool) -> bool:
    return bool(config.standalone_address)


_SSD_WHY = (
    "the embedded client of 1.2.4 keeps pages in memory alone, whatever ssd_enabled says; "
    "set medium to 'ssd', or leave it out"
)
_SERVER_WHY = (
    "a standalone server has its own memory; give it UMBP_DRAM_CAPACITY, "
    "UMBP_EMBEDDED_DRAM_PAGE_SIZE, UMBP_DRAM_HIGH_WM and UMBP_DRAM_LOW_WM when it is started"
)
_OLD_WHY = "only the embedded client of 1.2.2 has it; leave it out"
_NO_SSD_WHY = "nothing is kept on an SSD by this process; set medium to 'ssd', or leave it out"
_MASTER_WHY = "it is for a store with a master (master_address); leave it out"
_NODE_WHY = "an embedded store is known to no master; leave it out"

_EFFECT: dict[str, tuple[Where, str]] = {
    **dict.fromkeys(
        (
            "ssd_copy_async",
            "ssd_copy_queue_depth",
            "ssd_copy_worker_threads",
            "ssd_copy_batch_max_ops",
            "eviction_policy",
            "eviction_candidate_window",
            "auto_promote_on_read",
        ),
        (_in_old_embedded, _OLD_WHY),
    ),
    **dict.fromkeys(
        (
            "ssd_storage_dir",
            "ssd_capacity_bytes",
            "ssd_staging_buffer_slots",
            "ssd_segment_size_bytes",
            "ssd_queue_depth",
            "ssd_io_backend",
            "ssd_durability_mode",
            "ssd_high_watermark",
            "ssd_low_watermark",
        ),
        (_with_ssd, _NO_SSD_WHY),
    ),
    **dict.fromkeys(
        ("dram_capacity_bytes", "dram_page_size", "dram_high_watermark", "dram_low_watermark"),
        (_own_dram, _SERVER_WHY),
    ),
    **dict.fromkeys(
        (
            "ssd_staging_buffer_size",
            "disable_zero_copy_register",
            "auto_heartbeat",
            "io_engine_host",
            "io_engine_port",
            "peer_service_port",
            "staging_buffer_size",
            "ranged_scratch_size",
            "cache_remote_fetches",
        ),
        (_distributed, _MASTER_WHY),
    ),
    **dict.fromkeys(
        ("node_address", "node_id", "node_tags", "tags"), (_named_at_a_master, _NODE_WHY)
    ),
    "standalone_startup_timeout_ms": (
        _standalone,
        "it is for a standalone server (standalone_address); leave it out",
    ),
    "ssd_enabled": (
        lambda config, newest: not config.ssd_enabled or _in_old_embedded(config, newest),
        _SSD_WHY,
    ),
}
"""Settings that not every mode and version has: where each has an effect, and why not else."""
