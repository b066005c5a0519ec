"""The suite on SGLang's ``MooncakeStore`` (``--hicache-storage-backend mooncake``)."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from typing import Any, cast

from hicache_mooncake.server import MooncakeMaster
from hicache_mooncake.testing import RawMooncake
from hicache_shared.contract import HiCacheStorage, HiCacheStorageConfig
from hicache_shared.testing import BackendSuite, Capabilities
from hicache_shared.testing.harness import RawHarness
from tests.peers.peer import PAGE_LAYOUTS, PeerHarness, replaced

SEGMENT_BYTES = 1 << 30


class LentStore:
    """A native client that backends share, since setting one up takes seconds.

    All calls are passed on but ``setup``, which was done.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self._registered: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def setup(self, *settings: Any, **more: Any) -> int:
        return 0

    def register_buffer(self, address: int, nbytes: int) -> int:
        answer: int = self._native.register_buffer(address, nbytes)
        if answer == 0:
            self._registered.append(address)
        return answer

    def let_go(self) -> None:
        """Forget the memory that a backend registered, as a client of its own does at its end."""
        while self._registered:
            self._native.unregister_buffer(self._registered.pop())


class MooncakeStoreHarness(RawHarness, PeerHarness):
    name = "MooncakeStore"
    kind = "mooncake"
    capabilities = Capabilities(raw=True, restart=True, zero_copy=True, layouts=PAGE_LAYOUTS)
    requires = ("sglang", "torch", "mooncake")
    distributions = ("sglang", "mooncake-transfer-engine-non-cuda")

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        master = self._stack.enter_context(MooncakeMaster())
        self._raw = self._stack.enter_context(
            RawMooncake(master.address, master.admin_address, segment_bytes=SEGMENT_BYTES)
        )
        self.extra_config = {
            "master_server_address": master.address,
            "metadata_server": "P2PHANDSHAKE",
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 64 << 20,
        }

    def make_for(
        self, config: HiCacheStorageConfig, anchor: Any, *, own_client: bool = False
    ) -> HiCacheStorage:
        if own_client:
            return super().make_for(config, anchor)
        module: Any = importlib.import_module("mooncake.store")
        lent = LentStore(self._raw.client.native)
        with replaced(module, "MooncakeDistributedStore", lambda: lent):
            backend: Any = super().make_for(config, anchor)
        # SGLang drops a backend that it closed, and with it this class's client, which the
        # class leaves to its destructor.
        backend.close = lent.let_go
        return cast(HiCacheStorage, backend)

    def forget(self) -> None:
        self._raw.client.remove(self._raw.raw_keys())

    @property
    def raw(self) -> RawMooncake:
        return self._raw

    def close(self) -> None:
        self._stack.close()


class TestMooncakeStore(BackendSuite):
    harness_type = MooncakeStoreHarness
