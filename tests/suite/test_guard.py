"""What the guard sees: parts of the suite taken out or changed without a reason."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hicache_shared.contract import HiCacheStorage, HiCacheStorageConfig
from hicache_shared.errors import ConfigError
from hicache_shared.testing import BackendSuite, Capabilities, Harness, overrides
from hicache_shared.testing.reference import MemoryHarness
from hicache_shared.testing.suite.guard import (
    METHODS,
    GuardSuite,
    alterations,
    missing_methods,
)

TEST = "test_case_13_one_absent_page_leaves_its_neighbours_whole"


def suite(*bases: type, **members: Any) -> type[BackendSuite]:
    """A backend's test class with some members of its own."""
    members["harness_type"] = MemoryHarness
    return type("TestMine", (*bases, BackendSuite), members)


def test_a_subclass_that_only_names_its_harness_is_whole() -> None:
    assert list(alterations(suite())) == []


def test_more_tests_and_helpers_change_nothing() -> None:
    def test_of_my_own(self: object) -> None:
        pass

    mine = suite(test_of_my_own=test_of_my_own, helper=1, pytestmark=[pytest.mark.backend("mine")])
    assert list(alterations(mine)) == []


def test_a_test_that_is_set_to_none_is_dropped() -> None:
    assert list(alterations(suite(**{TEST: None}))) == [
        f"{TEST} is dropped: remove `{TEST} = None`"
    ]


def test_an_overridden_test_needs_a_reason() -> None:
    def easier(self: object) -> None:
        pass

    problem = f"{TEST} is overridden without a reason: put @overrides('...') above it"
    assert list(alterations(suite(**{TEST: easier}))) == [problem]
    with_reason = overrides("the client has one page a call")(easier)
    assert list(alterations(suite(**{TEST: with_reason}))) == []


@pytest.mark.parametrize("reason", ["", "  ", "\n"])
def test_an_empty_reason_is_refused(reason: str) -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        overrides(reason)


def test_a_reason_that_was_forgotten_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"needs a reason: @overrides"):
        overrides(suite)  # type: ignore[arg-type]


def narrow_pair(reason: str | None) -> Any:
    """A fixture over one model, with or without a reason."""

    def pair(self: object, request: pytest.FixtureRequest) -> object:
        return request.param

    function = pair if reason is None else overrides(reason)(pair)
    return pytest.fixture(params=[("mla", "page_first")])(function)


def test_a_fixture_that_is_narrowed_needs_a_reason() -> None:
    problem = "pair is overridden without a reason: put @overrides('...') above it"
    assert list(alterations(suite(pair=narrow_pair(None)))) == [problem]
    assert list(alterations(suite(pair=narrow_pair("only MLA is served")))) == []


def test_a_reason_may_stand_above_or_below_the_fixture() -> None:
    above = overrides("only MLA is served")(narrow_pair(None))
    assert list(alterations(suite(pair=above))) == []


def test_a_fixture_of_the_suite_that_is_no_fixture_any_more_is_seen() -> None:
    problem = "keys is overridden without a reason: put @overrides('...') above it"
    assert list(alterations(suite(keys=["a", "b"]))) == [problem]


def test_what_a_mixin_changes_is_seen() -> None:
    class Mixin:
        def test_case_13_one_absent_page_leaves_its_neighbours_whole(self) -> None:
            pass

    (problem,) = alterations(suite(Mixin))
    assert problem.startswith(f"{TEST} is overridden")
    assert list(alterations(type("TestSub", (suite(Mixin),), {}))) == [problem]
    explained = type("Mixin", (), {TEST: overrides("why")(vars(Mixin)[TEST])})
    assert list(alterations(suite(explained))) == []


def test_a_mixin_of_the_suite_stays_itself_behind_others() -> None:
    """Parts of the suite that a class names again, in another order, are no overrides."""
    mixin = type("Mixin", (GuardSuite,), {})
    assert list(alterations(type("TestMine", (BackendSuite, mixin), {}))) == []


def test_a_reason_is_not_inherited_by_another_override() -> None:
    explained = suite(**{TEST: overrides("why")(lambda self: None)})
    again = type("TestAgain", (explained,), {TEST: lambda self: None})
    (problem,) = alterations(again)
    assert problem.startswith(f"{TEST} is overridden")


def generate(self: object, metafunc: object) -> None:
    pass


def test_a_class_that_generates_tests_itself_is_seen() -> None:
    assert list(alterations(suite(pytest_generate_tests=generate))) == [
        "TestMine.pytest_generate_tests changes which tests run: remove it"
    ]


def test_a_file_that_generates_tests_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "pytest_generate_tests", generate, raising=False)
    (problem,) = alterations(suite(__module__=__name__))
    assert problem.endswith("pytest_generate_tests changes which tests run: remove it")


@pytest.mark.parametrize("name", [name for name in vars(GuardSuite) if name.startswith("test_")])
def test_the_guard_itself_cannot_be_taken_out(name: str) -> None:
    with pytest.raises(TypeError, match=f"TestMine: {name} cannot be overridden"):
        suite(**{name: None})
    with pytest.raises(TypeError, match="Mixin"):
        suite(type("Mixin", (), {name: overrides("why")(lambda self: None)}))


def test_a_harness_of_the_reference_has_what_it_says() -> None:
    assert list(missing_methods(MemoryHarness)) == []


@pytest.mark.parametrize("capability", METHODS)
def test_a_capability_without_its_methods_is_named(capability: str) -> None:
    class Claims(Harness):
        capabilities = Capabilities(**{capability: True})  # type: ignore[arg-type]

        def make(self, config: HiCacheStorageConfig) -> HiCacheStorage:
            raise NotImplementedError

    problems = list(missing_methods(Claims))
    assert problems == [
        f"Claims says {capability}=True: define {method}(), or leave the capability off"
        for method in METHODS[capability]
    ]


def test_an_unknown_capability_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="'quick'"):
        Capabilities(quick=True)  # type: ignore[call-arg]


def test_a_field_of_the_identity_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'model'.*model_id"):
        Capabilities(identity=("model",))


def test_capabilities_are_frozen_and_off_unless_said() -> None:
    capabilities = Capabilities()
    assert not any(getattr(capabilities, name) for name in Capabilities.__slots__)
    with pytest.raises(AttributeError):
        capabilities.raw = True  # type: ignore[misc]


def test_no_part_of_the_suite_hides_a_test_of_another() -> None:
    names = [
        name for part in BackendSuite.__mro__ for name in vars(part) if name.startswith("test_")
    ]
    assert sorted(set(names)) == sorted(names)
