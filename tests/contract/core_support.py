"""Small pools and backends for the tests of the core, and pools that misbehave on purpose."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from hicache_shared.contract import HiCacheStorageConfig, PoolTransfer
from hicache_shared.hostpool import (
    DSAIndexerGeometry,
    DSAIndexerHostPool,
    MHAGeometry,
    MHAHostPool,
    MLAGeometry,
    MLAHostPool,
)
from hicache_shared.memory import MemoryStore
from hicache_shared.memory_backend import MemoryBackend, MemoryConfig
from hicache_shared.store import KeyBatch, PageBatch, StoredPool
from hicache_shared.testing.harness import storage_config

PAGE = 4
DYNAMIC = {"backend_name": "b", "module_path": "m", "class_name": "c"}
"""What SGLang needs in the extra config to load a backend by its path."""


def mha(
    layout: str = "page_first", pages: int = 8, heads: int = 2, layers: int = 3, page: int = PAGE
) -> MHAHostPool:
    return MHAHostPool(
        MHAGeometry(layers=layers, head_num=heads, head_dim=5),
        pages=pages,
        page_size=page,
        layout=layout,
    )


def mla(layout: str = "page_first", pages: int = 8) -> MLAHostPool:
    geometry = MLAGeometry(layers=3, kv_lora_rank=6, qk_rope_head_dim=2)
    return MLAHostPool(geometry, pages=pages, page_size=PAGE, layout=layout)


def indexer(layout: str = "page_first", pages: int = 8) -> DSAIndexerHostPool:
    geometry = DSAIndexerGeometry(layers=3)
    return DSAIndexerHostPool(geometry, pages=pages, page_size=PAGE, layout=layout)


def slots(pages: Sequence[int], width: int = PAGE) -> Any:
    firsts = np.asarray(pages, dtype=np.int64).reshape(-1, 1) * width
    return (firsts + np.arange(width)).reshape(-1)


def transfer(name: str, keys: Sequence[str], pages: Sequence[int], width: int = PAGE) -> Any:
    return PoolTransfer(name, host_indices=slots(pages, width), keys=list(keys))


def fill(buffer: Any, seed: int) -> None:
    data = buffer.reshape(-1).view(np.uint8)
    data[:] = np.random.default_rng(seed).integers(0, 256, data.nbytes, dtype=np.uint8)


class LoggedStore(MemoryStore):
    """Notes every call; ``answer`` may change what a call gives, or raise."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[str, int]]]] = []
        self.deadlines: list[float] = []
        self.answer: Callable[[str, list[list[Any]]], Any] = lambda _, answers: answers
        self.closes = 0

    def open(self, pools: Sequence[StoredPool]) -> None:
        self.calls.append(("open", [(pool.name, 0) for pool in pools]))
        self.answer("open", [])
        super().open(pools)

    def exists(self, asks: Sequence[KeyBatch], deadline_s: float) -> list[list[bool]]:
        self._note("exists", asks, deadline_s)
        answers: list[list[bool]] = self.answer("exists", super().exists(asks, deadline_s))
        return answers

    def put(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        self._note("put", batches, deadline_s)
        codes: list[list[int]] = self.answer("put", super().put(batches, deadline_s))
        return codes

    def get(self, batches: Sequence[PageBatch], deadline_s: float) -> list[list[int]]:
        self._note("get", batches, deadline_s)
        codes: list[list[int]] = self.answer("get", super().get(batches, deadline_s))
        return codes

    def close(self) -> None:
        self.closes += 1
        super().close()

    def _note(self, call: str, batches: Sequence[Any], deadline_s: float) -> None:
        self.calls.append((call, [(b.pool.name, len(b.hashes)) for b in batches]))
        self.deadlines.append(deadline_s)

    def named(self, call: str) -> list[list[tuple[str, int]]]:
        return [what for name, what in self.calls if name == call]


class LoggedBackend(MemoryBackend):
    """The reference backend over a :class:`LoggedStore` of its own, ``logged``."""

    def open_store(self, config: MemoryConfig, storage_config: HiCacheStorageConfig) -> MemoryStore:
        self.logged = LoggedStore()
        return self.logged


def config(extra: dict[str, Any] | None = None, **changes: Any) -> HiCacheStorageConfig:
    changes = {"is_mla_model": False, **changes}
    return storage_config(extra=extra, **changes)


def logged_backend(*pools: tuple[str, Any], **changes: Any) -> LoggedBackend:
    """A backend with these pools, the first of them the anchor, and not yet opened."""
    backend = LoggedBackend(config(**changes), {})
    backend.register_mem_pool_host(pools[0][1])
    for name, pool in pools:
        backend.register_mem_host_pool_v2(pool, name)
    return backend


def memory_backend(pool: Any, shelf: str | None = None, **changes: Any) -> MemoryBackend:
    """A backend with a KV pool on a named shelf."""
    extra = {**(changes.pop("extra", None) or {}), "shelf": shelf or uuid4().hex}
    backend = MemoryBackend(config(extra, **changes), {})
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend


class FakeTensor:
    """As much of a ``torch.Tensor`` in host memory as is used; freed memory is overwritten."""

    class _Device:
        type = "cpu"

    class _Storage:
        def __init__(self, data: npt.NDArray[Any]) -> None:
            self._data = data

        def data_ptr(self) -> int:
            return self._data.ctypes.data

        def nbytes(self) -> int:
            return self._data.nbytes

    device = _Device()

    def __init__(self, data: npt.NDArray[Any], *, owns: bool = False) -> None:
        self.data = data
        self.dtype = data.dtype
        self.owns = owns

    def __del__(self) -> None:
        if self.owns:
            ctypes.memset(self.data.ctypes.data, 0xDD, self.data.nbytes)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def data_ptr(self) -> int:
        return self.data.ctypes.data

    def is_contiguous(self) -> bool:
        return bool(self.data.flags.c_contiguous)

    def untyped_storage(self) -> Any:
        root = self.data
        while isinstance(root.base, np.ndarray):
            root = root.base
        return self._Storage(root)

    def new_empty(self, size: int) -> FakeTensor:
        return FakeTensor(np.empty(size, self.data.dtype))

    def long(self) -> FakeTensor:
        return FakeTensor(self.data.astype(np.int64))

    def new_tensor(self, values: Any) -> FakeTensor:
        return FakeTensor(np.array(values, self.data.dtype))

    def numel(self) -> int:
        return self.data.size
