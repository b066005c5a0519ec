"""The part of the suite that sees to the whole suite being there."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hicache_shared.pytest_plugin.report import REASON
from hicache_shared.testing.harness import Harness
from hicache_shared.testing.suite.fixtures import SuiteFixtures

SUITE = "hicache_shared.testing.suite"

Test = TypeVar("Test", bound=Callable[..., object])


def overrides(reason: str) -> Callable[[Test], Test]:
    """Marks a test or fixture of a backend that stands in for one of the suite, and says why.

    Raises:
        ValueError: there is no reason.
    """
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError("an override of the suite needs a reason: @overrides('...')")

    def mark(test: Test) -> Test:
        setattr(test, REASON, reason)
        return test

    return mark


class GuardSuite(SuiteFixtures):
    """A suite with parts taken out, or a harness without what it claims, says so by failing."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """The guard itself cannot be changed: nothing would be left to say so.

        Raises:
            TypeError: a class has one of the guard's tests.
        """
        super().__init_subclass__(**kwargs)
        for part in cls.__mro__:
            for name in [] if _is_of_the_suite(part) else GUARDS:
                if name in vars(part):
                    raise TypeError(f"{part.__name__}: {name} cannot be overridden; remove it")

    def test_no_test_is_dropped_and_none_overridden_without_a_reason(self) -> None:
        problems = list(alterations(type(self)))
        assert not problems, "\n".join(problems)

    def test_the_harness_has_what_it_says_it_has(self) -> None:
        problems = list(missing_methods(self.harness_type))
        assert not problems, "\n".join(problems)


GUARDS = tuple(name for name in vars(GuardSuite) if name.startswith("test_"))

METHODS = {
    "raw": ("raw_keys", "raw_get", "raw_put", "raw_delete"),
    "limited": ("make_limited",),
    "faults": ("fault",),
    "hold": ("hold",),
    "relief": ("make_limited", "relieve"),
    "processes": ("elsewhere",),
    "server": ("own_server",),
}
"""What a harness must define itself for each capability."""


def alterations(cls: type) -> Iterator[str]:
    """What a class changed of the suite without saying why, one sentence each."""
    for name, original in _members_of_the_suite(cls).items():
        found = inspect.getattr_static(cls, name, None)
        if found is None:
            yield f"{name} is dropped: remove `{name} = None`"
        elif found is not original and not hasattr(found, REASON):
            yield f"{name} is overridden without a reason: put @overrides('...') above it"
    for part in cls.__mro__:
        if "pytest_generate_tests" in vars(part):
            yield f"{part.__name__}.pytest_generate_tests changes which tests run: remove it"
    if hasattr(sys.modules.get(cls.__module__), "pytest_generate_tests"):
        yield f"{cls.__module__}.pytest_generate_tests changes which tests run: remove it"


def missing_methods(harness_type: type[Harness]) -> Iterator[str]:
    """What a harness says that it has and has not, one sentence each."""
    for capability, methods in METHODS.items():
        if not getattr(harness_type.capabilities, capability):
            continue
        for method in methods:
            if getattr(harness_type, method) is getattr(Harness, method):
                yield (
                    f"{harness_type.__name__} says {capability}=True: "
                    f"define {method}(), or leave the capability off"
                )


def _members_of_the_suite(cls: type) -> dict[str, object]:
    """What the suite's classes define, as the first of them has it."""
    members: dict[str, object] = {}
    for part in cls.__mro__:
        if _is_of_the_suite(part):
            members = {**vars(part), **members}
    return {name: member for name, member in members.items() if not name.startswith("__")}


def _is_of_the_suite(part: type) -> bool:
    return part.__module__ == SUITE or part.__module__.startswith(f"{SUITE}.")
