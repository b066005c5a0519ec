"""The ``PageStore`` port: what an adapter implements over its native client.

All pools of one SGLang call arrive together, so that an adapter can make one native
call of them. A store never sees SGLang's types, prefixes or hit policies; it is asked
about pages and answers a reason a page.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hicache_shared.hostmem import aligned_bytes
from hicache_shared.layout import PoolLayout


class Code(enum.IntEnum):
    """Why a page was or was not moved. ``OK`` means: exactly the page's bytes."""

    OK = 0
    MISSING = 1
    """There is no such page."""
    WRONG_SIZE = 2
    """The stored object is longer or shorter than the page."""
    NO_SPACE = 3
    """The store stayed full until the retries or the deadline ran out."""
    TIMEOUT = 4
    UNAVAILABLE = 5
    """The server cannot be reached, or the store is closed."""
    FAILED = 6
    """The client gave another error; it is in the log."""
    CORRUPT = 7
    """The stored bytes are not those that were put."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredPool:
    """One kind of object a store holds: a layout, and what its keys begin with.

    Attributes:
        layout: sizes and addresses of a page's components.
        prefix: text before the page hash in a key; ends with ``/``. It starts with the
            namespace, so that a clear can be scoped to it.
        namespace: the part of ``prefix`` that everything of one deployment shares.
        digest: 16 bytes over everything that must match for bytes to be interchangeable.
    """

    layout: PoolLayout
    prefix: str
    namespace: str
    digest: bytes

    @property
    def name(self) -> str:
        return self.layout.name


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """Pages of one pool to ask about. ``hashes`` are SGLang's page hashes, unprefixed."""

    pool: StoredPool
    hashes: Sequence[str]


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Pages of one pool to move.

    ``addresses`` has one entry a page: an ``int`` for a pool of one component, else a
    list of one ``int`` a component, in the order of ``pool.layout.component_bytes``.
    The memory belongs to the caller; a store keeps no address after the call returns.

    ``depth`` is the number of pages before the first one in its chain, where a put was told;
    the others follow it. A client may keep the start of chains longer than their ends.
    """

    pool: StoredPool
    hashes: Sequence[str]
    addresses: list[int] | list[list[int]]
    depth: int | None = None


@dataclass(frozen=True, slots=True)
class Caps:
    """What a store can do. Everything is off unless said.

    Attributes:
        max_components: most buffers one object can be made of; None is no limit.
        max_unequal_parts: of a store that writes an object in parts of one size: most parts
            that a page is cut into where its components differ in size. Pages of more, if the
            parts are small, come through a staging page. None is no limit.
        allocate: gives host memory (``uint8[n]``) that the store can move pages to and from
            once it is registered; for staging pages. Some clients take only their own.
        together: keys that one "exists" takes in little more time than it takes itself, so
            that a hit query of no more of them asks about all pools at once.
    """

    max_components: int | None = 1
    max_unequal_parts: int | None = None
    allocate: Callable[[int], npt.NDArray[np.uint8]] = aligned_bytes
    together: int = 0


Presence = list[bool] | npt.NDArray[np.bool_]
"""One answer a page, in whichever form the client gives it."""


class PageStore(Protocol):
    """Where pages are kept. What needs no preparation is inherited.

    Preconditions, which the backend above guarantees and a store may rely on:

    - every address range lies inside a buffer of an opened or registered pool (or of a
      region passed to :meth:`register_memory`), and in one ``get`` no two pages share one;
    - ``hashes`` and ``addresses`` are of equal length; batches may be empty;
    - no call is made after :meth:`close`, nor while it runs.

    Duties:

    1. Every method but :meth:`open`, :meth:`register` and :meth:`close` may be called from
       several threads at once.
    2. A fault of the client or its server is a :class:`Code`, never an exception.
    3. A ``get`` answers ``OK`` only if exactly the page's bytes were moved; after any other
       code the *other* pages of the call are as good as if it had not been asked for.
    4. A ``put`` answers ``OK`` only if the page can be read afterwards. Putting a page that
       is there is ``OK`` and moves nothing.
    5. One answer a page, in order; batches are answered in the order given.
    6. No call lasts much longer than its ``deadline_s`` (seconds from now).
    """

    @property
    def caps(self) -> Caps:
        return Caps()

    def open(self, pools: Sequence[StoredPool]) -> None:
        """Make ready for these pools; raises if that is impossible. Called once."""
        return

    def register(self, pool: StoredPool) -> None:
        """Make ready for a pool that came after :meth:`open`."""
        return

    def register_memory(self, address: int, nbytes: int) -> None:
        """Make a region that belongs to no pool (a staging page) usable for transfers."""
        return

    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> Sequence[Presence]:
        """Whether each page is there; a page whose state is unknown is not."""

    def put(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        """Store pages; a :class:`Code` a page."""

    def get(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        """Read pages into the caller's memory; a :class:`Code` a page."""

    def clear(self, namespace: str) -> None:
        """Forget every page under ``namespace`` and no other; raises ``ClearError``."""

    def healthy(self) -> bool:
        """Whether the server answered lately; cheap."""
        return True

    def close(self) -> None:
        """Release the client, its memory registrations and threads. Called once."""
        return


def spans_of(batch: PageBatch) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """The hash of each page of a batch, and address and bytes of its components."""
    sizes = batch.pool.layout.component_bytes
    places: Sequence[int | list[int]] = batch.addresses
    for page_hash, place in zip(batch.hashes, places, strict=True):
        addresses = place if isinstance(place, list) else [place]
        yield page_hash, list(zip(addresses, sizes, strict=True))


def parts_of(batch: PageBatch) -> Iterator[tuple[str, list[memoryview]]]:
    """The hash of each page of a batch, and the host memory of its components, writable bytes.

    For stores written in Python; a native client takes the addresses.
    """
    for page_hash, spans in spans_of(batch):
        yield page_hash, [_memory(*span) for span in spans]


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")
