"""One rank of an engine: a model's host pools, and a backend they are registered with."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_shared.contract import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolTransfer,
)
from hicache_shared.controller import Operation, model_transfers
from hicache_shared.hostmem import merged, storage_region
from hicache_shared.hostpool import Allocate, AssembledModel, ModelSpec, build, page_views
from hicache_shared.layout import buffers_of, is_logical, page_slots_of
from hicache_shared.testing.engine import EngineCalls
from hicache_shared.testing.harness import Harness, storage_config
from hicache_shared.testing.models import MLA_MAMBA as MLA_MAMBA
from hicache_shared.testing.models import spec_of as spec_of
from hicache_shared.testing.models import with_small_states
from hicache_shared.testing.page_bytes import PageBytes, bytes_of
from hicache_shared.testing.tensors import tensors

KV = "kv"
PAGES = 16
"""Host pages of every pool in the suite."""

LAYERS_DIV = {"mamba": 18, "mla-mamba": 18}
"""Models whose layers are large are cut down more."""

FLAT_KV = {"module_path": "hicache_shared.testing", "interface_v1": 0}
"""Extra config of a backend that SGLang loads by its path, without ``"interface_v1": 1``."""


def content(pool: str, key: str, nbytes: int) -> bytes:
    """The bytes of a page that are told by its pool and key alone, in any process."""
    seed = hashlib.sha256(f"{pool}/{key}".encode()).digest()
    return PageBytes(np.random.default_rng(list(seed)).bytes(nbytes))


def digest(page: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(page).hexdigest()


def chain(pages: int, salt: str = "") -> list[str]:
    """Page hashes as SGLang chains them: each over all before it. Fresh for a new salt."""
    hashes: list[str] = []
    for page in range(pages):
        before = hashes[-1] if hashes else salt
        hashes.append(hashlib.sha256(f"{before}/{page}".encode()).hexdigest())
    return hashes


class Rank:
    """Host pools of one model on one rank, registered in SGLang's order.

    Args:
        backend: a fresh backend.
        model: the host pools.
        config: what the backend was made with.
        zero_copy: whether SGLang would move its KV by v1, or as flat pages.

    Attributes:
        backend: the backend, called as SGLang would.
    """

    def __init__(
        self,
        backend: HiCacheStorage,
        model: AssembledModel,
        config: HiCacheStorageConfig,
        *,
        zero_copy: bool = True,
    ) -> None:
        self.backend = EngineCalls(backend, zero_copy=zero_copy, tensors=tensors())
        self.model = model
        self.config = config
        register(self.backend, model)

    @classmethod
    def make(
        cls,
        harness: Harness,
        model: str | ModelSpec,
        layout: str,
        *,
        own_client: bool = False,
        heads_over: int = 1,
        layers_div: int | None = None,
        pages: int = PAGES,
        extra: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Rank:
        """A rank of a preset.

        Args:
            harness: makes the backend.
            model: the name of a preset or of a model of the suite's own, or a model.
            layout: memory layout of its pools.
            own_client: whether the backend shares no client with others.
            heads_over: ranks that the model's attention heads are split over.
            layers_div: by what layer counts are divided; None is the suite's choice.
            pages: host pages of every pool.
            extra: settings for the extra config.
            changes: the served name (``deployment``), and fields of the storage
                configuration that differ from a rank alone.
        """
        assembled = small_model(harness, model, layout, heads_over, layers_div, pages)
        config = storage_config(
            is_mla_model=assembled.is_mla_model,
            identity=harness.capabilities.identity,
            extra=extra,
            **{"is_page_first_layout": layout == "page_first", **changes},
        )
        anchor = tensors().pool(assembled.group.anchor_entry.host_pool)
        backend = harness.make_for(config, anchor, own_client=own_client)
        zero_copy = harness.capabilities.zero_copy
        return cls(backend, assembled, config, zero_copy=zero_copy)

    @property
    def pools(self) -> dict[str, Any]:
        """Every physical pool by name, KV first where it has bytes."""
        entries = self.model.group.entries
        return {str(e.name): e.host_pool for e in entries if not is_logical(e.host_pool)}

    @property
    def sidecars(self) -> list[str]:
        """The physical pools beside the KV."""
        return [name for name in self.pools if name != KV]

    @property
    def windows(self) -> dict[str, int]:
        """Pages of the window of each pool that needs only a prefix's last pages."""
        return {str(p.name): p.window_pages for p in self.model.pools if p.window_pages}

    def transfer(self, name: str, keys: list[str], pages: Sequence[int]) -> PoolTransfer:
        """What moves ``keys[i]`` to or from host page ``pages[i]``."""
        return PoolTransfer(name, host_indices=self.slots(name, pages), keys=list(keys))

    def operation(self, hashes: list[str], pages: Sequence[int]) -> Operation:
        """What the controller writes or reads for a chain: ``pages[i]`` of every pool."""
        transfers = model_transfers(self.model.pools, hashes)
        for transfer in transfers:
            if transfer.indices_from_pool is None:
                last = list(pages)[len(pages) - len(transfer.keys or ()) :]
                transfer.host_indices = self.slots(str(transfer.name), last)
        return Operation(hashes, self.slots(KV, pages), transfers)

    def slots(self, name: str, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        """The token slots of some host pages, in order."""
        width = page_slots_of(self.model.group.get_pool(name))
        starts = np.asarray(pages, dtype=np.int64).reshape(-1, 1) * width
        return (starts + np.arange(width)).reshape(-1)

    def set(self, name: str, keys: list[str], pages: Sequence[int]) -> list[bool]:
        """Store host pages, KV by v1 and the others by v2; without keys there is no call."""
        if not keys:
            return []
        transfer = self.transfer(name, keys, pages)
        if name == KV:
            return self.backend.batch_set_v1(list(keys), transfer.host_indices)
        return self.backend.batch_set_v2([transfer])[name]

    def get(self, name: str, keys: list[str], pages: Sequence[int]) -> list[bool]:
        """Fill host pages, KV by v1 and the others by v2; without keys there is no call."""
        if not keys:
            return []
        transfer = self.transfer(name, keys, pages)
        if name == KV:
            return self.backend.batch_get_v1(list(keys), transfer.host_indices)
        return self.backend.batch_get_v2([transfer])[name]

    def set_everywhere(self, keys: list[str], pages: Sequence[int]) -> None:
        """Store the same pages of every pool, sidecars first; all must succeed."""
        for name in [*self.sidecars, KV]:
            assert self.set(name, keys, pages) == [True] * len(keys), f"set of pool {name}"

    def set_anchor(self, keys: list[str]) -> None:
        """Store pages of a logical anchor, which have no bytes, as SGLang does after each backup.

        Where the KV has bytes it is a pool like others, and nothing is done.
        """
        if KV in self.pools:
            return
        for start in range(0, len(keys), PAGES):
            part = keys[start : start + PAGES]
            answers = self.set(KV, part, range(len(part)))
            assert answers == [True] * len(part), "set of the logical anchor"

    def questions(self) -> list[PoolTransfer]:
        """Every sidecar as a hit query asks about it."""
        return [self.question(str(e.name)) for e in self.model.group.entries if str(e.name) != KV]

    def question(self, name: str) -> PoolTransfer:
        """A sidecar in a hit query: keys None, or as many placeholders as its window has pages."""
        window = self.windows.get(name)
        if window is None:
            return PoolTransfer(name, hit_policy=PoolHitPolicy.ALL_PAGES)
        return PoolTransfer(
            name, keys=["placeholder"] * window, hit_policy=PoolHitPolicy.TRAILING_PAGES
        )

    def hit(self, keys: list[str]) -> int:
        """Pages of ``keys`` that can be restored from every pool."""
        return self.backend.batch_exists_v2(keys, self.questions()).kv_hit_pages

    def fill(self, seed: int) -> None:
        """Random bytes in every byte of every pool, and in the guard areas."""
        generator = np.random.default_rng(seed)
        for array in self._memory():
            array[:] = generator.integers(0, 256, array.nbytes, dtype=np.uint8)

    def image(self) -> list[npt.NDArray[np.uint8]]:
        """A copy of every byte of every pool, also of those that belong to no page, and of the
        guard areas."""
        return [array.copy() for array in self._memory()]

    def page(self, name: str, page: int) -> PageBytes:
        """The bytes of one host page, component after component."""
        return PageBytes(b"".join(self.components(name, page)))

    def components(self, name: str, page: int) -> list[PageBytes]:
        """The bytes of each component of one host page."""
        return [bytes_of(view) for view in self.views(name, page)]

    def views(self, name: str, page: int) -> list[npt.NDArray[np.uint8]]:
        """The memory of one host page, a writable ``uint8`` view a component.

        As the pool itself finds it: nothing of what a backend stands on is asked.
        """
        return page_views(self.pools[name], page)

    def put_page(self, name: str, page: int, value: bytes) -> None:
        """Write one host page."""
        offset = 0
        for view in self.views(name, page):
            view[:] = np.frombuffer(value[offset : offset + view.nbytes], np.uint8)
            offset += view.nbytes

    def write(self, keys: Sequence[str], pages: Sequence[int]) -> None:
        """Let host page ``pages[i]`` of every pool hold the :func:`content` of ``keys[i]``."""
        for name in self.pools:
            for key, page in zip(keys, pages, strict=True):
                self.put_page(name, page, content(name, key, self.page_bytes(name)))

    def blank(self, pages: Sequence[int]) -> None:
        """Zero some host pages of every pool."""
        for name in self.pools:
            for page in pages:
                for view in self.views(name, page):
                    view[:] = 0

    def is_whole(self, name: str, key: str, page: int) -> bool:
        """Whether a host page holds what :func:`content` says of ``key``."""
        return self.page(name, page) == content(name, key, self.page_bytes(name))

    def page_bytes(self, name: str) -> int:
        return sum(view.nbytes for view in self.views(name, 0))

    def _memory(self) -> list[npt.NDArray[np.uint8]]:
        """The allocations behind the pools, with the guard areas around their buffers."""
        buffers = [buffer for name, pool in self.pools.items() for buffer in buffers_of(name, pool)]
        return [
            np.frombuffer((ctypes.c_uint8 * region.nbytes).from_address(region.address), np.uint8)
            for region in merged(map(storage_region, buffers))
        ]


def same(one: Sequence[npt.NDArray[np.uint8]], other: Sequence[npt.NDArray[np.uint8]]) -> bool:
    """Whether two images of host memory are equal."""
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def register(backend: HiCacheStorage | EngineCalls, model: AssembledModel) -> None:
    """Register a model's pools in the order that SGLang 0.5.23 does."""
    backend.register_mem_pool_host(model.group.anchor_entry.host_pool)
    for entry in model.group.entries:
        backend.register_mem_host_pool_v2(entry.host_pool, entry.name)
    backend.on_host_pools_registered()


GUARD_BYTES = 256 << 10
"""Memory around each buffer, so that a stray write is a failed test and not a crash."""


def guarded(allocate: Allocate, nbytes: int) -> npt.NDArray[np.uint8]:
    """A buffer with guard areas on both sides, which belong to its allocation."""
    whole = allocate(nbytes + 2 * GUARD_BYTES)
    return whole[GUARD_BYTES : GUARD_BYTES + nbytes]


def small_model(
    harness: Harness,
    model: str | ModelSpec,
    layout: str,
    heads_over: int = 1,
    layers_div: int | None = None,
    pages: int = PAGES,
) -> AssembledModel:
    """A model with its structure whole and its sizes cut down, on the harness's memory."""
    spec = with_small_states(spec_of(model))
    return build(
        spec,
        pages=pages,
        layout=layout,
        layers_div=layers_div or LAYERS_DIV.get(spec.name, 12),
        tp_size=heads_over,
        allocate=partial(guarded, harness.allocate),
    )
