"""What the ``hicache`` command needs to know of this adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hicache_shared.errors import ConfigError
from hicache_shared.plugins import BackendPlugin, ServeOptions

UNIX = "unix:"


@contextmanager
def serve(options: ServeOptions) -> Iterator[dict[str, Any]]:
    """Settings of an embedded store that holds ``store_bytes``, or of the named master.

    Raises:
        BackendUnavailableError: no native client is installed.
        ConfigError: a standalone server is named, which cannot move the command's memory.
    """
    from hicache_umbp.client import native_module, quiet

    quiet()
    native_module()
    if options.master is not None:
        yield {**_master(options.master), "dram_capacity_bytes": _room(options.store_bytes)}
        return
    yield {"dram_capacity_bytes": _room(options.store_bytes)}


def launch_config(master: str | None) -> dict[str, Any]:
    """The keys that name the master; none for an embedded store.

    Raises:
        ConfigError: that cannot be a master's address.
    """
    from hicache_shared.config import load
    from hicache_umbp.config import UmbpConfig

    extra = {"dram_capacity_bytes": "4gb"} if master is None else _master(master)
    load(UmbpConfig, extra, environ={})
    return extra


def _room(store_bytes: int) -> int:
    """Memory that holds so much below the mark at which the client evicts."""
    return store_bytes * 5 // 4 + 64 * 2**20


def _master(address: str) -> dict[str, str]:
    if address.startswith(UNIX):
        raise ConfigError(
            f"--master {address}: a standalone server moves pages only to and from memory of "
            "mori's own allocator, which SGLang takes for its backend name 'mori' alone and this "
            "command does not take; the README of hicache-umbp says how to use one. Leave --master "
            "out for an embedded store, or give the host:port of an umbp_master"
        )
    return {"master_address": address}


plugin = BackendPlugin(
    name="umbp",
    module_path="hicache_umbp",
    class_name="UmbpBackend",
    serve=serve,
    launch_config=launch_config,
    launch_hints=(
        "without --master the store is embedded: private to each rank and gone with it; a model "
        "whose pools all TP ranks share needs a master or a standalone server at TP > 1",
        "dram_capacity_bytes (UMBP_DRAM_CAPACITY): memory that each rank gives to the store",
        "with a master, UMBP_NODE_ADDRESS and UMBP_IO_ENGINE_HOST on each node: its addresses",
    ),
)
