"""The part of the suite that sees to the whole suite being there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from hicache_shared.testing.suite.fixtures import SuiteFixtures

REASON = "__overrides_because__"

Test = TypeVar("Test", bound=Callable[..., object])


def overrides(reason: str) -> Callable[[Test], Test]:
    """Marks a test or fixture of a backend that stands in for one of the suite, and says why.

    Raises:
        ValueError: there is no reason.
    """
    if not reason.strip():
        raise ValueError("an override of the suite needs a reason")

    def mark(test: Test) -> Test:
        setattr(test, REASON, reason)
        return test

    return mark


class GuardSuite(SuiteFixtures):
    """A suite with parts taken out says so by failing."""

    def test_no_test_is_dropped_and_none_overridden_without_a_reason(self) -> None:
        problems = list(alterations(type(self)))
        assert not problems, "\n".join(problems)


def alterations(cls: type) -> Iterator[str]:
    """What a class changed of the suite without saying why, one sentence each."""
    for part in cls.__mro__:
        if not _is_of_the_suite(part):
            continue
        for name, original in vars(part).items():
            if name.startswith("__") or name == "harness_type":
                continue
            found = getattr(cls, name)
            if found is None:
                yield f"{name} is dropped: remove `{name} = None`"
            elif found is not original and not _is_explained(cls, name):
                yield f"{name} is overridden without a reason: put @overrides('...') above it"


def _is_of_the_suite(part: type) -> bool:
    return part.__module__.startswith("hicache_shared.testing.suite")


def _is_explained(cls: type, name: str) -> bool:
    """Whether the first class that has the name is of the suite, or says why it has it."""
    for part in cls.__mro__:
        if name in vars(part):
            return _is_of_the_suite(part) or hasattr(vars(part)[name], REASON)
    return False
