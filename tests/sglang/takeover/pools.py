"""SGLang's own MLA host pool with a few small pages, and how a backend is attached to it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from hicache_shared.contract import rank_config

LAYERS, WIDTH, PAGE, PAGES = 3, 24, 4, 6
Start = Callable[..., dict[str, str]]
"""The fixture ``start``."""

KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(3)]


def config(tp: tuple[int, int] = (0, 1), mla: bool = True, **extra: Any) -> Any:
    return rank_config(
        "tiny",
        is_mla_model=mla,
        extra_config={"model_id": "t", "revision": "1", "kv_cache_dtype": "bf16", **extra},
        tp_rank=tp[0],
        tp_size=tp[1],
    )


def mla_pool(layout: str, allocator: str, dcp: tuple[int, int] = (0, 1)) -> Any:
    """SGLang's own MLA host pool; under DCP its pages are as many times wider."""
    buffers = tuple(torch.zeros(8, 1, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=WIDTH - 8,
        qk_rope_head_dim=8,
        kv_cache_dim=WIDTH,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info,
        host_to_device_ratio=1,
        host_size=0,
        page_size=PAGE * dcp[1],
        layout=layout,
        pin_memory=False,
        allocator_type=allocator,
        dcp_size=dcp[1],
        dcp_rank=dcp[0],
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
        host_token_capacity=PAGES * PAGE,
    )


def pages(pool: Any, numbers: range) -> list[Any]:
    return [pool.get_data_page(n * pool.logical_page_size).clone() for n in numbers]


def slots(pool: Any, numbers: range) -> Any:
    width = pool.logical_page_size
    return torch.arange(numbers.start * width, numbers.stop * width)


def fill(pool: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=generator))


def attached(name: str, pool: Any, storage_config: Any) -> Any:
    """As SGLang's controller attaches a backend of an in-tree name."""
    backend = StorageBackendFactory.create_backend(name, storage_config, pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend
