"""Where the contract stands in SGLang's source, and in ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tools.sglang_drift import expected
from tools.sglang_drift.shapes import (
    CALLS,
    CONSTANTS,
    EXTRA_KEYS,
    NAMES,
    Contract,
    backend_calls,
    class_shapes,
    constant,
    extra_keys,
    factory_shape,
    rights_of_names,
)

ROOT = Path(__file__).parents[2]
MIRROR = "shared/src/hicache_shared/_mirror.py"

STORAGE = "sglang/srt/mem_cache/hicache_storage.py"
FACTORY = "sglang/srt/mem_cache/storage/backend_factory.py"
PLUGINS = "sglang/srt/plugins/__init__.py"
METRICS = "sglang/srt/observability/metrics_collector.py"
CONTROLLERS = (
    "sglang/srt/managers/cache_controller.py",
    "sglang/srt/mem_cache/hybrid_cache/hybrid_cache_controller.py",
)
SERVING = "sglang/srt/"
IN_TREE = "sglang/srt/mem_cache/storage/"
"""SGLang's own backends: they call themselves, and are of no interest here."""

NAMED = ("storage_backend", "allocator_type")
"""Text without which a module neither calls a backend nor looks at a backend's name."""


def contract_of(sources: Mapping[str, str]) -> Contract:
    """The contract of a release.

    Args:
        sources: text of the release's modules by path; more than are needed does no harm.
    """
    users = [
        text
        for path, text in sources.items()
        if path.startswith(SERVING)
        and not path.startswith(IN_TREE)
        and any(word in text for word in NAMED)
    ]
    return {
        **class_shapes(sources[STORAGE], expected.CLASSES),
        **class_shapes(sources[METRICS], [expected.METRICS]),
        CONSTANTS: _constants(sources[STORAGE], "STORAGE_BATCH_SIZE"),
        CALLS: backend_calls(users),
        EXTRA_KEYS: extra_keys([sources[path] for path in CONTROLLERS]),
        expected.FACTORY: factory_shape(
            sources[FACTORY], {name: f"{name} makes" for name in expected.TAKEN_OVER}
        ),
        NAMES: rights_of_names(users, expected.TAKEN_OVER),
        expected.PLUGINS: _constants(sources[PLUGINS], "GENERAL_PLUGINS_GROUP"),
    }


def our_contract(mirror: str) -> Contract:
    """The contract that this repository is written for, the newest release's."""
    return {**class_shapes(mirror, (*expected.CLASSES, expected.METRICS)), **expected.REST}


def _constants(source: str, name: str) -> dict[str, str]:
    value = constant(source, name)
    return {} if value is None else {name: value}
