"""What SGLang calls for one backup and one prefetch of DeepSeek V4, as docs/sglang.md shows it."""

from __future__ import annotations

import importlib
from typing import Any

from tests.sglang.cache.calls import recorded
from tests.sglang.cache.document import check
from tests.sglang.cache.serving import Launch, prompt, running

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
    check("calls", f"```\n{run(backend)}```\n")
