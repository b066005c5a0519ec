"""The pytest plugin: options, what runs by default, and the report.

It is loaded into every pytest run of an environment, so it imports no more than it needs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicache_shared.errors import ConfigError
from hicache_shared.pytest_plugin.report import BACKEND, VERSIONS, Report, versions_of

if TYPE_CHECKING:
    from hicache_shared.testing.harness import Harness

REPORT = pytest.StashKey[Report]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hicache", "conformance of HiCache storage backends")
    group.addoption(
        "--hicache-backend",
        metavar="MODULE:CLASS",
        help="run the conformance suite on this HiCacheStorage class",
    )
    group.addoption(
        "--hicache-extra-config",
        metavar="JSON",
        default="{}",
        help="its extra config, as of SGLang's --hicache-storage-backend-extra-config",
    )
    group.addoption(
        "--hicache-faults",
        action="store_true",
        help="also stop, freeze and restart servers",
    )
    group.addoption(
        "--hicache-report", metavar="FILE", type=Path, help="write the verdicts as JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "faults: kills, freezes or fills a server on purpose")
    config.stash[REPORT] = Report()
    dotted = config.getoption("--hicache-backend")
    if dotted is not None:
        _run_on_class(config, dotted)


def _run_on_class(config: pytest.Config, dotted: str) -> None:
    """Collect the suite on a class, in place of what pytest would collect."""
    from hicache_shared.testing import class_suite
    from hicache_shared.testing.named_class import harness_of

    try:
        extra_config = json.loads(config.getoption("--hicache-extra-config"))
        class_suite.TestBackend.harness_type = harness_of(dotted, extra_config)
    except (ConfigError, ValueError) as error:
        raise pytest.UsageError(f"--hicache-backend: {error}") from error
    config.args = [str(class_suite.__file__)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out server faults unless asked for, and say in each report whose test it is."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        harness_type = _harness_type(item)
        if harness_type is not None:
            item.user_properties.append((BACKEND, harness_type.name))
            item.user_properties.append((VERSIONS, versions_of(harness_type.distributions)))
            if item.get_closest_marker("faults") and not config.getoption("--hicache-faults"):
                left_out.append(item)
                continue
        kept.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _harness_type(item: pytest.Item) -> type[Harness] | None:
    """What makes the harness of a test of the suite; None for any other test."""
    return getattr(getattr(item, "cls", None), "harness_type", None)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    report = config.stash[REPORT]
    for outcome in ("passed", "failed", "error", "skipped", "xfailed", "xpassed"):
        for one in terminalreporter.getreports(outcome):
            if isinstance(one, pytest.TestReport):
                report.add(one)
    if not report.backends:
        return
    terminalreporter.section("conformance")
    for line in report.lines():
        terminalreporter.line(line)
    path = config.getoption("--hicache-report")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report.as_json(), indent=1, sort_keys=True) + "\n")
