"""Our backends under SGLang's in-tree names, through its own plugin loader and factory."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from hicache_shared import takeover
from hicache_shared.config import CONFIG_FILE_KEY, SGLANG_KEYS, CommonConfig, settings_of
from hicache_shared.contract import rank_config
from hicache_shared.errors import BackendUnavailableError, ConfigError, LayoutError
from hicache_shared.plugins import ServeOptions, find
from tests.sglang import stand_ins

pytest.importorskip("sglang.srt.mem_cache.hicache_storage")
if importlib.util.find_spec("transformers") is None:
    pytest.skip("SGLang's host pools need transformers", allow_module_level=True)

stand_ins.install()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang's, torch's and transformers' own, on import
    import torch
    from sglang.srt import plugins as sglang_plugins
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

pytestmark = [
    pytest.mark.skipif(
        not any(entry.name == "hicache" for entry in entry_points(group="sglang.srt.plugins")),
        reason="hicache-shared is not installed as a distribution with its entry point",
    ),
    pytest.mark.filterwarnings("default"),  # SGLang's warnings are not ours to mend
]

IN_TREE = Path(importlib.util.find_spec("sglang.srt.mem_cache.storage").submodule_search_locations[0])  # type: ignore[union-attr,index]
LAYERS, WIDTH, PAGE, PAGES = 3, 24, 4, 6
KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(3)]


def loaded() -> dict[str, str]:
    """What SGLang's factory loads under the two names, as ``module.class``."""
    registry = StorageBackendFactory._registry
    return {
        name: f"{registry[name]['module_path']}.{registry[name]['class_name']}"
        for name in takeover.ADAPTERS
    }


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Lets SGLang load its plugins as at its start, with a variable set; undone afterwards."""
    registry = dict(StorageBackendFactory._registry)
    monkeypatch.setattr(StorageBackendFactory, "_registry", registry)

    def start(override: str | None = None, sglang_plugins_variable: str = "") -> dict[str, str]:
        monkeypatch.setenv("SGLANG_PLUGINS", sglang_plugins_variable)
        monkeypatch.delenv(takeover.VARIABLE, raising=False)
        if override is not None:
            monkeypatch.setenv(takeover.VARIABLE, override)
        monkeypatch.setattr(sglang_plugins, "_plugins_loaded", False)
        sglang_plugins.load_plugins()
        return loaded()

    return start


OWN = {
    "mooncake": "sglang.srt.mem_cache.storage.mooncake_store.mooncake_store.MooncakeStore",
    "mori": "sglang.srt.mem_cache.storage.umbp.umbp_store.UMBPStore",
}
OURS = {
    "mooncake": "hicache_mooncake.MooncakeBackend",
    "mori": "hicache_umbp.in_tree.MoriBackend",
}


@pytest.mark.parametrize("override", [None, "", " "])
def test_nothing_is_taken_over_without_the_variable(
    start: Callable[..., dict[str, str]], override: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert start(override) == OWN
    assert not [record for record in caplog.records if record.name.startswith("hicache_shared")]


@pytest.mark.parametrize("override", ["mooncake,mori", " mori , mooncake,", "mori,mori,mooncake"])
def test_both_names_load_ours_and_one_line_says_so(
    start: Callable[..., dict[str, str]], override: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(StorageBackendFactory._registry)
    assert start(override) == OURS
    (line,) = [r for r in caplog.records if r.name == takeover.__name__]
    assert line.levelno == logging.WARNING
    for name, ours in OURS.items():
        assert f"{name} as {ours}" in line.getMessage()
    others = set(before) - set(OURS)
    assert {n: StorageBackendFactory._registry[n] for n in others} == {n: before[n] for n in others}


def test_one_name_leaves_the_other_alone(start: Callable[..., dict[str, str]]) -> None:
    assert start("mooncake") == OWN | {"mooncake": OURS["mooncake"]}


@pytest.mark.parametrize("text", ["umbp", "mooncake,umbp", "Mooncake"])
@pytest.mark.parametrize("name", ["mooncake", "mori"])
def test_with_a_wrong_name_neither_backend_is_made_and_the_error_says_what_can_be_named(
    start: Callable[..., dict[str, str]], text: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang goes on after a plugin raised, and would use its own backends in silence."""
    start(text)
    (line,) = [r for r in caplog.records if r.name == takeover.__name__]
    assert line.levelno == logging.ERROR
    with pytest.raises(ConfigError, match=rf"{takeover.VARIABLE}={text}.*mooncake, mori"):
        StorageBackendFactory.create_backend(name, config(), None)


def test_an_adapter_that_is_not_installed_is_no_reason_to_use_sglangs_own(
    start: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise BackendUnavailableError(f"backend {name!r} is not installed: pip install it")

    monkeypatch.setattr("hicache_shared.plugins.find", missing)
    start("mooncake")
    with pytest.raises(BackendUnavailableError, match="'mooncake' is not installed: pip install"):
        StorageBackendFactory.create_backend("mooncake", config(), None)


def test_a_variable_that_was_mended_too_late_is_refused_too(
    start: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    start("nobody")
    monkeypatch.setenv(takeover.VARIABLE, "mooncake")
    with pytest.raises(ConfigError, match="wrong when SGLang started"):
        StorageBackendFactory.create_backend("mooncake", config(), None)


def test_sglang_plugins_filters_the_takeover_by_its_name(
    start: Callable[..., dict[str, str]],
) -> None:
    assert start("mooncake,mori", "another") == OWN
    assert start("mooncake,mori", "another,hicache") == OURS


def test_a_fresh_process_takes_over_before_anything_else_of_sglang_is_imported() -> None:
    program = (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.mem_cache.storage import StorageBackendFactory as F\n"
        "print([F._registry[n]['module_path'] for n in ('mooncake', 'mori')])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | {takeover.VARIABLE: "mooncake,mori"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "['hicache_mooncake', 'hicache_umbp.in_tree']"
    assert f"{takeover.VARIABLE}: SGLang loads storage backend mooncake as" in done.stderr


# -- users keep their settings ---------------------------------------------------------------------


def in_tree_sources(folder: str) -> str:
    return "\n".join(path.read_text() for path in sorted((IN_TREE / folder).glob("*_store.py")))


def config_type(backend: str) -> type[CommonConfig]:
    if backend == "mooncake":
        from hicache_mooncake.config import MooncakeConfig

        return MooncakeConfig
    from hicache_umbp.config import UmbpConfig

    return UmbpConfig


@pytest.mark.parametrize(("folder", "backend"), [("mooncake_store", "mooncake"), ("umbp", "umbp")])
def test_every_key_that_the_in_tree_adapter_reads_is_known_to_ours(
    folder: str, backend: str
) -> None:
    """A key that ours does not act on is refused with its reason, never as unknown."""
    found = set(re.findall(r'extra(?:_config)?\.get\(\s*"(\w+)"', in_tree_sources(folder)))
    assert len(found) > 10
    known = {setting.name for setting in settings_of(config_type(backend))}
    assert found <= known | SGLANG_KEYS | {CONFIG_FILE_KEY}


def test_every_variable_that_the_in_tree_mooncake_adapter_reads_is_read_by_ours() -> None:
    found = set(re.findall(r"envs\.((?:SGLANG_HICACHE_)?MOONCAKE_\w+)", in_tree_sources("mooncake_store")))
    kind = config_type("mooncake")
    known = {name for setting in settings_of(kind) for name in setting.env}
    assert found <= known | {str(kind.config_file_env)}


# -- real Mooncake, SGLang's own host pools ---------------------------------------------------------


def config(tp: tuple[int, int] = (0, 1), mla: bool = True, **extra: Any) -> Any:
    return rank_config(
        "tiny",
        is_mla_model=mla,
        extra_config={"model_id": "t", "revision": "1", "kv_cache_dtype": "bf16", **extra},
        tp_rank=tp[0],
        tp_size=tp[1],
    )


def mla_pool(layout: str, allocator: str, dcp: tuple[int, int] = (0, 1)) -> Any:
    """SGLang's own MLA host pool; under DCP its pages are as many times wider."""
    buffers = tuple(torch.zeros(8, 1, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=WIDTH - 8,
        qk_rope_head_dim=8,
        kv_cache_dim=WIDTH,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info,
        host_to_device_ratio=1,
        host_size=0,
        page_size=PAGE * dcp[1],
        layout=layout,
        pin_memory=False,
        allocator_type=allocator,
        dcp_size=dcp[1],
        dcp_rank=dcp[0],
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
        host_token_capacity=PAGES * PAGE,
    )


def pages(pool: Any, numbers: range) -> list[Any]:
    return [pool.get_data_page(n * pool.logical_page_size).clone() for n in numbers]


def slots(pool: Any, numbers: range) -> Any:
    width = pool.logical_page_size
    return torch.arange(numbers.start * width, numbers.stop * width)


def fill(pool: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=generator))


@pytest.fixture(scope="module")
def master() -> Iterator[dict[str, Any]]:
    with find("mooncake").serve(ServeOptions(64 << 20)) as extra:
        yield extra


def attached(name: str, pool: Any, storage_config: Any) -> Any:
    """As SGLang's controller attaches a backend of an in-tree name."""
    backend = StorageBackendFactory.create_backend(name, storage_config, pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend


@pytest.mark.backend("mooncake")
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_pages_in_mooncakes_own_host_memory_come_back_byte_exact(
    start: Callable[..., dict[str, str]], master: dict[str, Any], layout: str
) -> None:
    """SGLang allocates with MooncakeHostMemAllocator under this name, with the in-tree's keys."""
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import (
        MooncakeHostTensorAllocator,
    )

    start("mooncake")
    pool = mla_pool(layout, "mooncake")
    assert isinstance(pool.allocator, MooncakeHostTensorAllocator)
    backend = attached("mooncake", pool, config(extra_backend_tag=layout, **master))
    assert type(backend).__module__ == "hicache_mooncake.backend"
    fill(pool, 1)
    stored = pages(pool, range(3))
    assert backend.batch_set_v1(KEYS, slots(pool, range(3))) == [True] * 3
    fill(pool, 2)
    assert backend.batch_exists(KEYS) == 3
    assert backend.batch_get_v1(KEYS, slots(pool, range(3, 6))) == [True] * 3
    assert all(map(torch.equal, pages(pool, range(3, 6)), stored))
    backend.clear()
    backend.close()


@pytest.mark.backend("mooncake")
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_under_dcp_each_rank_restores_its_own_shard_by_logical_slots(
    start: Callable[..., dict[str, str]], master: dict[str, Any], layout: str
) -> None:
    """SGLang passes ``logical_page_size`` slots a key; TP rank 2 is a replica of DCP rank 0."""
    start("mooncake")
    places = [(0, 0), (1, 1), (2, 0)]
    backends, pools = [], []
    for tp_rank, dcp_rank in places:
        pool = mla_pool(layout, "mooncake", (dcp_rank, 2))
        place = config((tp_rank, 4), namespace=f"dcp {layout}", **master)
        place.dcp_rank, place.dcp_size, place.logical_page_size = dcp_rank, 2, 2 * PAGE
        fill(pool, dcp_rank)
        pools.append(pool)
        backends.append(attached("mooncake", pool, place))
    stored = [pages(pool, range(3)) for pool in pools]
    assert len(slots(pools[0], range(3))) == 3 * 2 * PAGE
    assert backends[0].batch_set_v1(KEYS, slots(pools[0], range(3))) == [True] * 3
    assert [backend.batch_exists(KEYS) for backend in backends] == [3, 0, 3]
    assert backends[1].batch_set_v1(KEYS, slots(pools[1], range(3))) == [True] * 3
    for backend, pool, expected in zip(backends, pools, stored, strict=True):
        fill(pool, 9)
        assert backend.batch_get_v1(KEYS, slots(pool, range(3, 6))) == [True] * 3
        assert all(map(torch.equal, pages(pool, range(3, 6)), expected))
    for backend in backends:
        backend.close()


@pytest.mark.backend("mooncake")
def test_another_dcp_size_shares_no_page(
    start: Callable[..., dict[str, str]], master: dict[str, Any]
) -> None:
    start("mooncake")
    hits = []
    for dcp_size in (2, 4, 1):
        pool = mla_pool("page_first", "mooncake", (0, dcp_size))
        place = config((0, 4), namespace="dcp sizes", **master)
        if dcp_size > 1:
            place.dcp_size, place.logical_page_size = dcp_size, dcp_size * PAGE
        backend = attached("mooncake", pool, place)
        hits.append(backend.batch_exists(KEYS))
        assert backend.batch_set_v1(KEYS, slots(pool, range(3))) == [True] * 3
        backend.close()
    assert hits == [0, 0, 0]


# -- what SGLang gives to some names alone ------------------------------------------------------------


class DraftPool:
    """As much of an MHA host pool as is looked at before it is refused."""

    head_num = 1


class EnvelopePool:
    stores_page_envelope = True
    pool_label = "full"


def test_page_envelopes_are_refused_by_name_before_a_client_is_made(
    start: Callable[..., dict[str, str]],
) -> None:
    start("mori")
    with pytest.raises(LayoutError, match="'full' is made of page envelopes.*unified-memory"):
        StorageBackendFactory.create_backend("mori", config(), EnvelopePool())


def test_sglangs_own_envelope_pool_says_that_it_is_one() -> None:
    from sglang.srt.mem_cache.pool_host.unified import UnifiedPageEnvelopeHostPool

    assert UnifiedPageEnvelopeHostPool.stores_page_envelope is EnvelopePool.stores_page_envelope
    assert not MLATokenToKVPoolHost.stores_page_envelope
