"""The adapter's settings: SGLang's names, values a rank, and clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hicache_shared.config import load, settings_of
from hicache_shared.errors import ConfigError
from hicache_shared.testing.harness import storage_config
from hicache_umbp.config import Medium, UmbpConfig
from hicache_umbp.effects import without_effect
from hicache_umbp.modes import Place

README = Path(__file__).parents[2] / "packages" / "umbp" / "README.md"

IN_TREE = [
    "node_address",
    "node_id",
    "node_tags",
    "tags",
    "dram_capacity_bytes",
    "ssd_enabled",
    "ssd_storage_dir",
    "ssd_capacity_bytes",
    "ssd_segment_size_bytes",
    "ssd_queue_depth",
    "ssd_io_backend",
    "ssd_durability_mode",
    "ssd_backend",
    "ssd_high_watermark",
    "ssd_low_watermark",
    "ssd_copy_queue_depth",
    "ssd_copy_worker_threads",
    "spdk_nvme_pci_addr",
    "spdk_proxy_shm_name",
    "spdk_proxy_startup_timeout_ms",
    "spdk_proxy_bin",
    "spdk_proxy_tenant_id",
    "spdk_proxy_tenant_id_base",
    "spdk_proxy_tenant_quota_bytes",
    "spdk_proxy_max_channels",
    "spdk_proxy_data_per_channel_mb",
    "spdk_proxy_auto_start",
    "spdk_proxy_idle_exit_timeout_ms",
    "spdk_proxy_allow_borrow",
    "spdk_proxy_reserved_shared_bytes",
    "spdk_passthrough",
    "kv_events_subscriber",
    "kv_events_endpoint",
    "kv_events_topic",
    "disable_zero_copy_register",
    "extra_backend_tag",
    "ssd_copy_async",
    "ssd_copy_batch_max_ops",
    "eviction_policy",
    "eviction_candidate_window",
    "auto_promote_on_read",
    "standalone_address",
    "standalone_auto_start",
    "standalone_startup_timeout_ms",
    "master_address",
    "auto_heartbeat",
    "io_engine_host",
    "io_engine_port",
    "staging_buffer_size",
    "ranged_scratch_size",
    "ssd_staging_buffer_size",
    "ssd_staging_buffer_slots",
    "peer_service_port",
    "cache_remote_fetches",
    "dram_page_size",
]
"""Every key of the extra config that SGLang 0.5.23's ``umbp_store.py`` knows."""


def config(extra: dict[str, Any], **environ: str) -> UmbpConfig:
    return load(UmbpConfig, extra, environ)


def test_every_key_of_the_in_tree_adapter_is_known() -> None:
    assert set(IN_TREE) <= set(UmbpConfig.model_fields)


def test_the_environment_of_the_in_tree_adapter_is_enough() -> None:
    loaded = load(
        UmbpConfig,
        None,
        {
            "UMBP_MASTER_ADDRESS": "m:1",
            "UMBP_NODE_ADDRESS": "10.0.0.1,10.0.0.2",
            "UMBP_NODE_TAGS": "a, b",
            "UMBP_IO_ENGINE_PORT": "9500",
            "UMBP_DRAM_CAPACITY": "8gb",
            "UMBP_CACHE_REMOTE_FETCHES": "false",
        },
    )
    assert loaded.master_address == "m:1"
    assert loaded.node_address_for(1) == "10.0.0.2"
    assert loaded.tags_or_none() == ["a", "b"]
    assert loaded.io_engine_port_for(3) == 9503
    assert loaded.dram_capacity_bytes == 8 * 2**30
    assert loaded.cache_remote_fetches is False


def test_without_an_address_the_store_is_embedded_in_memory() -> None:
    loaded = config({})
    assert (loaded.standalone_address, loaded.master_address) == ("", "")
    assert loaded.medium is Medium.DRAM
    assert config({"medium": "ssd"}).medium is Medium.SSD


@pytest.mark.parametrize("value", ["a,b,c", ["a", "b", "c"], '["a", "b", "c"]'])
def test_a_value_can_be_given_a_rank(value: object) -> None:
    loaded = config({"node_id": value, "io_engine_host": value})
    assert [loaded.node_id_for(rank) for rank in range(3)] == ["a", "b", "c"]
    assert loaded.io_engine_host_for(2) == "c"
    with pytest.raises(ConfigError, match="node_id: no value for rank 3"):
        loaded.node_id_for(3)


def test_one_value_serves_every_rank_and_one_port_counts_up() -> None:
    loaded = config({"node_address": "h", "peer_service_port": 9000, "io_engine_port": [1, 5]})
    assert [loaded.node_address_for(rank) for rank in range(2)] == ["h", "h"]
    assert [loaded.peer_service_port_for(rank) for rank in range(3)] == [9000, 9001, 9002]
    assert [loaded.io_engine_port_for(rank) for rank in range(2)] == [1, 5]
    with pytest.raises(ConfigError, match="leaves none for rank 2"):
        config({"peer_service_port": 65_534}).peer_service_port_for(2)


def test_nothing_given_a_rank_is_none() -> None:
    loaded = config({})
    assert loaded.node_address_for(3) is None
    assert loaded.node_id_for(3) is None
    assert loaded.io_engine_host_for(3) is None
    assert loaded.io_engine_port_for(3) is None
    assert loaded.peer_service_port_for(3) is None
    assert loaded.tags_or_none() is None
    assert config({"io_engine_host": ""}).io_engine_host_for(0) == ""


def test_ranks_are_numbered_as_in_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    rank = storage_config(is_mla_model=False, tp_rank=1, tp_size=4, pp_rank=1, pp_size=2, dp_rank=3)
    place = Place(rank)
    assert place.index == (3 * 2 + 1) * 4 + 1
    assert place.name("h") == "h:dp3:pp1:tp1"
    assert place.folder("/d") == "/d/dp3_pp1_tp1_cp0"
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert Place(rank).index == 6


def test_the_in_tree_tag_is_the_namespace() -> None:
    assert config({"extra_backend_tag": "team-a"}).namespace == "team-a"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"master_address": "h:1", "standalone_address": "unix:///s"}, "two modes"),
        ({"master_address": "nohost"}, "host:port"),
        ({"master_address": "h:99999"}, "host:port"),
        ({"standalone_address": "h:1"}, "unix:// and the absolute path"),
        ({"standalone_address": "unix://relative"}, "unix:// and the absolute path"),
        ({"standalone_auto_start": True}, "orphan"),
        ({"standalone_address": "unix:///s", "medium": "ssd"}, "UMBP_SSD_ENABLED=1"),
        ({"ssd_backend": "spdk"}, "ssd_backend: 'spdk'"),
        ({"spdk_proxy_shm_name": "x"}, "spdk_proxy_shm_name: not supported"),
        ({"spdk_passthrough": {}}, "spdk_passthrough: not supported"),
        ({"kv_events_subscriber": True}, "kv_events_subscriber"),
        ({"kv_events_topic": "t"}, "kv_events_subscriber"),
        ({"extra_backend_tag": "a", "namespace": "b"}, "leave one out"),
        ({"node_tags": "a", "tags": "b"}, "leave one out"),
        ({"dram_low_watermark": 0.98}, "dram_low_watermark must be below"),
        ({"dram_high_watermark": 0.5, "dram_low_watermark": 0.5}, "must be below"),
        ({"dram_high_watermark": 1.5}, "dram_high_watermark: 1.5"),
        ({"dram_capacity_bytes": 0}, "dram_capacity_bytes: 0"),
        ({"dram_capacity_bytes": "4 gigs"}, "for example dram_capacity_bytes='4gb'"),
        ({"medium": "hbm"}, "medium: 'hbm'"),
        ({"node_id": "["}, "one a rank with commas"),
        ({"node_id": ","}, "one a rank with commas"),
        ({"io_engine_port": 0}, "io_engine_port: 0"),
        ({"retry_start_ms": 1e-300}, "retry_start_ms: 1e-300"),
        ({"dram_capacity": 1}, "nearest known is 'dram_capacity_bytes'"),
    ],
)
def test_what_does_not_work_is_refused_with_the_reason(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(extra)
    assert words in str(caught.value)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config({"standalone_auto_start": True, "kv_events_subscriber": True, "spdk_proxy_bin": "x"})
    for words in ("orphan", "kv_events", "spdk_proxy_bin"):
        assert words in str(caught.value)


SERVER = {"standalone_address": "unix:///s"}
MASTER = {"master_address": "h:1"}


@pytest.mark.parametrize(
    ("mode", "newest", "given", "why"),
    [
        ({}, True, {"ssd_enabled": True}, "memory alone"),
        ({}, True, {"ssd_storage_dir": "/d"}, "nothing is kept on an SSD"),
        ({}, True, {"eviction_policy": "lru"}, "1.2.2"),
        ({}, True, {"io_engine_port": 1}, "with a master"),
        ({}, True, {"node_address": "h"}, "known to no master"),
        ({}, True, {"standalone_startup_timeout_ms": 5}, "standalone server"),
        ({}, True, {"disable_zero_copy_register": True}, "with a master"),
        (SERVER, True, {"dram_capacity_bytes": "4gb"}, "UMBP_DRAM_CAPACITY"),
        (SERVER, True, {"dram_page_size": 4096}, "UMBP_EMBEDDED_DRAM_PAGE_SIZE"),
        (SERVER, True, {"ssd_enabled": True}, "memory alone"),
        (MASTER, True, {"eviction_policy": "lru"}, "1.2.2"),
        (MASTER, True, {"standalone_startup_timeout_ms": 5}, "standalone server"),
    ],
)
def test_what_has_no_effect_in_a_mode_is_a_warning_with_the_reason(
    mode: dict[str, Any], newest: bool, given: dict[str, Any], why: str
) -> None:
    (name,) = given
    (warning,) = without_effect(config({**mode, **given}), newest=newest)
    assert warning.startswith(f"{name} has no effect here")
    assert why in warning


@pytest.mark.parametrize(
    ("mode", "newest", "given"),
    [
        ({}, True, {"dram_capacity_bytes": "1gb", "dram_page_size": 1, "ssd_enabled": False}),
        ({"medium": "ssd"}, True, {"ssd_storage_dir": "/d", "ssd_capacity_bytes": "1gb"}),
        ({}, False, {"ssd_enabled": True, "ssd_storage_dir": "/d", "eviction_policy": "lru"}),
        (MASTER, True, {"io_engine_port": 1, "node_tags": "a", "dram_page_size": 1}),
        (SERVER, True, {"node_id": "n", "standalone_startup_timeout_ms": 5}),
        ({}, True, {}),
        (SERVER, True, {}),
        (MASTER, True, {}),
    ],
)
def test_what_has_an_effect_is_not_warned_about(
    mode: dict[str, Any], newest: bool, given: dict[str, Any]
) -> None:
    assert without_effect(config({**mode, **given}), newest=newest) == []


def test_the_readme_documents_every_setting() -> None:
    text = README.read_text()
    for doc in settings_of(UmbpConfig):
        assert f"| `{doc.name}` |" in text
        assert doc.description in text
        for variable in doc.env:
            assert f"`{variable}`" in text
