"""The client's page size and watermarks, from the sizes of the objects that it will hold.

The client gives an object whole pages of its memory. With its own default, 64 KB to 2 MB by
mode, 64 MB held 32 to 1,024 objects of 34,560 bytes; with pages of that size, 1,941.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST_PAGE_BYTES = 8 << 10
"""Smaller pages are copied slower: measured, 4 KB halve a get of 786,240 bytes."""

MOST_WASTE = 0.04
"""Part of its memory that an object of any pool may waste. Of any, since a store may hold
many pages of one pool and few of another."""

HIGHEST = 0.97
"""The client evicts when a put has filled more than this part of its memory, ..."""

STEP = 0.01
"""... and stops when it has given back this part. So a full store stays full."""


def page_bytes(objects: Sequence[int]) -> int:
    """The page size for objects of these sizes, all in bytes; 0 (the default) for none.

    The largest that wastes little: a whole part of one of the sizes. Objects smaller than a
    page should be are only looked at where there are no others.
    """
    if not objects:
        return 0
    objects = [size for size in objects if size >= LEAST_PAGE_BYTES] or objects
    candidates = {
        -(-size // parts)
        for size in objects
        for parts in range(1, max(1, size // LEAST_PAGE_BYTES) + 1)
    }
    good = [page for page in candidates if waste(page, objects) <= MOST_WASTE]
    return max(good, default=min(candidates, key=lambda page: (waste(page, objects), page)))


def waste(page: int, objects: Sequence[int]) -> float:
    """The largest part of an object's memory that is lost with this page size."""
    return max(1 - size / (-(-size // page) * page) for size in objects)


def watermarks(capacity: int, page: int, objects: Sequence[int]) -> tuple[float, float]:
    """The high and the low watermark, as parts of ``capacity`` bytes.

    The client evicts at the end of a put that passed the high one, and only then: below it, a
    put that finds no space fails for ever. So the largest object must fit above it.
    """
    if not page or not objects:
        return HIGHEST, HIGHEST - STEP
    largest = max(-(-size // page) * page for size in objects)
    last_that_leaves_room = capacity // page * page - largest + page / 2
    high = max(STEP, min(HIGHEST, last_that_leaves_room / capacity))
    return high, max(STEP / 2, high - STEP)
