"""Parts of docs/sglang.md that tests write."""

from __future__ import annotations

import os
from pathlib import Path

DOCUMENT = Path(__file__).parents[3] / "docs" / "sglang.md"
WRITE = "HICACHE_WRITE_DOCS"


def check(part: str, made: str) -> None:
    """Hold a part of the document to what a test made, or write it where ``WRITE`` is set.

    Raises:
        AssertionError: they differ.
    """
    start, end = f"<!-- {part}: written by tests/sglang/cache -->\n", f"<!-- end of {part} -->\n"
    before, _, rest = DOCUMENT.read_text().partition(start)
    shown, found, after = rest.partition(end)
    assert found, f"{DOCUMENT.name} has no place for {part}"
    if os.environ.get(WRITE):
        DOCUMENT.write_text(f"{before}{start}{made}{end}{after}")
    else:
        assert shown == made, f"run the tests with {WRITE}=1 to write it anew"
