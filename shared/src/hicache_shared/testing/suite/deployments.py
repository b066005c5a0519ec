"""The part of the suite about deployments: one that differs in one respect never hits.

The numbers in names are those of ``docs/cases.md``: faults that people met in other adapters.
"""

from __future__ import annotations

from typing import Any

import pytest

from hicache_shared.hostpool import legal_layouts
from hicache_shared.testing.harness import IDENTITY_FIELDS, Harness
from hicache_shared.testing.models import spec_of, with_dtype, with_page_tokens
from hicache_shared.testing.rank import Rank
from hicache_shared.testing.suite.fixtures import (
    LEGAL_PAIRS,
    ONE_LAYOUT_PAIRS,
    NewRank,
    SuiteFixtures,
    not_supported,
)

CHANGES: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "float8_e4m3fn": {"dtype": "float8_e4m3fn"},
    "uint8": {"dtype": "uint8"},
    "half page": {"page_tokens": 32},
    "more layers": {"layers_div": 4},
    "fewer heads": {"heads_over": 2},
}
"""From bfloat16, pages of 64 tokens, layers divided by 12, and all heads on one rank."""

CHANGED = [
    ((model, "page_first"), change)
    for model in ("mha", "mla", "swa")
    for change in CHANGES
    if (model, change) != ("mla", "fewer heads")
]

LAYOUTS = [
    (pair, other)
    for pair in LEGAL_PAIRS
    for other in legal_layouts(spec_of(pair[0]))
    if pair[1] == "page_first" and other != "page_first"
]


class DeploymentSuite(SuiteFixtures):
    """What differs in one respect has pages of its own, and the old ones stay."""

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    def test_case_02_another_served_name_never_hits(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        never_crosses(harness, new_rank, keys, {}, {"deployment": "another"})

    @pytest.mark.parametrize("pair", ONE_LAYOUT_PAIRS, ids="-".join, indirect=True)
    @pytest.mark.parametrize("field", IDENTITY_FIELDS)
    def test_case_02_another_deployment_never_hits(
        self, harness: Harness, new_rank: NewRank, keys: list[str], field: str
    ) -> None:
        """One field of the extra config, where the backend reads it."""
        if field not in harness.capabilities.identity:
            not_supported(f"{harness.name} does not tell deployments apart by {field!r}")
        never_crosses(harness, new_rank, keys, {}, {"extra": {field: "other"}})

    @pytest.mark.parametrize(
        ("pair", "change"),
        CHANGED,
        indirect=["pair"],
        ids=[f"{'-'.join(pair)}-{change}" for pair, change in CHANGED],
    )
    def test_case_02_pools_of_another_shape_never_hit(
        self,
        harness: Harness,
        new_rank: NewRank,
        keys: list[str],
        pair: tuple[str, str],
        change: str,
    ) -> None:
        """Element type, tokens a page, layers or heads; the bytes a page may be as many."""
        never_crosses(harness, new_rank, keys, {}, changed(pair[0], **CHANGES[change]))

    @pytest.mark.parametrize(
        ("pair", "layout"),
        LAYOUTS,
        indirect=["pair"],
        ids=[f"{'-'.join(pair)}-{layout}" for pair, layout in LAYOUTS],
    )
    def test_case_02_another_memory_layout_never_hits(
        self, harness: Harness, new_rank: NewRank, keys: list[str], layout: str
    ) -> None:
        """As many bytes, in another order."""
        never_crosses(harness, new_rank, keys, {}, {"layout": layout})


def changed(model: str, *, dtype: str = "", page_tokens: int = 0, **changes: Any) -> dict[str, Any]:
    """What makes a rank of a model that differs from it in one respect."""
    spec = spec_of(model)
    if dtype:
        spec = with_dtype(spec, dtype)
    if page_tokens:
        spec = with_page_tokens(spec, page_tokens)
    return {"model": spec, **changes}


def never_crosses(
    harness: Harness,
    new_rank: NewRank,
    keys: list[str],
    own: dict[str, Any],
    others: dict[str, Any],
) -> None:
    """Neither of two ranks finds what the other stored, and both find their own, also later."""
    one, other = new_rank(**own), new_rank(**others)
    for rank, seed in ((one, 14), (other, 15)):
        rank.fill(seed)
    for writer, reader in ((one, other), (other, one)):
        hashes = keys[:4] if writer is one else keys[4:]
        writer.set_everywhere(hashes, range(4))
        harness.settle()
        assert writer.hit(hashes) == 4
        assert reader.hit(hashes) == 0
        for name in reader.pools:
            assert reader.get(name, hashes, range(8, 12)) == [False] * 4
    for rank, hashes in ((other, keys[:4]), (one, keys[4:])):
        rank.set_everywhere(hashes, range(4))
    harness.settle()
    for rank, again in ((one, new_rank(**own)), (other, new_rank(**others))):
        reads_the_pages_of(again, rank, keys)


def reads_the_pages_of(again: Rank, rank: Rank, keys: list[str]) -> None:
    """A new rank of the old identity has the pages that the old one stored, of both halves."""
    assert again.hit(keys) == 8
    for name in again.pools:
        assert again.get(name, keys, range(8, 16)) == [True] * 8
        for half in (0, 4):
            wanted = [rank.page(name, page) for page in range(4)]
            assert [again.page(name, 8 + half + page) for page in range(4)] == wanted
