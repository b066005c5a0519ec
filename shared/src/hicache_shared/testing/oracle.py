"""Which prefixes can be restored, by the definitions alone: slow, plain, and not the fold."""

from __future__ import annotations

from collections.abc import Mapping


def restorable_prefixes(
    pages: int, present: Mapping[str, set[int]], windows: Mapping[str, int]
) -> list[int]:
    """Prefix lengths, in pages, that every pool can serve.

    Args:
        pages: length of the chain.
        present: the pages that each gating pool holds.
        windows: the window, in pages, of each pool that needs only the last pages of a
            prefix; the others need all.
    """
    legal = []
    for length in range(1, pages + 1):
        needed = {
            name: range(max(0, length - windows[name]) if name in windows else 0, length)
            for name in present
        }
        if all(set(needed[name]) <= held for name, held in present.items()):
            legal.append(length)
    return legal
