"""The adapter's settings, and what finds the client."""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from hicache_shared.config import load, settings_of
from hicache_shared.errors import BackendUnavailableError, ConfigError
from hicache_ucm import client
from hicache_ucm.client import NativeError
from hicache_ucm.config import MOST_THREADS, UcmConfig

ROOT = {"root": "/mnt/kvcache"}
README = Path(__file__).parents[2] / "packages" / "ucm" / "README.md"


def config(extra: dict[str, Any], **environ: str) -> UcmConfig:
    return load(UcmConfig, {**ROOT, **extra}, environ)


def test_defaults_are_the_safe_ones() -> None:
    loaded = config({})
    assert (loaded.posix_io_engine, loaded.io_direct, loaded.shared) == ("psync", False, True)
    assert 4 <= loaded.threads <= MOST_THREADS
    assert loaded.capacity == 0, "no page is removed unless a capacity is given"
    assert config({"posix_data_trans_concurrency": 3}).threads == 3


def test_the_root_must_be_given_and_absolute() -> None:
    with pytest.raises(ConfigError, match=r"root: not given; .*HICACHE_UCM_ROOT"):
        load(UcmConfig, {}, {})
    with pytest.raises(ConfigError, match="expected an absolute path"):
        load(UcmConfig, {"root": "kvcache"}, {})
    assert load(UcmConfig, {}, {"HICACHE_UCM_ROOT": "/data"}).root == "/data"


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"posix_io_engine": "uring"}, "posix_io_engine"),
        ({"data_dir_shard_bytes": 4}, "data_dir_shard_bytes"),
        ({"posix_data_trans_concurrency": 0}, "posix_data_trans_concurrency"),
        ({"posix_gc_trigger_threshold_ratio": 1}, "posix_gc_trigger_threshold_ratio"),
        ({"capacity": "2 parsecs"}, "capacity"),
        ({"pool_capacity": "swa=2gb"}, "pool_capacity"),
        ({"pool_capacity": {"swa": "x"}}, "pool_capacity"),
        ({"storage_backends": "/a:/b"}, "storage_backends"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_expected(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config(extra)


def test_the_engine_that_writes_over_memory_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"posix_io_engine: 'aio'.*memory behind the first"):
        config({"posix_io_engine": "aio"})


def test_capacity_is_divided_so_that_pools_hold_as_many_pages() -> None:
    loaded = config({"capacity": "110gb", "pool_capacity": {"c128": "3gb"}})
    sizes = {"swa": 10_000, "c4": 1_000, "c128": 50}
    gib = 1 << 30
    assert loaded.capacities(sizes) == {"swa": 100 * gib, "c4": 10 * gib, "c128": 3 * gib}
    assert config({}).capacities(sizes) == {"swa": 0, "c4": 0, "c128": 0}


def test_settings_of_removal_without_a_capacity_are_refused() -> None:
    with pytest.raises(ConfigError, match="posix_gc_recycle_percent: no page is removed without"):
        config({"posix_gc_recycle_percent": 0.2})
    with pytest.raises(ConfigError, match="posix_gc_check_interval_sec: no page is removed"):
        config({}, HICACHE_UCM_GC_INTERVAL="10")
    assert config({"posix_gc_recycle_percent": 0.2, "capacity": "9gb"}).capacity == 9 << 30
    assert config({"posix_gc_recycle_percent": 0.2, "pool_capacity": {"swa": "9gb"}})


def test_capacities_of_pools_can_come_as_json_from_the_environment() -> None:
    loaded = config({}, HICACHE_UCM_POOL_CAPACITY=json.dumps({"swa": "2gb"}))
    assert loaded.pool_capacity == {"swa": 2 << 30}


def test_the_readme_documents_every_setting() -> None:
    text = README.read_text()
    for doc in settings_of(UcmConfig):
        assert f"| `{doc.name}` |" in text
        assert doc.description in text
        for variable in doc.env:
            assert f"`{variable}`" in text


# -- the client ------------------------------------------------------------------------------


def look(monkeypatch: pytest.MonkeyPatch, importable: bool = True, **installed: str) -> None:
    """Check for UCM where these distributions are installed, ``_`` for ``-`` in their names."""
    found = {name.replace("_", "-"): version for name, version in installed.items()}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    spec = ModuleSpec("ucm", None) if importable else None
    monkeypatch.setattr(client, "version", version)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    client._check_distribution()


def test_the_program_of_the_same_name_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailableError, match="another program of that name") as failed:
        look(monkeypatch, ucm="1.0")
    assert "pip uninstall ucm, then pip install 'hicache-ucm[cu129]'" in str(failed.value)


def test_no_client_at_all_gives_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailableError, match=r"not installed: pip install"):
        look(monkeypatch, importable=False)


def test_two_builds_that_overwrite_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailableError, match="uc-manager-cuda-cu129, uc-manager-cuda-cu"):
        look(monkeypatch, uc_manager_cuda_cu129="0.8.1", uc_manager_cuda_cu130="0.8.1")
    with pytest.raises(BackendUnavailableError, match="overwrite each other"):
        look(monkeypatch, uc_manager_cuda_cu129="0.8.1", ucm="1.0")


@pytest.mark.parametrize("version", ["0.5.0", "0.7.0", "0.8.0"])
def test_a_version_whose_lookup_stops_at_a_hole_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    with pytest.raises(BackendUnavailableError, match=r"too old: 0\.8\.1 is needed"):
        look(monkeypatch, uc_manager_cuda_cu129=version)


@pytest.mark.parametrize(
    "version", ["0.8.1", "0.8.1+cu129", "0.8.2.post1", "0.9.0rc3", "0.10.0", "1.0"]
)
def test_a_newer_version_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    look(monkeypatch, uc_manager_cuda_cu129=version)


def test_a_build_from_source_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the name of the selector, which is beside a build and holds no code."""
    look(monkeypatch, uc_manager="0.8.1")
    look(monkeypatch, uc_manager="0.8.1", uc_manager_cuda_cu129="0.8.1")
    with pytest.raises(BackendUnavailableError, match="is too old"):
        look(monkeypatch, uc_manager="0.7.0")


@pytest.mark.parametrize(
    ("text", "code"),
    [("-50005", -50005), ("-50000, posix_capacity_gb(1) is too small", -50000), ("bad", 0)],
)
def test_the_code_of_an_error_is_read_from_its_text(text: str, code: int) -> None:
    assert NativeError(text).code == code
