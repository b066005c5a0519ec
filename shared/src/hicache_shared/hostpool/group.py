"""The pools of one model, of which one anchors the page indices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hicache_shared.contract import PoolName
from hicache_shared.errors import LayoutError, UnknownPoolError
from hicache_shared.hostpool.memory import IndexArray


@dataclass
class PoolEntry:
    """A pool in a group.

    Attributes:
        name: the pool's name.
        host_pool: the pool.
        is_primary_index_anchor: whether its slots are the model's page indices.
    """

    name: PoolName | str
    host_pool: Any
    is_primary_index_anchor: bool = False


class HostPoolGroup:
    """SGLang's ``HostPoolGroup`` without its device side.

    The anchor is the entry marked as such, else the first. Allocation is as thread-safe
    as the pools; entries are added by one thread.

    Raises:
        LayoutError: there is no entry, two have one name, or two are anchors.
    """

    def __init__(self, entries: Iterable[PoolEntry]) -> None:
        self.entries = list(entries)
        self.entry_map = {entry.name: entry for entry in self.entries}
        anchors = [entry for entry in self.entries if entry.is_primary_index_anchor]
        if not self.entries or len(anchors) > 1:
            raise LayoutError(
                "a HostPoolGroup needs an entry and at most one anchor, got "
                f"{len(self.entries)} entries and {len(anchors)} anchors"
            )
        if len(self.entry_map) < len(self.entries):
            names = ", ".join(str(entry.name) for entry in self.entries)
            raise LayoutError(f"pool names in a HostPoolGroup are unique, got {names}")
        self.anchor_entry = anchors[0] if anchors else self.entries[0]
        anchor = self.anchor_entry.host_pool
        self.layout: str = anchor.layout
        self.page_size: int = anchor.page_size
        self.device: str = anchor.device
        self.size: int = anchor.size
        self.logical_size: int = anchor.logical_size

    def add_entry(self, entry: PoolEntry) -> None:
        """Add a pool that came late (a draft model's).

        Raises:
            LayoutError: its name is taken, or it is an anchor.
        """
        if entry.name in self.entry_map:
            raise LayoutError(f"host pool {str(entry.name)!r} is already in the group")
        if entry.is_primary_index_anchor:
            raise LayoutError(f"host pool {str(entry.name)!r} cannot replace the group's anchor")
        self.entries.append(entry)
        self.entry_map[entry.name] = entry

    def get_entry(self, name: PoolName | str | None = None) -> PoolEntry:
        """The entry of that name, or the anchor's. Raises UnknownPoolError."""
        if name is None:
            return self.anchor_entry
        if name not in self.entry_map:
            known = ", ".join(str(entry.name) for entry in self.entries)
            raise UnknownPoolError(f"no host pool {str(name)!r} in the group; it has {known}")
        return self.entry_map[name]

    def get_pool(self, name: PoolName | str) -> Any:
        """The pool of that name. Raises UnknownPoolError."""
        return self.get_entry(name).host_pool

    def alloc(
        self,
        need_size: int,
        *,
        pool: PoolName | str | None = None,
        reclaim: Callable[[int], Any] | None = None,
    ) -> IndexArray | None:
        """Slots of one pool (the anchor's without a name), or None if it is full.

        ``reclaim`` is called once with ``need_size`` before a second try.
        """
        host_pool = self.get_entry(pool).host_pool
        indices: IndexArray | None = host_pool.alloc(need_size)
        if indices is None and reclaim is not None:
            reclaim(need_size)
            indices = host_pool.alloc(need_size)
        return indices

    def free(self, indices: Any, *, pool: PoolName | str | None = None) -> int:
        """Give slots back to one pool; returns how many."""
        freed: int = self.get_entry(pool).host_pool.free(indices)
        return freed

    def available_size(self, pool: PoolName | str | None = None) -> int:
        """Free slots of one pool."""
        available: int = self.get_entry(pool).host_pool.available_size()
        return available

    def get_page_buffer_element_size(self, split_factor: int = 1) -> int | None:
        """Bytes of the first component of an anchor page; None for a logical anchor."""
        size: int | None = self.anchor_entry.host_pool.get_page_buffer_element_size(split_factor)
        return size

    @property
    def kv_buffer(self) -> Any:
        return self.anchor_entry.host_pool.kv_buffer

    @property
    def size_per_token(self) -> int:
        size: int = self.anchor_entry.host_pool.size_per_token
        return size

    def clear(self) -> None:
        """Make every slot of every pool free."""
        for entry in self.entries:
            entry.host_pool.clear()

    def destroy(self) -> None:
        """Let every pool go of its memory. Idempotent."""
        for entry in self.entries:
            entry.host_pool.destroy()
