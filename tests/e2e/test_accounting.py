"""Lengths at page ends, and how many tokens should come from the storage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.accounting import AccountingError, Cached, Rule
from tests.e2e.prompts import FIRST_TOKEN, boundary_lengths, boundary_prompts

PAGES = st.integers(1, 300)
LENGTHS = st.integers(1, 5000)


def test_lengths_are_just_before_at_and_just_after_a_page_end() -> None:
    assert boundary_lengths(64, [1, 3]) == [63, 64, 65, 191, 192, 193]


def test_a_length_is_there_once_and_none_is_empty() -> None:
    assert boundary_lengths(1, [1, 2]) == [1, 2, 3]


@given(page=PAGES, tokens=LENGTHS)
def test_the_expected_count_is_the_most_whole_pages_that_leave_a_token(
    page: int, tokens: int
) -> None:
    counts = [pages * page for pages in range(tokens) if pages * page < tokens]
    assert Rule(page, threshold=0).from_storage(tokens) == max(counts)


@given(page=PAGES, pages=st.integers(1, 20))
def test_a_prompt_that_ends_with_its_page_restores_one_page_less(page: int, pages: int) -> None:
    rule = Rule(page, threshold=0)
    assert rule.from_storage(page * pages + 1) == page * pages
    assert rule.from_storage(page * pages) == page * (pages - 1)


@pytest.mark.parametrize(("tokens", "expected"), [(256, 0), (257, 256), (320, 256), (321, 320)])
def test_below_the_threshold_nothing_is_looked_up(tokens: int, expected: int) -> None:
    assert Rule(64).from_storage(tokens) == expected


@given(page=PAGES, tokens=LENGTHS, times=st.integers(1, 8))
def test_a_model_with_states_restores_up_to_the_last_one_or_nothing(
    page: int, tokens: int, times: int
) -> None:
    step = page * times
    kept = max(end for end in range(0, tokens + 1, step))
    expected = Rule(page, threshold=0, states=step).from_storage(tokens)
    assert expected == (kept if kept < tokens else 0)


def test_tiers_are_read_from_an_answer() -> None:
    details = {"device": 16, "host": 0, "storage": 48, "storage_backend": "UcmBackend"}
    meta = {"cached_tokens": 64, "cached_tokens_details": details}
    assert Cached.of(meta) == Cached(16, 0, 48, "UcmBackend")
    assert Cached.of({"cached_tokens": 0, "cached_tokens_details": None}) == Cached()


def test_tiers_that_do_not_add_up_are_an_error() -> None:
    meta = {"cached_tokens": 64, "cached_tokens_details": {"device": 16, "host": 0, "storage": 0}}
    with pytest.raises(AccountingError, match="counts 64 cached tokens, and its tiers 16"):
        Cached.of(meta)


@given(page=st.integers(8, 64), seeds=st.lists(st.text(max_size=3), min_size=2, unique=True))
def test_no_two_prompts_begin_with_the_same_page(page: int, seeds: list[str]) -> None:
    prompts = [
        prompt
        for seed in seeds
        for text in ((), (1, 2, 3))
        for prompt in boundary_prompts(
            page, [2, 5], vocabulary=32000, seed=seed + str(text), text=text
        )
    ]
    assert len({prompt.tokens[:page] for prompt in prompts}) == len(prompts)


def test_a_seed_gives_the_same_prompts_again() -> None:
    first, second = (boundary_prompts(16, [1, 4], vocabulary=500, seed="a") for _ in range(2))
    assert first == second
    assert [len(prompt.tokens) for prompt in first] == [15, 16, 17, 63, 64, 65]
    assert all(FIRST_TOKEN <= token < 500 for prompt in first for token in prompt.tokens)
    assert first[0].name == "15 tokens (1 x 16 - 1)"
    assert first[5].name == "65 tokens (4 x 16 + 1)"


def test_a_text_is_what_follows_a_few_drawn_tokens() -> None:
    text = tuple(range(1000, 1100))
    (prompt, *_) = boundary_prompts(16, [4], vocabulary=500, seed="a", text=text)
    copied = prompt.tokens[8:]
    begin = text.index(copied[0])
    assert copied == tuple((text + text)[begin : begin + 55])
