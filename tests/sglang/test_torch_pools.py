"""Pools over torch tensors, as SGLang's own, go through a backend like those over numpy."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from hicache_shared.contract import PoolTransfer, rank_config
from hicache_shared.layout import Access, layouts_of
from hicache_shared.memory_backend import MemoryBackend

torch = pytest.importorskip("torch")

PAGES, PAGE_SIZE, LAYERS, ITEM = 6, 4, 3, 40


class TorchPool:
    """As SGLang's ``DeepSeekV4StateHostPool``: it asks its indices for ``numel()``."""

    size_per_token = ITEM
    page_size = PAGE_SIZE
    size = PAGES * PAGE_SIZE
    dtype = torch.bfloat16

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.kv_buffer: Any = (
            [torch.zeros(PAGES, ITEM, dtype=self.dtype) for _ in range(LAYERS)]
            if layout == "layer_first"
            else torch.zeros(PAGES, LAYERS, ITEM, dtype=self.dtype)
        )

    def get_hybrid_pool_buffer(self) -> list[Any]:
        return self.kv_buffer if isinstance(self.kv_buffer, list) else [self.kv_buffer]

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        assert indices.numel() % PAGE_SIZE == 0
        rows = (indices.reshape(-1, PAGE_SIZE)[:, 0] // PAGE_SIZE).tolist()
        if self.layout == "layer_first":
            views = [layer[row] for row in rows for layer in self.kv_buffer]
        else:
            views = [self.kv_buffer[row] for row in rows]
        return [view.data_ptr() for view in views], [view.nbytes for view in views]

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        return self.kv_buffer[index // PAGE_SIZE].flatten()

    def get_dummy_flat_data_page(self) -> Any:
        return torch.zeros(LAYERS * ITEM, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: Any) -> None:
        self.kv_buffer[index // PAGE_SIZE] = data_page.reshape(LAYERS, ITEM)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.get_hybrid_pool_buffer():
            buffer.copy_(torch.randn(buffer.shape, generator=generator))

    def page(self, page: int) -> list[float]:
        rows = self.kv_buffer if self.layout == "layer_first" else [self.kv_buffer]
        return [value for row in rows for value in row[page].flatten().tolist()]


def backend(**extra: Any) -> MemoryBackend:
    named = {"model_id": "tiny", "revision": "1", "kv_cache_dtype": "bf16", "namespace": "torch"}
    config = rank_config("tiny", is_mla_model=False, extra_config={**named, **extra})
    return MemoryBackend(config, {})


KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(3)]


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_torch_pages_come_back_byte_exact(layout: str) -> None:
    pool, store = TorchPool(layout), backend(shelf=layout)
    store.register_mem_pool_host(pool)
    pool.fill(1)
    stored = [pool.page(page) for page in range(3)]
    assert store.batch_set_v1(KEYS, torch.arange(3 * PAGE_SIZE)) == [True] * 3
    pool.fill(2)
    transfer = PoolTransfer("kv", host_indices=torch.arange(12, 24), keys=KEYS)
    assert store.batch_get_v2([transfer]) == {"kv": [True] * 3}
    assert [pool.page(page) for page in range(3, 6)] == stored
    store.close()


def test_the_types_of_all_buffers_are_in_the_dtype() -> None:
    """SGLang's Mamba pool names its convolution states' type alone as its own."""
    kinds = set()
    for temporal in (torch.float16, torch.bfloat16, torch.float32):
        pool = TorchPool("layer_first")
        pool.kv_buffer[0] = torch.zeros(PAGES, ITEM, dtype=temporal)
        kinds.add(layouts_of("mamba", pool)[0].dtype)
    assert kinds == {"bfloat16+float16", "bfloat16", "bfloat16+float32"}


def test_a_torch_pool_is_affine_and_named_by_its_dtype() -> None:
    (layout,) = layouts_of("kv", TorchPool("layer_first"))
    assert (layout.access, layout.dtype) == (Access.AFFINE, "bfloat16")
    assert layout.component_bytes == (2 * ITEM,) * LAYERS


def test_flat_torch_pages_come_back_byte_exact() -> None:
    pool = TorchPool("page_first")
    store = backend(shelf="flat", module_path="hicache_shared.memory_backend")
    store.register_mem_pool_host(pool)
    pool.fill(3)
    pages = [pool.get_data_page(page * PAGE_SIZE) for page in range(3)]
    assert store.batch_set(KEYS, pages)
    targets = [pool.get_dummy_flat_data_page() for _ in KEYS]
    assert all(
        torch.equal(a, b) for a, b in zip(store.batch_get(KEYS, targets), pages, strict=True)
    )
    assert store.batch_exists(KEYS) == 3
    store.close()
