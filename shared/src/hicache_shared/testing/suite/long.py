"""The part of the suite about thousands of pages in one call."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from hicache_shared.contract import STORAGE_BATCH_PAGES
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.models import DEEP, TINY
from hicache_shared.testing.rank import KV, Rank, chain
from hicache_shared.testing.suite.fixtures import NewRank, SuiteFixtures

MANY = 4096

TINY_PAIR = [(TINY, "page_first")]

PATIENT = {"deadline_s": 9}
"""A call may last no longer than 10 s in SGLang; a busy machine takes its time."""


class LongSuite(SuiteFixtures):
    """KV goes by calls of at most 128 pages, as SGLang cuts them; all else in one call."""

    @pytest.mark.parametrize("pair", TINY_PAIR, ids="-".join, indirect=True)
    def test_4096_pages_come_back_byte_exact(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        rank = new_rank(pages=MANY, extra=PATIENT)
        hashes = chain(MANY, keys[0])
        rank.write(hashes, range(MANY))
        assert set_many(rank, hashes, range(MANY)) == {KV: [True] * MANY, "swa": [True] * MANY}
        harness.settle()
        longer = [*hashes, *chain(MANY, keys[1])]
        result = rank.backend.batch_exists_v2(longer, rank.questions())
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (
            MANY,
            [*range(1, MANY + 1)],
        )
        assert rank.backend.batch_exists(longer) == MANY
        rank.fill(120)
        pages = list(range(MANY))
        random.Random(keys[0]).shuffle(pages)
        assert get_many(rank, hashes, pages) == {KV: [True] * MANY, "swa": [True] * MANY}
        for name in rank.pools:
            wrong = [i for i in range(MANY) if not rank.is_whole(name, hashes[i], pages[i])]
            assert not wrong, f"pages of pool {name} with other bytes"

    @pytest.mark.parametrize("pair", [(DEEP, "layer_first")], ids="-".join, indirect=True)
    def test_a_call_of_pages_with_many_components_comes_back_byte_exact(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """The most pages of one call in SGLang's default layout, and a call that follows."""
        rank = new_rank(pages=2 * STORAGE_BATCH_PAGES, layers_div=1, extra=PATIENT)
        pages = range(STORAGE_BATCH_PAGES)
        for first in keys[:2]:
            hashes = chain(len(pages), first)
            rank.write(hashes, pages)
            assert rank.set(KV, hashes, pages) == [True] * len(pages)
            harness.settle()
            there = range(len(pages), 2 * len(pages))
            assert rank.get(KV, hashes, there) == [True] * len(pages)
            whole = zip(hashes, there, strict=True)
            assert all(rank.is_whole(KV, key, page) for key, page in whole)

    @pytest.mark.parametrize("pair", TINY_PAIR, ids="-".join, indirect=True)
    def test_4096_keys_with_holes_have_one_answer_each(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """Absent ones at random, and holes that a hit query has to find far behind the start."""
        rank = new_rank(pages=MANY, extra=PATIENT)
        hashes = chain(MANY, keys[0])
        generator = random.Random(keys[0])
        gone = {3000, 3700, *(generator.randrange(3000, MANY) for _ in range(200))}
        held = [page for page in range(MANY) if page not in gone]
        rank.write(hashes, range(MANY))
        assert all(set_many(rank, [hashes[page] for page in held], held)["swa"])
        harness.settle()
        assert rank.hit(hashes) == rank.backend.batch_exists(hashes) == 3000
        rank.fill(121)
        answers = get_many(rank, hashes, range(MANY))
        for name in rank.pools:
            assert answers[name] == [page not in gone for page in range(MANY)]
            assert all(rank.is_whole(name, hashes[page], page) for page in held)

    @pytest.mark.parametrize("pair", TINY_PAIR, ids="-".join, indirect=True)
    def test_keys_that_come_twice_among_4096_have_two_answers(
        self, harness: Harness, new_rank: NewRank, keys: list[str]
    ) -> None:
        """The same page stored twice in one call, and filled in two places by one call."""
        rank = new_rank(pages=MANY, extra=PATIENT)
        hashes = chain(MANY // 2, keys[0])
        rank.write(hashes, range(MANY // 2))
        twice, same_pages = [*hashes, *hashes], [*range(MANY // 2)] * 2
        assert set_many(rank, twice, same_pages) == {KV: [True] * MANY, "swa": [True] * MANY}
        harness.settle()
        pairs = [key for key in hashes for _ in range(2)]
        assert rank.backend.batch_exists(pairs) == MANY
        rank.fill(122)
        assert get_many(rank, pairs, range(MANY)) == {KV: [True] * MANY, "swa": [True] * MANY}
        for name in rank.pools:
            assert all(rank.is_whole(name, key, page) for page, key in enumerate(pairs))


def set_many(rank: Rank, keys: list[str], pages: Sequence[int]) -> dict[str, list[bool]]:
    """The sidecar in one call, then the KV in SGLang's batches."""
    answers = rank.backend.batch_set_v2([rank.transfer("swa", keys, pages)])
    return answers | {KV: _batches(rank.set, keys, pages)}


def get_many(rank: Rank, keys: list[str], pages: Sequence[int]) -> dict[str, list[bool]]:
    """The KV in SGLang's batches, then the sidecar in one call."""
    kv = _batches(rank.get, keys, pages)
    return rank.backend.batch_get_v2([rank.transfer("swa", keys, pages)]) | {KV: kv}


def _batches(
    call: Callable[[str, list[str], Sequence[int]], list[bool]],
    keys: list[str],
    pages: Sequence[int],
) -> list[bool]:
    answers: list[bool] = []
    for start in range(0, len(keys), STORAGE_BATCH_PAGES):
        end = start + STORAGE_BATCH_PAGES
        answers += call(KV, keys[start:end], pages[start:end])
    return answers
