"""The suite on the reference backend."""

from __future__ import annotations

import pytest

from hicache_shared.testing import BackendSuite
from hicache_shared.testing.reference import MemoryHarness

pytestmark = pytest.mark.backend("memory")


class TestMemory(BackendSuite):
    harness_type = MemoryHarness
