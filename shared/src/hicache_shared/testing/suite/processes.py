"""The part of the suite about two processes on one store.

The numbers in names are those of ``docs/cases.md``: faults that people met in other adapters.
"""

from __future__ import annotations

from typing import Any

import pytest

from hicache_shared.testing.harness import Harness
from hicache_shared.testing.other_process import Elsewhere
from hicache_shared.testing.rank import Rank, chain, content, digest
from hicache_shared.testing.suite.fixtures import (
    MHA_PAIR,
    TWO_PAIRS,
    NewRank,
    SuiteFixtures,
    needs,
)

PROCESS_PAIRS = [*TWO_PAIRS, MHA_PAIR]


class ProcessSuite(SuiteFixtures):
    """What one process stores, another reads, byte by byte; ranks keep to their own."""

    @pytest.mark.parametrize("pair", PROCESS_PAIRS, ids="-".join, indirect=True)
    def test_two_processes_read_what_each_other_stored(
        self, harness: Harness, new_rank: NewRank, pair: tuple[str, str], keys: list[str]
    ) -> None:
        needs(harness, "processes")
        rank = new_rank()
        with Elsewhere(harness, *pair) as other:
            whole = {name: [True] * 4 for name in rank.pools}
            assert other.set(keys[:4], range(4)) == whole
            rank.write(keys[4:], range(4))
            rank.set_everywhere(keys[4:], range(4))
            harness.settle()
            assert rank.hit(keys) == other.hit(keys) == 8
            for name in rank.pools:
                assert rank.get(name, keys, range(8, 16)) == [True] * 8
                assert all(rank.is_whole(name, key, 8 + i) for i, key in enumerate(keys))
            answers, digests = other.get(keys, range(8, 16))
            assert answers == {name: [True] * 8 for name in rank.pools}
            assert digests == digests_of(rank, keys)

    @pytest.mark.parametrize("pair", PROCESS_PAIRS, ids="-".join, indirect=True)
    def test_two_processes_that_store_one_page_at_once_leave_it_whole(
        self, harness: Harness, new_rank: NewRank, pair: tuple[str, str], keys: list[str]
    ) -> None:
        """Either may say no where the other was first; who says yes has it readable."""
        needs(harness, "processes")
        rank = new_rank()
        with Elsewhere(harness, *pair) as other:
            for turn in range(6):
                hashes = chain(4, f"{keys[0]}/{turn}")
                rank.write(hashes, range(4))
                rank.set_anchor(hashes)
                other.send({"step": "set", "keys": hashes, "pages": [*range(4)]})
                own = {name: rank.set(name, hashes, range(4)) for name in rank.pools}
                others = other.receive()["answers"]
                harness.settle()
                for name in rank.pools:
                    answers = rank.get(name, hashes, range(8, 12))
                    stored = [a or b for a, b in zip(own[name], others[name], strict=True)]
                    assert all(answers[i] for i in range(4) if stored[i])
                    pages = [i for i in range(4) if answers[i]]
                    assert all(rank.is_whole(name, hashes[i], 8 + i) for i in pages)
                assert other.hit(hashes) == rank.hit(hashes)

    @pytest.mark.parametrize("pair", PROCESS_PAIRS, ids="-".join, indirect=True)
    def test_case_04_ranks_in_two_processes_share_replicated_pools_and_never_sharded_ones(
        self, harness: Harness, new_rank: NewRank, pair: tuple[str, str], keys: list[str]
    ) -> None:
        """Tensor-parallel ranks 0 and 1 of 2, as an engine runs them."""
        needs(harness, "processes")
        places: list[dict[str, Any]] = [{"tp_rank": i, "tp_size": 2} for i in range(2)]
        rank = new_rank(**places[0])
        with Elsewhere(harness, *pair, **places[1]) as other:
            rank.write(keys, range(8))
            rank.set_everywhere(keys, range(8))
            harness.settle()
            shared = rank.model.is_mla_model
            assert other.hit(keys) == (8 if shared else 0)
            answers, digests = other.get(keys, range(8))
            assert answers == {name: [shared] * 8 for name in rank.pools}
            assert not shared or digests == digests_of(rank, keys)


def digests_of(rank: Rank, keys: list[str]) -> dict[str, list[str]]:
    """Of the content of ``keys``, by pool."""
    return {
        name: [digest(content(name, key, rank.page_bytes(name))) for key in keys]
        for name in rank.pools
    }
