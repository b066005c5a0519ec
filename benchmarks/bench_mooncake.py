"""What this code costs beside the native client, in one run on a real Mooncake.

Three tables: a hit query of 2,048 pages over 7 pools (keys and answers; no page bytes), the
same query on an empty store, and the share of a get's and a put's time that is spent inside
the native client. Figures are medians of several calls on one machine, so read them as ratios.

    python -m benchmarks.bench_mooncake [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from hicache_mooncake import MooncakeBackend
from hicache_mooncake.client import MooncakeClient, connect
from hicache_mooncake.config import MooncakeConfig
from hicache_mooncake.server import MooncakeMaster
from hicache_mooncake.store import MooncakeStore
from hicache_shared.contract import PoolHitPolicy, PoolTransfer
from hicache_shared.hostpool import AssembledModel, build, preset
from hicache_shared.testing.harness import storage_config
from hicache_shared.testing.rank import chain, register

CHAIN_PAGES = 2048
REPEATS = 15


class TimedClient:
    """Passes calls on to a client and adds up the time spent inside it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.seconds = 0.0
        self.present = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def exists(self, keys: list[str]) -> list[int]:
        return self._timed(self._all_present if self.present else self._client.exists, keys)

    def _all_present(self, keys: list[str]) -> list[int]:
        """Asks about each key, and answers as if it were there: no bytes need exist."""
        return [1] * len(self._client.exists(keys))

    def get(self, pages: Any) -> list[int]:
        return self._timed(self._client.get, pages)

    def put(self, pages: Any) -> list[int]:
        return self._timed(self._client.put, pages)

    def close(self) -> int:
        return 0

    def _timed(self, call: Callable[[Any], list[int]], argument: Any) -> list[int]:
        started = time.perf_counter()
        answers = call(argument)
        self.seconds += time.perf_counter() - started
        return answers


@contextmanager
def timed_backend(model: AssembledModel) -> Iterator[tuple[MooncakeBackend, TimedClient]]:
    """A backend on a master of its own, over a client that is timed."""
    with MooncakeMaster() as master:
        config = MooncakeConfig(
            master_server_address=master.address, local_hostname="127.0.0.1", protocol="tcp"
        )
        client = connect(config, segment_bytes=2 << 30)
        timed = TimedClient(client)

        class Timed(MooncakeBackend):
            def open_store(self, config: Any, storage_config: Any) -> MooncakeStore:
                return MooncakeStore(cast(MooncakeClient, timed))

        extra = {"master_server_address": master.address, "local_hostname": "127.0.0.1"}
        backend = Timed(storage_config(is_mla_model=model.is_mla_model, extra=extra), {})
        register(backend, model)
        yield backend, timed
        backend.close()
        client.close()


def questions(model: AssembledModel) -> list[PoolTransfer]:
    """Every sidecar as SGLang asks about it."""
    return [
        PoolTransfer(
            pool.name,
            keys=["placeholder"] * pool.window_pages or None,
            hit_policy=PoolHitPolicy(pool.policy),
        )
        for pool in model.pools[1:]
    ]


def measure(call: Callable[[], object], timed: TimedClient) -> tuple[float, float]:
    """Median milliseconds of a call, and of the native client inside it."""
    walls, natives = [], []
    for _ in range(REPEATS):
        timed.seconds = 0.0
        started = time.perf_counter()
        call()
        walls.append((time.perf_counter() - started) * 1e3)
        natives.append(timed.seconds * 1e3)
    return statistics.median(walls), statistics.median(natives)


def bench_queries() -> list[dict[str, Any]]:
    """DeepSeek V4 Flash with one pool more, so that seven pools have bytes."""
    model = build(preset("deepseek-v4-flash"), layout="page_first", pages=4, layers_div=44)
    extra = build(preset("mla"), layout="page_first", pages=4, layers_div=44)
    rows = []
    with timed_backend(model) as (backend, timed):
        backend.register_mem_host_pool_v2(extra.group.anchor_entry.host_pool, "seventh")
        asked = [*questions(model), PoolTransfer("seventh")]
        keys = chain(CHAIN_PAGES, "query")
        for state, present in (("all stored", True), ("empty store", False)):
            timed.present = present
            hit = backend.batch_exists_v2(keys, asked).kv_hit_pages
            wall, native = measure(lambda: backend.batch_exists_v2(keys, asked), timed)
            rows.append(
                {
                    "query": f"{CHAIN_PAGES} pages x {len(asked)} pools, {state}",
                    "hit_pages": hit,
                    "wall_ms": round(wall, 2),
                    "native_ms": round(native, 2),
                    "python_ms": round(wall - native, 2),
                }
            )
    return rows


def bench_moves() -> list[dict[str, Any]]:
    rows = []
    for pages in (32, 128):
        model = build(preset("deepseek-v4-flash"), layout="page_first", pages=pages)
        with timed_backend(model) as (backend, timed):
            names = [str(pool.name) for pool in model.pools[1:]]
            for label, pools in [("group", names), *((name, [name]) for name in names)]:
                rows.append(_move(backend, timed, model, label, pools, pages))
        model.destroy()
    return rows


def _move(
    backend: MooncakeBackend,
    timed: TimedClient,
    model: AssembledModel,
    label: str,
    pools: list[str],
    pages: int,
) -> dict[str, Any]:
    def transfers(keys: list[str]) -> list[PoolTransfer]:
        return [
            PoolTransfer(
                name,
                host_indices=np.arange(pages * model.group.get_pool(name).page_size),
                keys=keys,
            )
            for name in pools
        ]

    fresh = iter(range(1_000_000))

    def put() -> None:
        backend.clear()
        timed.seconds = 0.0
        batch = transfers(chain(pages, f"{label}{next(fresh)}"))
        started = time.perf_counter()
        answers = backend.batch_set_v2(batch)
        puts.append((time.perf_counter() - started, timed.seconds))
        if not all(all(answer) for answer in answers.values()):
            raise RuntimeError(f"a put of {label} failed")

    puts: list[tuple[float, float]] = []
    for _ in range(REPEATS):
        put()
    keys = chain(pages, "get")
    backend.batch_set_v2(transfers(keys))
    batch = transfers(keys)
    wall, native = measure(lambda: backend.batch_get_v2(batch), timed)
    page_bytes = sum(
        stored.layout.page_bytes for name in pools for stored in backend._pools[name].stored
    )
    return {
        "pool": label,
        "pages": pages,
        "page_bytes": page_bytes,
        "get_native_share": round(native / wall, 3),
        "get_gbps": round(page_bytes * pages / wall / 1e6, 2),
        "put_native_share": round(statistics.median(n / w for w, n in puts), 3),
        "put_gbps": round(page_bytes * pages / statistics.median(w for w, _ in puts) / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    queries, moves = bench_queries(), bench_moves()
    if as_json:
        print(json.dumps({"queries": queries, "moves": moves}, indent=2))
        return
    for rows in (queries, moves):
        print("  ".join(f"{name:>18}" for name in rows[0]))
        for row in rows:
            print("  ".join(f"{value:>18}" for value in row.values()))
        print()


if __name__ == "__main__":
    main()
