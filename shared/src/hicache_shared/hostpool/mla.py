"""The host pool of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hicache_shared.hostmem import aligned_bytes
from hicache_shared.hostpool.base import BlockPool
from hicache_shared.hostpool.memory import Allocate, AnyArray


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAGeometry:
    """The latent KV of some layers, the same on every tensor-parallel rank.

    Attributes:
        layers: layers of the pool.
        kv_lora_rank: elements of the latent part of a row.
        qk_rope_head_dim: elements of the rotary part of a row.
        dtype: name of the element type.
    """

    kind: ClassVar[str] = "mla"
    layers: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: str = "bfloat16"

    def divided(self, layers_div: int) -> MLAGeometry:
        return replace(self, layers=max(1, self.layers // layers_div))

    def of_rank(self, tp_size: int) -> MLAGeometry:
        return self

    def pool(
        self, *, label: str, pages: int, page_size: int, layout: str, allocate: Allocate
    ) -> MLAHostPool:
        return MLAHostPool(
            self, label=label, pages=pages, page_size=page_size, layout=layout, allocate=allocate
        )


class MLAHostPool(BlockPool):
    """SGLang's ``MLATokenToKVPoolHost``, which has no ``get_hybrid_pool_buffer``.

    ``kv_buffer`` is one array, with rows of ``kv_lora_rank + qk_rope_head_dim`` elements:

    - ``layer_first``: ``[layers, size, 1, row]``
    - ``page_first``: ``[size, layers, 1, row]``
    - ``page_first_direct``: ``[pages, layers, page_size, 1, row]``

    A page is one component, or one a layer in ``layer_first``.
    """

    kind = "mla"

    def __init__(
        self,
        geometry: MLAGeometry,
        *,
        pages: int,
        page_size: int,
        layout: str,
        label: str = "kv",
        allocate: Allocate = aligned_bytes,
    ) -> None:
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
        self.kv_lora_rank = geometry.kv_lora_rank
        self.qk_rope_head_dim = geometry.qk_rope_head_dim
        self.kv_cache_dim = geometry.kv_lora_rank + geometry.qk_rope_head_dim
        self.size_per_token = self.kv_cache_dim * self.layer_num * self.dtype.itemsize
        shapes = {
            "layer_first": (self.layer_num, self.size, 1, self.kv_cache_dim),
            "page_first": (self.size, self.layer_num, 1, self.kv_cache_dim),
            "page_first_direct": (pages, self.layer_num, page_size, 1, self.kv_cache_dim),
        }
        self.kv_buffer = self._new_array(shapes[layout])

    def _block(self, page: int) -> AnyArray:
        rows = slice(page * self.page_size, (page + 1) * self.page_size)
        buffer: AnyArray = self._live(self.kv_buffer)
        if self.layout == "layer_first":
            return buffer[:, rows]
        if self.layout == "page_first":
            return buffer[rows]
        return buffer[page : page + 1]

    def _page_views(self, page: int) -> list[AnyArray]:
        block = self._block(page)
        return list(block) if self.layout == "layer_first" else [block]
