"""Where SGLang is installed, the contract's types are SGLang's own, and our copy equals them."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

from hicache_shared import _mirror, contract
from hicache_shared.memory_backend import MemoryBackend

sglang = pytest.importorskip("sglang.srt.mem_cache.hicache_storage")

DATACLASSES = [
    "HiCacheStorageConfig",
    "HiCacheStorageExtraInfo",
    "PoolTransfer",
    "PoolTransferResult",
    "SidecarPoolSpec",
]
TYPES = [*DATACLASSES, "HiCacheStorage", "PoolHitPolicy", "PoolName"]


@pytest.mark.parametrize("name", TYPES)
def test_the_contract_uses_sglangs_own_type(name: str) -> None:
    assert getattr(contract, name) is getattr(sglang, name)


@pytest.mark.parametrize("name", DATACLASSES)
def test_our_copy_has_sglangs_fields_in_order_with_their_defaults(name: str) -> None:
    def fields(cls: Any) -> list[tuple[str, Any]]:
        return [(field.name, _plain(field.default)) for field in dataclasses.fields(cls)]

    assert fields(getattr(_mirror, name)) == fields(getattr(sglang, name))


@pytest.mark.parametrize("name", ["PoolName", "PoolHitPolicy"])
def test_our_copy_has_sglangs_members(name: str) -> None:
    def members(enum: Any) -> dict[str, str]:
        return {member.name: member.value for member in enum}

    assert members(getattr(_mirror, name)) == members(getattr(sglang, name))
    assert [str(m) for m in getattr(_mirror, name)] == [str(m) for m in getattr(sglang, name)]


def test_our_copy_has_sglangs_methods_and_parameters() -> None:
    def methods(cls: Any) -> dict[str, list[str]]:
        functions = inspect.getmembers(cls, inspect.isfunction)
        return {
            name: list(inspect.signature(function).parameters)
            for name, function in functions
            if not name.startswith("_")
        }

    assert methods(_mirror.HiCacheStorage) == methods(sglang.HiCacheStorage)


def test_sglangs_dynamic_factory_loads_our_class() -> None:
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    config = contract.rank_config(
        "tiny",
        is_mla_model=False,
        extra_config={
            "backend_name": "memory",
            "module_path": "hicache_shared.memory_backend",
            "class_name": "MemoryBackend",
            "interface_v1": 1,
        },
    )
    backend = StorageBackendFactory.create_backend("dynamic", config, None)
    assert isinstance(backend, MemoryBackend)
    backend.close()


def test_a_class_of_our_copy_would_be_refused_by_the_factory() -> None:
    assert not issubclass(_mirror.HiCacheStorage, sglang.HiCacheStorage)


def _plain(default: Any) -> Any:
    return default.value if hasattr(default, "value") else default


def test_our_copy_of_the_metrics_has_sglangs_fields() -> None:
    """Read from the source: the module imports half the engine, which is not installed here."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "srt/observability/metrics_collector.py"
    (metrics,) = [
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == "StorageMetrics"
    ]
    fields = [
        node.target.id
        for node in metrics.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    assert fields == [field.name for field in dataclasses.fields(_mirror.StorageMetrics)]
