"""SGLang's own device pools and allocators, one small model of each kind, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType

PAGES = 16
"""Of each device pool: two prompts, and some pages that move what is restored elsewhere."""

PAGE_SIZE = 64
V4_PAGE_SIZE = 256
REQUESTS = 4
LAYERS = 4
ON_CPU = {"device": "cpu", "enable_memory_saver": False}

Buffers = dict[str, list[torch.Tensor]]
Rows = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Device:
    """What a rank has on its GPU.

    Attributes:
        page_size: in tokens.
        components: of the prefix tree, as SGLang derives them from the model.
        window: of sliding-window layers, in tokens.
        buffers: every buffer of a pool, a tensor a layer and component.
        rows: the rows of a pool's buffers that hold the pages of these KV slots; of a pool with
            a window those of the last page alone.
    """

    page_size: int
    kv: Any
    allocator: Any
    requests: Any
    components: tuple[ComponentType, ...]
    buffers: Callable[[], Buffers]
    rows: Callable[[torch.Tensor], Rows]
    window: int | None = None

    def allocate(self, tokens: int) -> torch.Tensor:
        """KV slots of whole pages, with slots of sliding-window layers beside them."""
        if not isinstance(self.allocator, SWATokenToKVPoolAllocator):
            return self.allocator.alloc(tokens)
        full = self.allocator.full_attn_allocator.alloc(tokens)
        swa = self.allocator.swa_attn_allocator.alloc(tokens)
        self.allocator.set_full_to_swa_mapping(full, swa)
        return full

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self._tensors():
            shape = (tensor.numel() * tensor.element_size(),)
            random = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            tensor.copy_(random.view(tensor.dtype).reshape(tensor.shape))

    def wipe(self) -> None:
        for tensor in self._tensors():
            tensor.zero_()
        self.allocator.clear()
        self.requests.clear()

    def read(self, rows: Rows) -> dict[str, list[bytes]]:
        """The bytes of these rows, of each buffer of each pool."""
        return {
            pool: [
                buffer[rows[pool]].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                for buffer in buffers
            ]
            for pool, buffers in self.buffers().items()
        }

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for tensors in self.buffers().values() for tensor in tensors]


def mha() -> Device:
    kv = MHATokenToKVPool(**_sizes(), **_heads(), layer_num=LAYERS, **ON_CPU)
    return _plain(kv, lambda: {"k": kv.k_buffer, "v": kv.v_buffer})


def mla() -> Device:
    kv = MLATokenToKVPool(**_sizes(), **_latent(), layer_num=LAYERS, **ON_CPU)
    return _plain(kv, lambda: {"kv": kv.kv_buffer})


def dsa() -> Device:
    kv = DSATokenToKVPool(
        **_sizes(), **_latent(), kv_cache_dim=576, index_head_dim=128, layer_num=LAYERS, **ON_CPU
    )

    def rows(slots: torch.Tensor) -> Rows:
        return {"kv": slots, "indexer": slots[::PAGE_SIZE] // PAGE_SIZE}

    device = _plain(kv, lambda: {"kv": kv.kv_buffer, "indexer": kv.index_k_with_scale_buffer})
    return Device(**{**vars(device), "rows": rows})


def swa() -> Device:
    kv = SWAKVPool(
        **_sizes(),
        **_heads(),
        size_swa=PAGES * PAGE_SIZE,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1, 3],
        device="cpu",
    )
    allocator = _swa_allocator(kv, PAGE_SIZE, torch.bfloat16, PAGES)

    def buffers() -> Buffers:
        full, windowed = kv.full_kv_pool, kv.swa_kv_pool
        return {
            "k": full.k_buffer,
            "v": full.v_buffer,
            "swa k": windowed.k_buffer,
            "swa v": windowed.v_buffer,
        }

    def rows(slots: torch.Tensor) -> Rows:
        last = allocator.full_to_swa_index_mapping[slots[-PAGE_SIZE:]]
        return {"k": slots, "v": slots, "swa k": last, "swa v": last}

    return Device(
        PAGE_SIZE,
        kv,
        allocator,
        _requests(PAGE_SIZE),
        (ComponentType.FULL, ComponentType.SWA),
        buffers,
        rows,
        window=PAGE_SIZE,
    )


def mamba() -> Device:
    """Layers 0 and 2 are linear. The rows of its state are the slots of requests, not of KV."""
    linear = [0, 2]
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=256,
        n_groups=1,
        num_heads=2,
        head_dim=16,
        state_size=16,
        conv_kernel=4,
    )
    with envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
        params = Mamba2CacheParams(shape=shape, layers=linear)
    requests = HybridReqToTokenPool(
        size=REQUESTS,
        mamba_size=24,
        mamba_spec_state_size=REQUESTS,
        max_context_len=PAGES * PAGE_SIZE,
        cache_params=params,
        mamba_layer_ids=linear,
        enable_mamba_extra_buffer=True,  # else a tree of pages is refused
        speculative_num_draft_tokens=3,
        **ON_CPU,
    )
    kv = HybridLinearKVPool(
        **_sizes(),
        **_heads(),
        full_attention_layer_ids=[1, 3],
        mamba_pool=requests.mamba_pool,
        **ON_CPU,
    )

    def buffers() -> Buffers:
        states = requests.mamba_pool.mamba_cache
        return {
            "k": kv.full_kv_pool.k_buffer,
            "v": kv.full_kv_pool.v_buffer,
            "temporal": list(states.temporal),
            "conv": [layer for conv in states.conv for layer in conv],
        }

    device = _plain(kv, buffers)
    components = (ComponentType.FULL, ComponentType.MAMBA)
    return Device(**{**vars(device), "requests": requests, "components": components})


def deepseek_v4(layers: int = 7) -> Device:
    """DeepSeek V4 Flash's own geometry, of its 43 layers or the first few."""
    ratios = ([0, 0] + [4, 128] * 20 + [4])[:layers]
    tokens = PAGES * V4_PAGE_SIZE
    kv = DeepSeekV4TokenToKVPool(
        max_num_reqs=REQUESTS,
        full_size=tokens,
        swa_size=tokens,
        c4_size=tokens // 4,
        c128_size=tokens // 128,
        c4_state_pool_size=PAGES * 8,
        c128_state_pool_size=128,
        page_size=V4_PAGE_SIZE,
        swa_page_size=V4_PAGE_SIZE,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=layers,
        compression_ratios=ratios,
        sliding_window=128,
        start_layer=0,
        end_layer=layers,
        **ON_CPU,
    )
    allocator = _swa_allocator(kv, V4_PAGE_SIZE, torch.float8_e4m3fn, PAGES)

    def states(pools: list[Any]) -> list[torch.Tensor]:
        """Of layers that compress by four: a row a page of the sliding window."""
        chosen = [pool for pool, ratio in zip(pools, ratios, strict=True) if ratio == 4]
        scores = [pool.kv_score_buffer.kv_score for pool in chosen]
        return [score[: PAGES * chosen[0].ring_size].view(PAGES, -1) for score in scores]

    def buffers() -> Buffers:
        return {
            "swa": kv.swa_kv_pool.kv_buffer,
            "c4": kv.c4_kv_pool.kv_buffer,
            "c4 indexer": kv.c4_indexer_kv_pool.index_k_with_scale_buffer,
            "c128": kv.c128_kv_pool.kv_buffer,
            "c4 state": states(kv.compress_state_pools),
            "c4 indexer state": states(kv.indexer_compress_state_pools),
        }

    def rows(slots: torch.Tensor) -> Rows:
        pages = slots[::V4_PAGE_SIZE] // V4_PAGE_SIZE
        last = allocator.full_to_swa_index_mapping[slots[-1:]] // V4_PAGE_SIZE
        windowed = dict.fromkeys(("swa", "c4 state", "c4 indexer state"), last)
        return {**dict.fromkeys(("c4", "c4 indexer", "c128"), pages), **windowed}

    return Device(
        V4_PAGE_SIZE,
        kv,
        allocator,
        _requests(V4_PAGE_SIZE),
        (ComponentType.FULL, ComponentType.SWA),
        buffers,
        rows,
        window=128,
    )


KINDS: dict[str, Callable[[], Device]] = {
    "mha": mha,
    "mla": mla,
    "dsa": dsa,
    "swa": swa,
    "mamba": mamba,
    "deepseek-v4": deepseek_v4,
    "deepseek-v4-flash": partial(deepseek_v4, layers=43),
}


def page_size_of(kind: str) -> int:
    """In tokens: it is said at launch, before the device pools are made."""
    return V4_PAGE_SIZE if kind.startswith("deepseek-v4") else PAGE_SIZE


def _sizes() -> dict[str, Any]:
    return {"size": PAGES * PAGE_SIZE, "page_size": PAGE_SIZE, "dtype": torch.bfloat16}


def _heads() -> dict[str, int]:
    return {"head_num": 4, "head_dim": 32}


def _latent() -> dict[str, int]:
    return {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def _requests(page_size: int) -> ReqToTokenPool:
    return ReqToTokenPool(size=REQUESTS, max_context_len=PAGES * page_size, **ON_CPU)


def _plain(kv: Any, buffers: Callable[[], Buffers]) -> Device:
    """A device whose buffers have a row a KV slot."""
    allocator = PagedTokenToKVPoolAllocator(
        PAGES * PAGE_SIZE, PAGE_SIZE, torch.bfloat16, "cpu", kv, need_sort=False
    )

    def rows(slots: torch.Tensor) -> Rows:
        return dict.fromkeys(buffers(), slots)

    components = (ComponentType.FULL,)
    return Device(PAGE_SIZE, kv, allocator, _requests(PAGE_SIZE), components, buffers, rows)


def _swa_allocator(
    kv: Any, page_size: int, dtype: torch.dtype, pages: int
) -> SWATokenToKVPoolAllocator:
    return SWATokenToKVPoolAllocator(
        size=pages * page_size,
        size_swa=pages * page_size,
        page_size=page_size,
        dtype=dtype,
        device="cpu",
        kvcache=kv,
        need_sort=False,
    )
