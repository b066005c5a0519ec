"""One rank of SGLang's cache on the CPU: its tree, controller and host pools over our backend.

What the scheduler does for a request is done here by hand, with the same calls in the same order:
a prompt is computed and written through, looked up, fetched from storage, and loaded back.
"""

from __future__ import annotations

import atexit
import json
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from tests.sglang.cache.devices import KINDS, Device, page_size_of

PATIENCE_S = 60.0
"""A step that takes longer hangs."""


@dataclass(frozen=True)
class Launch:
    """What the operator says at launch.

    Attributes:
        backend: settings of the extra config: the class to load, and its own.
        layout: ``--hicache-mem-layout``.
        io: ``--hicache-io-backend``.
        zero_copy: ``"interface_v1"``; without it KV goes through SGLang's flat pages.
        more: of the extra config.
        ranks: ``--tp-size``.
    """

    backend: dict[str, Any]
    layout: str = "page_first"
    io: str = "kernel"
    zero_copy: bool = True
    more: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1

    def extra_config(self, page_size: int) -> dict[str, Any]:
        return {
            **self.backend,
            **({"interface_v1": 1} if self.zero_copy else {}),
            "prefetch_threshold": page_size,
            **self.more,
        }

    def server_args(self, page_size: int) -> ServerArgs:
        args = ServerArgs(
            model_path="dummy",
            served_model_name="tests/model",
            device="cpu",
            tp_size=self.ranks,
            page_size=page_size,
            enable_hierarchical_cache=True,
            hicache_ratio=2.0,
            hicache_mem_layout=self.layout,
            hicache_io_backend=self.io,
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(self.extra_config(page_size)),
            hicache_storage_prefetch_policy="wait_complete",
        )
        args._mamba_cache_chunk_size = page_size  # else read from a model's configuration
        return args


class Rank:
    """A running cache. Not thread-safe: it is SGLang's scheduler thread.

    Args:
        kind: of model, one of ``devices.KINDS``.
        launch: the operator's settings.
        group: of the ranks that share a model; None for a rank alone.
    """

    def __init__(self, kind: str, launch: Launch, group: Any = None) -> None:
        args = launch.server_args(page_size_of(kind))
        set_global_server_args_for_scheduler(args)  # device pools read them too
        device = self.device = KINDS[kind]()
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=device.requests,
            token_to_kv_pool_allocator=device.allocator,
            page_size=device.page_size,
            sliding_window_size=device.window,
            tree_components=device.components,
            enable_mamba_extra_buffer=ComponentType.MAMBA in device.components,
            tp_cache_group=group,
        )
        self.cache = UnifiedRadixCache(params)
        self.cache.init_hicache(args, params)
        self._requests = 0

    @property
    def backend(self) -> Any:
        """What SGLang's factory made."""
        return self.cache.cache_controller.storage_backend

    def request(self, tokens: Sequence[int]) -> Req:
        """A request for a prompt, of one token more than is to be found: SGLang computes that."""
        self._requests += 1
        return Req(
            rid=f"request {self._requests}",
            origin_input_text="",
            origin_input_ids=array("q", [*tokens, 0]),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )

    def compute(self, tokens: Sequence[int]) -> torch.Tensor:
        """As after a prefill: pages of the device, with what lies in them, enter the tree.

        Returns:
            Their KV slots.
        """
        slots = self.device.allocate(len(tokens))
        params = InsertParams(key=_key(tokens), value=slots)
        if ComponentType.MAMBA in self.device.components:
            request = self.request(tokens)
            self.device.requests.alloc([request])
            params.mamba_value = request.kv.mamba_pool_idx.unsqueeze(0)
        self.cache.insert(params)
        return slots

    def backed_up(self) -> None:
        """Wait until all that was computed is on the host and in storage."""
        cache = self.cache
        self.until(lambda: not cache.ongoing_write_through and not cache.ongoing_backup)

    def flush(self) -> None:
        """SGLang's flush: the tree, host and device forget all, and their memory is wiped."""
        self.cache.reset()
        for entry in self.cache.host_pool_group.entries:
            for buffer in host_buffers(entry.host_pool):
                buffer.zero_()
        self.device.wipe()

    def start_prefetch(self, request: Req) -> None:
        """Ask storage for what neither device nor host has of a prompt."""
        request.init_next_round_input(self.cache, cow_mamba=False)
        matched = request.prefix_len + request.host_hit_length
        tokens = request.full_untruncated_fill_ids
        node = request.last_host_node
        cache = self.cache
        cache.prefetch_from_storage(
            request.cache_request_handle,
            node,
            tokens[matched : len(tokens) - 1],
            cache.get_last_hash_value(node),
            cache.get_prefix_hash_values(node) if cache.hicache_storage_pass_prefix_keys else None,
            matched_prefix_tokens=tokens[:matched],
        )

    def end_prefetch(self, request: Req) -> int:
        """Wait for it; the number of tokens that came to the host."""
        handle = request.cache_request_handle
        self.until(lambda: self.cache.check_prefetch_progress(handle))
        return int(self.cache.pop_prefetch_loaded_tokens(handle))

    def fetch(self, tokens: Sequence[int]) -> int:
        """Bring a prompt from storage to the host, then to the device; tokens that came."""
        request = self.request(tokens)
        self.start_prefetch(request)
        fetched = self.end_prefetch(request)
        self.load_back(tokens)
        return fetched

    def load_back(self, tokens: Sequence[int]) -> None:
        """Bring what the host has of a prompt to the device."""
        cache, request = self.cache, self.request(tokens)
        if ComponentType.MAMBA in self.device.components:
            self.device.requests.alloc([request])
        request.init_next_round_input(cache, cow_mamba=False)
        params = InitLoadBackParams(request.best_match_node, request.host_hit_length, req=request)
        cache.init_load_back(params)
        cache.ready_to_load_host_cache()
        self.until(lambda: not cache.ongoing_load_back)

    def on_device(self, tokens: Sequence[int]) -> Restored:
        """How much of a prompt the device has, and its bytes."""
        match = self.cache.match_prefix(MatchPrefixParams(key=_key(tokens)))
        node = match.last_device_node
        slots = self.cache.path_device_indices(node)
        if not match.device_prefix_len:
            return Restored(0, [], {})
        rows = self.device.rows(slots)
        if ComponentType.MAMBA in self.device.components:
            state = self.cache.tree_core.get_component_device_value(node, ComponentType.MAMBA)
            rows |= {"temporal": state, "conv": state}
        pages = (slots[:: self.device.page_size] // self.device.page_size).tolist()
        return Restored(match.device_prefix_len, pages, self.device.read(rows))

    def slots(self, tokens: Sequence[int]) -> torch.Tensor:
        """KV slots of what the device has of a prompt."""
        match = self.cache.match_prefix(MatchPrefixParams(key=_key(tokens)))
        return self.cache.path_device_indices(match.last_device_node)

    def until(self, done: Callable[[], Any]) -> None:
        """Turn SGLang's event loop until something is so.

        Raises:
            TimeoutError: it is not after a minute.
        """
        end = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > end:
                raise TimeoutError("SGLang's event loop waits for what does not come")
            self.cache.check_hicache_events()
            time.sleep(0.002)

    def close(self) -> None:
        """As SGLang ends: the host pools lose their memory, then the backend is closed.

        Raises:
            RuntimeError: storage threads did not end.
        """
        self.cache.release_host_resources()
        atexit.unregister(self.cache.shutdown)  # it would keep all memory until the end
        ended, message = self.cache.detach_storage_backend()
        if not ended:
            raise RuntimeError(message)


@dataclass(frozen=True)
class Restored:
    """What the device has of a prompt.

    Attributes:
        tokens: its length.
        pages: of the KV.
        bytes: of each pool, a buffer after the other; of pools with a window the last page's.
    """

    tokens: int
    pages: list[int]
    bytes: dict[str, list[bytes]]


@contextmanager
def running(kind: str, launch: Launch) -> Iterator[Rank]:
    """A rank alone, closed at the end."""
    with get_parallel().override(tp_rank=0, pp_rank=0):
        rank = Rank(kind, launch)
        try:
            yield rank
        finally:
            rank.close()


def prompt(device: Device, pages: int, start: int = 1000) -> list[int]:
    """Tokens that fill so many pages."""
    return list(range(start, start + pages * device.page_size))


def host_buffers(pool: Any) -> list[torch.Tensor]:
    """All memory of a host pool; none of a logical one."""
    if hasattr(pool, "index_k_with_scale_buffer"):
        held = pool.index_k_with_scale_buffer
    elif hasattr(pool, "get_hybrid_pool_buffer"):
        held = pool.get_hybrid_pool_buffer()
    else:
        held = pool.kv_buffer
    if held is None:
        return []
    return list(held) if isinstance(held, list | tuple) else [held]


def _key(tokens: Sequence[int]) -> RadixKey:
    return RadixKey(array("q", tokens))
