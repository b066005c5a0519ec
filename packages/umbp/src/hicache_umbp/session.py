"""The client that calls use: made when pages are known, made anew after its server was away.

A native client does not come back to a server that was started again: its memory is unknown
there, and its gRPC channel waits ever longer between tries.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_shared.errors import BackendUnavailableError, LayoutError
from hicache_shared.hostmem import Region, RegionSet
from hicache_umbp.client import UmbpClient
from hicache_umbp.peer import Peer, State

logger = logging.getLogger(__name__)

PULSE_AFTER_S = 0.25
"""A server that has not answered for this long is asked whether it does before the native
client is called, which would wait for a frozen one without end."""

PULSE_S = 1.0
"""Seconds within which a server answers, unless it is frozen."""

RETRY_S = 0.2
"""Seconds between looks for a server that is away."""

LONG_PAUSE_S = 2.0
"""Seconds between tries with a server that is there and does not take this client."""

LOOK_S = 0.05
"""Seconds within which health is not looked at anew."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How a mode makes clients and what it can do.

    Attributes:
        name: for messages.
        connect: a fresh native client; takes the component sizes in bytes of a page of each
            pool. Raises BackendUnavailableError.
        peer: the server behind the client; None where there is none.
        reconnects: whether a fresh client is made after the server was away.
        registers: whether host memory is registered.
        must_register: whether there is no other path for memory that cannot be.
        remote: whether an object that is there may be out of reach, on another machine.
    """

    name: str
    connect: Callable[[Sequence[tuple[int, ...]]], UmbpClient]
    peer: Peer | None = None
    reconnects: bool = False
    registers: bool = True
    must_register: bool = False
    remote: bool = False


class Session:
    """Thread-safe.

    Attributes:
        unregistered: regions that the client refused and that go through its own buffer.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.unregistered: list[Region] = []
        self._pages: Sequence[tuple[int, ...]] = ()
        self._client: UmbpClient | None = None
        self._identity: object = None
        self._regions = RegionSet()
        self._lock = threading.Lock()
        self._registering = threading.Lock()
        self._native = threading.Lock()
        """Held over native calls, which may wait for a server; ``_lock`` never is."""
        self._heard = 0.0
        self._looked = 0.0
        self._next_try = 0.0
        self._up = True
        self._closed = False

    def open(self, pages: Sequence[tuple[int, ...]]) -> None:
        """Make the client for pages of these component sizes, in bytes.

        Raises:
            BackendUnavailableError: there is no server, or the client cannot be made.
        """
        self._pages = tuple(pages)
        peer = self.mode.peer
        if peer is not None and (state := peer.state(PULSE_S)) is not State.UP:
            raise BackendUnavailableError(
                f"UMBP's server at {peer.name} {state.value}; start it, and check its address"
            )
        self._connect()

    def client(self) -> UmbpClient | None:
        """The client to call now; None while its server is away."""
        # In this order, as they are set the other way round: never an old client for a new server.
        peer, identity, client = self.mode.peer, self._identity, self._client
        if peer is None or self._closed:
            return client
        if client is None or not self._up:
            return self._again(peer)
        if self.mode.reconnects and peer.identity() != identity:
            self._lost(client, "was started again")
            return self._again(peer)
        if time.monotonic() - self._heard > PULSE_AFTER_S:
            state = peer.state(PULSE_S)
            if state is not State.UP:
                self._lost(client, state.value, silent=state is State.SILENT)
                return None
            self.heard(client)
        return client

    def heard(self, client: UmbpClient) -> None:
        """The server answered a call of this client."""
        if client is self._client:
            self._heard = time.monotonic()

    def suspect(self, client: UmbpClient) -> bool:
        """A call had no page at all; whether that is since the server is away."""
        peer = self.mode.peer
        if peer is None:
            return False
        if self._gone(peer, client):
            return True
        self.heard(client)
        return client is not self._client

    def _gone(self, peer: Peer, client: UmbpClient) -> bool:
        """Whether the client's server has ended. One that is frozen has not."""
        if not peer.listens():
            self._lost(client, State.DEAD.value)
            return True
        if self.mode.reconnects and peer.identity() != self._identity:
            self._lost(client, "was started again")
            return True
        return False

    def healthy(self) -> bool:
        """Whether the server answers; looked at every 50 ms at most."""
        if self._closed:
            return False
        peer = self.mode.peer
        if peer is None:
            return True
        if time.monotonic() - self._heard > LOOK_S and time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            client = self.client()
            if client is not None:
                self._gone(peer, client)
        return self._up

    def register(self, region: Region) -> None:
        """Register host memory, each byte once.

        Raises:
            LayoutError: the client refuses the memory and has no other path.
            BackendUnavailableError: the server does not answer.
        """
        with self._registering:
            missing = self._regions.missing(region)
            if missing is not None:
                self._register_missing(missing)

    def _register_missing(self, missing: Region) -> None:
        if self.client() is None and not self.mode.reconnects:
            raise BackendUnavailableError(f"UMBP ({self.mode.name}): its server is away")
        # Under the lock, since a fresh client is given the regions that there are.
        with self._native:
            client = self._client
            try:
                if client is not None:
                    self._register(client, missing)
            except BackendUnavailableError:
                if not self.mode.reconnects:
                    raise
            self._regions.add(missing)

    def close(self) -> None:
        """Let go of the client, which takes its memory's registrations with it.

        Regions are not deregistered one by one: a standalone server's client (1.2.4) loses
        all of them with the first.
        """
        self._heard = 0.0  # whatever was heard before: the client's end waits for a frozen server
        client = self.client()
        self._closed = True
        self._regions.drain()
        if client is None and self._client is not None and self.mode.peer is not None:
            self._client.leak()
        self._client = None

    # -- the client's life --------------------------------------------------------------

    def _connect(self) -> None:
        peer = self.mode.peer
        self._identity = peer.identity() if peer is not None else None
        client = self.mode.connect(self._pages)
        for region in self._regions:
            self._register(client, region)
        self._heard = time.monotonic()
        self._client = client

    def _again(self, peer: Peer) -> UmbpClient | None:
        """The client, if its server is back; one thread looks, the others do not wait."""
        if time.monotonic() < self._next_try or not self._native.acquire(blocking=False):
            return None
        pause = RETRY_S
        try:
            if not self._closed and not self._up and peer.state(PULSE_S) is State.UP:
                if self.mode.reconnects:
                    self._connect()
                self._heard = time.monotonic()
                self._up = True
                logger.warning("UMBP server %s is back", peer.name)
            return self._client if self._up else None
        except (BackendUnavailableError, LayoutError) as error:
            logger.warning("UMBP server %s: not connected again yet: %s", peer.name, error)
            pause = LONG_PAUSE_S
            return None
        finally:
            self._next_try = time.monotonic() + pause
            self._native.release()

    def _lost(self, client: UmbpClient, why: str, *, silent: bool = False) -> None:
        """Go on without this client."""
        with self._lock:
            if client is not self._client or not self._up:
                return
            self._up = False
            if self.mode.reconnects:
                self._client = None
                if silent:
                    client.leak()
        name = self.mode.peer.name if self.mode.peer is not None else self.mode.name
        logger.error("UMBP server %s %s; pages count as missing until then", name, why)

    def _register(self, client: UmbpClient, region: Region) -> None:
        if not self.mode.registers:
            self._refused(region, "disable_zero_copy_register is set")
            return
        try:
            if client.register(region.address, region.nbytes):
                return
            why = "the client answered False"
        except RuntimeError as error:
            why = str(error)
        if self.mode.must_register:
            if self.mode.peer is not None and self._gone(self.mode.peer, client):
                raise BackendUnavailableError(
                    f"UMBP's server at {self.mode.peer.name} went away while memory was "
                    f"registered: {why}"
                )
            raise LayoutError(
                f"UMBP ({self.mode.name}): host memory {region.address:#x}+{region.nbytes} cannot "
                f"be registered: {why}. A standalone server moves pages only to and from memory of "
                "mori's UMBPHostMemAllocator (AnonymousShm): see the README for how SGLang takes "
                "it, or use the embedded or the distributed mode"
            )
        self._refused(region, why)

    def _refused(self, region: Region, why: str) -> None:
        if region in self.unregistered:
            return
        self.unregistered.append(region)
        logger.warning(
            "UMBP (%s): host memory %#x+%d is not registered (%s); its pages are copied through "
            "the client's own buffer, which is slower",
            self.mode.name,
            region.address,
            region.nbytes,
            why,
        )
