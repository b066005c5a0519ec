"""Runs the tests that are to find the mutants, each on its mutant and on the reference.

They run in a process of their own, where this is a plugin, so that no fault goes beyond that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from hicache_shared.testing import BackendSuite
from hicache_shared.testing.reference import MemoryHarness
from tests.suite.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
REFERENCE = "TestReference"


@dataclass(frozen=True, slots=True)
class Phase:
    """What pytest found in one phase of one test.

    Attributes:
        test: its class, name and parameters, with ``::`` between class and name.
        when: ``setup``, ``call`` or ``teardown``.
        outcome: ``passed``, ``failed`` or ``skipped``.
        raised: the type of the exception that ended it.
        message: its first line.
    """

    test: str
    when: str
    outcome: str
    raised: str
    message: str


def class_of(mutant: Mutant) -> str:
    """The name of its test class. What tests draw at random follows from names."""
    return "Test" + mutant.name.title().replace(" ", "")


def classes() -> dict[str, type[BackendSuite]]:
    """The suite on each mutant, and on the reference."""
    harnesses = {class_of(mutant): mutant.harness_type for mutant in MUTANTS}
    return {
        name: type(name, (BackendSuite,), {"harness_type": harness_type})
        for name, harness_type in {REFERENCE: MemoryHarness, **harnesses}.items()
    }


WANTED = {f"{class_of(mutant)}::{mutant.killed_by}" for mutant in MUTANTS}
WANTED |= {f"{REFERENCE}::{mutant.killed_by}" for mutant in MUTANTS}
WANTED_TESTS = {tuple(run.partition("[")[0].split("::")) for run in WANTED}

PHASES = pytest.StashKey[list[Phase]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutant-phases", type=Path, help="where to write what was found, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PHASES] = []


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> list[pytest.Item] | None:
    """Leave out other tests before their many runs are made."""
    if isinstance(collector, pytest.Class) and (collector.name, name) not in WANTED_TESTS:
        return []
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the runs that the mutants name."""
    items[:] = [item for item in items if test_of(item) in WANTED]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    raised = call.excinfo.typename if call.excinfo else ""
    message = str(call.excinfo.value).partition("\n")[0] if call.excinfo else ""
    phase = Phase(test_of(item), call.when, report.outcome, raised, message)
    item.config.stash[PHASES].append(phase)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    phases = [asdict(phase) for phase in session.config.stash[PHASES]]
    session.config.getoption("--mutant-phases").write_text(json.dumps(phases))


def test_of(item: pytest.Item) -> str:
    """Its class, name and parameters."""
    return "::".join(item.nodeid.split("::")[1:])


def run(folder: Path) -> list[Phase]:
    """Run the tests in a process of their own; what each phase of each test gave."""
    phases = folder / "phases.json"
    options = ["-p", __name__, "-p", "no:cacheprovider", "-p", "no:xdist", "--hicache-faults"]
    where = Path(__file__).with_name("mutant_classes.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--mutant-phases={phases}", str(where)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if done.returncode != pytest.ExitCode.TESTS_FAILED:
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout}{done.stderr}")
    return [Phase(**phase) for phase in json.loads(phases.read_text())]
