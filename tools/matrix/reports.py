"""What the reports of several runs say together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
"""Of the pytest plugin's ``--hicache-report``."""

FAILS, PASSES, NOT_SUPPORTED, NOT_RUN = "fails", "passes", "not supported", "not run"
VERDICTS = {
    "failed": FAILS,
    "passed": PASSES,
    "not supported": NOT_SUPPORTED,
    "skipped": NOT_RUN,
    "not run": NOT_RUN,
}
"""Those of a report, strongest first: of two runs the stronger verdict counts."""

_TEST = re.compile(r"test_(?:case_(\d+)_)?(\w+)")


class MatrixError(Exception):
    """Something that keeps the table from being written, with what to do about it."""


@dataclass(frozen=True, order=True)
class Behaviour:
    """A test of the suite.

    Attributes:
        case: its number in docs/cases.md, 0 where it has none.
        claim: the test's name in words.
        test: the test's name.
    """

    case: int
    claim: str
    test: str


@dataclass
class Run:
    """What is known of one backend.

    Attributes:
        versions: of its distributions.
        verdicts: test -> one of :data:`VERDICTS`' values.
        examples: test that fails -> parameters and message of one failure.
    """

    versions: dict[str, str] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)


def behaviour_of(test: str) -> Behaviour:
    """The test as a line of the table."""
    match = _TEST.fullmatch(test)
    if match is None:
        raise MatrixError(f"{test!r} is not the name of a test of the suite")
    case, claim = match.groups()
    return Behaviour(int(case or 0), claim.replace("_", " "), test)


def read(paths: Iterable[Path], again: Iterable[Path] = ()) -> dict[str, Run]:
    """Backend -> what the reports say of it.

    Args:
        paths: of reports.
        again: of reports of second runs, whose verdicts stand in for those of the first.

    Raises:
        MatrixError: a report is missing or of another kind, or two of them disagree about the
            versions of one backend.
    """
    runs: dict[str, Run] = {}
    for path in paths:
        for name, told in _backends_of(path).items():
            run = runs.setdefault(name, Run(versions=dict(told["versions"])))
            if run.versions != told["versions"]:
                raise MatrixError(
                    f"{path}: {name} ran with {told['versions']}, in another report with "
                    f"{run.versions}; remove the older report"
                )
            _add(run, told["behaviours"])
    for path in again:
        for name, told in _backends_of(path).items():
            _replace(runs[name], told["behaviours"])
    return runs


def _backends_of(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise MatrixError(
            f"{path} is no report of a run ({error}); `python3 -m nox -s tests sglang` write them"
        ) from error
    if report.get("schema") != SCHEMA:
        raise MatrixError(
            f"{path} has schema {report.get('schema')!r}, not {SCHEMA}; run the sessions again"
        )
    backends: dict[str, Any] = report["backends"]
    return backends


def _add(run: Run, behaviours: Mapping[str, Any]) -> None:
    order = [*VERDICTS.values()]
    for test, told in behaviours.items():
        verdict = VERDICTS[told["verdict"]]
        before = run.verdicts.get(test, NOT_RUN)
        run.verdicts[test] = min(before, verdict, key=order.index)
        for parameters, message in sorted(told["failures"].items()):
            run.examples.setdefault(test, f"[{parameters}] {message}")


def _replace(run: Run, behaviours: Mapping[str, Any]) -> None:
    ran = {test: told for test, told in behaviours.items() if VERDICTS[told["verdict"]] != NOT_RUN}
    for test in ran:
        run.verdicts.pop(test, None)
        run.examples.pop(test, None)
    _add(run, ran)
