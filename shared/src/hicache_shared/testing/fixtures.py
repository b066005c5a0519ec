"""What all parts of the suite share: pairs of model and memory layout, and fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache_shared.hostpool import PRESETS, legal_layouts, preset
from hicache_shared.layout import MEMORY_LAYOUTS
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.rank import MLA_MAMBA, Rank, chain, spec_of

LEGAL_PAIRS = [(model, layout) for model in PRESETS for layout in legal_layouts(preset(model))]
ILLEGAL_PAIRS = [
    (model, layout)
    for model in PRESETS
    for layout in MEMORY_LAYOUTS
    if (model, layout) not in LEGAL_PAIRS
]

TRAILING_PAIRS = [p for p in LEGAL_PAIRS if any(q.window_pages for q in preset(p[0]).pools)]
LOGICAL_PAIRS = [p for p in LEGAL_PAIRS if preset(p[0]).pools[0].geometry.kind == "logical"]
PAGE_HEAD_PAIRS = [p for p in LEGAL_PAIRS if p[1] == "page_head"]
MLA_MAMBA_PAIRS = [(MLA_MAMBA, layout) for layout in legal_layouts(spec_of(MLA_MAMBA))]
FLAT_PAIRS = [
    p
    for p in LEGAL_PAIRS
    if preset(p[0]).pools[0].geometry.kind != "logical" and p[0] != "mha-asymmetric"
]
"""Models whose KV has a flat form."""

ONE_LAYOUT_PAIRS = [(model, "page_first") for model in PRESETS]
TWO_PAIRS = [("mla", "page_first"), ("deepseek-v4-flash", "page_first")]
"""Where what is claimed hardly depends on the pools: one alone, and many on a logical anchor."""

NewRank = Callable[..., Rank]


class SuiteFixtures:
    """Ranks and page hashes, over a fixture ``harness`` of the module that subclasses."""

    @pytest.fixture(params=LEGAL_PAIRS, ids="-".join)
    def pair(self, request: pytest.FixtureRequest) -> tuple[str, str]:
        """A model and a memory layout."""
        pair: tuple[str, str] = request.param
        return pair

    @pytest.fixture
    def new_rank(self, harness: Harness, pair: tuple[str, str]) -> Iterator[NewRank]:
        """Makes ranks of the pair; their backends are closed after the test."""
        ranks: list[Rank] = []

        def make(**changes: Any) -> Rank:
            ranks.append(Rank.make(harness, *pair, **changes))
            return ranks[-1]

        yield make
        for rank in ranks:
            rank.backend.close()  # type: ignore[attr-defined]
        harness.forget()

    @pytest.fixture
    def rank(self, new_rank: NewRank) -> Rank:
        return new_rank()

    @pytest.fixture
    def keys(self, request: pytest.FixtureRequest) -> list[str]:
        """Eight page hashes that no other test uses."""
        return chain(8, request.node.nodeid)


def needs(harness: Harness, capability: str) -> None:
    """Skip, saying so, where a harness does not offer what a test needs."""
    if not getattr(harness.capabilities, capability):
        pytest.skip(f"not supported: the harness of {harness.name} has no {capability!r}")
