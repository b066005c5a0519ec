"""All pages of one call as the flat lists that UMBP's batch calls take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from hicache_shared.store import KeyBatch, PageBatch, StoredPool

T = TypeVar("T")
Join: TypeAlias = Callable[[tuple[T, ...]], T]
Batches: TypeAlias = Sequence[KeyBatch | PageBatch]

TRAILER_BYTES = 16
"""Bytes of the pool's digest at the end of an object of several components. A ranged get of
a longer object succeeds, so an object must show where it ends."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Objects of one native call.

    Attributes:
        keys: the full key of each.
        sizes: bytes of each.
        addresses: an int each; where ``parts`` is not None, a list of one int a buffer.
        parts: None if each is one buffer, else the bytes of each buffer, a list each.
        offsets: where each buffer lies in its object; as ``parts``.
    """

    keys: list[str]
    sizes: list[int]
    addresses: list[Any]
    parts: list[list[int]] | None = None
    offsets: list[list[int]] = field(default_factory=list)

    def subset(self, chosen: Sequence[int]) -> Pages:
        """The objects at the given positions."""
        return Pages(
            [self.keys[i] for i in chosen],
            [self.sizes[i] for i in chosen],
            [self.addresses[i] for i in chosen],
            None if self.parts is None else [self.parts[i] for i in chosen],
            [self.offsets[i] for i in chosen] if self.parts is not None else [],
        )


def object_bytes(component_bytes: Sequence[int], *, ranged: bool) -> list[int]:
    """Bytes of each object that a page of these components becomes."""
    if len(component_bytes) == 1 or not ranged:
        return list(component_bytes)
    return [sum(component_bytes) + TRAILER_BYTES]


def objects_of(pool: StoredPool, *, ranged: bool) -> int:
    """Objects that a page of the pool becomes."""
    return 1 if ranged else len(pool.layout.component_bytes)


def keys_of(asks: Batches, epochs: Sequence[str], *, ranged: bool) -> list[str]:
    """The full keys of all objects: batch by batch, component by component, in page order.

    Where several components cannot be one object, each has a key of its own.
    """
    keys: list[str] = []
    for ask, epoch in zip(asks, epochs, strict=True):
        head = ask.pool.prefix + epoch
        objects = objects_of(ask.pool, ranged=ranged)
        if objects == 1:
            keys += [head + page for page in ask.hashes]
        else:
            for part in range(objects):
                keys += [f"{head}{part}/{page}" for page in ask.hashes]
    return keys


def split(flat: list[T], widths: Sequence[tuple[int, int]], join: Join[T]) -> list[list[T]]:
    """Answers of all objects, cut into one list a batch with one answer a page.

    Args:
        flat: as :func:`keys_of` orders objects.
        widths: pages and objects a page of each batch.
        join: makes one answer of those of a page's objects.
    """
    answers: list[list[T]] = []
    start = 0
    for pages, objects in widths:
        parts = [flat[start + i * pages : start + (i + 1) * pages] for i in range(objects)]
        answers.append(parts[0] if objects == 1 else list(map(join, zip(*parts, strict=True))))
        start += pages * objects
    return answers


def widths_of(batches: Batches, *, ranged: bool) -> list[tuple[int, int]]:
    """Pages of each batch, and objects a page."""
    return [(len(batch.hashes), objects_of(batch.pool, ranged=ranged)) for batch in batches]


def plain_pages(
    batches: Sequence[PageBatch], epochs: Sequence[str], *, ranged: bool
) -> tuple[Pages, list[int] | None]:
    """The objects of batches that are one buffer each, and their depths if all are known."""
    pages = Pages(keys_of(batches, epochs, ranged=ranged), [], [])
    depths: list[int] | None = []
    for batch in batches:
        components = batch.pool.layout.component_bytes
        count = len(batch.hashes)
        for part, nbytes in enumerate(components):
            pages.sizes.extend([nbytes] * count)
            if len(components) == 1:
                pages.addresses.extend(batch.addresses)
            else:
                pages.addresses.extend(page[part] for page in batch.addresses)  # type: ignore[index]
            if batch.depth is None:
                depths = None
            elif depths is not None:
                depths.extend(range(batch.depth, batch.depth + count))
    return pages, depths


def ranged_pages(
    batches: Sequence[PageBatch], epochs: Sequence[str], trailers: Sequence[int]
) -> Pages:
    """The objects of batches whose pages have several components, with their trailers.

    Args:
        batches: the pages.
        epochs: of each batch.
        trailers: the address of each object's trailer, in order.
    """
    pages = Pages(keys_of(batches, epochs, ranged=True), [], [], [], [])
    places = iter(trailers)
    for batch in batches:
        sizes = [*batch.pool.layout.component_bytes, TRAILER_BYTES]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        count = len(batch.hashes)
        pages.sizes.extend([sum(sizes)] * count)
        pages.parts.extend([sizes] * count)  # type: ignore[union-attr]
        pages.offsets.extend([offsets] * count)
        pages.addresses.extend([*page, next(places)] for page in batch.addresses)  # type: ignore[misc]
    return pages
