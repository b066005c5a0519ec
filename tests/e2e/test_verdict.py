"""Verdicts, and the exit code of a run."""

from __future__ import annotations

import pytest

from tests.e2e.accounting import Cached, Rule
from tests.e2e.divergence import Bounds, Difference
from tests.e2e.verdict import ExitCode, Judge, Judged, Verdict, exit_code

SAME = Difference(None, 0.0, 0.0)
OTHER = Difference(3, 0.0, 0.0)
FAR = Difference(None, 0.5, 0.0)
JUDGE = Judge(Rule(16, threshold=16), Bounds(), "UcmBackend")
WHOLE = Cached(storage=48, backend="UcmBackend")


def verdict(
    seen: Difference = SAME, cached: Cached = WHOLE, controls: tuple[Difference, ...] = (SAME,)
) -> Verdict:
    return JUDGE.verdict(49, controls, seen, cached)[0]


def test_the_same_output_with_the_expected_tokens_is_from_storage() -> None:
    assert verdict() is Verdict.FROM_STORAGE


@pytest.mark.parametrize("seen", [OTHER, FAR, Difference(None, 0.0, 0.5)])
def test_another_output_differs_wherever_it_came_from(seen: Difference) -> None:
    assert verdict(seen) is Verdict.DIFFERS
    assert verdict(seen, Cached()) is Verdict.DIFFERS


@pytest.mark.parametrize(
    "cached",
    [
        Cached(),
        Cached(device=48, backend="UcmBackend"),
        Cached(host=48, backend="UcmBackend"),
        Cached(storage=32, backend="UcmBackend"),
        Cached(storage=64, backend="UcmBackend"),
        Cached(device=16, storage=48, backend="UcmBackend"),
        Cached(storage=48, backend="HiCacheFile"),
        Cached(storage=48),
    ],
)
def test_the_same_output_from_elsewhere_is_not_from_storage(cached: Cached) -> None:
    assert verdict(cached=cached) is Verdict.NOT_FROM_STORAGE


def test_a_prompt_without_a_page_has_nothing_to_restore() -> None:
    judge = Judge(JUDGE.rule, JUDGE.bounds, "UcmBackend")
    assert judge.verdict(15, (SAME,), SAME, Cached())[0] is Verdict.FROM_STORAGE


@pytest.mark.parametrize("seen", [SAME, OTHER])
@pytest.mark.parametrize("cached", [WHOLE, Cached()])
@pytest.mark.parametrize("controls", [(OTHER,), (SAME, FAR)])
def test_what_the_engine_does_not_repeat_says_nothing(
    seen: Difference, cached: Cached, controls: tuple[Difference, ...]
) -> None:
    assert verdict(seen, cached, controls) is Verdict.UNREPEATABLE


def test_the_reason_names_what_came_and_what_was_expected() -> None:
    _, why = JUDGE.verdict(49, (), SAME, Cached(storage=32, backend="UcmBackend"))
    assert why == (
        "storage 32, host 0, device 0 by UcmBackend; expected 48 from storage by UcmBackend"
    )


def judged(verdict: Verdict, counts: bool = True) -> Judged:
    return Judged("a prompt", "then", verdict, "", counts)


GOOD = judged(Verdict.FROM_STORAGE)


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([GOOD], ExitCode.GOOD),
        ([GOOD, judged(Verdict.UNREPEATABLE)], ExitCode.GOOD),
        ([GOOD, judged(Verdict.NOT_FROM_STORAGE)], ExitCode.NOT_FROM_STORAGE),
        ([judged(Verdict.NOT_FROM_STORAGE), judged(Verdict.DIFFERS), GOOD], ExitCode.DIFFERS),
        ([judged(Verdict.UNREPEATABLE)], ExitCode.INCONCLUSIVE),
        ([judged(Verdict.FROM_STORAGE, counts=False)], ExitCode.INCONCLUSIVE),
        ([], ExitCode.INCONCLUSIVE),
    ],
)
def test_the_exit_code_is_that_of_the_worst_finding(found: list[Judged], code: ExitCode) -> None:
    assert exit_code(found) is code


def test_exit_codes_are_distinct_and_stable() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "GOOD": 0,
        "DIFFERS": 1,
        "USAGE": 2,
        "NO_ENGINE": 3,
        "NOT_FROM_STORAGE": 4,
        "INCONCLUSIVE": 5,
    }
