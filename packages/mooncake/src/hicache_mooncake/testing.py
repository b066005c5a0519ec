"""Reading and writing behind the contract: whole objects by their full key."""

from __future__ import annotations

import urllib.request
from types import TracebackType
from typing import Self

from hicache_mooncake.client import connect
from hicache_mooncake.config import MooncakeConfig
from hicache_shared.errors import HiCacheError

ADMIN_TIMEOUT_S = 10.0


class RawAccessError(HiCacheError, RuntimeError):
    """The client refused an access behind the contract."""


class RawMooncake:
    """A client of its own that knows nothing of pools, namespaces or page sizes.

    Copies each object, so it is for tests and for looking into a store, not for pages on
    the way. Not thread-safe. Objects up to about 60 MB.

    Args:
        master: ``host:port`` of the master.
        admin: ``host:port`` of its HTTP service, where keys are listed.
        segment_bytes: memory that this client gives to the store.

    Attributes:
        client: the client, for tests that lend it to backends.

    Raises:
        BackendUnavailableError: no client or no master.
    """

    def __init__(self, master: str, admin: str, *, segment_bytes: int = 0) -> None:
        config = MooncakeConfig(
            master_server_address=master,
            local_hostname="127.0.0.1",
            protocol="tcp",
            local_buffer_size=64 * 2**20,
        )
        self.client = connect(config, segment_bytes=segment_bytes)
        self._admin = admin

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def raw_put(self, key: str, data: bytes) -> None:
        """Store ``data`` under exactly this key, in place of what is there.

        Raises:
            RawAccessError: the client refused.
        """
        self.raw_delete(key)
        answer = self.client.native.put(key, data)
        if answer != 0 or self.client.exists([key]) != [1]:
            raise RawAccessError(f"putting {len(data)} bytes under {key!r} gave {answer}")

    def raw_get(self, key: str) -> bytes | None:
        """The object's bytes, None where there is none."""
        if self.client.exists([key]) != [1]:
            return None
        return bytes(self.client.native.get(key))

    def raw_keys(self, prefix: str = "") -> list[str]:
        """All keys of the server that begin with ``prefix``, in order."""
        url = f"http://{self._admin}/get_all_keys"
        with urllib.request.urlopen(url, timeout=ADMIN_TIMEOUT_S) as answer:
            keys = answer.read().decode().splitlines()
        return sorted(key for key in keys if key.startswith(prefix))

    def raw_delete(self, key: str) -> bool:
        """Remove an object, leased or not; whether there was one."""
        return self.client.remove([key]) == [0]

    def close(self) -> None:
        self.client.close()
