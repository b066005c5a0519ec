"""What the reference host pools share: legal memory layouts, slots, page addresses.

The pools look to a storage backend as SGLang 0.5.23's do (``mem_cache/pool_host`` and
``mem_cache/memory_pool_host.py``): the same attributes, array shapes, order of bytes and
components, and the same absence of checks on the range of indices. Transfers to and from
a device are left out. Attributes that a SGLang pool lacks, its reference lacks too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import numpy as np

from hicache_shared.errors import LayoutError, TransferError
from hicache_shared.hostpool.memory import (
    Allocate,
    AnyArray,
    ByteArray,
    DType,
    IndexArray,
    dtype_of,
    new_array,
)
from hicache_shared.hostpool.slots import Slots

LEGAL_LAYOUTS: dict[str, tuple[str, ...]] = {
    "logical": ("page_first", "page_first_direct", "page_head", "layer_first"),
    "mha": ("page_first", "page_first_direct", "page_head", "layer_first"),
    "mha_asymmetric": ("page_first", "page_first_direct"),
    "mla": ("page_first", "page_first_direct", "layer_first"),
    "dsa_indexer": ("page_first", "page_first_direct"),
    "mamba": ("page_first", "page_first_direct"),
    "deepseek_v4_paged": ("page_first", "page_first_direct", "layer_first"),
    "deepseek_v4_state": ("page_first", "page_first_direct", "layer_first"),
}
"""Pool kind -> memory layouts in which its pages can be stored (SGLang 0.5.23)."""

PageMeta: TypeAlias = tuple[list[int], list[int]]
"""Addresses and sizes in bytes, component by component, page by page."""


class SlotPool:
    """A pool of token slots, with or without memory behind them.

    Slots are ``int64`` arrays of token indices; allocation is page-aligned and
    thread-safe. ``size`` and ``page_size`` are in slots (tokens; states for Mamba).

    Args:
        label: the pool's name in messages.
        pages: pages the pool holds.
        page_size: slots a page.
        layout: SGLang's ``--hicache-mem-layout``.
        dtype: name of the element type.

    Raises:
        LayoutError: the layout is not legal for this kind of pool, or there is no page.
    """

    kind: ClassVar[str]
    shared_allocation_domain: ClassVar[None] = None
    stores_page_envelope: ClassVar[bool] = False
    storage_format_tag: str | None = None
    device: ClassVar[str] = "cpu"

    def __init__(self, *, label: str, pages: int, page_size: int, layout: str, dtype: str) -> None:
        check_layout(self.kind, layout, label)
        if pages < 1 or page_size < 1:
            raise LayoutError(
                f"pool {label!r} needs a page and a slot at least, got {pages} pages of {page_size}"
            )
        self.layout = layout
        self.page_size = page_size
        self.size = pages * page_size
        self.dtype: DType = dtype_of(dtype)
        self._label = label
        self._slots = Slots(pages, page_size)

    @property
    def logical_size(self) -> int:
        """Slots that the controller sees; the same, as there is no decode context parallelism."""
        return self.size

    def alloc(self, need_size: int) -> IndexArray | None:
        """``int64[need_size]`` slots, whole pages, or None if fewer are free.

        Raises:
            TransferError: ``need_size`` is not a multiple of the page size.
        """
        return self._slots.alloc(need_size)

    def free(self, indices: Any) -> int:
        """Give slots back; returns how many. Raises TransferError on a double free."""
        return self._slots.free(indices)

    def available_size(self) -> int:
        """Free slots."""
        return self._slots.available()

    def clear(self) -> None:
        """Make every slot free. Memory keeps its bytes."""
        self._slots.clear()

    def destroy(self) -> None:
        """Let go of the memory. Idempotent."""


def check_layout(kind: str, layout: str, label: str) -> None:
    """Raise LayoutError unless pools of ``kind`` can be stored in ``layout``."""
    legal = LEGAL_LAYOUTS[kind]
    if layout not in legal:
        raise LayoutError(
            f"pool {label!r} ({kind}) cannot be stored in memory layout {layout!r}; legal are "
            f"{', '.join(legal)} (set --hicache-mem-layout)"
        )


class HostPool(SlotPool, ABC):
    """A pool with memory: pages made of contiguous pieces, its components."""

    dcp_size: ClassVar[int] = 1
    dcp_rank: ClassVar[int] = 0
    size_per_token: int
    kv_buffer: Any

    def __init__(
        self,
        *,
        label: str,
        pages: int,
        page_size: int,
        layout: str,
        dtype: str,
        allocate: Allocate,
    ) -> None:
        super().__init__(label=label, pages=pages, page_size=page_size, layout=layout, dtype=dtype)
        self._allocate = allocate

    @property
    def logical_page_size(self) -> int:
        """Slots a page that the controller sees."""
        return self.page_size

    def destroy(self) -> None:
        """Let go of the memory: ``kv_buffer`` is None afterwards. Idempotent."""
        self.kv_buffer = None

    @abstractmethod
    def _page_views(self, page: int) -> list[AnyArray]:
        """The contiguous pieces of one page, in the order a backend sees them."""

    @abstractmethod
    def get_data_page(self, index: int, flat: bool = True) -> AnyArray:
        """The page that holds slot ``index``; flat, a view where its bytes are contiguous."""

    @abstractmethod
    def get_dummy_flat_data_page(self) -> AnyArray:
        """Zeros of a flat page's shape and dtype."""

    @abstractmethod
    def set_from_flat_data_page(self, index: int, data_page: AnyArray) -> None:
        """Write a flat page over the page that holds slot ``index``.

        Raises:
            TransferError: ``data_page`` is not exactly a page long.
        """

    def get_page_buffer_meta(self, indices: Any) -> PageMeta | None:
        """Addresses and sizes of the components of pages.

        Args:
            indices: token slots, whole pages of them; the first of each page counts. Like
                SGLang's, the range is not checked: a page past the end gives an address
                past the end.

        Raises:
            TransferError: the number of slots is not a multiple of the page size.
        """
        return self._listed(indices, self._page_views)

    def get_page_buffer_element_size(self, split_factor: int = 1) -> int | None:
        """Bytes of a page's first component."""
        meta = self.get_page_buffer_meta(np.arange(self.page_size, dtype=np.int64))
        return meta[1][0] if meta else None

    def _new_array(self, shape: tuple[int, ...], dtype: DType | None = None) -> AnyArray:
        return new_array(shape, dtype or self.dtype, self._allocate)

    def _live(self, buffer: Any) -> Any:
        """The buffer, unless the pool was destroyed."""
        if buffer is None:
            raise LayoutError(f"pool {self._label!r} was destroyed and has no memory")
        return buffer

    def _listed(self, indices: Any, views: Callable[[int], list[AnyArray]]) -> PageMeta:
        pages = self._pages_of(indices)
        first = views(0)
        second = views(1) if self.size > self.page_size else None
        places = []
        for part, view in enumerate(first):
            address = view.ctypes.data
            stride = second[part].ctypes.data - address if second else view.nbytes
            places.append((address, stride))
        sizes = [view.nbytes for view in first]
        pointers = [address + stride * page for page in pages for address, stride in places]
        return pointers, sizes * len(pages)

    def _pages_of(self, indices: Any) -> list[int]:
        slots = np.asarray(indices, dtype=np.int64).reshape(-1)
        if slots.size % self.page_size:
            raise TransferError(
                f"pool {self._label!r} takes whole pages of {self.page_size} slots, "
                f"got {slots.size} slots"
            )
        pages: list[int] = (slots[:: self.page_size] // self.page_size).tolist()
        return pages

    def _flat_bytes(self, data_page: AnyArray, nbytes: int) -> ByteArray:
        """A flat page as bytes, after a check of its length."""
        data = np.ascontiguousarray(data_page).reshape(-1).view(np.uint8)
        if data.nbytes != nbytes:
            raise TransferError(
                f"a flat page of pool {self._label!r} has {nbytes} bytes, got {data.nbytes}"
            )
        return data


class BlockPool(HostPool):
    """A pool whose page is one block of one array, so that flat is a reshape of it."""

    @abstractmethod
    def _block(self, page: int) -> AnyArray:
        """The page as a view of the pool's array."""

    def get_data_page(self, index: int, flat: bool = True) -> AnyArray:
        block = self._block(int(index) // self.page_size)
        return block.reshape(-1) if flat else block

    def get_dummy_flat_data_page(self) -> AnyArray:
        block = self._block(0)
        return np.zeros(block.size, dtype=block.dtype)

    def set_from_flat_data_page(self, index: int, data_page: AnyArray) -> None:
        block = self._block(int(index) // self.page_size)
        data = self._flat_bytes(data_page, block.nbytes)
        block[...] = data.view(block.dtype).reshape(block.shape)


def page_views(pool: HostPool, page: int) -> list[ByteArray]:
    """Writable ``uint8`` views of everything one page holds, in component order.

    For tests and commands that fill and compare pages; SGLang's pools have no such thing.
    """
    return [view.reshape(-1).view(np.uint8) for view in pool._page_views(page)]
