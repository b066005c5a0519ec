"""SGLang started with our plugin, and what a backend under an in-tree name is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from hicache_shared import takeover
from hicache_shared.plugins import ServeOptions, find
from tests.sglang.imports import left_out_without_sglang, mark

HERE = Path(__file__).parent

collect_ignore_glob = left_out_without_sglang("tests.sglang.takeover.pools")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """SGLang's loader finds distributions alone."""
    installed = any(True for _ in distributions(name="hicache-shared"))
    skip = pytest.mark.skip(reason="hicache-shared is not installed")
    mark(items, HERE, *([] if installed else [skip]))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Lets SGLang load its plugins as at its start, with a variable set; undone afterwards.

    Called with the text of the two variables, it returns what the factory then loads under the
    in-tree names, as ``module.class``.
    """
    from sglang.srt import plugins
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    registry = dict(StorageBackendFactory._registry)
    monkeypatch.setattr(StorageBackendFactory, "_registry", registry)

    def start(override: str | None = None, allowed: str = "") -> dict[str, str]:
        monkeypatch.setenv("SGLANG_PLUGINS", allowed)
        monkeypatch.delenv(takeover.VARIABLE, raising=False)
        if override is not None:
            monkeypatch.setenv(takeover.VARIABLE, override)
        monkeypatch.setattr(plugins, "_plugins_loaded", False)
        plugins.load_plugins()
        return {
            name: f"{registry[name]['module_path']}.{registry[name]['class_name']}"
            for name in takeover.ADAPTERS
        }

    return start


@pytest.fixture(scope="module")
def master() -> Iterator[dict[str, Any]]:
    """The settings of a real Mooncake master on loopback."""
    with find("mooncake").serve(ServeOptions(64 << 20)) as extra:
        yield extra


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A standalone server, and the variables by which SGLang takes memory that it can move."""
    from hicache_umbp.server import UmbpServer

    with UmbpServer(capacity_bytes=64 << 20, page_bytes=4096) as server:
        monkeypatch.setenv("UMBP_STANDALONE_ADDRESS", server.address)
        monkeypatch.setenv("SGLANG_HICACHE_HOST_HUGEPAGE", "0")
        yield server.address
