"""The suite on the real UMBP: an embedded client, and a standalone server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from threading import Event
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.hostmem import aligned_bytes
from hicache_shared.testing import BackendSuite, Capabilities, ElsewhereSpec, Harness, Holding
from hicache_shared.testing.harness import IDENTITY_FIELDS, RawHarness, storage_config, with_extra
from hicache_umbp import UmbpBackend
from hicache_umbp.backend import epochs_of
from hicache_umbp.client import UmbpClient, native_module
from hicache_umbp.config import UmbpConfig
from hicache_umbp.memory import shared_bytes
from hicache_umbp.modes import mode_of
from hicache_umbp.pages import Pages
from hicache_umbp.server import UmbpServer
from hicache_umbp.session import PULSE_AFTER_S, Session
from hicache_umbp.store import UmbpStore
from hicache_umbp.testing import RawUmbp

pytestmark = pytest.mark.backend("umbp")

CAPACITY = 768 << 20
SMALL = 16 << 20
"""Of a limited store: one evicts to make room for its largest page, so it holds some."""

PAGE_BYTES = 16 << 10
"""One client serves the models of all tests, so its page fits none in particular."""

ROOMY = {"UMBP_DRAM_HIGH_WM": "0.8", "UMBP_DRAM_LOW_WM": "0.7"}
"""Watermarks above which the largest page of the suite fits into a small store."""

NEVER_EVICTS = 1.0
"""A watermark that is never passed: the store is full for good."""


class LentClient(RawUmbp):
    """A client that several backends share, since embedded ones share nothing else.

    Calls raise while ``broken``, as a native binding may, and one can be held.
    """

    def __init__(self, client: UmbpClient, **how: Any) -> None:
        super().__init__(client, **how)
        self.broken = False
        self.holding = Holding()

    def renew(self, client: UmbpClient) -> None:
        self.client, self._own = client, None

    def exists(self, keys: list[str]) -> list[bool]:
        self._pass()
        return super().exists(keys)

    def get(self, pages: Pages) -> list[bool]:
        self._pass()
        return super().get(pages)

    def put(self, pages: Pages, depths: list[int] | None = None) -> list[bool]:
        self._pass()
        return super().put(pages, depths)

    def _pass(self) -> None:
        if self.broken:
            raise RuntimeError("the client is broken")
        self.holding.pass_by()


class FullAtFirst:
    """A client of a full store, and of another one as soon as the first refused a page."""

    def __init__(self, full: UmbpClient, empty: UmbpClient, refused: Event) -> None:
        self._now = full
        self._empty = empty
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)

    def put(self, pages: Pages, depths: list[int] | None = None) -> list[bool]:
        answers = self._now.put(pages, depths)
        if False in answers and not self._refused.is_set():
            self._now = self._empty
            self._refused.set()
        return answers


def client_of(settings: dict[str, Any]) -> UmbpClient:
    """A client for any pages, of a rank alone."""
    config = UmbpConfig.model_validate(settings)
    return mode_of(config, storage_config(is_mla_model=False)).connect([])


class UmbpHarness(RawHarness):
    """What both modes share. ``settings`` are those of the store that tests share."""

    capabilities = Capabilities(
        raw=True,
        limited=True,
        faults=True,
        hold=True,
        relief=True,
        restart=True,
        keeps=True,
        zero_copy=True,
        flat=True,
        identity=IDENTITY_FIELDS,
    )
    requires = ("mori",)
    distributions = ("hicache-umbp", "amd-mori")

    def __init__(self, settings: dict[str, Any]) -> None:
        self._config = UmbpConfig.model_validate(settings)
        self._settings = settings
        self._lent = LentClient(client_of(settings), allocate=self.allocate)
        self._epochs = epochs_of(self._config)
        self._limited: UmbpBackend | None = None

    def make(self, config: HiCacheStorageConfig) -> UmbpBackend:
        mode = replace(
            mode_of(self._config, config), connect=lambda _: cast(UmbpClient, self._lent)
        )

        class LentClientBackend(UmbpBackend):
            def open_store(_, config: UmbpConfig, storage_config: object) -> UmbpStore:  # noqa: N805
                return UmbpStore(Session(mode), self._epochs, allocate=self.allocate)

        return LentClientBackend(with_extra(config, self._settings), {})

    def make_own(self, config: HiCacheStorageConfig) -> UmbpBackend:
        return UmbpBackend(with_extra(config, self._settings), {})

    @contextmanager
    def fault(self) -> Iterator[None]:
        self._lent.broken = True
        try:
            yield
        finally:
            self._lent.broken = False

    def hold(self) -> AbstractContextManager[Event]:
        return self._lent.holding.hold()

    @contextmanager
    def relieve(self) -> Iterator[Event]:
        assert self._limited is not None
        session = cast(UmbpStore, self._limited._store)._session
        empty, refused = session._client, Event()
        assert empty is not None
        with self.full_client(session) as full:
            session._client = cast(UmbpClient, FullAtFirst(full, empty, refused))
            try:
                yield refused
            finally:
                session._client = empty

    def full_client(self, session: Session) -> AbstractContextManager[UmbpClient]:
        """A client of a store that is full for good, and that knows the session's memory."""
        raise NotImplementedError

    @property
    def raw(self) -> LentClient:
        return self._lent

    @contextmanager
    def _limited_backend(
        self, config: HiCacheStorageConfig, settings: dict[str, Any]
    ) -> Iterator[UmbpBackend]:
        self._limited = UmbpBackend(with_extra(config, settings), {})
        try:
            yield self._limited
        finally:
            self._limited.close()
            self._limited = None


def fill(client: UmbpClient, memory: npt.NDArray[np.uint8]) -> None:
    """Put objects of a megabyte and less until the store takes none."""
    client.register(memory.ctypes.data, memory.nbytes)
    for nbytes in (1 << 20, 1 << 14):
        keys = [f"ballast/{nbytes}/{i}" for i in range((64 << 20) // nbytes)]
        client.put(Pages(keys, [nbytes] * len(keys), [memory.ctypes.data] * len(keys)))


class EmbeddedHarness(UmbpHarness):
    name = "umbp embedded"

    def __init__(self) -> None:
        super().__init__({"dram_capacity_bytes": CAPACITY, "dram_page_size": PAGE_BYTES})

    @contextmanager
    def make_limited(
        self, config: HiCacheStorageConfig, wanted_bytes: int
    ) -> Iterator[tuple[UmbpBackend, int]]:
        capacity = max(wanted_bytes, SMALL)
        with self._limited_backend(config, {"dram_capacity_bytes": capacity}) as backend:
            yield backend, capacity

    @contextmanager
    def full_client(self, session: Session) -> Iterator[UmbpClient]:
        module = native_module()
        config, distributed = module.UMBPConfig(), module.UMBPDistributedConfig()
        config.dram.capacity_bytes, distributed.dram_page_size = 16 << 20, PAGE_BYTES
        config.dram.high_watermark = config.dram.low_watermark = NEVER_EVICTS
        config.distributed = distributed
        client = UmbpClient(module.UMBPClient(config))
        fill(client, aligned_bytes(1 << 20))
        yield client

    def close(self) -> None:
        """End the client: the classes of ``make`` keep this until a garbage collection."""
        del self._lent


class StandaloneHarness(UmbpHarness):
    """The client is made anew after each test, since it lets go of no memory before its end."""

    name = "umbp standalone"
    capabilities = replace(UmbpHarness.capabilities, server=True, processes=True)

    def __init__(self) -> None:
        self._server = UmbpServer(capacity_bytes=CAPACITY, page_bytes=PAGE_BYTES)
        self._server.__enter__()
        super().__init__({"standalone_address": self._server.address})

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return shared_bytes(nbytes)

    @contextmanager
    def make_limited(
        self, config: HiCacheStorageConfig, wanted_bytes: int
    ) -> Iterator[tuple[UmbpBackend, int]]:
        capacity = max(wanted_bytes, SMALL)
        with (
            UmbpServer(capacity_bytes=capacity, page_bytes=PAGE_BYTES, options=ROOMY) as server,
            self._limited_backend(config, {"standalone_address": server.address}) as backend,
        ):
            yield backend, capacity

    @contextmanager
    def full_client(self, session: Session) -> Iterator[UmbpClient]:
        options = dict.fromkeys(("UMBP_DRAM_HIGH_WM", "UMBP_DRAM_LOW_WM"), str(NEVER_EVICTS))
        with UmbpServer(capacity_bytes=16 << 20, page_bytes=PAGE_BYTES, options=options) as server:
            client = client_of({"standalone_address": server.address})
            fill(client, shared_bytes(1 << 20))
            for region in session._regions:
                client.register(region.address, region.nbytes)
            yield client

    def elsewhere(self, config: HiCacheStorageConfig) -> ElsewhereSpec:
        return ElsewhereSpec(
            "hicache_umbp:UmbpBackend",
            with_extra(config, self._settings).extra_config or {},
            allocate="hicache_umbp.memory:shared_bytes",
        )

    def forget(self) -> None:
        self._lent.renew(client_of(self._settings))

    def restart(self) -> None:
        self.forget()

    def own_server(self) -> ServerHarness:
        return ServerHarness()

    def close(self) -> None:
        self._server.stop()


class ServerHarness(Harness):
    """A standalone server to stop and freeze."""

    name = "umbp standalone"
    capabilities = Capabilities(zero_copy=True, identity=IDENTITY_FIELDS)

    def __init__(self) -> None:
        self._server = UmbpServer(capacity_bytes=64 << 20, page_bytes=PAGE_BYTES)
        self._server.__enter__()

    def make(self, config: HiCacheStorageConfig) -> UmbpBackend:
        return UmbpBackend(with_extra(config, {"standalone_address": self._server.address}), {})

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return shared_bytes(nbytes)

    def stop_server(self) -> None:
        self._server.kill()

    def start_server(self) -> None:
        self._server.restart()

    def freeze_server(self) -> None:
        self._server.freeze()
        time.sleep(PULSE_AFTER_S)  # as long as an answer of the server counts for more to come

    def thaw_server(self) -> None:
        self._server.thaw()

    def close(self) -> None:
        self._server.stop()


class TestEmbedded(BackendSuite):
    harness_type = EmbeddedHarness


class TestStandalone(BackendSuite):
    harness_type = StandaloneHarness
