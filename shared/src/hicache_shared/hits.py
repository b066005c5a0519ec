"""The hit query: which prefixes of a chain can be restored from every pool.

A cold prompt is cheap: one gating pool is asked first, in growing chunks, and the others
only inside the run that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hicache_shared.contract import (
    BLOCK_GROUPS,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from hicache_shared.errors import TransferError
from hicache_shared.fold import Mask, PoolPresence, fold
from hicache_shared.plan import RegisteredPool

FIRST_CHUNK_PAGES = 64
CHUNK_GROWTH = 4

HIT_POLICIES = frozenset({"all_pages", "trailing_pages", BLOCK_GROUPS})

Ask = Callable[[list[tuple[RegisteredPool, Sequence[str]]]], list[Mask]]
"""Whether each page of each (pool, keys) is stored; a mask ``bool[len(keys)]`` each."""


@dataclass(frozen=True, slots=True)
class Question:
    """One pool of a hit query, with the rule by which it counts."""

    pool: RegisteredPool
    policy: PoolHitPolicy
    window: int = 1
    block_pages: int = 0
    group_pages: int = 0

    @classmethod
    def of(cls, transfer: PoolTransfer, pool: RegisteredPool) -> Question:
        """In a hit query a transfer's keys are placeholders: only their number counts.

        Raises:
            TransferError: the policy is unknown.
        """
        policy, window = transfer.hit_policy, max(1, len(transfer.keys or ()))
        if policy not in HIT_POLICIES:
            raise TransferError(
                f"pool {pool.name!r}: expected a hit policy of {sorted(HIT_POLICIES)}, "
                f"got {policy!r}"
            )
        if policy != BLOCK_GROUPS:
            return cls(pool, policy, window)
        return cls(pool, policy, window, transfer.block_pages, transfer.group_pages)

    def presence(self, present: Sequence[bool] | Mask) -> PoolPresence:
        return PoolPresence(
            self.pool.name, present, self.policy, self.window, self.block_pages, self.group_pages
        )


def query(
    keys: Sequence[str], questions: Sequence[Question], ask: Ask, *, together: int = 0
) -> PoolTransferResult:
    """The restorable prefixes of ``keys`` over the given pools, which are all physical.

    Up to ``together`` keys of all pools are asked about in one call.

    Pools that were not asked, since the leading pool has nothing, are left out of
    ``extra_pool_hit_pages``: no verdict.
    """
    known: dict[str, Mask] = {}
    leader = None if len(keys) * len(questions) <= together else _leader(questions)
    if leader is None:
        run = len(keys)
    else:
        run = _leading_run(keys, leader.pool, ask)
        known[leader.pool.name] = np.ones(run, dtype=np.bool_)
    followers: dict[str, tuple[RegisteredPool, Sequence[str]]] = {}
    for question in questions:
        span = keys if question.policy == BLOCK_GROUPS else keys[:run]
        name = question.pool.name
        if name not in known and len(span) > len(followers.get(name, (None, ()))[1]):
            followers[name] = (question.pool, span)
    answers = ask(list(followers.values())) if followers else []
    known.update(zip(followers, answers, strict=True))
    asked = [question for question in questions if question.pool.name in known]
    if asked and all(_whole(question, known, len(keys)) for question in asked):
        return PoolTransferResult(len(keys), dict.fromkeys(known, len(keys)), _up_to(len(keys)))
    return fold(len(keys), [question.presence(known[question.pool.name]) for question in asked])


def _whole(question: Question, known: Mapping[str, Mask], pages: int) -> bool:
    """Whether a gating pool has every page: then no rule cuts anything, and folding is saved."""
    present = known[question.pool.name]
    return question.policy != BLOCK_GROUPS and present.size == pages and bool(present.all())


def _up_to(pages: int) -> list[int]:
    return list(range(1, pages + 1))


def _leader(questions: Sequence[Question]) -> Question | None:
    """The pool to ask first: KV where it has bytes, else the smallest that needs every page."""
    candidates = [q for q in questions if q.policy == PoolHitPolicy.ALL_PAGES]
    for candidate in candidates:
        if candidate.pool.name == "kv":
            return candidate
    return min(candidates, key=lambda q: q.pool.page_bytes, default=None)


def _leading_run(keys: Sequence[str], pool: RegisteredPool, ask: Ask) -> int:
    """How many pages from the start ``pool`` has without a gap."""
    run = 0
    chunk = FIRST_CHUNK_PAGES
    while run < len(keys):
        part = keys[run : run + chunk]
        (present,) = ask([(pool, part)])
        if not present.all():
            return run + int(np.argmin(present))
        run += len(part)
        chunk *= CHUNK_GROWTH
    return run
