"""Where tests of a real backend skip, and where its absence is a fault.

``@pytest.mark.backend("name")`` says which backend a test is about. Such a test is left out
where the backend's native client has no wheel for this Python. It skips where the client is not
installed and ``HICACHE_REQUIRE_BACKEND`` is not set; with the variable set the test fails. With
the client installed it runs, and a server that does not start fails it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass

import pytest

REQUIRE = "HICACHE_REQUIRE_BACKEND"


@dataclass(frozen=True)
class Client:
    """A backend's native client.

    Attributes:
        package: what is imported.
        only: the Pythons that it has wheels for, where that is not all.
    """

    package: str
    only: tuple[str, ...] = ()


CLIENTS = {
    "mooncake": Client("mooncake"),
    "ucm": Client("ucm", only=("3.12",)),
    "umbp": Client("mori", only=("3.12",)),
}
"""Backends that need a native client."""


def is_made_for_this_python(backend: str) -> bool:
    """Whether the backend's native client has a wheel for this Python, or needs none."""
    client = CLIENTS.get(backend)
    python = ".".join(map(str, sys.version_info[:2]))
    return client is None or not client.only or python in client.only


def check(backend: str) -> None:
    """Skip or fail the running test if the native client of its backend is not installed."""
    client = CLIENTS.get(backend)
    if client is None or importlib.util.find_spec(client.package) is not None:
        return
    missing = f"the native client of {backend} (package {client.package!r}) is not installed"
    if os.environ.get(REQUIRE):
        pytest.fail(f"{missing}, and {REQUIRE} is set", pytrace=False)
    pytest.skip(f"{missing}; set {REQUIRE}=1 to fail instead")
