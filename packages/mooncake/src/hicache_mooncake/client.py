"""Mooncake's native client, thinly: setup that explains itself, answers with names.

What is known of the client's behaviour (codes, limits, what crashes it) is in this file;
what to do about it is the store's affair. Its logs go to standard error by itself.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hicache_mooncake.config import DEFAULT_TENANT, MooncakeConfig
from hicache_mooncake.pages import Pages
from hicache_mooncake.room import LONGEST_QUEUE, QUEUE_VARIABLE, queue_length
from hicache_shared.errors import BackendUnavailableError
from hicache_shared.store import Code

logger = logging.getLogger(__name__)

INSTALL = (
    "pip install 'hicache-mooncake[client]' (CUDA 12), 'hicache-mooncake[client-cuda13]' "
    "(CUDA 13) or 'hicache-mooncake[client-non-cuda]' (no CUDA driver); on Debian also "
    "apt-get install libibverbs1 libnuma1 libcurl4"
)

TIMED_OUT = -901

_CODES = {
    0: Code.OK,
    -200: Code.NO_SPACE,
    -703: Code.MISSING,
    -704: Code.MISSING,
    -900: Code.UNAVAILABLE,
    TIMED_OUT: Code.TIMEOUT,
}

BAD_ARGUMENT = -600
TRANSFER_FAILED = -800
MAYBE_WRONG_SIZE = frozenset({BAD_ARGUMENT, TRANSFER_FAILED})
"""Answers of a get that also mean "the object has another size": longer than the buffer, or
shorter than the buffers of a multi-buffer get."""

REMOVED = frozenset({0, -704})
"""Answers of a removal after which there is no object."""


def code_of(native: int) -> Code:
    """The port's code for an answer of the client that is 0 or negative."""
    return _CODES.get(native, Code.FAILED)


def native_module() -> Any:
    """The module ``mooncake.store``.

    Raises:
        BackendUnavailableError: it is not installed or does not load.
    """
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise BackendUnavailableError(
            f"the Mooncake client cannot be loaded ({error}); install it: {INSTALL}"
        ) from error


class MooncakeClient:
    """One connected client.

    The data calls may be made from several threads at once and release the GIL. No call may
    be made after :meth:`close`, nor while it runs: the native client crashes.

    Attributes:
        native: the ``MooncakeDistributedStore``.
        master: the master's address, for messages.
        most_transfers: components of pages that calls may move at once, all together.

    Answers of ``exists``: 1, 0 or a negative native code a key; of ``put``: 0 or negative; of
    ``get``: the object's size in bytes or negative.
    """

    def __init__(
        self, native: Any, replicate_config: Any, master: str, most_transfers: int
    ) -> None:
        self.native = native
        self._replicate = replicate_config
        self.master = master
        self.most_transfers = most_transfers

    def exists(self, keys: list[str]) -> list[int]:
        answers: list[int] = self.native.batch_is_exist(keys)
        return answers

    def get(self, pages: Pages) -> list[int]:
        """Read objects into the pages' memory.

        An object shorter than its page gives its own size with part of the page written, or
        ``TRANSFER_FAILED`` where the call has pages of several components; a longer one gives
        ``BAD_ARGUMENT``.
        """
        native = self.native
        answers: list[int] = (
            native.batch_get_into(pages.keys, pages.addresses, pages.sizes)
            if pages.parts is None
            else native.batch_get_into_multi_buffers(pages.keys, pages.addresses, pages.parts)
        )
        return answers

    def put(self, pages: Pages) -> list[int]:
        """Store one object a page. A key that exists gives 0 and keeps its bytes."""
        native, how = self.native, self._replicate
        answers: list[int] = (
            native.batch_put_from(pages.keys, pages.addresses, pages.sizes, how)
            if pages.parts is None
            else native.batch_put_from_multi_buffers(pages.keys, pages.addresses, pages.parts, how)
        )
        return answers

    def sizes(self, keys: list[str]) -> list[int | None]:
        """The stored size of each key in bytes; None where the master does not tell.

        Costs about 6 us a key, and a line in the client's log for each absent key.
        """
        found: Mapping[str, list[Any]] = self.native.batch_get_replica_desc(keys)
        return [_stored_size(found.get(key, [])) for key in keys]

    def remove(self, keys: list[str]) -> list[int]:
        """Remove objects, leased ones too; 0 or a negative native code a key."""
        answers: list[int] = self.native.batch_remove(keys, True)
        return answers

    def remove_matching(self, pattern: str) -> int:
        """Remove objects whose key matches an ECMAScript pattern, leased ones too."""
        return int(self.native.remove_by_regex(pattern, True))

    def register(self, address: int, nbytes: int) -> int:
        """Make host memory usable for transfers; 0 or a negative native code."""
        return int(self.native.register_buffer(address, nbytes))

    def unregister(self, address: int) -> int:
        return int(self.native.unregister_buffer(address))

    def healthy(self) -> bool:
        """Whether the last heartbeat reached the master; under a microsecond."""
        return bool(self.native.health_check() == 0)

    def close(self) -> int:
        """Leave the cluster; takes about 2 s, about 12 s where the master is dead."""
        return int(self.native.close())


def connect(
    config: MooncakeConfig, *, segment_bytes: int, device: str = "", offload: Path | None = None
) -> MooncakeClient:
    """Set up a client.

    Args:
        config: the adapter's settings.
        segment_bytes: memory that this process gives to the store; may be 0.
        device: RDMA devices of this rank; empty lets the client choose.
        offload: this rank's own folder for SSD offload, or None.

    Raises:
        BackendUnavailableError: no client, no master, or no such device.
    """
    module = native_module()
    _warn_of_settings(config)
    options: dict[str, Any] = {"tenant_id": config.tenant_id}
    if offload is not None:
        offload.mkdir(parents=True, exist_ok=True)
        options |= {"enable_ssd_offload": True, "ssd_offload_path": str(offload)}
    if config.protocol == "tcp":
        # Read at the first transfer, not in setup. Without it a frozen peer costs 30-60 s a call.
        os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(config.stall_timeout))
    native = module.MooncakeDistributedStore()
    with _environment(
        {
            "MC_STORE_CLIENT_SETUP_RETRIES": str(config.setup_retries),
            "MC_RPC_TIMEOUT_MS": str(config.rpc_timeout),
            QUEUE_VARIABLE: str(LONGEST_QUEUE),
        }
    ):
        answer = native.setup(
            config.local_hostname,
            config.metadata_server,
            segment_bytes,
            config.local_buffer_size,
            config.protocol,
            device,
            config.master_server_address,
            None,
            **options,
        )
    if answer != 0:
        raise BackendUnavailableError(
            f"Mooncake setup answered {answer}: no usable master at "
            f"{config.master_server_address} within {config.setup_retries} tries. Check that "
            f"mooncake_master runs there and its port is reachable from {config.local_hostname!r}, "
            f"that protocol {config.protocol!r} and device {device or '(none set)'} exist here, "
            f"and that {segment_bytes} bytes of memory are free; the client's log on standard "
            "error says more"
        )
    replicate = module.ReplicateConfig()
    replicate.replica_num = config.replica_num
    if config.preferred_segment:
        replicate.preferred_segment = config.preferred_segment
    # One queue a peer, and every copy may go to the same one.
    most_transfers = max(1, queue_length() // config.replica_num)
    return MooncakeClient(native, replicate, config.master_server_address, most_transfers)


def _warn_of_settings(config: MooncakeConfig) -> None:
    """What setup accepts and is seldom meant."""
    if config.protocol == "rdma" and not any(Path("/sys/class/infiniband").glob("*")):
        logger.warning(
            "protocol 'rdma' but this machine shows no RDMA device: setup may succeed all the "
            "same, and only pages of this process's own segment are then readable; set "
            "protocol to 'tcp' (MOONCAKE_PROTOCOL=tcp) unless a device is expected"
        )
    if config.tenant_id != DEFAULT_TENANT:
        logger.warning(
            "tenant_id %r isolates nothing unless the master runs with --enable_multi_tenants "
            "and a policy file; pages are kept apart by namespace and model_id",
            config.tenant_id,
        )


def _stored_size(replicas: list[Any]) -> int | None:
    """Bytes of the first replica in memory; those on disk do not tell."""
    for replica in replicas:
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
    return None


@contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that the client reads in setup, unless the operator set them."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
