"""The host pool of DeepSeek sparse attention's indexer keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hicache_shared.hostmem import aligned_bytes
from hicache_shared.hostpool.base import BlockPool
from hicache_shared.hostpool.memory import Allocate, AnyArray, dtype_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DSAIndexerGeometry:
    """Indexer keys of some layers, the same on every tensor-parallel rank.

    Attributes:
        layers: layers that have an indexer.
        index_head_dim: bytes (fp8 elements) of a token's key.
        quant_block_size: elements that share one fp32 scale.
        kv_dtype: element type of the KV pool beside it, which SGLang names as this pool's
            ``dtype`` although it holds bytes.
    """

    kind: ClassVar[str] = "dsa_indexer"
    layers: int
    index_head_dim: int = 128
    quant_block_size: int = 128
    kv_dtype: str = "bfloat16"

    @property
    def token_bytes(self) -> int:
        """Bytes of a token of one layer: the key and its scales."""
        return self.index_head_dim + self.index_head_dim // self.quant_block_size * 4

    def divided(self, layers_div: int) -> DSAIndexerGeometry:
        return replace(self, layers=max(1, self.layers // layers_div))

    def of_rank(self, tp_size: int) -> DSAIndexerGeometry:
        return self

    def pool(
        self, *, label: str, pages: int, page_size: int, layout: str, allocate: Allocate
    ) -> DSAIndexerHostPool:
        return DSAIndexerHostPool(
            self, label=label, pages=pages, page_size=page_size, layout=layout, allocate=allocate
        )


class DSAIndexerHostPool(BlockPool):
    """SGLang's ``DSAIndexerPoolHost``: it has **no** ``kv_buffer`` until it is destroyed.

    ``index_k_with_scale_buffer`` is ``uint8[pages', layers, 1, page_bytes_a_layer]`` in both
    legal layouts, with more rows than the pool has pages. A page is one component.
    """

    kind = "dsa_indexer"

    def __init__(
        self,
        geometry: DSAIndexerGeometry,
        *,
        pages: int,
        page_size: int,
        layout: str,
        label: str = "indexer",
        allocate: Allocate = aligned_bytes,
    ) -> None:
        super().__init__(
            label=label,
            pages=pages,
            page_size=page_size,
            layout=layout,
            dtype=geometry.kv_dtype,
            allocate=allocate,
        )
        self.page_num = pages
        self.layer_num = geometry.layers
        self.start_layer = 0
        self.end_layer = geometry.layers
        self.indexer_dtype = dtype_of("uint8")
        self.indexer_page_stride_size = geometry.token_bytes * page_size
        self.indexer_page_num = (self.size + page_size + 1) // page_size
        self.size_per_token = geometry.token_bytes * self.layer_num
        self.index_k_with_scale_buffer: AnyArray | None = self._new_array(
            (self.indexer_page_num, self.layer_num, 1, self.indexer_page_stride_size),
            self.indexer_dtype,
        )

    def destroy(self) -> None:
        self.index_k_with_scale_buffer = None
        super().destroy()

    def get_hybrid_pool_buffer(self) -> list[AnyArray]:
        return [self._live(self.index_k_with_scale_buffer)]

    def _block(self, page: int) -> AnyArray:
        buffer = self.get_hybrid_pool_buffer()[0]
        return buffer[page : page + 1]

    def _page_views(self, page: int) -> list[AnyArray]:
        return [self._block(page)]
