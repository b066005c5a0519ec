"""SGLang's own cache classes, each of our backends under them, and what they need to run here."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hicache_shared import plugins
from hicache_shared.plugins import ServeOptions
from tests.sglang import stand_ins

HERE = Path(__file__).parent
STORE_BYTES = 256 << 20

if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    stand_ins.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, torch's and transformers' own, on import
        import tests.sglang.cache.serving  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """SGLang's warnings are not ours to mend; a thread that dies is."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(
                pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
            )
            item.add_marker(pytest.mark.filterwarnings("default"))


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
