"""What a run collected of the suite, before anything was left out of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import pytest


@dataclass
class Collected:
    """All of it is plain data, so that it comes through from another process (pytest-xdist).

    Attributes:
        runs: how many runs each test has, over its parameters, by backend and name. A test of
            the suite that a class does not have, or that was not asked for, has 0.
        classes: the backend of each class, by node id.
    """

    runs: dict[str, dict[str, int]] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)

    def add(self, item: pytest.Item, backend: str) -> None:
        """Take in a test of the suite."""
        from hicache_shared.testing import BackendSuite

        if backend not in self.runs:
            tests = [name for name in dir(BackendSuite) if name.startswith("test_")]
            self.runs[backend] = dict.fromkeys(tests, 0)
        where, name, _ = parts_of(item.nodeid)
        self.runs[backend][name] = self.runs[backend].get(name, 0) + 1
        self.classes[where] = backend

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def parts_of(nodeid: str) -> tuple[str, str, str]:
    """The class of a test by node id, its name, and its parameters."""
    test, _, parameters = nodeid.partition("[")
    where, _, name = test.rpartition("::")
    return where, name, parameters.removesuffix("]")
