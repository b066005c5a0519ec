"""The adapter's settings: SGLang's names, and clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hicache_mooncake.config import MooncakeConfig
from hicache_shared.config import load, settings_of
from hicache_shared.errors import ConfigError

MASTER = {"master_server_address": "10.0.0.1:50051"}
README = Path(__file__).parents[2] / "packages" / "mooncake" / "README.md"


def config(extra: dict[str, Any], **environ: str) -> MooncakeConfig:
    return load(MooncakeConfig, {**MASTER, **extra}, environ)


def test_the_environment_of_the_in_tree_adapter_is_enough() -> None:
    loaded = load(
        MooncakeConfig,
        None,
        {
            "MOONCAKE_MASTER": "m:1",
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": "2gb",
            "LOCAL_HOSTNAME": "node7",
            "MOONCAKE_CHECK_SERVER": "false",
            "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        },
    )
    assert loaded.master_server_address == "m:1"
    assert loaded.protocol == "tcp"
    assert loaded.global_segment_size == 2 * 2**30
    assert loaded.local_hostname == "node7"


def test_defaults_are_those_of_the_in_tree_adapter() -> None:
    loaded = config({})
    assert loaded.protocol == "rdma"
    assert loaded.metadata_server == "P2PHANDSHAKE"
    assert loaded.global_segment_size == 4 * 2**30
    assert loaded.local_hostname == "localhost"
    assert loaded.tenant_id == "default"


def test_the_segment_is_divided_over_the_ranks() -> None:
    assert config({"global_segment_size": "8gb"}).segment_bytes(4) == 2 * 2**30


@pytest.mark.parametrize("devices", ['{"0": "mlx5_0", "1": "mlx5_1"}', {0: "mlx5_0", 1: "mlx5_1"}])
def test_devices_can_be_named_a_rank(devices: object) -> None:
    loaded = config({"device_name": devices})
    assert loaded.device_for(1) == "mlx5_1"
    with pytest.raises(ConfigError, match="no device for TP rank 2"):
        loaded.device_for(2)


def test_one_device_name_serves_every_rank() -> None:
    assert config({}, MOONCAKE_DEVICE="mlx5_0").device_for(5) == "mlx5_0"


def test_each_rank_offloads_to_a_folder_of_its_own() -> None:
    loaded = config({"enable_ssd_offload": True, "ssd_offload_path": "/d"})
    assert loaded.offload_folder(1, 2, 3, 4) == Path("/d/rank_1_2_3_4")
    assert config({"ssd_offload_path": "/d"}).offload_folder(0, 0, 0, 0) is None


def test_the_in_tree_tag_is_the_namespace() -> None:
    assert config({"extra_backend_tag": "team-a"}).namespace == "team-a"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"standalone_storage": True}, "allocator"),
        ({"client_server_address": "h:1"}, "allocator"),
        ({"check_server": True}, "setup_retries"),
        ({"enable_group_semantics": True}, "one object"),
        ({"enable_ssd_offload": True}, "ssd_offload_path"),
        ({"extra_backend_tag": "a", "namespace": "b"}, "leave one out"),
        ({"master_server_address": "nohost"}, "host:port"),
        ({"device_name": "{bad"}, "JSON of TP rank"),
        ({"device_name": '{"a":' * 200_000}, "JSON of TP rank"),
        ({"global_segment_size": "4 gigs"}, "for example global_segment_size='4gb'"),
        ({"local_buffer_size": 0}, "local_buffer_size: 0"),
        ({"replica_num": 0}, "replica_num: 0"),
        ({"retry_start_ms": 1e-300}, "retry_start_ms: 1e-300"),
        ({"global_segment_sise": 1}, "nearest known is 'global_segment_size'"),
    ],
)
def test_what_does_not_work_is_refused_with_the_reason(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(extra)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:50051",
        "node-1.rack_2.example:1",
        "h:65535",
        "[fe80::1]:50051",
        "etcd://10.0.0.1:2379",
        "etcd://e1:2379;e2:2379;e3:2379",
    ],
)
def test_addresses_that_the_client_takes_are_accepted(address: str) -> None:
    assert config({"master_server_address": address}).master_server_address == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "h",
        "h:",
        ":50051",
        "h:0",
        "h:65536",
        "h:99999",
        "h:\u0665",
        "h:1:2",
        "h:1,h:2",
        "h:1;h:2",
        "h:1/x",
        " h:1",
        "h 1:1",
        "::1:50051",
        "etcd://",
        "etcd://h",
        "etcd://h:1,h:2",
        "etcd://h:1;",
        "etcd://etcd://h:1",
        "http://x",
        "http://x:80",
        "redis://h:6379",
    ],
)
def test_an_address_that_cannot_be_a_masters_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config({"master_server_address": address})
    assert f"master_server_address: {address!r} (from extra config)" in str(caught.value)
    assert "expected host:port" in str(caught.value)
    assert "for example master_server_address='10.0.0.1:50051'" in str(caught.value)


def test_a_master_must_be_named() -> None:
    with pytest.raises(ConfigError, match="environment variable MOONCAKE_MASTER"):
        load(MooncakeConfig, {}, {})


def test_a_request_may_take_half_the_deadline() -> None:
    assert config({}).rpc_timeout == 2500
    assert config({"deadline_s": 1}).rpc_timeout == 500
    assert config({"rpc_timeout_ms": 70}).rpc_timeout == 70


def test_the_readme_documents_every_setting() -> None:
    text = README.read_text()
    for doc in settings_of(MooncakeConfig):
        assert f"| `{doc.name}` |" in text
        assert doc.description in text
        for variable in doc.env:
            assert f"`{variable}`" in text
