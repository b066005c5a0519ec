"""A model's host pools over memory whose every byte is known, to fill, wipe and compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_shared.hostmem import ALIGNMENT, aligned_bytes
from hicache_shared.hostpool import AssembledModel, HostPool, ModelSpec, build, page_views
from hicache_shared.hostpool.memory import ByteArray

Page: TypeAlias = list[ByteArray]
"""A page's bytes, component by component."""

MARGIN = ALIGNMENT
"""Bytes around each buffer that belong to no pool and must not change."""

PERIOD = 65_521
"""Bytes after which the wipe pattern repeats; a prime, so that no page fits into it evenly."""


@dataclass(frozen=True, slots=True)
class Places:
    """Which host pages a chain of ``n`` pages uses, by pool: ``[i]`` is that of chain page i.

    Attributes:
        sources: where pages are stored from: even host pages, in random order.
        targets: where they are restored to: odd host pages, in random order, so that every
            one lies between two that must not change.
    """

    sources: dict[str, list[int]]
    targets: dict[str, list[int]]


class Host:
    """One rank's host pools with ``2 n + 1`` pages each, for a chain of ``n``.

    Args:
        spec: the model.
        layout: memory layout of its pools.
        layers_div: divides every pool's layers.
        pages: pages of the chain.
        seed: of everything random.

    Raises:
        LayoutError: the model cannot be built so.
    """

    def __init__(
        self, spec: ModelSpec, *, layout: str, layers_div: int, pages: int, seed: int
    ) -> None:
        self._arrays: list[ByteArray] = []
        self._random = np.random.Generator(np.random.SFC64(seed))
        self._pattern = np.tile(_random_bytes(self._random, PERIOD), 64)
        self.pages = pages
        self.model: AssembledModel = build(
            spec,
            layout=layout,
            pages=2 * pages + 1,
            layers_div=layers_div,
            allocate=self._allocate,
        )
        self.pools: dict[str, HostPool] = {
            str(entry.name): entry.host_pool
            for entry in self.model.group.entries
            if isinstance(entry.host_pool, HostPool)
        }
        self.places = self._places()

    def _allocate(self, nbytes: int) -> ByteArray:
        array = aligned_bytes(nbytes + 2 * MARGIN)
        self._arrays.append(array)
        return array[MARGIN : MARGIN + nbytes]

    def _places(self) -> Places:
        """Pools with slots of their own get an order of their own, so that a mix-up shows."""
        even, odd = np.arange(0, 2 * self.pages + 1, 2), np.arange(1, 2 * self.pages, 2)
        own = {str(pool.name): pool.source for pool in self.model.pools}
        orders = {
            name: (
                self._random.permutation(even)[: self.pages].tolist(),
                self._random.permutation(odd).tolist(),
            )
            for name, source in own.items()
            if source is None
        }
        order_of = {name: orders[str(source or name)] for name, source in own.items()}
        return Places(
            {name: order[0] for name, order in order_of.items()},
            {name: order[1] for name, order in order_of.items()},
        )

    def slots(self, name: str, pages: list[int]) -> npt.NDArray[np.int64]:
        """``int64`` slots of host pages, as a transfer wants them."""
        width = self.model.group.get_pool(name).page_size
        starts = np.asarray(pages, dtype=np.int64).reshape(-1, 1) * width
        slots: npt.NDArray[np.int64] = starts + np.arange(width, dtype=np.int64)
        return slots.reshape(-1)

    def page_bytes(self, name: str) -> int:
        """Bytes of a page; 0 for an anchor without memory."""
        return sum(view.nbytes for view in self._views(name, 0))

    def components(self, name: str) -> int:
        """Contiguous pieces a page is made of; 0 for an anchor without memory."""
        return len(self._views(name, 0))

    def _views(self, name: str, page: int) -> Page:
        return page_views(self.pools[name], page) if name in self.pools else []

    # --- bytes ----------------------------------------------------------------------------

    def fill(self) -> dict[str, list[Page]]:
        """Put fresh random bytes everywhere; returns copies of the chain's pages by pool."""
        for _, block in self._blocks():
            block[:] = _random_bytes(self._random, block.nbytes)
        return {
            name: [
                [view.copy() for view in self._views(name, page)]
                for page in self.places.sources[name]
            ]
            for name in self.pools
        }

    def wipe(self) -> None:
        """Put the wipe pattern everywhere."""
        for _, block in self._blocks():
            block[:] = self._pattern[: block.nbytes]

    def differences(self, restored: Mapping[str, Mapping[int, Page | None]]) -> list[str]:
        """What is not as it should be in memory that was wiped and partly restored.

        Each restored host page must hold the bytes given for it (None: anything), and every
        other byte the wipe pattern. The restored pages are wiped again on the way.

        Returns:
            A line for each pool with wrong pages and for each buffer with a stray write.
        """
        found = []
        for name, pages in restored.items():
            wrong = [
                self._difference(name, p, page) for p, page in pages.items() if page is not None
            ]
            lines = [line for line in wrong if line]
            if lines:
                found.append(f"pool {name}: {lines[0]} ({len(lines)} of {len(pages)} pages differ)")
        for name, pages in restored.items():
            for page in pages:
                for view in self._views(name, page):
                    view[:] = self._wiped(view)
        return found + self._strays()

    def _difference(self, name: str, host_page: int, expected: Page) -> str | None:
        chain_page = self.places.targets[name].index(host_page)
        for part, (view, want) in enumerate(
            zip(self._views(name, host_page), expected, strict=True)
        ):
            if not np.array_equal(view, want):
                at = int(np.flatnonzero(view != want)[0])
                return (
                    f"page {chain_page} (host page {host_page}) differs from byte {at} of "
                    f"component {part} on: 0x{view[at]:02x}, expected 0x{want[at]:02x}"
                )
        return None

    def _strays(self) -> list[str]:
        found = []
        seen: set[int] = set()
        for array, block in self._blocks():
            expected = self._pattern[: block.nbytes]
            if id(array) not in seen and not np.array_equal(block, expected):
                seen.add(id(array))
                at = int(np.flatnonzero(block != expected)[0])
                found.append(self._owner(block.ctypes.data + at))
        return found

    def _owner(self, address: int) -> str:
        """Whose byte that is, in words."""
        for name in self.pools:
            for page in range(2 * self.pages + 1):
                for part, view in enumerate(self._views(name, page)):
                    at = address - view.ctypes.data
                    if 0 <= at < view.nbytes:
                        return (
                            f"pool {name}: guard byte {at} of component {part} of host page "
                            f"{page} changed, which no page was restored to"
                        )
        return "a guard byte outside every page changed"

    def _wiped(self, view: ByteArray) -> ByteArray:
        """The wipe pattern where a view lies."""
        address = view.ctypes.data
        array = next(a for a in self._arrays if 0 <= address - a.ctypes.data < a.nbytes)
        offset = (address - array.ctypes.data) % PERIOD
        repeats = -(-(offset + view.nbytes) // PERIOD)
        return np.tile(self._pattern[:PERIOD], repeats)[offset : offset + view.nbytes]

    def _blocks(self) -> Iterator[tuple[ByteArray, ByteArray]]:
        """Every buffer in pieces as long as the pattern."""
        size = self._pattern.nbytes
        for array in self._arrays:
            for start in range(0, array.nbytes, size):
                yield array, array[start : start + size]


def _random_bytes(random: np.random.Generator, nbytes: int) -> ByteArray:
    """Drawn eight at a time, which is several times as fast as one at a time."""
    words = random.integers(0, 2**64 - 1, -(-nbytes // 8), dtype=np.uint64, endpoint=True)
    return words.view(np.uint8)[:nbytes]
