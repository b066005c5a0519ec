"""The suite on a real Mooncake: a master on loopback and native clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Event
from typing import Any, cast

import pytest

from hicache_mooncake import MooncakeBackend
from hicache_mooncake.client import MooncakeClient, code_of
from hicache_mooncake.config import MooncakeConfig
from hicache_mooncake.pages import Pages
from hicache_mooncake.server import MooncakeMaster
from hicache_mooncake.store import MooncakeStore
from hicache_mooncake.testing import RawAccessError, RawMooncake
from hicache_shared.contract import HiCacheStorageConfig
from hicache_shared.store import Code
from hicache_shared.testing import BackendSuite, Capabilities, ElsewhereSpec, Harness, Holding
from hicache_shared.testing.harness import IDENTITY_FIELDS, RawHarness, with_extra
from tests.mooncake.holder import holder

pytestmark = pytest.mark.backend("mooncake")

SEGMENT_BYTES = 1 << 30
SMALL_SEGMENT_BYTES = 16 << 20


class LentClient:
    """A client that several backends share, since setting one up and closing it takes seconds.

    Passes every call on, except that ``close`` leaves it open, that calls raise while
    ``broken``, as a native binding may, and that one can be held. After a put that was
    refused for want of space it removes the objects that are named in ``ballast``.
    """

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self.broken = False
        self.holding = Holding()
        self.ballast: list[str] = []
        self.refused = Event()

    def __getattr__(self, name: str) -> Any:
        if self.broken and name != "healthy":
            raise RuntimeError("the client is broken")
        if name in ("exists", "get"):
            self.holding.pass_by()
        return getattr(self._client, name)

    def put(self, pages: Pages) -> list[int]:
        if self.broken:
            raise RuntimeError("the client is broken")
        self.holding.pass_by()
        answers = self._client.put(pages)
        if self.ballast and any(code_of(answer) is Code.NO_SPACE for answer in answers):
            self._client.remove(self.ballast)
            self.ballast = []
            self.refused.set()
        return answers

    def close(self) -> int:
        return 0


class Cluster:
    """A master, a process that holds the pages, and a client: behind the contract, and to lend."""

    def __init__(self, segment_bytes: int) -> None:
        self._stack = ExitStack()
        self.master = self._stack.enter_context(MooncakeMaster())
        self._stack.enter_context(holder(self.master, segment_bytes))
        self.raw = self._stack.enter_context(
            RawMooncake(self.master.address, self.master.admin_address)
        )
        self.lent = LentClient(self.raw.client)

    def close(self) -> None:
        self._stack.close()


class MooncakeHarness(RawHarness):
    name = "mooncake"
    capabilities = Capabilities(
        raw=True,
        limited=True,
        faults=True,
        hold=True,
        relief=True,
        restart=True,
        server=True,
        keeps=True,
        processes=True,
        zero_copy=True,
        flat=True,
        identity=IDENTITY_FIELDS,
    )
    requires = ("mooncake",)
    distributions = ("hicache-mooncake", "mooncake-transfer-engine-non-cuda")

    def __init__(self) -> None:
        self._cluster = Cluster(SEGMENT_BYTES)
        self._small = Cluster(SMALL_SEGMENT_BYTES)

    def make(self, config: HiCacheStorageConfig) -> MooncakeBackend:
        return self._lending(self._cluster, config)

    def make_own(self, config: HiCacheStorageConfig) -> MooncakeBackend:
        return MooncakeBackend(addressed(self._cluster.master, config), {})

    def own_server(self) -> ServerHarness:
        return ServerHarness()

    @contextmanager
    def make_limited(
        self, config: HiCacheStorageConfig, wanted_bytes: int
    ) -> Iterator[tuple[MooncakeBackend, int]]:
        for key in self._small.raw.raw_keys():
            self._small.raw.raw_delete(key)
        backend = self._lending(self._small, config, deadline_s=0.3)
        try:
            yield backend, SMALL_SEGMENT_BYTES
        finally:
            backend.close()

    @contextmanager
    def fault(self) -> Iterator[None]:
        self._cluster.lent.broken = True
        try:
            yield
        finally:
            self._cluster.lent.broken = False

    def hold(self) -> AbstractContextManager[Event]:
        return self._cluster.lent.holding.hold()

    @contextmanager
    def relieve(self) -> Iterator[Event]:
        lent, raw = self._small.lent, self._small.raw
        lent.refused.clear()
        lent.ballast = fill(raw)
        try:
            yield lent.refused
        finally:
            lent.ballast = []

    def forget(self) -> None:
        self._cluster.raw.client.remove_matching(".*")

    def elsewhere(self, config: HiCacheStorageConfig) -> ElsewhereSpec:
        extra_config = addressed(self._cluster.master, config).extra_config or {}
        return ElsewhereSpec("hicache_mooncake:MooncakeBackend", extra_config)

    @property
    def raw(self) -> RawMooncake:
        return self._cluster.raw

    def close(self) -> None:
        self._cluster.close()
        self._small.close()

    def _lending(
        self, cluster: Cluster, config: HiCacheStorageConfig, **extra: Any
    ) -> MooncakeBackend:
        class LentClientBackend(MooncakeBackend):
            def open_store(self, config: MooncakeConfig, storage_config: object) -> MooncakeStore:
                return MooncakeStore(cast(MooncakeClient, cluster.lent))

        return LentClientBackend(addressed(cluster.master, config, **extra), {})


class ServerHarness(Harness):
    """A master to stop and freeze, and backends that give the store its memory."""

    name = "mooncake"
    capabilities = Capabilities(
        server=True, gives_up=True, zero_copy=True, identity=IDENTITY_FIELDS
    )

    def __init__(self) -> None:
        self._master = MooncakeMaster()
        self._master.__enter__()

    def make(self, config: HiCacheStorageConfig) -> MooncakeBackend:
        return MooncakeBackend(addressed(self._master, config), {})

    def stop_server(self) -> None:
        self._master.kill()

    def start_server(self) -> None:
        self._master.restart()

    def freeze_server(self) -> None:
        self._master.freeze()

    def thaw_server(self) -> None:
        self._master.thaw()

    def close(self) -> None:
        self._master.stop()


def addressed(
    master: MooncakeMaster, config: HiCacheStorageConfig, **extra: Any
) -> HiCacheStorageConfig:
    """The configuration of a backend on a master."""
    address = {
        "master_server_address": master.address,
        "local_hostname": "127.0.0.1",
        "protocol": "tcp",
        "global_segment_size": "64mb",
    }
    return with_extra(config, {**address, **extra})


def fill(raw: RawMooncake) -> list[str]:
    """Put objects until not even a small one finds space; their keys.

    They are leased, as ``raw_put`` asks for them, so that the master evicts none at once.
    """
    keys: list[str] = []
    for nbytes in (1 << 20, 1 << 17, 1 << 14):
        try:
            while True:
                key = f"ballast/{len(keys)}"
                raw.raw_put(key, bytes(nbytes))
                keys.append(key)
        except RawAccessError:
            continue
    return keys


class TestMooncake(BackendSuite):
    harness_type = MooncakeHarness
