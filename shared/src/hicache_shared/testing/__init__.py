"""The conformance suite: subclass :class:`BackendSuite` with a harness of your backend.

A backend's whole test file is a harness and a subclass of :class:`BackendSuite` that names it;
docs/write-a-backend.md shows one.
"""

import pytest

# Before the modules are imported: pytest shows the values of a failed assert only in test
# files and in what is registered.
pytest.register_assert_rewrite("hicache_shared.testing.suite", "hicache_shared.testing.rank")

from hicache_shared.testing.harness import (  # noqa: E402
    Capabilities,
    ElsewhereSpec,
    Harness,
    Holding,
)
from hicache_shared.testing.suite import BackendSuite  # noqa: E402
from hicache_shared.testing.suite.guard import overrides  # noqa: E402

__all__ = ["BackendSuite", "Capabilities", "ElsewhereSpec", "Harness", "Holding", "overrides"]
