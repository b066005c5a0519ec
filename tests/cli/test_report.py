"""The table for people fits a terminal of 80 columns."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from hicache_shared import plugins
from hicache_shared.cli.report import print_report
from hicache_shared.cli.roundtrip import Request, roundtrip
from hicache_shared.hostpool import PRESETS


class Silent:
    def start(self, steps: int) -> None: ...
    def step(self, text: str) -> None: ...


@pytest.mark.parametrize("model", PRESETS)
def test_no_column_is_cut_in_80_columns(model: str) -> None:
    request = Request(model=model, pages=1, layout="page_first", layers_div=1, seed=0)
    report = roundtrip(plugins.MEMORY, request, None, Silent())
    pools = [replace(p, pages=9_999, set_gbps=12.34, get_gbps=56.78) for p in report.pools]
    out = io.StringIO()
    print_report(replace(report, pools=pools), Console(file=out, width=80))
    text = out.getvalue()
    assert "…" not in text
    for pool in pools:
        (row,) = (line for line in text.splitlines() if line.startswith(f" {pool.pool} "))
        assert len(row) <= 80
        expected = [pool.pool, "9,999", f"{pool.page_bytes:,}", f"{pool.components:,}"]
        assert row.split() == [*expected, "12.34", "56.78"]
