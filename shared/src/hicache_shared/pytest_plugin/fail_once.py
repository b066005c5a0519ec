"""``--hicache-fail-once``: after a run of a test failed, its other parameters are left out.

The verdict is known then, and a backend that hangs or ends its process does so once.
"""

from __future__ import annotations

from typing import Any

import pytest

from hicache_shared.pytest_plugin.collected import parts_of

SENT = "hicache_failed"
"""What the process that reports tells a worker of pytest-xdist that it starts."""

REASON = "left out, as the test failed with other parameters"


class FailOnce:
    """A plugin that remembers the tests that failed, those under which a worker died too."""

    def __init__(self, config: pytest.Config) -> None:
        told: dict[str, Any] = getattr(config, "workerinput", {})
        self._failed: set[str] = set(told.get(SENT, ()))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[SENT] = sorted(self._failed)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if _test_of(item.nodeid) in self._failed:
            pytest.skip(REASON)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(_test_of(report.nodeid))


def _test_of(nodeid: str) -> str:
    where, name, _ = parts_of(nodeid)
    return f"{where}::{name}"
