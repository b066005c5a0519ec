"""Knows the backend of each test: skips where there is none, and counts at the end."""

from __future__ import annotations

from collections import Counter

import pytest

from tests import backends

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
WITHOUT_BACKEND = "none"


def backend_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("backend")
    return str(marker.args[0]) if marker else WITHOUT_BACKEND


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note each test's backend where its reports carry it, from other processes too."""
    for item in items:
        item.user_properties.append(("backend", backend_of(item)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Look for the backend before any fixture starts it."""
    backends.check(backend_of(item))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line a backend."""
    counts: dict[str, Counter[str]] = {}
    for outcome in OUTCOMES:
        for report in terminalreporter.getreports(outcome):
            if not isinstance(report, pytest.TestReport):
                continue  # of a file that cannot be collected: it belongs to no backend
            properties = dict(report.user_properties)
            if "backend" in properties:
                counts.setdefault(str(properties["backend"]), Counter())[outcome] += 1
    if not counts:
        return
    terminalreporter.section("tests per backend")
    for backend in sorted(counts, key=lambda name: (name == WITHOUT_BACKEND, name)):
        parts = [f"{count} {outcome}" for outcome, count in counts[backend].items()]
        terminalreporter.line(f"{backend}: {', '.join(parts)}")
