"""The round trip: store a model's pages, forget them, restore them, compare every byte."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from uuid import uuid4

from hicache_shared.cli import size
from hicache_shared.cli.host import Host, Page
from hicache_shared.contract import (
    STORAGE_BATCH_PAGES,
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolName,
    PoolTransfer,
    rank_config,
)
from hicache_shared.controller import Operation, ReferenceController, model_transfers
from hicache_shared.errors import ClearError, LayoutError
from hicache_shared.hostpool import ModelSpec, PoolSpec, legal_layouts, preset
from hicache_shared.plugins import BackendPlugin, ServeOptions

log = logging.getLogger(__name__)

FIXED_STEPS = 10
"""Steps of a round trip beside storing and restoring each pool on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to put through a backend."""

    model: str
    pages: int
    layout: str
    layers_div: int
    seed: int


@dataclass(frozen=True, slots=True)
class PoolReport:
    """One pool of a round trip.

    Attributes:
        pool: its name.
        page_bytes: bytes a page; 0 for an anchor without memory.
        components: contiguous pieces a page is made of.
        pages: pages stored, and restored with no other pool in the call.
        prefetched_pages: pages that one prefetch of the whole prefix restores: its window
            for a trailing pool, else all.
        set_gbps, get_gbps: GB a second (1e9 bytes) with one pool a call; None where the pool
            has no bytes or not all of them moved.
    """

    pool: str
    page_bytes: int
    components: int
    pages: int
    prefetched_pages: int
    set_gbps: float | None
    get_gbps: float | None

    @property
    def bytes(self) -> int:
        return self.pages * self.page_bytes


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a round trip; ``findings`` is all that was wrong."""

    backend: str
    request: Request
    restored_prefix_pages: int
    pools: list[PoolReport]
    findings: list[str]

    @property
    def byte_exact(self) -> bool:
        return not self.findings


class Progress(Protocol):
    """Told of each step as it begins."""

    def start(self, steps: int) -> None: ...
    def step(self, text: str) -> None: ...


def roundtrip(
    plugin: BackendPlugin, request: Request, master: str | None, progress: Progress
) -> Report:
    """Put the model's pages through the backend, twice.

    First as SGLang's controller does it: one backup, a hit query, and a prefetch that restores
    all pages of most pools and the window of trailing ones. Then one pool a call, all pages of
    each, which also gives the rates. Each time every byte of the host's memory is compared.

    Raises:
        ConfigError, LayoutError: the request cannot be had; before anything is started.
        BackendUnavailableError: there is no native client or no server.
    """
    spec = _checked(request)
    host = Host(
        spec,
        layout=request.layout,
        layers_div=request.layers_div,
        pages=request.pages,
        seed=request.seed,
    )
    store_bytes = size.PASSES * request.pages * sum(map(host.page_bytes, host.pools))
    progress.start(FIXED_STEPS + 2 * len(host.pools))
    progress.step("starting")
    with plugin.serve(ServeOptions(store_bytes, master)) as extra:
        config = _storage_config(host, request, extra)
        with ReferenceController(host.model.group, config) as controller:
            backend = plugin.make(config)
            controller.attach(backend)
            trip = _Trip(host, controller, backend, request, progress)
            try:
                return trip.run(plugin.name)
            finally:
                _forget(backend)


def _checked(request: Request) -> ModelSpec:
    """The model, once its layout and its size are known to be possible."""
    spec = preset(request.model)
    legal = legal_layouts(spec)
    if request.layout not in legal:
        raise LayoutError(
            f"model {request.model!r} cannot be stored in memory layout {request.layout!r}; "
            f"legal are {', '.join(legal)}"
        )
    size.check(size.Size(spec, request.layout, request.layers_div, request.pages))
    return spec


def _storage_config(host: Host, request: Request, extra: dict[str, Any]) -> HiCacheStorageConfig:
    return rank_config(
        request.model,
        is_mla_model=host.model.is_mla_model,
        is_page_first_layout=request.layout.startswith("page_first"),
        extra_config={
            "namespace": f"roundtrip-{uuid4().hex[:12]}",
            "model_id": request.model,
            "revision": "roundtrip",
            "kv_cache_dtype": "auto",
            "deadline_s": 10,
            **extra,
        },
    )


def _forget(backend: HiCacheStorage) -> None:
    """Remove what was stored: the server may be one that others use."""
    try:
        backend.clear()
    except ClearError as error:
        log.warning("what was stored may remain: %s", error)


class _Trip:
    """Both passes over one backend."""

    def __init__(
        self,
        host: Host,
        controller: ReferenceController,
        backend: HiCacheStorage,
        request: Request,
        progress: Progress,
    ) -> None:
        self._host = host
        self._controller = controller
        self._backend = backend
        self._request = request
        self._pages = request.pages
        self._step = progress.step
        self._findings: list[str] = []
        self._set_gbps: dict[str, float | None] = {}
        self._get_gbps: dict[str, float | None] = {}

    def run(self, backend_name: str) -> Report:
        restored = self._together()
        # Rates are then those of memory that the store has used before.
        _forget(self._backend)
        self._one_by_one()
        pools = [self._pool_report(pool) for pool in self._host.model.pools]
        return Report(backend_name, self._request, restored, pools, self._findings)

    def _pool_report(self, pool: PoolSpec) -> PoolReport:
        name = str(pool.name)
        return PoolReport(
            pool=name,
            page_bytes=self._host.page_bytes(name),
            components=self._host.components(name),
            pages=self._pages,
            prefetched_pages=self._prefetched(pool),
            set_gbps=self._set_gbps.get(name),
            get_gbps=self._get_gbps.get(name),
        )

    def _prefetched(self, pool: PoolSpec) -> int:
        return min(self._pages, pool.window_pages or self._pages)

    # --- all pools in one call, as SGLang's controller does it ------------------------------

    def _together(self) -> int:
        """Back up, ask, prefetch, compare; the pages of the prefix that came back."""
        host, hashes = self._host, self._chain("together")
        self._step("filling the host pools")
        saved = host.fill()
        self._step("backing up all pools")
        operation = self._operation(hashes, host.places.sources, whole=True)
        written = self._controller.backup(operation)
        for name, pages in {**written.pool_pages, str(PoolName.KV): written.kv_pages}.items():
            if pages < self._pages:
                self._found(f"pool {name}: the backup stored {pages} of {self._pages} pages")
        self._step("wiping the host pools")
        host.wipe()
        self._step("asking what can be restored")
        operation = self._operation(hashes, host.places.targets, whole=False)
        answer = self._controller.query(hashes, operation.transfers)
        hit = min(self._pages, answer.kv_hit_pages)
        if hit < self._pages:
            cut = [f"{n} {k}" for n, k in answer.extra_pool_hit_pages.items() if k < self._pages]
            short = f" (shorter: {', '.join(cut)})" if cut else ""
            self._found(f"the hit query finds a prefix of {hit} of {self._pages} pages{short}")
        self._step("restoring all pools")
        restored = self._controller.prefetch(operation, hit)
        if restored < hit:
            self._found(f"the prefetch restored {restored} of {hit} pages")
        self._step("comparing every byte")
        expected = {
            str(pool.name): self._prefetched_pages(pool, saved[str(pool.name)], restored)
            for pool in host.model.pools
            if str(pool.name) in saved
        }
        self._compare("all pools in one call", expected)
        return restored

    def _operation(
        self, hashes: list[str], places: Mapping[str, list[int]], *, whole: bool
    ) -> Operation:
        """The chain at these host pages; ``whole`` takes all pages of trailing pools too."""
        pools = self._host.model.pools
        if whole:
            pools = tuple(
                replace(pool, window_pages=self._pages) if pool.window_pages else pool
                for pool in pools
            )
        transfers = model_transfers(pools, hashes)
        for transfer in transfers:
            if transfer.indices_from_pool is None:
                name = str(transfer.name)
                pages = places[name][: len(transfer.keys or ())]
                transfer.host_indices = self._host.slots(name, pages)
        anchor = str(pools[0].name)
        return Operation(hashes, self._host.slots(anchor, places[anchor]), transfers)

    def _prefetched_pages(
        self, pool: PoolSpec, saved: list[Page], restored: int
    ) -> dict[int, Page | None]:
        """What a prefetch leaves in the target pages; None where it fell short."""
        count = self._prefetched(pool)
        targets = self._host.places.targets[str(pool.name)][:count]
        if pool.window_pages:
            whole = restored == self._pages
            return dict(zip(targets, saved[-count:] if whole else [None] * count, strict=True))
        known = [*saved[:restored], *[None] * (count - restored)]
        return dict(zip(targets, known, strict=True))

    # --- one pool a call ------------------------------------------------------------------------

    def _one_by_one(self) -> None:
        """Store and restore all pages of each pool on its own, timed; compare."""
        host, hashes = self._host, self._chain("one by one")
        self._step("filling the host pools again")
        saved = host.fill()
        for name in host.pools:
            self._step(f"storing pool {name}")
            slots = host.slots(name, host.places.sources[name])
            stored, self._set_gbps[name] = self._timed(self._set, name, hashes, slots)
            self._count_missing(name, "stored", stored)
        self._step("wiping the host pools again")
        host.wipe()
        expected: dict[str, dict[int, Page | None]] = {}
        for name in host.pools:
            self._step(f"restoring pool {name}")
            targets = host.places.targets[name]
            slots = host.slots(name, targets)
            restored, self._get_gbps[name] = self._timed(self._get, name, hashes, slots)
            self._count_missing(name, "restored", restored)
            expected[name] = {
                target: page if ok else None
                for target, page, ok in zip(targets, saved[name], restored, strict=True)
            }
        self._step("comparing every byte again")
        self._compare("one pool a call", expected)

    def _timed(
        self, call: Callable[[str, list[str], Any], list[bool]], name: str, *arguments: Any
    ) -> tuple[list[bool], float | None]:
        started = time.perf_counter()
        answers = call(name, *arguments)
        seconds = time.perf_counter() - started
        moved = self._pages * self._host.page_bytes(name)
        return answers, moved / seconds / size.GB if all(answers) else None

    def _set(self, name: str, hashes: list[str], slots: Any) -> list[bool]:
        if name != PoolName.KV:
            return self._backend.batch_set_v2([_transfer(name, hashes, slots)])[name]
        return self._in_batches(self._backend.batch_set_v1, hashes, slots)

    def _get(self, name: str, hashes: list[str], slots: Any) -> list[bool]:
        if name != PoolName.KV:
            return self._backend.batch_get_v2([_transfer(name, hashes, slots)])[name]
        return self._in_batches(self._backend.batch_get_v1, hashes, slots)

    def _in_batches(
        self, call: Callable[[list[str], Any], list[bool]], hashes: list[str], slots: Any
    ) -> list[bool]:
        """KV goes in calls of as many pages as SGLang puts into one."""
        width = len(slots) // len(hashes)
        answers: list[bool] = []
        for start in range(0, len(hashes), STORAGE_BATCH_PAGES):
            end = start + STORAGE_BATCH_PAGES
            answers += call(hashes[start:end], slots[start * width : end * width])
        return answers

    # --- what was wrong ---------------------------------------------------------------------

    def _count_missing(self, name: str, done: str, answers: Sequence[bool]) -> None:
        missing = [page for page, ok in enumerate(answers) if not ok]
        if missing:
            self._found(
                f"pool {name}: {len(missing)} of {self._pages} pages were not {done} on their "
                f"own, page {missing[0]} first"
            )

    def _compare(self, how: str, expected: Mapping[str, Mapping[int, Page | None]]) -> None:
        for line in self._host.differences(expected):
            self._found(f"{line}, with {how}")

    def _found(self, line: str) -> None:
        self._findings.append(line)

    def _chain(self, name: str) -> list[str]:
        """Page hashes as SGLang chains them, another chain for each pass."""
        hashes: list[str] = []
        for page in range(self._pages):
            before = hashes[-1] if hashes else f"{name} {self._request.seed}"
            hashes.append(hashlib.sha256(f"{before} {page}".encode()).hexdigest())
        return hashes


def _transfer(name: str, hashes: list[str], slots: Any) -> PoolTransfer:
    return PoolTransfer(name, host_indices=slots, keys=hashes)
