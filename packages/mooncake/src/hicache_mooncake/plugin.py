"""What the ``hicache`` command needs to know of this adapter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hicache_shared.plugins import BackendPlugin, ServeOptions

DEFAULT_MASTER = "127.0.0.1:50051"
"""Where ``mooncake_master`` listens by default."""

LOG_LEVEL_VARIABLE = "MC_LOG_LEVEL"
"""How much the native client logs to standard error; it is INFO by default."""


@contextmanager
def serve(options: ServeOptions) -> Iterator[dict[str, Any]]:
    """A master to use: the one named, else one on loopback while the context lasts.

    The segment holds ``store_bytes`` below the mark at which the master begins to evict. A
    client of a named master has its transport from the environment and the configuration file.

    Raises:
        BackendUnavailableError: no native client is installed, or the master does not start.
    """
    from hicache_mooncake.client import native_module
    from hicache_mooncake.server import MooncakeMaster

    os.environ.setdefault(LOG_LEVEL_VARIABLE, "ERROR")
    native_module()
    extra = {
        "global_segment_size": options.store_bytes * 5 // 4 + 64 * 2**20,
        "setup_retries": 1,
    }
    if options.master is not None:
        yield {**extra, "master_server_address": options.master}
        return
    with MooncakeMaster() as master:
        yield {**extra, "master_server_address": master.address, "protocol": "tcp"}


def launch_config(master: str | None) -> dict[str, Any]:
    """The keys that name the master.

    Raises:
        ConfigError: that cannot be a master's address.
    """
    from hicache_mooncake.config import MooncakeConfig
    from hicache_shared.config import load

    extra = {"master_server_address": DEFAULT_MASTER if master is None else master}
    load(MooncakeConfig, extra, environ={})
    return extra


plugin = BackendPlugin(
    name="mooncake",
    module_path="hicache_mooncake",
    class_name="MooncakeBackend",
    serve=serve,
    launch_config=launch_config,
    launch_hints=(
        "master_server_address: where a running mooncake_master answers (--master)",
        "the protocol is rdma by default; without an RDMA device set MOONCAKE_PROTOCOL=tcp",
        "MOONCAKE_PROTOCOL, MOONCAKE_DEVICE, MOONCAKE_LOCAL_HOSTNAME and "
        "MOONCAKE_GLOBAL_SEGMENT_SIZE on each node: transport, and memory given to the store",
    ),
)
