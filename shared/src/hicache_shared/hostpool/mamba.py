"""The host pool of recurrent states: a temporal state and convolution states a slot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import numpy as np

from hicache_shared.errors import LayoutError
from hicache_shared.hostmem import aligned_bytes
from hicache_shared.hostpool.base import HostPool, PageMeta
from hicache_shared.hostpool.memory import Allocate, AnyArray, ByteArray, dtype_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaGeometry:
    """One rank's recurrent states of some layers.

    Attributes:
        layers: linear-attention layers.
        temporal_shape: shape of a layer's temporal state, heads first; an empty dimension
            for conv-only models.
        conv_shapes: shapes of a layer's convolution states, channels first.
        side_shapes: shapes of side states that a slot has beside its layers' states.
    """

    kind: ClassVar[str] = "mamba"
    layers: int
    temporal_shape: tuple[int, ...]
    conv_shapes: tuple[tuple[int, ...], ...]
    temporal_dtype: str = "float32"
    conv_dtype: str = "bfloat16"
    side_shapes: tuple[tuple[int, ...], ...] = ()
    side_dtype: str = "float32"

    def divided(self, layers_div: int) -> MambaGeometry:
        return replace(self, layers=max(1, self.layers // layers_div))

    def of_rank(self, tp_size: int) -> MambaGeometry:
        """The heads and channels of one of ``tp_size`` ranks.

        Raises:
            LayoutError: they do not split evenly.
        """
        return replace(
            self,
            temporal_shape=_split(self.temporal_shape, tp_size),
            conv_shapes=tuple(_split(shape, tp_size) for shape in self.conv_shapes),
        )

    def pool(
        self, *, label: str, pages: int, page_size: int, layout: str, allocate: Allocate
    ) -> MambaHostPool:
        if page_size != 1:
            raise LayoutError(f"pool {label!r} has one state a page, got page size {page_size}")
        return MambaHostPool(self, label=label, pages=pages, layout=layout, allocate=allocate)


def _split(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    if shape[0] % parts:
        raise LayoutError(f"a state of shape {shape} does not split over TP size {parts}")
    return (shape[0] // parts, *shape[1:])


class MambaHostPool(HostPool):
    """SGLang's ``MambaPoolHost``: page size 1, and neither ``layer_num`` nor layer bounds.

    ``temporal_buffer`` is ``[slots, layers, 1, *temporal_shape]``, ``conv_buffer`` a list of
    ``[slots, layers, 1, *conv_shape]``, and ``slot_state_buffers`` a list of
    ``[slots, *side_shape]``. ``kv_buffer`` lists those that are not empty.

    A page is temporal, conv_0, conv_1, ... With side states ``get_page_buffer_meta``
    raises ``NotImplementedError`` and only the flat form, bytes, carries the whole page.
    Destroying it leaves the single arrays in place, as SGLang does.
    """

    kind = "mamba"

    def __init__(
        self,
        geometry: MambaGeometry,
        *,
        pages: int,
        layout: str,
        label: str = "mamba",
        allocate: Allocate = aligned_bytes,
    ) -> None:
        super().__init__(
            label=label,
            pages=pages,
            page_size=1,
            layout=layout,
            dtype=geometry.conv_dtype,
            allocate=allocate,
        )
        self.page_num = pages
        self.num_mamba_layers = geometry.layers
        self.temporal_dtype = dtype_of(geometry.temporal_dtype)
        self.conv_dtype = self.dtype
        self.temporal_state_shape = geometry.temporal_shape
        self.conv_state_shapes = list(geometry.conv_shapes)
        self.temporal_state_elem_size = prod(geometry.temporal_shape)
        self.conv_state_elem_sizes = [prod(shape) for shape in geometry.conv_shapes]
        lead = (pages, geometry.layers, 1)
        self.temporal_buffer = self._new_array(
            (*lead, *geometry.temporal_shape), self.temporal_dtype
        )
        self.conv_buffer = [self._new_array((*lead, *shape)) for shape in geometry.conv_shapes]
        side_dtype = dtype_of(geometry.side_dtype)
        self.slot_state_buffers = [
            self._new_array((pages, *shape), side_dtype) for shape in geometry.side_shapes
        ]
        buffers = self.get_hybrid_pool_buffer()
        self.kv_buffer = [buffer for buffer in buffers if buffer.size > 0]
        self.size_per_token = sum(buffer[0].nbytes for buffer in buffers)

    def get_hybrid_pool_buffer(self) -> list[AnyArray]:
        """Every array, also an empty temporal one."""
        return [self.temporal_buffer, *self.conv_buffer, *self.slot_state_buffers]

    def get_page_buffer_meta(self, indices: Any) -> PageMeta:
        if self.slot_state_buffers:
            raise NotImplementedError(
                f"pool {self._label!r} has side states, which page addresses do not cover; "
                "store its flat pages"
            )
        return self._listed(indices, self._page_views)

    def _page_views(self, page: int) -> list[AnyArray]:
        buffers = self.get_hybrid_pool_buffer()
        return [buffer[page : page + 1] for buffer in buffers if buffer.size > 0]

    def get_data_page(self, index: int, flat: bool = True) -> ByteArray:
        """The bytes of all states of slot ``index``, always a copy."""
        views = self._page_views(int(index))
        return np.concatenate([view.reshape(-1).view(np.uint8) for view in views])

    def get_dummy_flat_data_page(self) -> ByteArray:
        return np.zeros(self.size_per_token, dtype=np.uint8)

    def set_from_flat_data_page(self, index: int, data_page: AnyArray) -> None:
        data = self._flat_bytes(data_page, self.size_per_token)
        start = 0
        for view in self._page_views(int(index)):
            view.reshape(-1).view(np.uint8)[:] = data[start : start + view.nbytes]
            start += view.nbytes
