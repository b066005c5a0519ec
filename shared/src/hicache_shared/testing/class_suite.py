"""The suite on the class that ``pytest --hicache-backend`` names. The plugin collects it."""

from __future__ import annotations

from hicache_shared.testing.suite import BackendSuite


class TestBackend(BackendSuite):
    pass
