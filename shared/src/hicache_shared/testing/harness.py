"""What the suite needs to know of a backend, and its way behind the contract."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hicache_shared.contract import HiCacheStorage, HiCacheStorageConfig, rank_config
from hicache_shared.hostmem import aligned_bytes


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a harness offers beyond the contract. Everything is off unless said.

    Attributes:
        raw: objects can be listed, read, planted and deleted by their full key.
        limited: :meth:`Harness.make_limited` makes a backend on a store of little space.
        faults: :meth:`Harness.fault` makes the store fail.
        hold: :meth:`Harness.hold` keeps a call inside the native store.
        relief: :meth:`Harness.relieve` fills the limited store and gives its space back.
    """

    raw: bool = False
    limited: bool = False
    faults: bool = False
    hold: bool = False
    relief: bool = False


class Harness(ABC):
    """One store, and backends on it. All backends of a harness share what is stored.

    Use as a context manager; leaving it stops whatever it started.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def make(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        """A backend as SGLang's factory would make it: ``cls(config, {})``."""

    def make_own(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        """A backend that shares no client with others, for tests that close it under load."""
        return self.make(config)

    def make_limited(
        self, config: HiCacheStorageConfig, wanted_bytes: int
    ) -> AbstractContextManager[tuple[HiCacheStorage, int]]:
        """A backend on an empty store of its own, and the bytes that store holds.

        They are ``wanted_bytes``, or the smallest size above that the store can have.
        """
        raise NotImplementedError

    def fault(self) -> AbstractContextManager[None]:
        """While inside, every call to the native store fails as it does when it is broken."""
        return nullcontext()

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

    def raw_keys(self) -> list[str]:
        raise NotImplementedError

    def raw_get(self, key: str) -> bytes | None:
        raise NotImplementedError

    def raw_put(self, key: str, value: bytes) -> None:
        """Plant an object, over another of that key if there is one."""
        raise NotImplementedError

    def raw_delete(self, key: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Stop what was started."""


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


def storage_config(
    *, is_mla_model: bool, extra: dict[str, Any] | None = None, **changes: Any
) -> HiCacheStorageConfig:
    """A configuration of one rank alone, with the given fields changed.

    ``extra`` is added to an extra config that names the model in full.
    """
    named = {"model_id": "suite/model", "revision": "r1", "kv_cache_dtype": "auto"}
    model_name = changes.pop("model_name", "suite")
    return rank_config(
        model_name, is_mla_model=is_mla_model, extra_config={**named, **(extra or {})}, **changes
    )
