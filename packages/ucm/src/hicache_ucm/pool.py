"""One pool in UCM: the shape of its blocks, its folder and its native store."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from hicache_shared.layout import PoolLayout, equal_parts
from hicache_shared.store import PageBatch, StoredPool
from hicache_ucm.client import Addresses, NativeStore
from hicache_ucm.folder import Folder
from hicache_ucm.keys import KEY_BYTES, block_ids

ROUND_BYTES = 256 << 20
"""Pages moved before a call looks at its deadline again. A second at 250 MB/s."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """How a page is cut into the parts of equal size that a PosixStore's block is made of.

    A page of equal components has one part a component. Where they differ in size, a part
    is their greatest common divisor, and a component is several of them: no byte is copied,
    and a page is still one file, there whole or not at all.

    Attributes:
        part_bytes: of each part; UCM's ``tensor_size``.
        parts: of a page.
    """

    part_bytes: int
    parts: int

    @classmethod
    def of(cls, layout: PoolLayout) -> BlockShape:
        return cls(*equal_parts(layout.component_bytes))

    def folder_name(self, pool: str) -> str:
        """The pool's folder, readable; pools of other names have other folders."""
        words = re.sub(r"[^A-Za-z0-9._-]", "_", pool)
        if words != pool or words.startswith("."):
            words = f"pool-{words}-{blake2b(pool.encode(), digest_size=4).hexdigest()}"
        return f"{words}_{self.part_bytes}x{self.parts}"


class PoolStore:
    """What the adapter's store knows of one stored pool. Thread-safe.

    Attributes:
        name: the pool's name.
        page_bytes: of a page, and so of a block.
        native: the PosixStore, which pools that are head shards of one share.
        removes: whether UCM removes its oldest pages.
    """

    def __init__(
        self, pool: StoredPool, folder: Folder, native: NativeStore, *, removes: bool
    ) -> None:
        layout = pool.layout
        self.name = pool.name
        self.page_bytes = layout.page_bytes
        self.folder = folder
        self.native = native
        self.removes = removes
        self._digest = pool.digest
        shape = BlockShape.of(layout)
        counts = [nbytes // shape.part_bytes for nbytes in layout.component_bytes]
        self._components = np.repeat(np.arange(len(counts)), counts)
        offsets = [part * shape.part_bytes for count in counts for part in range(count)]
        self._offsets = np.array(offsets, dtype=np.uint64)
        self._component_count = len(counts)
        self._one_a_component = max(counts) == 1

    def ids(self, hashes: Sequence[str]) -> bytes:
        return block_ids(self._digest, hashes) if hashes else b""

    def addresses(self, pages: list[int] | list[list[int]]) -> Addresses:
        """``uint64[pages, parts]``: where each part of each page lies."""
        components = np.array(pages, dtype=np.uint64).reshape(len(pages), self._component_count)
        if self._one_a_component:
            return components
        return np.ascontiguousarray(components[:, self._components] + self._offsets)


@dataclass(frozen=True, slots=True)
class Part:
    """Pages of one pool that one native task moves; ``ids`` are their joined keys."""

    pool: PoolStore
    ids: bytes
    addresses: Addresses

    @classmethod
    def of(cls, pool: PoolStore, batch: PageBatch, pages: slice) -> Part:
        return cls(pool, pool.ids(batch.hashes[pages]), pool.addresses(batch.addresses[pages]))

    def __len__(self) -> int:
        return len(self.addresses)

    def keys(self) -> list[bytes]:
        return [self.ids[i : i + KEY_BYTES] for i in range(0, len(self.ids), KEY_BYTES)]

    def subset(self, chosen: Sequence[int]) -> Part:
        """The pages at the given positions; itself where that is all of them."""
        if len(chosen) == len(self):
            return self
        keys = self.keys()
        ids = b"".join(keys[i] for i in chosen)
        return Part(self.pool, ids, self.addresses[np.asarray(chosen, dtype=np.intp)])


def rounds(pools: Sequence[PoolStore], batches: Sequence[PageBatch]) -> Iterator[list[Part]]:
    """Each batch in as many parts as rounds are needed; a round has a part of every batch."""
    total = sum(
        pool.page_bytes * len(batch.hashes) for pool, batch in zip(pools, batches, strict=True)
    )
    count = max(1, -(-total // ROUND_BYTES))
    for i in range(count):
        yield [
            Part.of(pool, batch, slice(_cut(batch, i, count), _cut(batch, i + 1, count)))
            for pool, batch in zip(pools, batches, strict=True)
        ]


def _cut(batch: PageBatch, i: int, count: int) -> int:
    return len(batch.hashes) * i // count
