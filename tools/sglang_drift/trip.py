"""A DeepSeek V4 round trip over one release's own types, made by its own factory.

Run as a program, with an excerpt of the release on ``PYTHONPATH`` (:func:`wheel.unpack`). The
host pools are the reference ones and the store is in memory: what is tried is that our backend
base works with the release's classes, enums, transfers and factory. The calls are those of
SGLang's controller, in its order. Prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from hicache_shared import contract
from hicache_shared.cli.host import Host, Page
from hicache_shared.controller import model_transfers
from hicache_shared.hostpool import preset

MODEL, PAGES, SEED = "deepseek-v4-flash", 4, 20_260_101
KV = str(contract.PoolName.KV)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trip restored: pools with memory, pages of the prefix, bytes; and what was wrong."""

    pools: int
    pages: int
    bytes: int
    findings: list[str]


def trip() -> Outcome:
    """Store a chain, wipe the host, ask, restore, and compare every byte of the host.

    Raises:
        TypeError: the types are our copy, so nothing of SGLang would be tried.
    """
    if contract.HiCacheStorage.__module__ != "sglang.srt.mem_cache.hicache_storage":
        raise TypeError(f"the types are those of {contract.HiCacheStorage.__module__}")
    host = Host(preset(MODEL), layout="page_first", layers_div=1, pages=PAGES, seed=SEED)
    backend = _registered(host)
    hashes = [hashlib.sha256(bytes([page])).hexdigest() for page in range(PAGES)]
    saved = host.fill()
    stored = backend.batch_set_v2(_placed(host, hashes, host.places.sources))
    kv = [backend.batch_set_v1(hashes, host.slots(KV, host.places.sources[KV]))]
    host.wipe()
    answer = backend.batch_exists_v2(hashes, model_transfers(host.model.pools, hashes))
    kv.append(backend.batch_get_v1(hashes, host.slots(KV, host.places.targets[KV])))
    got = backend.batch_get_v2(_placed(host, hashes, host.places.targets))
    backend.close()
    findings = [f"{name} stored {answers}" for name, answers in stored.items() if not all(answers)]
    findings += [f"{name} got {answers}" for name, answers in got.items() if not all(answers)]
    findings += [f"kv answered {answers}" for answers in kv if answers != [True] * PAGES]
    if answer.kv_hit_pages != PAGES or answer.restorable_prefix_pages != [*range(1, PAGES + 1)]:
        findings.append(f"the hit query answered {answer}")
    expected: dict[str, dict[int, Page | None]] = {
        name: dict(zip(host.places.targets[name], pages, strict=True))
        for name, pages in saved.items()
    }
    findings += host.differences(expected)
    nbytes = PAGES * sum(map(host.page_bytes, host.pools))
    return Outcome(len(host.pools), answer.kv_hit_pages, nbytes, findings)


def _registered(host: Host) -> Any:
    """The reference backend, made and given its pools as SGLang does it."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    config = contract.rank_config(
        MODEL,
        is_mla_model=host.model.is_mla_model,
        extra_config={
            "backend_name": "memory",
            "module_path": "hicache_shared.memory_backend",
            "class_name": "MemoryBackend",
            "interface_v1": 1,
            "shelf": "drift",
            "model_id": MODEL,
            "revision": "drift",
            "kv_cache_dtype": "auto",
        },
    )
    group = host.model.group
    backend = StorageBackendFactory.create_backend("dynamic", config, None)
    backend.register_mem_pool_host(group.anchor_entry.host_pool)
    for entry in group.entries:
        backend.register_mem_host_pool_v2(entry.host_pool, entry.name)
    if "on_host_pools_registered" in vars(contract.HiCacheStorage):
        backend.on_host_pools_registered()
    return backend


def _placed(
    host: Host, hashes: list[str], places: dict[str, list[int]]
) -> list[contract.PoolTransfer]:
    """Transfers of every sidecar, with all pages of each."""
    transfers = model_transfers(host.model.pools, hashes)
    for transfer in transfers:
        name = str(transfer.name)
        transfer.keys = list(hashes)
        transfer.host_indices = host.slots(name, places[name])
    return transfers


def main() -> int:
    outcome = trip()
    print(json.dumps(asdict(outcome)))
    return 1 if outcome.findings else 0


if __name__ == "__main__":
    sys.exit(main())
