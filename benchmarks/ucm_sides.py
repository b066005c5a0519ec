"""The two sides of the benchmark of UCM: hicache-ucm, and UCM's own SGLang adapter."""

from __future__ import annotations

import gc
import importlib
import logging
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from benchmarks.ucm_cases import Case
from hicache_shared.contract import PoolHitPolicy, PoolTransfer
from hicache_shared.hostpool import (
    AssembledModel,
    DType,
    build,
    page_views,
)
from hicache_shared.layout import is_logical
from hicache_shared.testing.harness import storage_config
from hicache_shared.testing.rank import chain, register

STORE = {
    "posix_io_engine": "psync",
    "io_direct": False,
    "posix_data_trans_concurrency": 4,
    "data_dir_shard_bytes": 2,
}
"""PosixStore's settings, for both."""

PEER_STORE = {"posix_lookup_concurrency": 1, "timeout_ms": 0, "store_health": {"enabled": False}}
"""Settings that hicache-ucm always makes."""

BLOCK = re.compile("[0-9a-f]{32}")
"""The file name of a block; of whatever else is in a root, nothing is removed."""


@dataclass
class Times:
    """Milliseconds of each operation, one a turn."""

    set: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)
    exists: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Side:
    """A backend with a model's host pools, and a folder of its own.

    Attributes:
        backend: it, with the pools registered.
        model: the host pools.
        view: the host pools as the backend gets to see them.
        root: where its blocks are.
        names: the pools that are moved.
    """

    backend: Any
    model: AssembledModel
    view: AssembledModel
    root: Path
    names: tuple[str, ...] = ()

    @property
    def components(self) -> list[list[int]]:
        """Bytes of the components of a page, pool by pool."""
        group = self.model.group
        return [[v.nbytes for v in page_views(group.get_pool(n), 0)] for n in self.names]

    @property
    def kv_beside(self) -> bool:
        """Whether there is KV with bytes that is not moved; a hit needs it all the same."""
        return "kv" not in self.names and not is_logical(self.view.group.get_pool("kv"))

    def slots(self, name: str, pages: int) -> Any:
        pool = self.view.group.get_pool(name)
        slots = np.arange(pages * pool.page_size)
        if isinstance(pool.dtype, DType):
            return slots
        return importlib.import_module("torch").from_numpy(slots)

    def calls(self, keys: list[str]) -> tuple[Callable[[], bool], Callable[[], bool]]:
        """Set and get of all pools; each says whether every page went well."""
        backend = self.backend
        if self.names == ("kv",):
            slots = self.slots("kv", len(keys))
            return (
                lambda: all(backend.batch_set_v1(keys, slots)),
                lambda: all(backend.batch_get_v1(keys, slots)),
            )
        transfers = [
            PoolTransfer(name, host_indices=self.slots(name, len(keys)), keys=keys)
            for name in self.names
        ]
        return (
            lambda: all(map(all, backend.batch_set_v2(transfers).values())),
            lambda: all(map(all, backend.batch_get_v2(transfers).values())),
        )

    def question(self, keys: list[str]) -> Callable[[], int]:
        """Pages that can be restored, by one question about all pools."""
        if self.names == ("kv",):
            return lambda: int(self.backend.batch_exists(keys))
        pools = [self.model.spec_of(name) for name in self.names]
        transfers = [
            PoolTransfer(
                pool.name,
                keys=["placeholder"] * pool.window_pages or None,
                hit_policy=PoolHitPolicy(pool.policy),
            )
            for pool in pools
        ]
        return lambda: int(self.backend.batch_exists_v2(keys, transfers).kv_hit_pages)

    def exact(self, pages: int) -> bool:
        """Store random pages, forget them, read them back, and compare every byte."""
        views = [
            view
            for name in self.names
            for page in range(pages)
            for view in page_views(self.model.group.get_pool(name), page)
        ]
        generator = np.random.default_rng(0)
        for view in views:
            view[:] = generator.integers(0, 256, view.nbytes, dtype=np.uint8)
        wanted = [view.copy() for view in views]
        put, get = self.calls(chain(pages, f"exact {self.names}"))
        stored = put()
        for view in views:
            view[:] = 0
        same = stored and get() and all(map(np.array_equal, views, wanted))
        self.wipe()
        return same

    def turn(self, keys: list[str], times: Times) -> None:
        """Set, get and a question, each timed; nothing stored is left."""
        if self.kv_beside:
            self.backend.batch_set_v1(keys, self.slots("kv", len(keys)))
        put, get = self.calls(keys)
        ask = self.question(keys)
        times.set.append(milliseconds(put))
        times.get.append(milliseconds(get))
        times.exists.append(milliseconds(lambda: ask() == len(keys)))
        self.wipe()

    def wipe(self) -> None:
        """Remove the stored blocks, so that memory and disk stay small."""
        for path in self.root.rglob("*"):
            if BLOCK.fullmatch(path.name):
                path.unlink()


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    done = call()
    spent = (time.perf_counter() - started) * 1e3
    if not done:
        raise RuntimeError("a call did not do what it was asked; its time would mean nothing")
    return spent


def ours(config: Any) -> Any:
    return importlib.import_module("hicache_ucm").UcmBackend(config, {})


def our_extra(root: Path) -> dict[str, Any]:
    # The longest there is; the peer has none.
    return {"root": str(root), "deadline_s": 10, **STORE}


class Peer:
    """UCM's own adapter and SGLang's own host pools, where they are installed."""

    KINDS: ClassVar[dict[str, tuple[str, str, tuple[str, ...]]]] = {
        "mha": ("pool_host.mha", "MHATokenToKVPoolHost", ()),
        "mha_asymmetric": ("pool_host.mha", "AsymmetricMHATokenToKVPoolHost", ()),
        "mla": ("pool_host.mla", "MLATokenToKVPoolHost", ()),
        "mamba": ("pool_host.mamba", "MambaPoolHost", ()),
        "deepseek_v4_paged": (
            "memory_pool_host",
            "DeepSeekV4PagedHostPool",
            ("item_bytes", "slot_page_size"),
        ),
        "deepseek_v4_state": (
            "memory_pool_host",
            "DeepSeekV4StateHostPool",
            ("state_page_bytes", "swa_page_size"),
        ),
    }
    """SGLang's class of each kind of pool, and attributes that ours has as properties."""

    def __init__(self) -> None:
        """Raises ImportError where something is missing."""
        self._torch = importlib.import_module("torch")
        connector: Any = importlib.import_module("ucm.integration.sglang.ucm_connector")
        store = importlib.import_module("ucm.integration.sglang.unifiedcache_store")
        # It asks for the rank of a process group that exists in an engine only.
        connector.get_world_group = lambda: SimpleNamespace(local_rank=0)
        self._class = store.UnifiedCacheStore
        self._torch.set_num_threads(1)  # as SGLang does on a GPU
        logging.disable(logging.INFO)

    def make(self, config: Any) -> Any:
        return self._class(config, {})

    def extra(self, root: Path) -> dict[str, Any]:
        connector = {
            "ucm_connector_name": "UcmPipelineStore",
            "ucm_connector_config": {"storage_backends": str(root), **STORE, **PEER_STORE},
        }
        return {"kv_connector_extra_config": connector}

    def view(self, model: AssembledModel) -> AssembledModel:
        """The same pools, of SGLang's own classes over the same memory."""
        entries = [
            replace(entry, host_pool=self._pool(entry.host_pool)) for entry in model.group.entries
        ]
        return replace(model, group=type(model.group)(entries))

    def _pool(self, pool: Any) -> Any:
        if pool.kind == "logical":
            return pool
        module, name, properties = self.KINDS[pool.kind]
        pool_class = getattr(importlib.import_module(f"sglang.srt.mem_cache.{module}"), name)
        # Its constructor wants the device's pools. Ours has the same attributes.
        twin = pool_class.__new__(pool_class)
        values = vars(pool) | {name: getattr(pool, name) for name in properties}
        for attribute, value in values.items():
            twin.__dict__[attribute] = self._tensors(value)
        twin.__dict__.update(
            device="cpu",
            pin_memory=False,
            slot_state_device_tensors=[],
            _size_per_token=pool.size_per_token,
        )
        return twin

    def _tensors(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            # torch has few unsigned types; the bytes are what counts.
            return self._torch.from_numpy(value.view("i" + value.dtype.str[2:]))
        if isinstance(value, DType):
            return getattr(self._torch, value.name)
        if isinstance(value, list | tuple):
            return type(value)(map(self._tensors, value))
        return value


def find_peer() -> Peer | None:
    try:
        return Peer()
    except ImportError as error:
        print(f"peer not installed: only our figures ({error})", file=sys.stderr)
        return None


@contextmanager
def sides(case: Case, pages: int, peer: Peer | None, root: Path) -> Iterator[dict[str, Side]]:
    """Us and, where it is installed, the peer, on host pools of some pages."""
    made: dict[str, Side] = {}
    with tempfile.TemporaryDirectory(dir=root, prefix="bench_ucm_") as folder:
        model = build(case.model, layout="page_first", pages=pages, tp_size=case.tp_size)
        view = model if peer is None else peer.view(model)
        made["ours"] = side(ours, our_extra, model, view, Path(folder, "ours"))
        if peer is not None:
            if case.peer_model is not None:
                model = build(case.peer_model, layout="page_first", pages=pages)
                view = peer.view(model)
            made["peer"] = side(peer.make, peer.extra, model, view, Path(folder, "peer"))
        yield made
        for each in made.values():
            each.backend.close()
        made.clear()
        gc.collect()


def side(
    make: Callable[[Any], Any],
    extra: Callable[[Path], dict[str, Any]],
    model: AssembledModel,
    view: AssembledModel,
    root: Path,
) -> Side:
    root.mkdir()
    backend = make(storage_config(is_mla_model=model.is_mla_model, extra=extra(root)))
    register(backend, view)
    return Side(backend=backend, model=model, view=view, root=root)
