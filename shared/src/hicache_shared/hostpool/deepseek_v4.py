"""Host pools of DeepSeek V4: compressed KV and indexer pages, and compressor states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hicache_shared.errors import LayoutError
from hicache_shared.hostmem import aligned_bytes
from hicache_shared.hostpool.base import HostPool
from hicache_shared.hostpool.memory import Allocate, AnyArray, ByteArray, IndexArray


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Geometry:
    """Rows of bytes, one a page and layer, the same on every tensor-parallel rank.

    Attributes:
        layers: layers of the pool.
        row_bytes: bytes of a page of one layer.
        state: whether the rows are compressor states, whose pool has no slots of its own.
    """

    layers: int
    row_bytes: int
    state: bool = False

    @property
    def kind(self) -> str:
        return "deepseek_v4_state" if self.state else "deepseek_v4_paged"

    def divided(self, layers_div: int) -> V4Geometry:
        return replace(self, layers=max(1, self.layers // layers_div))

    def of_rank(self, tp_size: int) -> V4Geometry:
        return self

    def pool(
        self, *, label: str, pages: int, page_size: int, layout: str, allocate: Allocate
    ) -> V4PagedHostPool | V4StateHostPool:
        pool_class = V4StateHostPool if self.state else V4PagedHostPool
        return pool_class(
            self, label=label, pages=pages, page_size=page_size, layout=layout, allocate=allocate
        )


class _V4Pool(HostPool):
    """Rows of ``uint8``. ``kv_buffer`` is

    - ``layer_first``: a list of ``[pages, row_bytes]``, one a layer
    - ``page_first``: ``[pages, layers, row_bytes]``
    - ``page_first_direct``: ``[pages, layers, 1, row_bytes]``

    A page is one component, or one a layer in ``layer_first``. As in SGLang,
    ``size_per_token`` is the bytes of a row, and there is no ``page_num``.
    """

    def __init__(
        self,
        geometry: V4Geometry,
        *,
        pages: int,
        page_size: int,
        layout: str,
        label: str,
        allocate: Allocate = aligned_bytes,
    ) -> None:
        if geometry.kind != self.kind:
            raise LayoutError(f"pool {label!r} is {self.kind}, its geometry {geometry.kind}")
        super().__init__(
            label=label,
            pages=pages,
            page_size=page_size,
            layout=layout,
            dtype="uint8",
            allocate=allocate,
        )
        self.pool_name = label
        self.num_host_pages = pages
        self.layer_num = geometry.layers
        self.start_layer = 0
        self.end_layer = geometry.layers
        self.size_per_token = geometry.row_bytes
        self._row_bytes = geometry.row_bytes
        self.kv_buffer = self._new_buffer()

    def _new_buffer(self) -> AnyArray | list[AnyArray]:
        pages, layers, row = self.num_host_pages, self.layer_num, self._row_bytes
        if self.layout == "layer_first":
            return [self._new_array((pages, row)) for _ in range(layers)]
        if self.layout == "page_first":
            return self._new_array((pages, layers, row))
        return self._new_array((pages, layers, 1, row))

    def get_hybrid_pool_buffer(self) -> list[AnyArray]:
        buffer = self._live(self.kv_buffer)
        return buffer if isinstance(buffer, list) else [buffer]

    def _page_views(self, page: int) -> list[AnyArray]:
        return [buffer[page : page + 1] for buffer in self.get_hybrid_pool_buffer()]

    def get_data_page(self, index: int, flat: bool = True) -> AnyArray:
        page = int(index) // self.page_size
        rows = [buffer[page] for buffer in self.get_hybrid_pool_buffer()]
        data: AnyArray = np.stack(rows) if self.layout == "layer_first" else rows[0]
        return data.reshape(-1) if flat else data

    def get_dummy_flat_data_page(self) -> ByteArray:
        return np.zeros(self.layer_num * self._row_bytes, dtype=np.uint8)

    def set_from_flat_data_page(self, index: int, data_page: AnyArray) -> None:
        views = self._page_views(int(index) // self.page_size)
        data = self._flat_bytes(data_page, self.layer_num * self._row_bytes)
        for view, part in zip(views, data.reshape(len(views), -1), strict=True):
            view.reshape(-1)[:] = part


class V4PagedHostPool(_V4Pool):
    """SGLang's ``DeepSeekV4PagedHostPool``: sliding-window KV, C4, C4 indexer, C128."""

    kind = "deepseek_v4_paged"

    @property
    def item_bytes(self) -> int:
        """Bytes of a page of one layer."""
        return self._row_bytes

    @property
    def slot_page_size(self) -> int:
        """Slots a page."""
        return self.page_size

    def alloc(self, need_size: int) -> IndexArray | None:
        """Slots, ``need_size`` rounded up to whole pages; None if fewer are free."""
        return super().alloc(-(-need_size // self.page_size) * self.page_size)


class V4StateHostPool(_V4Pool):
    """SGLang's ``DeepSeekV4StateHostPool``: compressor states on the slots of the SWA pool.

    It has no slots of its own: ``alloc``, ``free`` and ``available_size`` raise
    ``NotImplementedError``, and ``clear`` does nothing.
    """

    kind = "deepseek_v4_state"

    @property
    def state_page_bytes(self) -> int:
        """Bytes of a page of one layer."""
        return self._row_bytes

    @property
    def swa_page_size(self) -> int:
        """Slots a page."""
        return self.page_size

    def alloc(self, need_size: int) -> IndexArray | None:
        raise self._no_slots()

    def free(self, indices: Any) -> int:
        raise self._no_slots()

    def available_size(self) -> int:
        raise self._no_slots()

    def clear(self) -> None:
        """Nothing to free."""

    def _no_slots(self) -> NotImplementedError:
        return NotImplementedError(
            f"pool {self._label!r} uses the slots of the SWA pool and has none of its own"
        )
