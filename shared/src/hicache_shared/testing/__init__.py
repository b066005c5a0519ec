"""The conformance suite: subclass :class:`BackendSuite` with a harness of your backend.

A backend's whole test file is a harness, a fixture ``harness`` that makes it, and an empty
subclass of :class:`BackendSuite`; the project's README shows one.
"""

import pytest

# Before the modules are imported: pytest shows the values of a failed assert only in test
# files and in what is registered.
pytest.register_assert_rewrite(
    *(f"hicache_shared.testing.{name}" for name in ("calls", "faults", "fixtures", "rank", "suite"))
)

from hicache_shared.testing.harness import Capabilities, Harness, Holding  # noqa: E402
from hicache_shared.testing.suite import BackendSuite  # noqa: E402

__all__ = ["BackendSuite", "Capabilities", "Harness", "Holding"]
