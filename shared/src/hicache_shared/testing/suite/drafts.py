"""The part of the suite about the pools of a draft model beside the target's."""

from __future__ import annotations

from functools import partial

import pytest

from hicache_shared.hostpool import legal_layouts
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.models import DRAFT_MODELS, DSA_DRAFT, MLA_DRAFT, spec_of
from hicache_shared.testing.rank import chain
from hicache_shared.testing.suite.fixtures import NewRank, SuiteFixtures, allowed

DRAFT_PAIRS = [
    (model, layout) for model in DRAFT_MODELS for layout in legal_layouts(spec_of(model))
]


class DraftSuite(SuiteFixtures):
    """``draft``, ``draft_indexer`` and ``draft_swa``: refused with a reason, or like any pool.

    A refused one shows as not supported. What may not be is a draft pool that is taken and then
    comes back with other bytes, or is not asked about.
    """

    @pytest.mark.parametrize("pair", DRAFT_PAIRS, ids="-".join, indirect=True)
    def test_draft_pools_come_back_byte_exact(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """In ``layer_first`` the buffer of DeepSeek V4's is a list, an array a layer."""
        rank = allowed(new_rank, "draft pools")
        rank.write(keys, range(8))
        rank.set_everywhere(keys, range(8))
        harness.settle()
        assert rank.hit(keys) == 8
        for name in rank.pools:
            assert rank.get(name, keys, range(8, 16)) == [True] * 8
            assert all(rank.is_whole(name, key, 8 + i) for i, key in enumerate(keys))

    @pytest.mark.parametrize("pair", DRAFT_PAIRS, ids="-".join, indirect=True)
    def test_case_06_a_draft_pool_that_was_never_stored_is_no_hit(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """SGLang asks about it as about any sidecar."""
        rank = allowed(new_rank, "draft pools")
        rank.write(keys, range(8))
        for missing in (name for name in rank.pools if name.startswith("draft")):
            hashes = chain(4, keys[0] + missing)
            rank.set_anchor(hashes)
            for name in rank.pools:
                if name != missing:
                    assert all(rank.set(name, hashes, range(4)))
            harness.settle()
            assert rank.hit(hashes) == 0

    @pytest.mark.parametrize(
        "pair", [(DSA_DRAFT, "page_first"), (MLA_DRAFT, "page_first")], ids="-".join, indirect=True
    )
    def test_case_04_drafts_are_shared_over_ranks_by_their_own_kind(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """An MLA draft is the same on each rank; of an MHA draft each has its own heads, so that
        a rank of several may refuse it, and never reads another's."""
        one, other = (
            allowed(partial(new_rank, tp_rank=i, tp_size=2), "draft pools at TP 2")
            for i in range(2)
        )
        one.write(keys, range(8))
        one.set_everywhere(keys, range(8))
        harness.settle()
        for name in other.pools:
            sharded = name == "draft" and hasattr(other.pools[name], "head_num")
            answers = other.get(name, keys, range(8))
            assert answers == [not sharded] * 8
            assert sharded or all(other.is_whole(name, key, i) for i, key in enumerate(keys))
