"""The suite on SGLang's ``UMBPStore`` (``--hicache-storage-backend mori``)."""

from __future__ import annotations

import os
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hicache_shared.contract import HiCacheStorage, HiCacheStorageConfig
from hicache_shared.testing import BackendSuite, Capabilities
from hicache_umbp.memory import shared_bytes
from hicache_umbp.server import UmbpServer
from tests.peers.peer import PAGE_LAYOUTS, PeerHarness

ADDRESS = "UMBP_STANDALONE_ADDRESS"
"""Where UMBPStore takes a standalone server's address from: with a host pool, from here alone."""

CAPACITY = 768 << 20
TESTS_A_SERVER = 6
"""They store less than its capacity, of which the client gives back none."""

PAGE_BYTES = 16 << 10


class UMBPStoreHarness(PeerHarness):
    """On a standalone server, since embedded clients share nothing."""

    name = "UMBPStore"
    kind = "mori"
    capabilities = Capabilities(restart=True, zero_copy=True, layouts=PAGE_LAYOUTS)
    requires = ("sglang", "torch", "mori")
    distributions = ("sglang", "amd-mori")

    def __init__(self) -> None:
        super().__init__()
        self._start()

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return shared_bytes(nbytes)

    def make_for(
        self, config: HiCacheStorageConfig, anchor: Any, *, own_client: bool = False
    ) -> HiCacheStorage:
        backend: Any = super().make_for(config, anchor, own_client=own_client)
        clear = backend.clear

        def clear_and_say_so() -> None:
            self._tests_left = 0
            clear()

        backend.clear = clear_and_say_so
        return cast(HiCacheStorage, backend)

    def forget(self) -> None:
        """Go on with a new server now and then: one that is full, or was cleared, refuses puts."""
        self._tests_left -= 1
        if self._tests_left < 0:
            self.close()
            self._start()

    def _start(self) -> None:
        self._tests_left = TESTS_A_SERVER
        self._server = UmbpServer(capacity_bytes=CAPACITY, page_bytes=PAGE_BYTES)
        self._server.__enter__()
        os.environ[ADDRESS] = self._server.address

    def close(self) -> None:
        del os.environ[ADDRESS]
        self._server.stop()


class TestUMBPStore(BackendSuite):
    harness_type = UMBPStoreHarness
