"""The conformance suite: subclass :class:`BackendSuite` with a harness of your backend.

``tests/conformance/test_memory.py`` is the whole test file of a backend: a harness, a fixture
of that name which makes it, and an empty subclass.
"""

from hicache_shared.testing.harness import Capabilities, Harness, Holding
from hicache_shared.testing.suite import BackendSuite

__all__ = ["BackendSuite", "Capabilities", "Harness", "Holding"]
