"""The anchor of DeepSeek V4: token slots and no bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hicache_shared.hostpool.base import SlotPool
from hicache_shared.hostpool.memory import Allocate, ByteArray


@dataclass(frozen=True, slots=True)
class LogicalGeometry:
    """No layers and no bytes."""

    kind: ClassVar[str] = "logical"
    layers: ClassVar[int] = 0

    def divided(self, layers_div: int) -> LogicalGeometry:
        return self

    def of_rank(self, tp_size: int) -> LogicalGeometry:
        return self

    def pool(
        self, *, label: str, pages: int, page_size: int, layout: str, allocate: Allocate
    ) -> LogicalHostPool:
        return LogicalHostPool(label=label, pages=pages, page_size=page_size, layout=layout)


class LogicalHostPool(SlotPool):
    """SGLang's ``LogicalHostPool``: its slots are the page anchors of the compressed pools.

    ``kv_buffer`` is None from the start, flat pages are ``uint8[0]``, and there are no
    page addresses. Arguments as of :class:`~hicache_shared.hostpool.base.SlotPool`.
    """

    kind = "logical"

    def __init__(
        self, *, pages: int, page_size: int, layout: str = "layer_first", label: str = "kv"
    ) -> None:
        super().__init__(
            label=label, pages=pages, page_size=page_size, layout=layout, dtype="uint8"
        )
        self.layer_num = 0
        self.start_layer = 0
        self.end_layer = 0
        self.kv_buffer = None
        self.size_per_token = 0

    def get_data_page(self, index: int, flat: bool = True) -> ByteArray:
        return np.empty(0, dtype=np.uint8)

    def get_dummy_flat_data_page(self) -> ByteArray:
        return np.empty(0, dtype=np.uint8)

    def set_from_flat_data_page(self, index: int, data_page: Any) -> None:
        """Nothing to write."""

    def get_page_buffer_meta(self, indices: Any) -> None:
        return None

    def get_page_buffer_element_size(self, split_factor: int = 1) -> None:
        return None
