"""The staged hit query asks little when nothing is there and answers as if it had asked all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hicache_shared.contract import PoolHitPolicy
from hicache_shared.fold import Mask, fold
from hicache_shared.hits import Question, query
from hicache_shared.plan import RegisteredPool

ALL, TRAILING, GROUPS = PoolHitPolicy


class Asked:
    """Answers from sets of keys, and remembers how many keys of each pool were asked."""

    def __init__(self, stored: dict[str, set[str]]) -> None:
        self.stored = stored
        self.calls: list[dict[str, int]] = []

    def __call__(self, asks: list[tuple[RegisteredPool, Sequence[str]]]) -> list[Mask]:
        self.calls.append({pool.name: len(keys) for pool, keys in asks})
        return [np.array([key in self.stored[p.name] for key in keys]) for p, keys in asks]


def pool(name: str, page_bytes: int) -> RegisteredPool:
    class Sized(RegisteredPool):
        page_bytes = 0

    sized = Sized(name=name, pool=None, pages=1, page_slots=1, stored=())
    type(sized).page_bytes = page_bytes
    return sized


KEYS = [f"k{i}" for i in range(500)]
KV, BIG, SMALL, SWA = pool("kv", 100), pool("big", 50), pool("small", 5), pool("swa", 1)


def test_an_empty_store_is_asked_one_chunk_of_one_pool() -> None:
    ask = Asked({"kv": set(), "big": set(), "swa": set()})
    questions = [Question(KV, ALL), Question(BIG, ALL), Question(SWA, TRAILING)]
    result = query(KEYS, questions, ask)
    assert result.kv_hit_pages == 0
    assert ask.calls == [{"kv": 64}]
    assert result.extra_pool_hit_pages == {"kv": 0}, "pools that were not asked have no verdict"


def test_few_keys_are_asked_in_one_call_of_all_pools_where_a_call_costs_more_than_keys() -> None:
    questions = [Question(KV, ALL), Question(BIG, ALL), Question(SWA, TRAILING)]
    for stored, hit in ((30, 30), (0, 0)):
        ask = Asked({"kv": set(KEYS[:stored]), "big": set(KEYS), "swa": set(KEYS)})
        assert query(KEYS[:40], questions, ask, together=120).kv_hit_pages == hit
        assert ask.calls == [{"kv": 40, "big": 40, "swa": 40}]
    ask = Asked({"kv": set(), "big": set(), "swa": set()})
    query(KEYS[:41], questions, ask, together=120)
    assert ask.calls == [{"kv": 41}]


def test_without_kv_the_smallest_pool_of_all_pages_leads() -> None:
    ask = Asked({"big": set(), "small": set(), "swa": set()})
    query(KEYS, [Question(BIG, ALL), Question(SMALL, ALL), Question(SWA, TRAILING)], ask)
    assert ask.calls == [{"small": 64}]


def test_chunks_grow_and_the_others_are_asked_in_one_call_inside_the_run() -> None:
    ask = Asked({"kv": set(KEYS[:330]), "big": set(KEYS), "swa": set(KEYS)})
    result = query(KEYS, [Question(KV, ALL), Question(BIG, ALL), Question(SWA, TRAILING)], ask)
    assert ask.calls == [{"kv": 64}, {"kv": 256}, {"kv": 180}, {"big": 330, "swa": 330}]
    assert result.kv_hit_pages == 330


def test_without_a_pool_of_all_pages_every_page_is_asked_in_one_call() -> None:
    ask = Asked({"swa": set(KEYS[7:9])})
    result = query(KEYS, [Question(SWA, TRAILING, window=2)], ask)
    assert ask.calls == [{"swa": 500}]
    assert result.restorable_prefix_pages == [9]


def test_block_groups_are_asked_over_the_whole_span() -> None:
    ask = Asked({"kv": set(), "big": set(KEYS)})
    result = query(KEYS, [Question(KV, ALL), Question(BIG, GROUPS, 1, 10, 2)], ask)
    assert result.kv_hit_pages == 0
    assert result.extra_pool_hit_pages["big"] == 500


def test_no_physical_pool_has_nothing_to_restore() -> None:
    assert query(KEYS, [], Asked({})).kv_hit_pages == 0


def test_no_keys_ask_nothing() -> None:
    ask = Asked({"kv": set()})
    result = query([], [Question(KV, ALL)], ask)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])


presence = st.lists(st.booleans(), min_size=90, max_size=90)


@given(kv=presence, big=presence, swa=presence, window=st.integers(1, 4), lead=st.integers(0, 90))
def test_staged_asking_gives_the_prefixes_of_asking_everything(
    kv: list[bool], big: list[bool], swa: list[bool], window: int, lead: int
) -> None:
    keys = KEYS[:90]
    kv = [True] * lead + kv[lead:]
    masks = {"kv": kv, "big": big, "swa": swa}
    ask = Asked({n: {k for k, p in zip(keys, m, strict=True) if p} for n, m in masks.items()})
    questions = [Question(KV, ALL), Question(BIG, ALL), Question(SWA, TRAILING, window)]
    whole = fold(90, [question.presence(masks[question.pool.name]) for question in questions])
    for together in (0, 1000):
        staged = query(keys, questions, ask, together=together)
        assert staged.restorable_prefix_pages == whole.restorable_prefix_pages
        assert staged.kv_hit_pages == whole.kv_hit_pages
