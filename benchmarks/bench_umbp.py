"""UMBP by this adapter and by the calls of SGLang's in-tree one, in one run on one client.

The in-tree adapter (SGLang 0.5.23, ``mem_cache/storage/umbp/umbp_store.py``) makes one native
call a pool and a key a component; its calls are made here as it makes them, without what it does
around them. Tables for an embedded store and a standalone server: a hit query of 6 pools, and
gets and puts of 6 pools in one call, and of one. Medians of alternating calls on one machine, so
read them as ratios.

    python -m benchmarks.bench_umbp [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_shared.contract import PoolHitPolicy, PoolTransfer
from hicache_shared.hostmem import aligned_bytes
from hicache_shared.hostpool import AssembledModel, ModelSpec, V4Geometry, build, preset
from hicache_shared.store import KeyBatch
from hicache_shared.testing.harness import storage_config
from hicache_shared.testing.rank import chain, register
from hicache_umbp import UmbpBackend, paging
from hicache_umbp.client import quiet
from hicache_umbp.memory import shared_bytes
from hicache_umbp.server import UmbpServer
from hicache_umbp.store import UmbpStore

REPEATS = 21
SMALL = 34_560
"""Bytes of a page of C128."""

CAPACITY = 3 << 29
"""More than the puts of one row store: the in-tree adapter does not try a second time."""

MOST_BYTES = 180 << 20
"""Of one call."""

MOST_PUT_BYTES = 1 << 30
"""Of one row, there and back."""


@dataclass
class Side:
    """Both ways to the same native client."""

    backend: UmbpBackend
    store: UmbpStore
    native: Any
    model: AssembledModel

    @property
    def names(self) -> list[str]:
        return [str(pool.name) for pool in self.model.pools[1:]]

    def transfers(self, names: list[str], keys: list[str]) -> list[PoolTransfer]:
        return [
            PoolTransfer(name, host_indices=self.slots(name, len(keys)), keys=keys)
            for name in names
        ]

    def slots(self, name: str, pages: int) -> npt.NDArray[np.int64]:
        return np.arange(pages * self.model.group.get_pool(name).page_size)

    def questions(self) -> list[PoolTransfer]:
        """Every sidecar as SGLang asks about it."""
        return [
            PoolTransfer(
                pool.name,
                keys=["placeholder"] * pool.window_pages or None,
                hit_policy=PoolHitPolicy(pool.policy),
            )
            for pool in self.model.pools[1:]
        ]

    # -- as the in-tree adapter calls the client ------------------------------------------

    def in_tree_keys(self, name: str, keys: list[str]) -> list[str]:
        keys = [f"{key}__{name}" for key in keys]
        return [f"model_{key}" for key in keys]

    def in_tree_exists(self, keys: list[str]) -> int:
        hit = len(keys)
        for question in self.questions():
            found = list(self.native.batch_exists(self.in_tree_keys(question.name, keys[:hit])))
            page_exists = [all(found[i : i + 1]) for i in range(hit)]
            boundary = 0
            if question.hit_policy == PoolHitPolicy.ALL_PAGES:
                boundary = page_exists.index(False) if False in page_exists else hit
            else:
                window = max(1, len(question.keys or ()))
                for prefix in range(hit, 0, -1):
                    if all(page_exists[i] for i in range(max(0, prefix - window), prefix)):
                        boundary = prefix
                        break
            hit = min(hit, boundary)
        return hit

    def in_tree_move(self, call: Any, transfers: list[PoolTransfer]) -> dict[str, list[bool]]:
        results = {}
        for transfer in transfers:
            keys = self.in_tree_keys(transfer.name, list(transfer.keys or ()))
            pool = self.model.group.get_pool(transfer.name)
            pointers, sizes = pool.get_page_buffer_meta(transfer.host_indices)
            results[str(transfer.name)] = [bool(value) for value in call(keys, pointers, sizes)]
        return results


def six_pools(page_bytes: int) -> ModelSpec:
    """DeepSeek V4 Flash's pools, with pages of one size in all of them."""
    spec = preset("deepseek-v4-flash")
    pools = [
        replace(pool, geometry=V4Geometry(layers=1, row_bytes=page_bytes))
        for pool in spec.pools[1:]
    ]
    return replace(spec, pools=(spec.pools[0], *pools))


@contextmanager
def sides(mode: str, page_bytes: int, pages: int) -> Iterator[Side]:
    """A backend of a mode on six pools, and its native client."""
    with ExitStack() as stack:
        allocate = shared_bytes if mode == "standalone" else aligned_bytes
        spec = six_pools(page_bytes)
        model = build(spec, layout="page_first", pages=pages, allocate=allocate)
        stack.callback(model.destroy)
        extra: dict[str, Any] = {"dram_capacity_bytes": CAPACITY}
        if mode == "standalone":
            page = paging.page_bytes([page_bytes])
            server = UmbpServer(capacity_bytes=CAPACITY, page_bytes=page)
            extra = {"standalone_address": stack.enter_context(server).address}
        config = storage_config(is_mla_model=model.is_mla_model, extra=extra)
        backend = UmbpBackend(config, {})
        stack.callback(backend.close)
        register(backend, model)
        store = backend._store
        if not isinstance(store, UmbpStore) or (client := store._session.client()) is None:
            raise RuntimeError("the store has no client")
        yield Side(backend, store, client._native, model)
        del client


def alternate(
    *calls: Callable[[], object], repeats: int = REPEATS, before: Callable[[], object] = int
) -> list[float]:
    """Median seconds of each call, all in turn, the order reversed each time."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats):
        order = range(len(calls)) if turn % 2 else reversed(range(len(calls)))
        for i in order:
            before()
            started = time.perf_counter()
            calls[i]()
            times[i].append(time.perf_counter() - started)
    return [statistics.median(each) for each in times]


def bench_queries(mode: str) -> list[dict[str, Any]]:
    """All pages are there. ``exists`` is the store's part of it, ``query`` the whole answer."""
    rows = []
    with sides(mode, SMALL, 64) as side:
        for pages in (4, 16, 64):
            keys = chain(pages, f"query {pages}")
            transfers = side.transfers(side.names, keys)
            side.backend.batch_set_v2(transfers)
            side.in_tree_move(side.native.batch_put_from_ptr, transfers)
            asked = side.questions()
            hits = side.backend.batch_exists_v2(keys, asked).kv_hit_pages, side.in_tree_exists(keys)
            if hits != (pages, pages):
                raise RuntimeError(f"expected {pages} pages, both ways, got {hits}")
            pools = [stored for name in side.names for stored in side.backend._pools[name].stored]
            asks = [KeyBatch(stored, keys) for stored in pools]
            exists, query, theirs = alternate(
                partial(side.store.exists, asks, 5.0),
                partial(side.backend.batch_exists_v2, keys, asked),
                partial(side.in_tree_exists, keys),
                repeats=20 * REPEATS,
            )
            rows.append(
                {
                    "mode": mode,
                    "pages": pages,
                    "in_tree_us": round(theirs * 1e6),
                    "exists_us": round(exists * 1e6),
                    "query_us": round(query * 1e6),
                    "exists_faster": round(theirs / exists, 2),
                    "query_faster": round(theirs / query, 2),
                }
            )
    return rows


def bench_moves(mode: str) -> list[dict[str, Any]]:
    rows = []
    for page_bytes in (SMALL, 177_408, 786_240, 6_589_440):
        for pages in (4, 16, 64):
            if 6 * pages * page_bytes <= MOST_BYTES:
                with sides(mode, page_bytes, pages) as side:
                    rows += [_move(side, mode, n, pages, page_bytes) for n in (6, 1)]
    return rows


_fresh = itertools.count()


def _move(side: Side, mode: str, pools: int, pages: int, page_bytes: int) -> dict[str, Any]:
    native, names = side.native, side.names[:pools]
    kept = side.transfers(names, chain(pages, f"kept {pools}"))

    def all_of(answers: dict[str, list[bool]]) -> None:
        if not all(map(all, answers.values())):
            raise RuntimeError("a page was not moved")

    def ready() -> None:
        waiting[:] = side.transfers(names, chain(pages, f"fresh {next(_fresh)}"))

    waiting: list[PoolTransfer] = []
    total = pools * pages * page_bytes
    puts = alternate(
        lambda: all_of(side.backend.batch_set_v2(waiting)),
        lambda: all_of(side.in_tree_move(native.batch_put_from_ptr, waiting)),
        before=ready,
        repeats=max(3, min(REPEATS, MOST_PUT_BYTES // (2 * total))),
    )
    side.backend.batch_set_v2(kept)
    side.in_tree_move(native.batch_put_from_ptr, kept)
    gets = alternate(
        lambda: all_of(side.backend.batch_get_v2(kept)),
        lambda: all_of(side.in_tree_move(native.batch_get_into_ptr, kept)),
    )
    return {
        "mode": mode,
        "pools": pools,
        "pages": pages,
        "page_bytes": page_bytes,
        "in_tree_put_ms": round(puts[1] * 1e3, 3),
        "put_ms": round(puts[0] * 1e3, 3),
        "put_faster": round(puts[1] / puts[0], 2),
        "in_tree_get_ms": round(gets[1] * 1e3, 3),
        "get_ms": round(gets[0] * 1e3, 3),
        "get_faster": round(gets[1] / gets[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    quiet()
    modes = ("embedded", "standalone")
    queries = [row for mode in modes for row in bench_queries(mode)]
    moves = [row for mode in modes for row in bench_moves(mode)]
    if as_json:
        print(json.dumps({"queries": queries, "moves": moves}, indent=2))
        return
    for rows in (queries, moves):
        print("  ".join(f"{name:>14}" for name in rows[0]))
        for row in rows:
            print("  ".join(f"{value:>14}" for value in row.values()))
        print()


if __name__ == "__main__":
    main()
