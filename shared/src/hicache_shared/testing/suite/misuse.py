"""The part of the suite about wrong calls, late and repeated registration.

The numbers in names are those of ``docs/cases.md``: faults that people met in other adapters.
"""

from __future__ import annotations

import numpy as np
import pytest

from hicache_shared.contract import PoolTransfer
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.rank import Rank, register, small_model
from hicache_shared.testing.suite.fixtures import (
    SuiteFixtures,
)


class MisuseSuite(SuiteFixtures):
    """A wrong call is an error that names the pool; a repeated one is none."""

    def test_indices_that_do_not_fit_are_an_error_and_move_nothing(
        self, rank: Rank, keys: list[str]
    ) -> None:
        before = rank.image()
        for name, pool in rank.pools.items():
            width, size = pool.page_size, pool.size
            wrong = {
                "too few": np.arange(width * 2 - 1) if width > 1 else np.arange(1),
                "too many": np.arange(width * 3),
                "past the end": np.arange(size - width, size + width),
                "negative": np.arange(-width, width),
                "twice": np.concatenate([np.arange(width)] * 2),
            }
            if width > 1:
                wrong["unaligned"] = np.arange(1, 2 * width + 1)
            for indices in wrong.values():
                transfer = PoolTransfer(name, host_indices=indices, keys=keys[:2])
                with pytest.raises(Exception, match=name):
                    rank.backend.batch_get_v2([transfer])
                with pytest.raises(Exception, match=name):
                    rank.backend.batch_set_v2([transfer])
        assert all(np.array_equal(a, b) for a, b in zip(before, rank.image(), strict=True))

    def test_case_18_registering_the_same_storage_again_changes_nothing(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        register(rank.backend, rank.model)
        rank.fill(26)
        rank.set_everywhere(keys, range(8))
        harness.settle()
        assert rank.hit(keys) == 8

    def test_a_pool_that_is_registered_late_works_like_the_others(
        self, harness: Harness, rank: Rank, keys: list[str]
    ) -> None:
        late = small_model(harness, "mla", "page_first").group.anchor_entry.host_pool
        rank.backend.register_mem_host_pool_v2(late, "a_pool_of_tomorrow")
        transfer = PoolTransfer(
            "a_pool_of_tomorrow", host_indices=np.arange(2 * late.page_size), keys=keys[:2]
        )
        assert rank.backend.batch_set_v2([transfer]) == {"a_pool_of_tomorrow": [True, True]}
        harness.settle()
        assert rank.backend.batch_get_v2([transfer]) == {"a_pool_of_tomorrow": [True, True]}
