"""Counts tests per backend at the end of a run."""

from __future__ import annotations

from collections import Counter

import pytest

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
WITHOUT_BACKEND = "none"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note each test's backend where its reports carry it, from other processes too."""
    for item in items:
        marker = item.get_closest_marker("backend")
        backend = marker.args[0] if marker else WITHOUT_BACKEND
        item.user_properties.append(("backend", backend))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line a backend."""
    counts: dict[str, Counter[str]] = {}
    for outcome in OUTCOMES:
        for report in terminalreporter.getreports(outcome):
            properties = dict(report.user_properties)
            if "backend" in properties:
                counts.setdefault(str(properties["backend"]), Counter())[outcome] += 1
    if not counts:
        return
    terminalreporter.section("tests per backend")
    for backend in sorted(counts, key=lambda name: (name == WITHOUT_BACKEND, name)):
        parts = [f"{count} {outcome}" for outcome, count in counts[backend].items()]
        terminalreporter.line(f"{backend}: {', '.join(parts)}")
