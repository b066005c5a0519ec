"""Prompts that end just before, at and just after the end of a page."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_TOKEN = 3
"""Models keep the first ids for marks such as "begin" and "end"."""


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        name: for people.
        tokens: ids.
    """

    name: str
    tokens: tuple[int, ...]


def boundary_lengths(page: int, pages: Sequence[int]) -> list[int]:
    """Lengths in tokens around the end of the m-th page, for each m in ``pages``: one less, the
    end itself, and one more; each once, in order, and none without a token."""
    lengths = {page * count + more for count in pages for more in (-1, 0, 1)}
    return sorted(length for length in lengths if length > 0)


def boundary_prompts(
    page: int, pages: Sequence[int], *, vocabulary: int, seed: str, text: Sequence[int] = ()
) -> list[Prompt]:
    """One prompt a boundary length.

    No two of them, of one seed or of several, begin with the same page, so that none finds
    what another one stored.

    Args:
        page: tokens a page.
        pages: the ends of which pages to look at, counted from 1.
        vocabulary: ids are below it.
        seed: what makes the prompts of this run its own.
        text: ids of a text. Where given, a prompt is a few random ids and then a part of it: real
            text is what a model predicts with confidence, and so repeats.
    """
    return [
        Prompt(_name(length, page), _tokens(length, vocabulary, f"{seed}/{length}", text))
        for length in boundary_lengths(page, pages)
    ]


def _tokens(length: int, vocabulary: int, seed: str, text: Sequence[int]) -> tuple[int, ...]:
    chance = random.Random(seed)
    mark = min(length, MARK_TOKENS) if text else length
    drawn = [chance.randrange(FIRST_TOKEN, vocabulary) for _ in range(mark)]
    begin = chance.randrange(len(text)) if text else 0
    copied = [text[(begin + place) % len(text)] for place in range(length - mark)]
    return tuple(drawn + copied)


MARK_TOKENS = 8
"""Random ids before a text: 8 of a vocabulary of 500 are 71 bits."""


def _name(length: int, page: int) -> str:
    pages, more = divmod(length + 1, page)
    return f"{length} tokens ({pages} x {page} {'- 1' if more == 0 else f'+ {more - 1}'})"
