"""Settings of the Mooncake adapter, under the names SGLang's in-tree adapter uses.

Names, defaults and the division of the segment are those of SGLang 0.5.23
(``mem_cache/storage/mooncake_store``), so that a takeover changes nothing. What this
adapter does not do is refused with the reason, never ignored.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, model_validator

from hicache_shared.config import (
    ByteSize,
    CommonConfig,
    Count,
    Number,
    PositiveByteSize,
    setting,
)
from hicache_shared.errors import ConfigError

DEFAULT_TENANT = "default"

MOST_PORT = 65_535


ETCD = "etcd://"
"""The one election service that the client's wheel is built with."""

_ENDPOINT = re.compile(
    r"(?:[^\s:/,;\[\]]+|\[[0-9a-f:.]+\]):([1-9]\d{0,4})", re.ASCII | re.IGNORECASE
)
"""``host:port`` or ``[IPv6]:port``; the group is the port."""


def _address(value: str) -> str:
    """``host:port``, or an election service as ``etcd://host:port;host:port``."""
    endpoints = value.removeprefix(ETCD).split(";") if value.startswith(ETCD) else [value]
    for endpoint in endpoints:
        found = _ENDPOINT.fullmatch(endpoint)
        if found is None or int(found[1]) > MOST_PORT:
            raise ValueError(
                f"expected host:port with a port of 1 to {MOST_PORT}, or for masters with "
                f"failover {ETCD}host:port, with ';' between several"
            )
    return value


def _devices(value: object) -> object:
    """JSON text of an object becomes a mapping; keys become text, as JSON has them."""
    if isinstance(value, str) and value.strip().startswith("{"):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f"expected a device name or JSON of TP rank to name: {error}"
            ) from error
    if isinstance(value, dict):
        return {str(rank): name for rank, name in value.items()}
    return value


class MooncakeConfig(CommonConfig):
    """Settings of the Mooncake adapter."""

    config_file_env: ClassVar[str | None] = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"

    master_server_address: Annotated[str, AfterValidator(_address)] = setting(
        env="MOONCAKE_MASTER",
        example="10.0.0.1:50051",
        description="Where the master answers: host:port, or etcd://host:port with failover "
        "(';' between several).",
    )
    local_hostname: str = setting(
        "localhost",
        env=("MOONCAKE_LOCAL_HOSTNAME", "LOCAL_HOSTNAME"),
        example="10.0.0.2",
        description="The name under which other nodes reach this one.",
        per_node=True,
        min_length=1,
    )
    metadata_server: str = setting(
        "P2PHANDSHAKE",
        env="MOONCAKE_TE_META_DATA_SERVER",
        example="P2PHANDSHAKE",
        description="The transfer engine's metadata service. P2PHANDSHAKE needs none, and is "
        "advised: the master's own HTTP metadata service binds every interface.",
        min_length=1,
    )
    global_segment_size: ByteSize = setting(
        4 * 2**30,
        env="MOONCAKE_GLOBAL_SEGMENT_SIZE",
        example="4gb",
        description="Memory that this node gives to the store, divided over TP x PP ranks; "
        "0 stores on other nodes only.",
    )
    local_buffer_size: PositiveByteSize = setting(
        16 * 2**20,
        env="MOONCAKE_LOCAL_BUFFER_SIZE",
        example="16mb",
        description="The client's own scratch memory. Pages are moved without it.",
    )
    protocol: str = setting(
        "rdma",
        env="MOONCAKE_PROTOCOL",
        example="tcp",
        description="The transport: rdma, tcp, or another that the installed client has. Setup "
        "succeeds with rdma on a machine without a NIC, so a warning says when none is seen.",
        min_length=1,
    )
    device_name: Annotated[str | dict[str, str], BeforeValidator(_devices)] = setting(
        "",
        env="MOONCAKE_DEVICE",
        example='{"0": "mlx5_0", "1": "mlx5_1"}',
        description="RDMA devices, comma-separated, or a JSON object of TP rank to devices; "
        "empty lets the client choose.",
    )
    enable_ssd_offload: bool = setting(
        False,
        env="MOONCAKE_ENABLE_SSD_OFFLOAD",
        example=True,
        description="Let the client move cold objects to local disk. It does so in buckets of "
        "256 MB; MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES makes them smaller.",
    )
    ssd_offload_path: str | None = setting(
        None,
        env="MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
        example="/var/lib/mooncake",
        description="Folder for that; each rank uses a folder of its own in it, since clients "
        "that share one overwrite each other's files.",
        min_length=1,
    )
    tenant_id: str = setting(
        DEFAULT_TENANT,
        env="MOONCAKE_TENANT_ID",
        example=DEFAULT_TENANT,
        description="Mooncake's tenant. It isolates nothing unless the master runs with "
        "--enable_multi_tenants and a policy file; use namespace to keep deployments apart.",
        min_length=1,
    )
    extra_backend_tag: str = setting(
        "",
        env="HICACHE_MOONCAKE_BACKEND_TAG",
        example="team-a",
        description="The in-tree adapter's word for namespace; give one of the two.",
    )
    replica_num: Count = setting(
        1,
        env="HICACHE_MOONCAKE_REPLICA_NUM",
        example=1,
        description="Copies of each page, on different segments; fewer where there are fewer.",
        ge=1,
        le=16,
    )
    preferred_segment: str = setting(
        "",
        env="HICACHE_MOONCAKE_PREFERRED_SEGMENT",
        example="10.0.0.2:12345",
        description="The segment that pages go to while it has room; another one otherwise.",
    )
    setup_retries: Count = setting(
        5,
        env="HICACHE_MOONCAKE_SETUP_RETRIES",
        example=5,
        description="Tries to reach the master at start, about 4.5 s each where it is absent.",
        ge=1,
        le=100,
    )
    rpc_timeout_ms: Count | None = setting(
        None,
        env="HICACHE_MOONCAKE_RPC_TIMEOUT_MS",
        example=2500,
        description="Milliseconds a request to the master may take; half of deadline_s where "
        "not given. MC_RPC_TIMEOUT_MS, where set, goes before it.",
        ge=10,
        le=60_000,
    )
    retry_start_ms: Number = setting(
        20.0,
        env="HICACHE_MOONCAKE_RETRY_START_MS",
        example=20,
        description="First pause before a page that found no space is tried again; doubled "
        "each time up to 320 ms, until deadline_s is over.",
        ge=1,
        le=1000,
    )
    master_metrics_port: Count = setting(
        9003,
        env="MOONCAKE_MASTER_METRICS_PORT",
        example=9003,
        description="Accepted for the in-tree adapter's configurations; nothing here uses it.",
        ge=1,
        le=MOST_PORT,
    )
    check_server: bool = setting(
        False,
        env="MOONCAKE_CHECK_SERVER",
        example=False,
        description="Refused when true: start waits for the master for setup_retries tries.",
    )
    standalone_storage: bool = setting(
        False,
        env="MOONCAKE_STANDALONE_STORAGE",
        example=False,
        description="Refused when true: a standalone client can only use host memory of its own "
        "allocator, which SGLang gives to the in-tree adapter alone.",
    )
    client_server_address: str = setting(
        "",
        env="MOONCAKE_CLIENT",
        example="",
        description="The standalone client's address; refused like standalone_storage.",
    )
    enable_group_semantics: bool = setting(
        False,
        env="HICACHE_MOONCAKE_GROUP_SEMANTICS",
        example=False,
        description="Refused when true: here a page is one object, not a group of them.",
    )

    @model_validator(mode="after")
    def _only_what_works(self) -> Self:
        if self.standalone_storage or self.client_server_address:
            raise ValueError(
                "standalone_storage, client_server_address: not supported, since the standalone "
                "client takes only memory of its own allocator, which SGLang gives to its in-tree "
                "adapter alone; leave both out and set master_server_address"
            )
        if self.check_server:
            raise ValueError(
                "check_server: not supported; start waits for the master by itself, for "
                "setup_retries tries; leave it out"
            )
        if self.enable_group_semantics:
            raise ValueError(
                "enable_group_semantics: not supported; a page is one object here; leave it out"
            )
        if self.extra_backend_tag and self.namespace not in ("", self.extra_backend_tag):
            raise ValueError(
                f"namespace {self.namespace!r} and extra_backend_tag {self.extra_backend_tag!r} "
                "mean the same thing and differ; leave one out"
            )
        if self.enable_ssd_offload and self.ssd_offload_path is None:
            raise ValueError(
                "enable_ssd_offload: needs ssd_offload_path; for example "
                "ssd_offload_path='/var/lib/mooncake'"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _tag_is_namespace(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("namespace"):
            tag = values.get("extra_backend_tag")
            if isinstance(tag, str) and tag:
                return {**values, "namespace": tag}
        return values

    @property
    def rpc_timeout(self) -> int:
        """Milliseconds a request to the master may take."""
        return self.rpc_timeout_ms or max(10, int(self.deadline_s * 500))

    @property
    def stall_timeout(self) -> int:
        """Seconds without progress after which a TCP transfer is given up; a get of a frozen
        peer's pages took up to three times that."""
        return max(1, round(0.4 * self.deadline_s))

    def segment_bytes(self, ranks: int) -> int:
        """This rank's share of the segment, divided as in tree over TP x PP ranks."""
        return self.global_segment_size // ranks

    def device_for(self, tp_rank: int) -> str:
        """The RDMA devices of a rank.

        Raises:
            ConfigError: ``device_name`` is a mapping that leaves the rank out.
        """
        if isinstance(self.device_name, str):
            return self.device_name
        if str(tp_rank) not in self.device_name:
            raise ConfigError(
                f"device_name: no device for TP rank {tp_rank}; it has ranks "
                f"{', '.join(self.device_name)}; for example device_name='mlx5_0'"
            )
        return self.device_name[str(tp_rank)]

    def offload_folder(self, dp_rank: int, tp_rank: int, pp_rank: int, cp_rank: int) -> Path | None:
        """This rank's own folder for offload, named as in tree; None where it is off."""
        if not self.enable_ssd_offload or self.ssd_offload_path is None:
            return None
        return Path(self.ssd_offload_path) / f"rank_{dp_rank}_{tp_rank}_{pp_rank}_{cp_rank}"


__all__ = ["DEFAULT_TENANT", "MooncakeConfig"]
