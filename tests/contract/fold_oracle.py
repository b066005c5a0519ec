"""Legal prefixes by brute force, from the contract's definitions alone.

It imports nothing of the code it judges. A pool here is a plain tuple:
``(name, present, policy, window, block_pages, group_pages)`` with ``policy`` one of
``"all_pages"``, ``"trailing_pages"``, ``"block_groups"``.
"""

from __future__ import annotations

Pool = tuple[str, list[bool], str, int, int, int]


def has(present: list[bool], page: int) -> bool:
    """Pages that were not asked about are absent."""
    return page < len(present) and present[page]


def prefix_is_legal(pool: Pool, prefix: int) -> bool:
    _, present, policy, window, _, _ = pool
    first_needed = 0 if policy == "all_pages" else max(0, prefix - window)
    for page in range(first_needed, prefix):  # noqa: SIM110 - the definition, spelt out
        if not has(present, page):
            return False
    return True


def block_is_covered(pool: Pool, block: int) -> bool:
    _, present, _, _, block_pages, group_pages = pool
    end = (block + 1) * block_pages
    for page in range(end - group_pages, end):  # noqa: SIM110 - the definition, spelt out
        if not has(present, page):
            return False
    return True


def boundary(pages: int, pool: Pool) -> int:
    longest = 0
    if pool[2] == "block_groups":
        block_pages = pool[4]
        while longest + block_pages <= pages and block_is_covered(pool, longest // block_pages):
            longest += block_pages
        return longest
    for prefix in range(1, pages + 1):
        if prefix_is_legal(pool, prefix):
            longest = prefix
    return longest


def answer(pages: int, pools: list[Pool]) -> tuple[int, dict[str, int], list[int]]:
    """(kv_hit_pages, extra_pool_hit_pages, restorable_prefix_pages)."""
    gating = [pool for pool in pools if pool[2] != "block_groups"]
    restorable = [
        prefix
        for prefix in range(1, pages + 1)
        if gating and all(prefix_is_legal(pool, prefix) for pool in gating)
    ]
    boundaries: dict[str, int] = {}
    for pool in pools:
        own = boundary(pages, pool)
        name = pool[0]
        boundaries[name] = own if name not in boundaries else min(own, boundaries[name])
    return max(restorable, default=0), boundaries, restorable
