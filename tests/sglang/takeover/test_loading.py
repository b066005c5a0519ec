"""Our plugin in SGLang's own loader, and our classes in its own factory."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.unified import UnifiedPageEnvelopeHostPool
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from hicache_shared import takeover
from hicache_shared.errors import BackendUnavailableError, ConfigError, LayoutError
from tests.sglang.takeover.pools import Start, config

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
    start: Start, override: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert start(override) == OWN
    assert not [record for record in caplog.records if record.name.startswith("hicache_shared")]


@pytest.mark.parametrize("override", ["mooncake,mori", " mori , mooncake,", "mori,mori,mooncake"])
def test_both_names_load_ours_and_one_line_says_so(
    start: Start, override: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(StorageBackendFactory._registry)
    assert start(override) == OURS
    (line,) = [r for r in caplog.records if r.name == takeover.__name__]
    assert line.levelno == logging.WARNING
    for name, ours in OURS.items():
        assert f"{name} as {ours}" in line.getMessage()
    others = set(before) - set(OURS)
    assert {n: StorageBackendFactory._registry[n] for n in others} == {n: before[n] for n in others}


def test_one_name_leaves_the_other_alone(start: Start) -> None:
    assert start("mooncake") == OWN | {"mooncake": OURS["mooncake"]}


@pytest.mark.parametrize("text", ["umbp", "mooncake,umbp", "Mooncake"])
@pytest.mark.parametrize("name", ["mooncake", "mori"])
def test_with_a_wrong_name_neither_backend_is_made_and_the_error_says_what_can_be_named(
    start: Start, text: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang goes on after a plugin raised, and would use its own backends in silence."""
    start(text)
    (line,) = [r for r in caplog.records if r.name == takeover.__name__]
    assert line.levelno == logging.ERROR
    with pytest.raises(ConfigError, match=rf"{takeover.VARIABLE}={text}.*mooncake, mori"):
        StorageBackendFactory.create_backend(name, config(), None)


def test_an_adapter_that_is_not_installed_is_no_reason_to_use_sglangs_own(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise BackendUnavailableError(f"backend {name!r} is not installed: pip install it")

    monkeypatch.setattr("hicache_shared.plugins.find", missing)
    start("mooncake")
    with pytest.raises(BackendUnavailableError, match="'mooncake' is not installed: pip install"):
        StorageBackendFactory.create_backend("mooncake", config(), None)


def test_a_variable_that_was_mended_too_late_is_refused_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("nobody")
    monkeypatch.setenv(takeover.VARIABLE, "mooncake")
    with pytest.raises(ConfigError, match="wrong when SGLang started"):
        StorageBackendFactory.create_backend("mooncake", config(), None)


def test_sglang_plugins_filters_the_takeover_by_its_name(
    start: Start,
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


class EnvelopePool:
    stores_page_envelope = True
    pool_label = "full"


def test_page_envelopes_are_refused_by_name_before_a_client_is_made(
    start: Start,
) -> None:
    start("mori")
    with pytest.raises(LayoutError, match=r"'full' is made of page envelopes.*unified-memory"):
        StorageBackendFactory.create_backend("mori", config(), EnvelopePool())


def test_sglangs_own_envelope_pool_says_that_it_is_one() -> None:
    assert UnifiedPageEnvelopeHostPool.stores_page_envelope is EnvelopePool.stores_page_envelope
    assert not MLATokenToKVPoolHost.stores_page_envelope
