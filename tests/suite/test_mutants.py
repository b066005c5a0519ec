"""Every deliberately broken backend fails the test that is there for its fault.

A crash does not count, nor does an error before or after the test, nor another test's failure;
and the unbroken reference passes the very same run.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from hicache_shared.testing import BackendSuite
from tests.suite.inner import REFERENCE, Phase, class_of, run
from tests.suite.mutants import MUTANTS, Mutant
from tests.suite.table import DOCUMENT, with_table

pytestmark = pytest.mark.backend("memory")

Phases = dict[str, list[Phase]]


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> Phases:
    """What each phase of each run gave, by class and run."""
    found: Phases = defaultdict(list)
    for phase in run(tmp_path_factory.mktemp("mutants")):
        found[phase.test].append(phase)
    return found


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_is_killed_by_the_test_for_its_fault(phases: Phases, mutant: Mutant) -> None:
    found = phases[f"{class_of(mutant)}::{mutant.killed_by}"]
    assert [phase.when for phase in found] == ["setup", "call", "teardown"], "no such test"
    setup, call, teardown = found
    assert (setup.outcome, setup.message) == ("passed", "")
    assert (teardown.outcome, teardown.message) == ("passed", "")
    assert call.outcome == "failed", f"{mutant.killed_by} does not see it: {mutant.wrong}"
    assert call.raised in mutant.raises, f"{call.raised}: {call.message}"


@pytest.mark.parametrize("killed_by", sorted({mutant.killed_by for mutant in MUTANTS}))
def test_the_reference_passes_what_kills_a_mutant(phases: Phases, killed_by: str) -> None:
    found = phases[f"{REFERENCE}::{killed_by}"]
    assert [(phase.when, phase.outcome, phase.message) for phase in found] == [
        (when, "passed", "") for when in ("setup", "call", "teardown")
    ]


def test_there_are_many_mutants_of_different_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 35


def test_the_tests_that_kill_mutants_are_the_suites_own() -> None:
    assert {m.test for m in MUTANTS if not hasattr(BackendSuite, m.test)} == set()


def test_the_documentation_lists_every_mutant_with_its_test() -> None:
    written = DOCUMENT.read_text()
    assert written == with_table(written), "run python -m tests.suite.table"
