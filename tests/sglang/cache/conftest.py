"""SGLang's own cache classes, each of our backends under them, and what they need to run here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hicache_shared import plugins
from hicache_shared.plugins import ServeOptions
from tests.sglang.imports import left_out_without_sglang, mark

HERE = Path(__file__).parent
STORE_BYTES = 256 << 20

collect_ignore_glob = left_out_without_sglang("tests.sglang.cache.serving")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A thread that dies is a failure."""
    dies = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
    mark(items, HERE, dies)


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(name, marks=pytest.mark.backend(name)) for name in ("mooncake", "ucm", "umbp")
    ],
)
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """The extra config of a running store: the class that SGLang loads, and its settings.

    Mooncake's has a real master on loopback, UCM's a folder; UMBP's is embedded in the client.
    """
    plugin = plugins.find(request.param)
    with ExitStack() as stack:
        if plugin.name == "ucm":  # whose own ``serve`` takes the standard output away
            settings = plugin.launch_config(str(tmp_path_factory.mktemp("ucm")))
        else:
            settings = stack.enter_context(plugin.serve(ServeOptions(STORE_BYTES)))
        yield {
            "backend_name": plugin.name,
            "module_path": plugin.module_path,
            "class_name": plugin.class_name,
            "model_id": "tests/model",
            "revision": "1",
            "kv_cache_dtype": "auto",
            "deadline_s": 10,  # a busy machine is slow, which is no fault
            **settings,
        }


@pytest.fixture
def backend(store: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    """The same, with a namespace of the test's own."""
    return {**store, "namespace": request.node.name}
