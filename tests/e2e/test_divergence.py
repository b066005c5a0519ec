"""How far two runs are apart, held to whole distributions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.divergence import Bounds, Step, compare, kl

WORDS = 6
DISTRIBUTIONS = st.lists(st.integers(1, 1000), min_size=WORDS, max_size=WORDS).map(
    lambda weights: [weight / sum(weights) for weight in weights]
)


def top(distribution: list[float], count: int) -> dict[int, float]:
    order = sorted(range(WORDS), key=lambda word: -distribution[word])
    return {word: math.log(distribution[word]) for word in order[:count]}


@given(p=DISTRIBUTIONS, q=DISTRIBUTIONS)
def test_with_all_words_it_is_the_divergence(p: list[float], q: list[float]) -> None:
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert kl(top(p, WORDS), top(q, WORDS)) == pytest.approx(exact, abs=1e-5)


@given(p=DISTRIBUTIONS, q=DISTRIBUTIONS, count=st.integers(0, WORDS))
def test_with_the_likeliest_words_it_is_never_more(
    p: list[float], q: list[float], count: int
) -> None:
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert 0 <= kl(top(p, count), top(q, count)) <= exact + 1e-5


@given(p=DISTRIBUTIONS, count=st.integers(0, WORDS))
def test_of_a_distribution_from_itself_it_is_nothing(p: list[float], count: int) -> None:
    assert kl(top(p, count), top(p, count)) == pytest.approx(0, abs=1e-6)


def test_other_likeliest_words_are_far_apart() -> None:
    assert kl({1: math.log(0.9)}, {2: math.log(0.9)}) > 1.5
    first, second = {1: math.log(0.9), 2: math.log(0.05)}, {1: math.log(0.05), 2: math.log(0.9)}
    assert kl(first, second) > 2


def run(*tokens: int, logprob: float = -0.5) -> list[Step]:
    return [Step(token, logprob, {token: logprob}) for token in tokens]


def test_the_same_run_is_the_same() -> None:
    difference = compare(run(1, 2, 3), run(1, 2, 3))
    assert difference.first is None
    assert difference.within(Bounds(kl=0, logprob=0))


@pytest.mark.parametrize(
    ("other", "first"), [((1, 9, 3), 1), ((9, 2, 3), 0), ((1, 2), 2), ((1, 2, 3, 4), 3), ((), 0)]
)
def test_another_token_or_length_is_a_difference(other: tuple[int, ...], first: int) -> None:
    difference = compare(run(1, 2, 3), run(*other))
    assert difference.first == first
    assert not difference.within(Bounds(kl=99, logprob=99))


def test_what_comes_after_another_token_is_not_compared() -> None:
    first, second = run(1, 2, 3), [*run(1, 9), Step(3, -50.0, {3: -50.0})]
    assert compare(first, second).logprob == 0


def test_a_logprob_that_moves_too_far_is_a_difference() -> None:
    difference = compare(run(1, 2), run(1, 2, logprob=-0.7))
    assert difference.logprob == pytest.approx(0.2)
    assert difference.within(Bounds(kl=1, logprob=0.3))
    assert not difference.within(Bounds(kl=1, logprob=0.1))


def test_distributions_that_move_too_far_are_a_difference() -> None:
    sure = [Step(1, -0.1, {1: math.log(0.9), 2: math.log(0.05)})]
    less = [Step(1, -0.1, {1: math.log(0.5), 2: math.log(0.45)})]
    difference = compare(sure, less)
    assert difference.kl > 0.3
    assert not difference.within(Bounds(kl=0.1, logprob=1))
