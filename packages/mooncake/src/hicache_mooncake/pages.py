"""All pages of one call as the flat lists that Mooncake's batch calls take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hicache_shared.store import KeyBatch, PageBatch

T = TypeVar("T")


def keys_of(batches: Sequence[KeyBatch] | Sequence[PageBatch]) -> list[str]:
    """The full keys of all batches, in order."""
    keys: list[str] = []
    for batch in batches:
        prefix = batch.pool.prefix
        keys += [prefix + page for page in batch.hashes]
    return keys


def split(batches: Sequence[KeyBatch] | Sequence[PageBatch], flat: list[T]) -> list[list[T]]:
    """Answers for all pages, cut back into one list a batch."""
    if len(batches) == 1:
        return [flat]
    cut, start = [], 0
    for batch in batches:
        end = start + len(batch.hashes)
        cut.append(flat[start:end])
        start = end
    return cut


def repeats(batches: Sequence[PageBatch]) -> bool:
    """Whether a key may come twice. Page hashes are compared, which are short and hashed before."""
    return len({batch.pool.prefix for batch in batches}) < len(batches) or any(
        len(set(batch.hashes)) < len(batch.hashes) for batch in batches
    )


def parts_of(asks: Sequence[KeyBatch], most_keys: int) -> Iterator[list[KeyBatch]]:
    """The batches in order, as many together as have ``most_keys`` keys at most."""
    part: list[KeyBatch] = []
    keys = 0
    for ask in asks:
        if part and keys + len(ask.hashes) > most_keys:
            yield part
            part, keys = [], 0
        part.append(ask)
        keys += len(ask.hashes)
    if part:
        yield part


@dataclass(frozen=True, slots=True)
class Pages:
    """Attributes:
    keys: the full key of each page.
    sizes: bytes of each page.
    addresses: an int a page; where ``parts`` is not None, a list of one int a component.
    parts: None if every page is one buffer, else the bytes of each component, a list a page.
    """

    keys: list[str]
    sizes: list[int]
    addresses: list[Any]
    parts: list[list[int]] | None

    @classmethod
    def of(cls, batches: Sequence[PageBatch]) -> Pages:
        """Flatten; where one page has several components, every page goes as a list."""
        keys = keys_of(batches)
        sizes: list[int] = []
        addresses: list[Any] = []
        several = any(len(batch.pool.layout.component_bytes) > 1 for batch in batches)
        parts: list[list[int]] | None = [] if several else None
        for batch in batches:
            components = list(batch.pool.layout.component_bytes)
            sizes += [sum(components)] * len(batch.hashes)
            if parts is None:
                addresses += batch.addresses
                continue
            parts += [components] * len(batch.hashes)
            addresses += (
                [[address] for address in batch.addresses]
                if len(components) == 1
                else batch.addresses
            )
        return cls(keys, sizes, addresses, parts)

    @property
    def transfers(self) -> int:
        """Components of all pages: the client moves each by itself."""
        return len(self.keys) if self.parts is None else sum(map(len, self.parts))

    def cut(self, most_transfers: int) -> Iterator[Pages]:
        """The pages in order, as many together as make ``most_transfers`` at most, or one."""
        if self.transfers <= most_transfers:
            yield self
            return
        sizes = [1] * len(self.keys) if self.parts is None else list(map(len, self.parts))
        start, transfers = 0, 0
        for i, size in enumerate(sizes):
            if i > start and transfers + size > most_transfers:
                yield self.subset(range(start, i))
                start, transfers = i, 0
            transfers += size
        yield self.subset(range(start, len(sizes)))

    def subset(self, chosen: Sequence[int]) -> Pages:
        """The pages at the given positions."""
        return Pages(
            [self.keys[i] for i in chosen],
            [self.sizes[i] for i in chosen],
            [self.addresses[i] for i in chosen],
            None if self.parts is None else [self.parts[i] for i in chosen],
        )
