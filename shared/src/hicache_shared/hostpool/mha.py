"""Host pools of multi-head attention: K and V of one size, or of two.

They also serve sliding-window layers and draft models.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hicache_shared.errors import LayoutError
from hicache_shared.hostmem import aligned_bytes
from hicache_shared.hostpool.base import BlockPool, HostPool, PageMeta
from hicache_shared.hostpool.memory import Allocate, AnyArray


@dataclass(frozen=True, slots=True, kw_only=True)
class MHAGeometry:
    """One rank's K and V of some layers.

    Attributes:
        layers: layers of the pool.
        head_num: KV heads.
        head_dim: elements of a K head.
        v_head_dim: elements of a V head; None where it is ``head_dim``.
        dtype: name of the element type.
    """

    layers: int
    head_num: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: str = "bfloat16"

    @property
    def v_dim(self) -> int:
        """Elements of a V head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def kind(self) -> str:
        return "mha" if self.v_dim == self.head_dim else "mha_asymmetric"

    def divided(self, layers_div: int) -> MHAGeometry:
        return replace(self, layers=max(1, self.layers // layers_div))

    def of_rank(self, tp_size: int) -> MHAGeometry:
        """The heads of one of ``tp_size`` ranks; with more ranks than heads, one each.

        Raises:
            LayoutError: neither number divides the other.
        """
        if self.head_num % tp_size and tp_size % self.head_num:
            raise LayoutError(f"{self.head_num} KV heads do not split over TP size {tp_size}")
        return replace(self, head_num=max(1, self.head_num // tp_size))

    def pool(
        self, *, label: str, pages: int, page_size: int, layout: str, allocate: Allocate
    ) -> MHAHostPool | AsymmetricMHAHostPool:
        pool_class = MHAHostPool if self.kind == "mha" else AsymmetricMHAHostPool
        return pool_class(
            self, label=label, pages=pages, page_size=page_size, layout=layout, allocate=allocate
        )


class _MHAPool(HostPool):
    """What pools of equal and of unequal K and V have in common."""

    def __init__(
        self,
        geometry: MHAGeometry,
        *,
        pages: int,
        page_size: int,
        layout: str,
        label: str = "kv",
        allocate: Allocate = aligned_bytes,
    ) -> None:
        if geometry.kind != self.kind:
            raise LayoutError(
                f"pool {label!r} is {self.kind}, which K heads of {geometry.head_dim} and V heads "
                f"of {geometry.v_dim} elements do not fit; use MHAGeometry.pool"
            )
        super().__init__(
            label=label,
            pages=pages,
            page_size=page_size,
            layout=layout,
            dtype=geometry.dtype,
            allocate=allocate,
        )
        self.pool_label = label
        self.page_num = pages
        self.layer_num = geometry.layers
        self.start_layer = 0
        self.end_layer = geometry.layers
        self.head_num = geometry.head_num
        self.head_dim = geometry.head_dim
        self.v_head_dim = geometry.v_dim
        self.size_per_token = (
            (self.head_dim + self.v_head_dim) * self.head_num * self.layer_num * self.dtype.itemsize
        )
        self.kv_buffer = self._new_buffer()

    @abstractmethod
    def _new_buffer(self) -> Any:
        """The memory: something with K at 0 and V at 1."""

    @property
    def k_buffer(self) -> AnyArray:
        buffer: AnyArray = self._live(self.kv_buffer)[0]
        return buffer

    @property
    def v_buffer(self) -> AnyArray:
        buffer: AnyArray = self._live(self.kv_buffer)[1]
        return buffer

    def get_hybrid_pool_buffer(self) -> list[AnyArray]:
        """``[k, v]``; views of one allocation where K and V are of one size."""
        return [self.k_buffer, self.v_buffer]


class MHAHostPool(_MHAPool, BlockPool):
    """SGLang's ``MHATokenToKVPoolHost``. ``kv_buffer`` is one array, K before V:

    - ``layer_first``: ``[2, layers, size, heads, dim]``
    - ``page_first``: ``[2, size, layers, heads, dim]``
    - ``page_first_direct``: ``[2, pages, layers, page_size, heads, dim]``
    - ``page_head``: ``[2, pages, heads, page_size, layers, dim]``

    A page is k and v, or k and v of each layer in turn in ``layer_first``, where its flat
    form (all K before all V) is another order of bytes.

    Args:
        geometry: layers and heads; K and V of one size.
        pages, page_size, layout, label: as of ``SlotPool``.
        allocate: where the memory comes from.
    """

    kind = "mha"

    def _new_buffer(self) -> AnyArray:
        layers, heads, dim = self.layer_num, self.head_num, self.head_dim
        shapes = {
            "layer_first": (2, layers, self.size, heads, dim),
            "page_first": (2, self.size, layers, heads, dim),
            "page_first_direct": (2, self.page_num, layers, self.page_size, heads, dim),
            "page_head": (2, self.page_num, heads, self.page_size, layers, dim),
        }
        return self._new_array(shapes[self.layout])

    def _block(self, page: int) -> AnyArray:
        rows = slice(page * self.page_size, (page + 1) * self.page_size)
        buffer: AnyArray = self._live(self.kv_buffer)
        if self.layout == "layer_first":
            return buffer[:, :, rows]
        if self.layout == "page_first":
            return buffer[:, rows]
        return buffer[:, page : page + 1]

    def _page_views(self, page: int) -> list[AnyArray]:
        block = self._block(page)
        if self.layout == "layer_first":
            return [block[part, layer] for layer in range(self.layer_num) for part in (0, 1)]
        return [block[0], block[1]]

    def get_split_heads_page_buffer_meta(self, indices: Any, split_factor: int) -> PageMeta:
        """Addresses and sizes of each page's head shards: k_h0, v_h0, k_h1, v_h1, ...

        Raises:
            LayoutError: the layout is not ``page_head``, or the heads do not split.
            TransferError: the number of slots is not a multiple of the page size.
        """
        if self.layout != "page_head":
            raise LayoutError(
                f"pool {self._label!r} splits heads in page_head only, it is {self.layout}"
            )
        if split_factor < 1 or self.head_num % split_factor:
            raise LayoutError(
                f"pool {self._label!r} has {self.head_num} heads, which do not split in "
                f"{split_factor}"
            )
        width = self.head_num // split_factor
        return self._listed(indices, lambda page: self._head_views(page, width))

    def get_page_buffer_element_size(self, split_factor: int = 1) -> int | None:
        """Bytes of a page's K, or of one head shard of it."""
        if split_factor == 1:
            return super().get_page_buffer_element_size()
        first_page = np.arange(self.page_size, dtype=np.int64)
        return self.get_split_heads_page_buffer_meta(first_page, split_factor)[1][0]

    def _head_views(self, page: int, width: int) -> list[AnyArray]:
        block = self._block(page)
        return [
            block[part, :, head : head + width]
            for head in range(0, self.head_num, width)
            for part in (0, 1)
        ]


class AsymmetricMHAHostPool(_MHAPool):
    """SGLang's ``AsymmetricMHATokenToKVPoolHost``: K and V heads differ in size.

    ``kv_buffer`` is a tuple of two arrays, K and V:

    - ``page_first``: ``[size, layers, heads, dim]``
    - ``page_first_direct``: ``[pages, layers, page_size, heads, dim]``

    A page is k and v. There is no flat form: those methods raise ``NotImplementedError``.
    """

    kind = "mha_asymmetric"

    def _new_buffer(self) -> tuple[AnyArray, AnyArray]:
        if self.layout == "page_first":
            lead: tuple[int, ...] = (self.size, self.layer_num, self.head_num)
        else:
            lead = (self.page_num, self.layer_num, self.page_size, self.head_num)
        return self._new_array((*lead, self.head_dim)), self._new_array((*lead, self.v_head_dim))

    def _page_views(self, page: int) -> list[AnyArray]:
        step = self.page_size if self.layout == "page_first" else 1
        rows = slice(page * step, (page + 1) * step)
        return [self.k_buffer[rows], self.v_buffer[rows]]

    def get_split_heads_page_buffer_meta(self, indices: Any, split_factor: int) -> PageMeta:
        raise NotImplementedError(
            "heads are split in memory layout page_head only, which pools of unequal K and V lack"
        )

    def get_data_page(self, index: int, flat: bool = True) -> AnyArray:
        raise self._no_flat_form()

    def get_dummy_flat_data_page(self) -> AnyArray:
        raise self._no_flat_form()

    def set_from_flat_data_page(self, index: int, data_page: AnyArray) -> None:
        raise self._no_flat_form()

    def _no_flat_form(self) -> NotImplementedError:
        return NotImplementedError(
            f"pool {self._label!r} has K and V of different sizes and so no flat pages; "
            "use the zero-copy interface (interface_v1)"
        )
