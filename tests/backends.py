"""Where tests of a real backend skip, and where its absence is a fault.

``@pytest.mark.backend("name")`` says which backend a test is about. Such a test skips only
where the backend's native client is not installed and ``HICACHE_REQUIRE_BACKEND`` is not
set, or where there is no such client for this Python. With the variable set the test fails;
with the client installed it runs, and a server that does not start fails it.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

REQUIRE = "HICACHE_REQUIRE_BACKEND"

CLIENTS = {"mooncake": "mooncake", "umbp": "mori"}
"""Backends that need a native client, and the client's import package."""

PYTHONS = {"umbp": (3, 12)}
"""Backends whose native client has a wheel for one Python alone (of those tested on)."""


def check(backend: str) -> None:
    """Skip or fail the running test if the native client of its backend is not installed."""
    client = CLIENTS.get(backend)
    if client is None or importlib.util.find_spec(client) is not None:
        return
    only = PYTHONS.get(backend, sys.version_info[:2])
    if only != sys.version_info[:2]:
        pytest.skip(
            f"the native client of {backend} has no wheel but for Python {only[0]}.{only[1]}"
        )
    missing = f"the native client of {backend} (package {client!r}) is not installed"
    if os.environ.get(REQUIRE):
        pytest.fail(f"{missing}, and {REQUIRE} is set", pytrace=False)
    pytest.skip(f"{missing}; set {REQUIRE}=1 to fail instead")
