"""What a run of the suite found, backend by backend: for people, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from hicache_shared.pytest_plugin.cases import right_of
from hicache_shared.pytest_plugin.collected import Collected, parts_of

BACKEND = "hicache_backend"
VERSIONS = "hicache_versions"
OVERRIDE = "hicache_override"
"""Properties of a test's report."""

REASON = "__overrides_because__"
"""The attribute of a test that stands in for one of the suite: why it does."""

NOT_SUPPORTED = "not supported"
"""A verdict, and how the reason of a skipped test begins where a backend lacks a capability."""

OVERRIDDEN = "overridden"
NOT_RUN = "not run"

SHOWN = 3
"""Tests that were not run and that are named in the terminal; the JSON has all."""

SCHEMA = 1


@dataclass
class Behaviour:
    """What one test of the suite found over all models, layouts and other parameters.

    Attributes:
        counts: of ``passed``, ``failed``, ``overridden``, ``not supported``, ``skipped`` and
            ``not run``.
        failures: parameters of each failure, and the last line of its message.
        reasons: why it is overridden, not supported, or was skipped.
        reported: node ids of the runs that gave a report.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)
    reasons: set[str] = field(default_factory=set)
    reported: set[str] = field(default_factory=set)

    @property
    def verdict(self) -> str:
        for outcome in ("failed", OVERRIDDEN, "passed", NOT_SUPPORTED, "skipped"):
            if self.counts[outcome]:
                return outcome
        return NOT_RUN


class Report:
    """The verdicts of a run, put together from pytest's reports.

    Args:
        collected: what the run was to test.
    """

    def __init__(self, collected: Collected) -> None:
        self.backends: dict[str, dict[str, Behaviour]] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self._collected = collected

    def add(self, report: pytest.TestReport) -> None:
        """Take in what pytest reports of one phase of one test."""
        where, name, parameters = parts_of(report.nodeid)
        properties: dict[str, Any] = dict(report.user_properties)
        # The report of a process that died has no properties.
        backend = properties.get(BACKEND) or self._collected.classes.get(where)
        if backend is None:
            return
        if VERSIONS in properties:
            self.versions[backend] = json.loads(properties[VERSIONS])
        behaviour = self.backends.setdefault(backend, {}).setdefault(name, Behaviour())
        behaviour.reported.add(report.nodeid)
        outcome = _outcome(report)
        if outcome == "passed" and OVERRIDE in properties:
            outcome = OVERRIDDEN
            behaviour.reasons.add(f"{OVERRIDDEN} {name}: {properties[OVERRIDE]}")
        behaviour.counts[outcome] += 1
        if outcome == "failed":
            behaviour.failures[parameters] = _message(report)
        elif outcome not in ("passed", OVERRIDDEN):
            behaviour.reasons.add(_reason(report))

    def complete(self) -> None:
        """Count what gave no report as not run. Called when all reports are in."""
        for backend, tests in self._collected.runs.items():
            behaviours = self.backends.setdefault(backend, {})
            for name, runs in tests.items():
                behaviour = behaviours.setdefault(name, Behaviour())
                if left := runs - len(behaviour.reported):
                    behaviour.counts[NOT_RUN] += left

    def lines(self) -> Iterable[str]:
        """A few lines a backend; what failed with its test, how often, and one message."""
        for backend, behaviours in sorted(self.backends.items()):
            totals = sum((one.counts for one in behaviours.values()), Counter[str]())
            yield f"{backend}: " + ", ".join(f"{n} {outcome}" for outcome, n in totals.items())
            for name, one in behaviours.items():
                if one.failures:
                    example, message = next(iter(one.failures.items()))
                    share = f"{one.counts['failed']} of {sum(one.counts.values())}"
                    yield f"  FAILED {name}: {share}, e.g. [{example}]: {message}"
                    yield f"    right is: {right_of(name)}"
            reasons = {reason for one in behaviours.values() for reason in one.reasons}
            yield from (f"  {reason}" for reason in sorted(reasons))
            left_out = sorted(name for name, one in behaviours.items() if one.verdict == NOT_RUN)
            if left_out:
                more = f" and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""
                yield f"  {NOT_RUN}: {', '.join(left_out[:SHOWN])}{more}"

    def as_json(self) -> dict[str, Any]:
        """``{"schema": 1, "backends": {name: {"versions": {...}, "behaviours": {...}}}}``."""
        return {
            "schema": SCHEMA,
            "backends": {
                backend: {
                    "versions": self.versions.get(backend, {}),
                    "behaviours": {
                        name: {
                            "verdict": one.verdict,
                            "counts": dict(one.counts),
                            "failures": one.failures,
                            "reasons": sorted(one.reasons),
                        }
                        for name, one in behaviours.items()
                    },
                }
                for backend, behaviours in self.backends.items()
            },
        }


@cache  # asked for each test, and looked up on disk
def versions_of(distributions: tuple[str, ...]) -> str:
    """JSON of the versions of the distributions that are installed."""
    found: dict[str, str] = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return json.dumps(found)


def _outcome(report: pytest.TestReport) -> str:
    if report.outcome != "skipped":
        return report.outcome
    if hasattr(report, "wasxfail"):
        return "failed"
    return NOT_SUPPORTED if _reason(report).startswith(NOT_SUPPORTED) else "skipped"


def _reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return reason.removeprefix("Skipped: ")


def _message(report: pytest.TestReport) -> str:
    """The line of a failure that says what went wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr if crash is None else crash.message).removeprefix("Failed: ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "no message"
