"""The pytest plugin: options, what runs by default, and the report.

It is loaded into every pytest run of an environment, so it imports no more than it needs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicache_shared.errors import ConfigError
from hicache_shared.pytest_plugin.collected import Collected
from hicache_shared.pytest_plugin.fail_once import FailOnce
from hicache_shared.pytest_plugin.report import (
    BACKEND,
    OVERRIDE,
    REASON,
    VERSIONS,
    Report,
    versions_of,
)

if TYPE_CHECKING:
    from hicache_shared.testing.harness import Harness

COLLECTED = pytest.StashKey[Collected]()
SENT = "hicache_collected"
"""What a worker of pytest-xdist sends to the process that reports."""


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
        "--hicache-fail-once",
        action="store_true",
        help="after a failure of a test, leave out its other parameters",
    )
    group.addoption(
        "--hicache-layouts",
        metavar="LAYOUT,...",
        type=lambda value: tuple(value.split(",")),
        help="run the tests of these memory layouts of host pools only",
    )
    group.addoption(
        "--hicache-profile",
        choices=("ci", "nightly"),
        default="ci",
        help="how long programs are looked for that a backend answers wrongly: ci is short and "
        "the same each time, nightly is long and goes new ways (default: %(default)s)",
    )
    group.addoption(
        "--hicache-report", metavar="FILE", type=Path, help="write the verdicts as JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "faults: kills, freezes or fills a server on purpose")
    config.stash[COLLECTED] = Collected()
    _check_report_path(config.getoption("--hicache-report"))
    if config.getoption("--hicache-fail-once"):
        config.pluginmanager.register(FailOnce(config))
    dotted = config.getoption("--hicache-backend")
    if dotted is not None:
        _run_on_class(config, dotted)


def _run_on_class(config: pytest.Config, dotted: str) -> None:
    """Collect the suite on a class, in place of what pytest would collect.

    The class may lie in the folder where pytest was started, as for ``python -m pytest``.
    """
    from hicache_shared.testing import class_suite
    from hicache_shared.testing.named_class import harness_of, try_out

    is_worker = hasattr(config, "workerinput")
    if config.args_source is config.ArgsSource.ARGS and not is_worker:
        raise pytest.UsageError(
            f"--hicache-backend runs the suite alone, and not {' '.join(config.args)}; "
            "choose tests of it with -k"
        )
    folder = str(config.invocation_params.dir)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        harness_type = harness_of(dotted, _extra_config(config))
        if not (is_worker or config.option.collectonly):
            try_out(harness_type)
    except ConfigError as error:
        raise pytest.UsageError(f"--hicache-backend: {error}") from error
    class_suite.TestBackend.harness_type = harness_type
    config.args = [str(class_suite.__file__)]


def _check_report_path(path: Path | None) -> None:
    """Say before the tests that their report could not be written."""
    if path is not None and path.is_dir():
        raise pytest.UsageError(f"--hicache-report: {path} is a folder; give a file")


def _extra_config(config: pytest.Config) -> dict[str, Any]:
    text = config.getoption("--hicache-extra-config")
    expected = f"""--hicache-extra-config: expected a JSON object such as {EXAMPLE}, got {text!r}"""
    try:
        extra_config = json.loads(text)
    except ValueError as error:
        raise pytest.UsageError(f"{expected}: {error}") from error
    if not isinstance(extra_config, dict):
        raise pytest.UsageError(expected)
    return extra_config


EXAMPLE = """'{"interface_v1": 1}'"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for, and say in each report whose test it is."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    collected = config.stash[COLLECTED]
    for item in items:
        harness_type = _harness_type(item)
        if harness_type is not None:
            collected.add(item, harness_type.name)
            item.user_properties.append((BACKEND, harness_type.name))
            item.user_properties.append((VERSIONS, versions_of(harness_type.distributions)))
            if (reason := _override(item)) is not None:
                item.user_properties.append((OVERRIDE, reason))
            if not _wanted(item, config):
                left_out.append(item)
                continue
        kept.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    if hasattr(config, "workeroutput"):
        config.workeroutput[SENT] = collected.plain()


FIXTURES = ("harness", "pair", "new_rank", "rank", "keys")
"""Fixtures of the suite, which every test of a class stands on."""


def _override(item: Any) -> str | None:
    """Why a test is not the suite's own: it, or a fixture of its class, is another's."""
    places = [item.function, *(getattr(item.cls, name, None) for name in FIXTURES)]
    reasons = [reason for place in places if (reason := getattr(place, REASON, None)) is not None]
    return reasons[0] if reasons else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hear from a worker, each of which collects all tests; one that died told nothing."""
    told = getattr(node, "workeroutput", {}).get(SENT)
    if told is not None:
        node.config.stash[COLLECTED] = Collected(**told)


def _wanted(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether a test of the suite is among those that the options ask for."""
    if item.get_closest_marker("faults") and not config.getoption("--hicache-faults"):
        return False
    layouts = config.getoption("--hicache-layouts")
    callspec = getattr(item, "callspec", None)
    pair = callspec.params.get("pair") if callspec is not None else None
    return layouts is None or pair is None or pair[1] in layouts


def _harness_type(item: pytest.Item) -> type[Harness] | None:
    """What makes the harness of a test of the suite; None for any other test."""
    return getattr(getattr(item, "cls", None), "harness_type", None)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    report = Report(config.stash[COLLECTED])
    for outcome in ("passed", "failed", "error", "skipped", "xfailed", "xpassed"):
        for one in terminalreporter.getreports(outcome):
            if isinstance(one, pytest.TestReport):
                report.add(one)
    report.complete()
    if not report.backends:
        return
    terminalreporter.section("conformance")
    for line in report.lines():
        terminalreporter.line(line)
    path = config.getoption("--hicache-report")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report.as_json(), indent=1, sort_keys=True) + "\n")
