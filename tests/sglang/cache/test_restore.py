"""What SGLang's own classes put through our backends comes back byte for byte.

Each test loads the backend through SGLang's ``dynamic`` factory, writes a prompt through to
storage, lets the tree, the host and the device forget it and wipes their memory, then has SGLang
look it up, fetch it and load it to other pages of the device.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.sglang.cache.document import check
from tests.sglang.cache.serving import Launch, running
from tests.sglang.cache.trip import PAGES, came_back

KERNEL = [("layer_first", "kernel"), ("page_first", "kernel")]
DIRECT = [("layer_first", "direct"), ("page_first_direct", "direct")]

LAYOUTS = {
    "mha": [*KERNEL, ("page_head", "kernel"), *DIRECT],
    "mla": [*KERNEL, *DIRECT],
    "dsa": [KERNEL[1], DIRECT[1]],
    "swa": [*KERNEL, ("page_head", "kernel"), *DIRECT],
    "mamba": [KERNEL[1], DIRECT[1]],
    "deepseek-v4": [*KERNEL, *DIRECT],
    "deepseek-v4-flash": [KERNEL[1]],  # all its layers are slow to copy
}
"""``--hicache-mem-layout`` and ``--hicache-io-backend`` that SGLang 0.5.23 takes for each kind of
model and that can be stored."""

NAMES = {
    "mha": "MHA",
    "mla": "MLA",
    "dsa": "DSA",
    "swa": "MHA with sliding windows",
    "mamba": "MHA with Mamba layers",
    "deepseek-v4": "DeepSeek V4",
}
"""In the document."""

ALL = [(kind, *layout) for kind, layouts in LAYOUTS.items() for layout in layouts]


@pytest.mark.parametrize(("kind", "layout", "io"), ALL)
def test_a_prompt_comes_back_from_storage(
    backend: dict[str, Any], kind: str, layout: str, io: str
) -> None:
    with running(kind, Launch(backend, layout, io)) as rank:
        came_back(rank)
        assert rank.backend.stats.slow_paths() == {}


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "deepseek-v4-flash"])
def test_without_interface_v1_kv_comes_back_through_flat_pages(
    backend: dict[str, Any], kind: str
) -> None:
    with running(kind, Launch(backend, zero_copy=False)) as rank:
        came_back(rank)
        copied = rank.backend.stats.slow_paths().get("KV is copied in flat form", 0)
        assert copied == (0 if kind == "deepseek-v4" else 2 * PAGES)  # V4's KV has no bytes


def test_the_document_lists_these_layouts() -> None:
    rows = "".join(
        f"| {name} | {', '.join(f'`{layout}` + `{io}`' for layout, io in LAYOUTS[kind])} |\n"
        for kind, name in NAMES.items()
    )
    check("layouts", f"| model | layout + io backend |\n|---|---|\n{rows}")
