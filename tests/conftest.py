"""Knows the backend of each test: skips where there is none, and counts at the end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import backends

# A machine may be busy: how long an example takes is no test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
WITHOUT_BACKEND = "none"


def backend_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("backend")
    return str(marker.args[0]) if marker else WITHOUT_BACKEND


def is_worker(config: pytest.Config) -> bool:
    """Whether this is one of several processes that a run is divided over (pytest-xdist)."""
    return hasattr(config, "workeroutput")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hear from a worker, each of which collects all tests, what was left out."""
    told = getattr(node, "workeroutput", {})  # a worker that died told nothing
    node.config.stash[LEFT_OUT] = Counter(told.get("left_out", {}))


LEFT_OUT = pytest.StashKey[Counter[str]]()
"""Tests of each backend whose client has no wheel for this Python."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note each test's backend where its reports carry it, from other processes too."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        item.user_properties.append(("backend", backend_of(item)))
        (kept if backends.is_made_for_this_python(backend_of(item)) else left_out).append(item)
    left = Counter(map(backend_of, left_out))
    config.stash[LEFT_OUT] = left
    if is_worker(config):
        config.workeroutput["left_out"] = dict(left)  # type: ignore[attr-defined]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Look for the backend before any fixture starts it."""
    backends.check(backend_of(item))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
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
    for backend, count in sorted(config.stash.get(LEFT_OUT, Counter()).items()):
        terminalreporter.line(f"{backend}: {count} left out, its client has no wheel here")
