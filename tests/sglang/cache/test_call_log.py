"""What SGLang calls for one backup and one prefetch of DeepSeek V4, as docs/sglang.md shows it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from tests.sglang.cache.calls import recorded
from tests.sglang.cache.serving import Launch, prompt, running

DOCUMENT = Path(__file__).parents[3] / "docs" / "sglang.md"
START = "<!-- calls of one backup and one prefetch: written by tests/sglang/cache -->\n```\n"
END = "```\n<!-- end of calls -->\n"
WRITE = "HICACHE_WRITE_DOCS"
PAGES = 4


def run(launch: dict[str, Any]) -> str:
    """The calls of a launch, a prompt's backup, its prefetch, and the end."""
    backend_class = getattr(importlib.import_module(launch["module_path"]), launch["class_name"])
    parts = []
    with recorded(backend_class) as calls:

        def part(title: str) -> None:
            parts.append("\n".join([f"# {title}", *calls, ""]))
            calls.clear()

        with running("deepseek-v4-flash", Launch(launch)) as rank:
            part("at launch")
            tokens = prompt(rank.device, PAGES)
            rank.compute(tokens)
            rank.backed_up()
            part(f"backup of {PAGES} pages of {rank.device.page_size} tokens")
            rank.flush()
            assert rank.fetch(tokens) == len(tokens)
            part("prefetch of the same")
        part("at the end")
    return "\n".join(parts)


def test_the_document_shows_the_calls_that_sglang_makes(backend: dict[str, Any]) -> None:
    made = run(backend)
    before, _, rest = DOCUMENT.read_text().partition(START)
    shown, _, after = rest.partition(END)
    if os.environ.get(WRITE):
        DOCUMENT.write_text(f"{before}{START}{made}{END}{after}")
        return
    assert shown == made, f"set {WRITE}=1 and run this test to write them anew"
