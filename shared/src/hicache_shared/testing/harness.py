"""What the suite needs to know of a backend, and its way behind the contract."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from hicache_shared.contract import HiCacheStorage, HiCacheStorageConfig, rank_config
from hicache_shared.errors import ConfigError
from hicache_shared.hostmem import aligned_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a harness offers beyond the contract. Everything is off unless said.

    A test that needs what is off shows as "not supported", never as passed.

    Attributes:
        raw: objects can be listed, read, planted, deleted and corrupted by their full key.
        limited: :meth:`Harness.make_limited` makes a backend on a store of little space.
        faults: :meth:`Harness.fault` makes the store fail.
        hold: :meth:`Harness.hold` keeps a call inside the native store.
        relief: :meth:`Harness.relieve` fills the limited store and gives its space back.
        restart: pages outlive every backend that stored them; :meth:`Harness.restart` drops
            what the harness itself keeps open of the client.
        processes: :meth:`Harness.elsewhere` tells another process how to use the same store.
        server: :meth:`Harness.own_server` gives a harness whose server can be stopped,
            started, frozen and thawed.
        gives_up: of the harness that it gives: a call that is in the store when the server
            freezes gives up in time; without it, it comes back when the server does.
        keeps: the store drops nothing by itself while it has space: what was stored lately, and
            takes up a small part of it, is a hit.
        checksums: bytes that changed in the store, their number being right, are a miss.
        zero_copy: the backend is made with ``"interface_v1": 1``, so SGLang moves its KV by
            ``batch_get_v1`` and ``batch_set_v1``; else by flat pages.
        flat: SGLang may also move its KV by flat pages, ``batch_get`` and ``batch_set``: always
            where ``zero_copy`` is off, and with it where the backend can be made without.
        layouts: memory layouts that SGLang can be run with beside the backend; empty for all.
        identity: fields of the extra config that tell deployments apart, of
            ``model_id``, ``revision``, ``kv_cache_dtype`` and ``namespace``.
    """

    raw: bool = False
    limited: bool = False
    faults: bool = False
    hold: bool = False
    relief: bool = False
    restart: bool = False
    processes: bool = False
    server: bool = False
    gives_up: bool = False
    keeps: bool = False
    checksums: bool = False
    zero_copy: bool = False
    flat: bool = False
    layouts: tuple[str, ...] = ()
    identity: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError for a field of ``identity`` that the suite has no values for."""
        for field in self.identity:
            if field not in IDENTITY_FIELDS:
                raise ConfigError(
                    f"identity has {field!r}; it can have {', '.join(IDENTITY_FIELDS)}"
                )


IDENTITY_FIELDS = ("model_id", "revision", "kv_cache_dtype", "namespace")
"""What the adapters of this repository read of the extra config to tell deployments apart."""


class Harness(ABC):
    """Describes one backend: how it is made, and the ways behind the contract.

    A harness is one store, and backends on it; all of them share what is stored. Use as a
    context manager; leaving it stops whatever it started.

    Attributes:
        name: of the backend, in reports.
        capabilities: what of the optional methods is there.
        requires: packages to import, of the native client. Where one is not installed, or the
            constructor raises BackendUnavailableError, the tests skip; with
            ``HICACHE_REQUIRE_BACKEND`` set they fail.
        distributions: whose versions a report names.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()
    requires: ClassVar[tuple[str, ...]] = ()
    distributions: ClassVar[tuple[str, ...]] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def make(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        """A backend as SGLang's factory would make it: ``cls(config, {})``."""

    def make_own(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        """A backend that shares no client with others, for tests that close it under load."""
        return self.make(config)

    def make_for(
        self, config: HiCacheStorageConfig, anchor: Any, *, own_client: bool = False
    ) -> HiCacheStorage:
        """A backend for a model whose anchor pool, as backends see it, is ``anchor``.

        SGLang's factory gives the pool to the constructors of its own backends; those of the
        ``dynamic`` kind, as made by :meth:`make` and :meth:`make_own`, get none.
        """
        return self.make_own(config) if own_client else self.make(config)

    def make_limited(
        self, config: HiCacheStorageConfig, wanted_bytes: int
    ) -> AbstractContextManager[tuple[HiCacheStorage, int]]:
        """A backend on an empty store of its own, and the bytes that store holds.

        They are ``wanted_bytes``, or the smallest size above that the store can have.
        """
        raise NotImplementedError

    def fault(self) -> AbstractContextManager[None]:
        """While inside, every call to the native store fails as it does when it is broken."""
        raise NotImplementedError

    def hold(self) -> AbstractContextManager[threading.Event]:
        """The next call to the native store waits inside it until this is left.

        Calls of backends that :meth:`make` made; later ones pass. The event is set when one
        waits. See :class:`Holding`.
        """
        raise NotImplementedError

    def relieve(self) -> AbstractContextManager[threading.Event]:
        """Fill the store of the open :meth:`make_limited` until it takes no page more.

        When it has refused one for want of space, and not before, it is emptied again and
        the event is set.
        """
        raise NotImplementedError

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Host memory for pools, ``uint8[nbytes]``; some clients take only their own."""
        return aligned_bytes(nbytes)

    def settle(self) -> None:
        """Wait until what was stored can be read, where that takes a moment."""

    def forget(self) -> None:
        """Drop what is stored, where it would pile up over the tests. Called after each."""

    def restart(self) -> None:
        """Let go of clients that backends share, as an engine that ends does.

        Called when every backend is closed. What was stored stays.
        """

    def elsewhere(self, config: HiCacheStorageConfig) -> ElsewhereSpec:
        """How another process makes a backend on the same store."""
        raise NotImplementedError

    def own_server(self) -> AbstractContextManager[Harness]:
        """A harness of the same backend on a server that no other test uses.

        Its backends share no client, and it has the four methods that follow.
        """
        raise NotImplementedError

    def stop_server(self) -> None:
        """Kill the server, as a machine that fails does."""
        raise NotImplementedError

    def start_server(self) -> None:
        """Start the server again, at the same address, and wait until it serves.

        Pages may be lost.
        """
        raise NotImplementedError

    def freeze_server(self) -> None:
        """Stop the server from answering while its connections stay open (SIGSTOP).

        Returns when a call that begins now will notice.
        """
        raise NotImplementedError

    def thaw_server(self) -> None:
        """Let a frozen server go on."""
        raise NotImplementedError

    def raw_keys(self) -> list[str]:
        raise NotImplementedError

    def raw_get(self, key: str) -> bytes | None:
        raise NotImplementedError

    def raw_put(self, key: str, value: bytes) -> None:
        """Plant an object, over another of that key if there is one."""
        raise NotImplementedError

    def raw_delete(self, key: str) -> None:
        raise NotImplementedError

    def raw_corrupt(self, key: str) -> None:
        """Change one byte of an object, in its middle, and keep its size."""
        self.raw_put(key, corrupted(self.raw_get(key) or b""))

    def close(self) -> None:
        """Stop what was started."""


class RawObjects(Protocol):
    """What adapters have behind the contract: a store's objects by their full key."""

    def raw_keys(self) -> list[str]: ...

    def raw_get(self, key: str, /) -> bytes | None: ...

    def raw_put(self, key: str, value: bytes, /) -> None: ...

    def raw_delete(self, key: str, /) -> object: ...


class RawHarness(Harness):
    """A harness whose way behind the contract is an object of the adapter's."""

    @property
    @abstractmethod
    def raw(self) -> RawObjects:
        """The objects of the store that all backends share."""

    def raw_keys(self) -> list[str]:
        return self.raw.raw_keys()

    def raw_get(self, key: str) -> bytes | None:
        return self.raw.raw_get(key)

    def raw_put(self, key: str, value: bytes) -> None:
        self.raw.raw_put(key, value)

    def raw_delete(self, key: str) -> None:
        self.raw.raw_delete(key)


@dataclass(frozen=True, slots=True)
class ElsewhereSpec:
    """A backend's class by name, and the extra config that leads it to a store.

    Attributes:
        backend: ``package.module:Class``.
        extra_config: SGLang's, plain JSON.
        allocate: ``package.module:function`` that gives host memory, as
            :meth:`Harness.allocate`; empty for plain memory.
    """

    backend: str
    extra_config: dict[str, Any]
    allocate: str = ""


HOLD_S = 60.0
"""A held call goes on after this long by itself, so that a failing test ends."""


class Holding:
    """Makes one call wait; what a harness puts into its native store. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: tuple[threading.Event, threading.Event] | None = None

    @contextmanager
    def hold(self) -> Iterator[threading.Event]:
        """The next call that comes by waits until this is left; the event says that one does."""
        waiting, leave = threading.Event(), threading.Event()
        with self._lock:
            self._next = (waiting, leave)
        try:
            yield waiting
        finally:
            with self._lock:
                self._next = None
            leave.set()

    def pass_by(self) -> None:
        """Called in each native call, before it touches anything."""
        with self._lock:
            held, self._next = self._next, None
        if held is not None:
            waiting, leave = held
            waiting.set()
            leave.wait(HOLD_S)


def corrupted(value: bytes) -> bytes:
    """The bytes with one changed, in their middle."""
    changed = bytearray(value)
    changed[len(changed) // 2] ^= 0xFF
    return bytes(changed)


def with_extra(config: HiCacheStorageConfig, extra: Mapping[str, Any]) -> HiCacheStorageConfig:
    """The configuration with settings for those that its extra config leaves open."""
    return replace(config, extra_config={**extra, **(config.extra_config or {})})


def storage_config(
    *,
    is_mla_model: bool,
    deployment: str = "suite",
    identity: Sequence[str] = IDENTITY_FIELDS,
    extra: dict[str, Any] | None = None,
    **changes: Any,
) -> HiCacheStorageConfig:
    """A configuration of one rank alone, with the given fields changed.

    Args:
        is_mla_model: SGLang's flag: every tensor-parallel rank holds the same primary KV.
        deployment: the served name, and part of the checkpoint's.
        identity: fields of the extra config that name the deployment.
        extra: added to the extra config, over those.
        changes: other fields of the configuration.
    """
    full = {"model_id": f"suite/{deployment}", "revision": "r1", "kv_cache_dtype": "auto"}
    named = {field: full[field] for field in identity if field in full}
    extra_config = {**named, **(extra or {})}
    return rank_config(deployment, is_mla_model=is_mla_model, extra_config=extra_config, **changes)
