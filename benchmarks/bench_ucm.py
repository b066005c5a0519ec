"""hicache-ucm beside UCM's own SGLang adapter, in one process on one file system.

Both stand on the same PosixStore of the same wheel with the same settings, are called as
SGLang calls them (sidecars by v2, KV by v1), on the same host pools, in turns. Each turn
stores fresh pages, reads them back and asks for them. Before a pool is timed, the bytes of
four pages are compared for either side. Times are medians with the smallest and the largest.
``peer_by_ours`` is the median over the turns of the peer's time by ours, so that what else
the machine does falls out: above 1 we are faster.

    python -m benchmarks.bench_ucm [--root FOLDER] [--pages 1,8,32,128] [--json]

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
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.ucm_cases import Case, cases
from benchmarks.ucm_sides import STORE, Peer, Side, Times, find_peer, milliseconds, sides
from hicache_shared.hostpool import (
    build,
    page_views,
)
from hicache_shared.testing.rank import chain

SMALL_BYTES = 64 << 20
"""Calls that move less are repeated twice as often."""

TINY_BYTES = 8 << 20
"""Calls that move less are repeated eight times as often."""

COLD_KEYS = 2048
"""Keys of the question to which nothing is stored: a prompt of 128k tokens."""


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
