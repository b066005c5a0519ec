"""A round trip's report: for programs as JSON, for people as a table and a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hicache_shared.cli.output import failure
from hicache_shared.cli.roundtrip import PoolReport, Report, Request

NOT_BYTE_EXACT = "NotByteExact"


def as_json(report: Report) -> dict[str, Any]:
    """The report under the names that programs rely on."""
    found = report.findings
    return {
        **request_json(report.backend, report.request),
        "restored_prefix_pages": report.restored_prefix_pages,
        "byte_exact": report.byte_exact,
        "pools": [_pool_json(pool) for pool in report.pools],
        **({"error": failure(NOT_BYTE_EXACT, "; ".join(found))} if found else {}),
    }


def request_json(backend: str, request: Request) -> dict[str, Any]:
    """What was asked for: the part of the JSON that is there from the beginning."""
    return {
        "backend": backend,
        "model": request.model,
        "layout": request.layout,
        "layers_div": request.layers_div,
        "pages": request.pages,
    }


def _pool_json(pool: PoolReport) -> dict[str, Any]:
    return {
        "pool": pool.pool,
        "page_bytes": pool.page_bytes,
        "components": pool.components,
        "pages": pool.pages,
        "bytes": pool.bytes,
        "set_gbps": pool.set_gbps,
        "get_gbps": pool.get_gbps,
    }


def print_report(report: Report, console: Console) -> None:
    """The table, what was restored, and the verdict."""
    request = report.request
    divided = f", layers divided by {request.layers_div}" if request.layers_div > 1 else ""
    console.print(
        f"{request.model} through {report.backend}: {request.pages} pages, "
        f"layout {request.layout}{divided}",
        style="bold",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table(report.pools))
    console.print(_restored(report), highlight=False, soft_wrap=True)
    if report.byte_exact:
        physical = sum(pool.page_bytes > 0 for pool in report.pools)
        console.print(
            f"[bold green]byte-exact[/]: every byte of {physical} pools as stored, no other changed"
        )
        return
    console.print("[bold red]NOT byte-exact[/]:")
    for line in report.findings:
        console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)


def _table(pools: list[PoolReport]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("pool", no_wrap=True)
    for name in ("pages", "bytes\na page", "components", "set\nGB/s", "get\nGB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for pool in pools:
        table.add_row(
            pool.pool,
            f"{pool.pages:,}",
            f"{pool.page_bytes:,}",
            f"{pool.components:,}",
            _rate(pool.set_gbps),
            _rate(pool.get_gbps),
        )
    return table


def _rate(gbps: float | None) -> str:
    return "-" if gbps is None else f"{gbps:.2f}"


def _restored(report: Report) -> str:
    """What the prefetch restored, and that each pool was then restored whole."""
    pages = report.request.pages
    windows = [
        f"the last {pool.prefetched_pages} of {pool.pool}"
        for pool in report.pools
        if pool.prefetched_pages < pages
    ]
    trailing = f"; of pools with a window {', '.join(windows)}" if windows else ""
    return (
        f"restored prefix: {report.restored_prefix_pages} of {pages} pages{trailing}\n"
        f"then each pool on its own: all {pages} pages"
    )


class Bar:
    """Shows the steps of a round trip on a terminal; elsewhere it shows nothing."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None)
        self._begun = 0

    def start(self, steps: int) -> None:
        self._progress.update(self._task, total=steps)

    def step(self, text: str) -> None:
        self._progress.update(self._task, description=text, completed=self._begun)
        self._begun += 1


@contextmanager
def bar() -> Iterator[Bar]:
    """A progress bar on standard error while the context lasts."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=not console.is_terminal,
    ) as progress:
        yield Bar(progress)
