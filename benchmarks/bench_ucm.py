"""hicache-ucm beside UCM's own SGLang adapter, in one process on one file system.

Both stand on the same PosixStore of the same wheel with the same settings, are called as
SGLang calls them (sidecars by v2, KV by v1), on the same host pools, in turns. Each turn
stores fresh pages, reads them back and asks for them. Before a pool is timed, the bytes of
four pages are compared for either side. Times are medians with the smallest and the largest.
``peer_by_ours`` is the median over the turns of the peer's time by ours, so that what else
the machine does falls out: above 1 we are faster.

    python benchmarks/bench_ucm.py [--root FOLDER] [--pages 1,8,32,128] [--json]

UCM's adapter (the peer) needs torch and SGLang, gigabytes that nothing else here needs; they
work without a GPU. Without them only our figures are shown. To install them, Python 3.12:

    pip install torch==2.13.0 torchvision==0.28.0 transformers==5.19.0 pyyaml
    pip install --no-deps sglang==0.5.23 uc-manager-cuda-cu129==0.8.1 wrapt==1.17.2

and what SGLang's storage interface imports: the group ``sglang-needs`` of pyproject.toml, and
apache-tvm-ffi, compressed-tensors, dill, einops, gguf, openai, partial-json-parser,
sentencepiece. With the peer the host pools are SGLang's own classes over torch tensors, for
both sides. Set ``UCM_LOG_LEVEL=error UCM_LOG_TO_FILE=false`` in the environment: UCM logs to
standard output, and reads them when Python starts.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from hicache_shared.contract import PoolHitPolicy, PoolTransfer
from hicache_shared.hostpool import (
    AssembledModel,
    DType,
    MambaGeometry,
    MambaModel,
    MHAGeometry,
    ModelSpec,
    SWAModel,
    build,
    page_views,
    preset,
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

SMALL_BYTES = 64 << 20
"""Calls that move less are repeated twice as often."""

TINY_BYTES = 8 << 20
"""Calls that move less are repeated eight times as often."""

COLD_KEYS = 2048
"""Keys of the question to which nothing is stored: a prompt of 128k tokens."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table for each number of pages.

    Attributes:
        name: what the row is called.
        model: the model whose pools are moved.
        pools: those moved in one call; KV goes by v1.
        tp_size: ranks that attention heads and states are split over.
        peer_model: what the peer moves, where it cannot move ``model``; None is the same.
        peer_pools: its pools; empty is the same.
    """

    name: str
    model: ModelSpec
    pools: tuple[str, ...]
    tp_size: int = 1
    peer_model: ModelSpec | None = None
    peer_pools: tuple[str, ...] = ()


def cases() -> Iterator[Case]:
    v4 = preset("deepseek-v4-flash")
    sidecars = tuple(str(pool.name) for pool in v4.pools[1:])
    yield Case(name="V4 Flash, all pools", model=v4, pools=sidecars)
    for name in sidecars:
        yield Case(name=f"V4 Flash, {name.removeprefix('deepseek_v4_')}", model=v4, pools=(name,))
    yield Case(name="MHA, Llama-3.1-8B", model=preset("mha"), pools=("kv",))
    yield Case(name="MLA, DeepSeek-V2-Lite", model=preset("mla"), pools=("kv",))

    qwen = preset("mamba")
    states = qwen.pools[1].geometry
    assert isinstance(states, MambaGeometry)
    half = replace(qwen.pools[1], geometry=replace(states, temporal_dtype="bfloat16"))
    bf16 = replace(qwen, pools=(qwen.pools[0], half))
    yield Case(name="Mamba, Qwen3-Next TP8, bf16", model=bf16, pools=("mamba",), tp_size=8)
    yield Case(name="Mamba, Qwen3-Next TP8, fp32", model=qwen, pools=("mamba",), tp_size=8)
    # Nemotron-H-8B: 24 layers, 128 heads of 64, states of 128, 8 groups, kernel 4.
    nemotron = MambaGeometry(layers=24, temporal_shape=(128, 64, 128), conv_shapes=((10240, 3),))
    yield Case(
        name="Mamba, Nemotron-H-8B TP8", model=mamba_model(nemotron), pools=("mamba",), tp_size=8
    )

    # MiMo-V2-Flash's full-attention layers, and a head size made up to share almost no divisor.
    for name, v_head_dim in (("K 192 V 128", 128), ("K 192 V 127", 127)):
        keys_values = MHAGeometry(layers=9, head_num=4, head_dim=192, v_head_dim=v_head_dim)
        yield Case(
            name=f"Asymmetric K/V, {name}",
            model=asymmetric_model(keys_values),
            pools=("swa",),
            peer_model=mamba_model(staged_alike(keys_values)),
            peer_pools=("mamba",),
        )


PAGE_TOKENS = 64


def mamba_model(states: MambaGeometry) -> ModelSpec:
    """Recurrent states beside a KV pool that is not moved."""
    return MambaModel(
        name="mamba",
        kv=MHAGeometry(layers=1, head_num=8, head_dim=64),
        states=states,
        page_tokens=PAGE_TOKENS,
        device_tokens=PAGE_TOKENS,
        device_states=1,
    ).spec()


def asymmetric_model(keys_values: MHAGeometry) -> ModelSpec:
    """Sliding-window K and V of unequal size beside a KV pool that is not moved."""
    return SWAModel(
        name="asymmetric",
        kv=MHAGeometry(layers=1, head_num=8, head_dim=64),
        swa=keys_values,
        window_tokens=PAGE_TOKENS,
        page_tokens=PAGE_TOKENS,
        device_tokens=PAGE_TOKENS,
        swa_device_tokens=PAGE_TOKENS,
    ).spec()


def staged_alike(keys_values: MHAGeometry) -> MambaGeometry:
    """States of the sizes of a page's K and V.

    The peer refuses a sidecar of unequal K and V, and as primary KV cuts the page in half,
    which reads and writes beyond its pools. Its staging, which it has for Mamba alone, is
    what carries unequal components.
    """
    row = PAGE_TOKENS * keys_values.head_num
    return MambaGeometry(
        layers=keys_values.layers,
        temporal_shape=(row, keys_values.head_dim),
        conv_shapes=((row, keys_values.v_dim),),
        temporal_dtype=keys_values.dtype,
        conv_dtype=keys_values.dtype,
    )


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


def bench(
    group: list[Case], peer: Peer | None, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The rows of cases that share their host pools."""
    fits = {case.name: fitting(case, options) for case in group}
    most = max(max(counts) for counts in fits.values())
    with sides(group[0], most, peer, options.root) as made:
        for case in group:
            named = {
                name: replace(
                    each, names=case.peer_pools or case.pools if name == "peer" else case.pools
                )
                for name, each in made.items()
            }
            wrong = [name for name, each in named.items() if not each.exact(min(4, most))]
            if wrong:
                raise RuntimeError(f"{case.name}: the bytes of {' and '.join(wrong)} differ")
            for pages in fits[case.name]:
                print(f"{case.name}, {pages} pages", file=sys.stderr, flush=True)
                yield from warm(case, named, pages, options.repeats)
            if len(case.pools) > 1:
                yield cold(case, named, options.repeats)


def warm(case: Case, made: dict[str, Side], pages: int, repeats: int) -> Iterator[dict[str, Any]]:
    times = {name: Times() for name in made}
    moved = sum(map(sum, made["ours"].components)) * pages
    for turn in range(-1, repeats * (1 + (moved < SMALL_BYTES) + 6 * (moved < TINY_BYTES))):
        keys = chain(pages, f"{case.name}{pages}{turn}")
        for name in list(made) if turn % 2 else reversed(made):
            # The first turn warms up.
            made[name].turn(keys, Times() if turn < 0 else times[name])
    for call in ("set", "get", "exists"):
        yield row(case, made["ours"], pages, call, times)


def cold(case: Case, made: dict[str, Side], repeats: int) -> dict[str, Any]:
    """A question about a long prompt of which nothing is stored."""
    times = {name: Times() for name in made}
    for turn in range(repeats):
        keys = chain(COLD_KEYS, f"cold{turn}")
        for name, each in made.items():
            times[name].exists.append(milliseconds(partial(misses, each.question(keys))))
    return row(case, made["ours"], COLD_KEYS, "exists", times) | {"call": "exists, cold"}


def misses(ask: Callable[[], int]) -> bool:
    return ask() == 0


def row(case: Case, ours: Side, pages: int, call: str, times: dict[str, Times]) -> dict[str, Any]:
    components = ours.components
    figures: dict[str, Any] = {
        "case": case.name,
        "page_bytes": sum(map(sum, components)),
        "parts": sum(sum(sizes) // math.gcd(*sizes) for sizes in components),
        "pages": pages,
        "call": call,
    }
    taken: dict[str, list[float]] = {name: getattr(each, call) for name, each in times.items()}
    for name, values in taken.items():
        figures[f"{name}_ms"] = round(statistics.median(values), 3)
        figures[f"{name}_range"] = [round(min(values), 3), round(max(values), 3)]
    if "peer" in taken:
        ratios = [b / a for a, b in zip(taken["ours"], taken["peer"], strict=True)]
        figures["peer_by_ours"] = round(statistics.median(ratios), 2)
    return figures


def fitting(case: Case, options: argparse.Namespace) -> list[int]:
    """Those numbers of pages whose bytes stay under the bound; one at least."""
    model = build(case.model, layout="page_first", pages=1, tp_size=case.tp_size)
    pools = [model.group.get_pool(name) for name in case.pools]
    page_bytes = sum(view.nbytes for pool in pools for view in page_views(pool, 0))
    return [count for count in options.pages if count * page_bytes <= options.max_bytes] or [1]


def show(rows: list[dict[str, Any]]) -> None:
    def cell(value: object) -> str:
        return "..".join(map(str, value)) if isinstance(value, list) else str(value)

    widths = {key: max(len(key), *(len(cell(row.get(key, ""))) for row in rows)) for key in rows[0]}
    print("  ".join(f"{key:>{width}}" for key, width in widths.items()))
    for figures in rows:
        print("  ".join(f"{cell(figures.get(key, '')):>{width}}" for key, width in widths.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder on the file system to measure (%(default)s)",
    )
    parser.add_argument(
        "--pages",
        type=lambda text: [int(count) for count in text.split(",")],
        default=[1, 8, 32, 128],
        help="pages a call, with commas",
    )
    parser.add_argument("--repeats", type=int, default=7, help="turns of each side (%(default)s)")
    parser.add_argument("--max-bytes", type=int, default=3 << 29, help="most bytes a call moves")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    peer = find_peer()
    chosen = [case for case in cases() if options.only.lower() in case.name.lower()]
    rows: list[dict[str, Any]] = []
    for _, group in groupby(chosen, key=lambda case: id(case.model)):
        rows += bench(list(group), peer, options)
    if options.json:
        print(json.dumps({"store": STORE, "peer": peer is not None, "rows": rows}, indent=2))
    else:
        show(rows)


if __name__ == "__main__":
    main()
