"""The ``hicache`` command on UMBP."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hicache_shared.cli import main
from hicache_shared.config import load
from hicache_shared.hostpool import PRESETS
from hicache_umbp.config import UmbpConfig
from hicache_umbp.plugin import launch_config, plugin
from hicache_umbp.server import UmbpServer

pytestmark = pytest.mark.backend("umbp")

SMALL = ["--pages", "4", "--layers-div", "12"]


def hicache(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hicache_shared.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("model", PRESETS)
def test_every_preset_is_byte_exact_through_umbp_and_stdout_is_json_alone(model: str) -> None:
    done = hicache("roundtrip", "--backend", "umbp", "--model", model, "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["backend"], report["byte_exact"]) == ("umbp", True)
    assert report["restored_prefix_pages"] == 4


def test_without_a_master_there_the_backend_is_not_available() -> None:
    done = hicache("roundtrip", "--backend", "umbp", "--master", "127.0.0.1:1", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["kind"] == "BackendUnavailableError"


def test_a_standalone_server_is_refused_with_the_reason() -> None:
    with UmbpServer() as server:
        done = hicache("roundtrip", "--backend", "umbp", "--master", server.address, "--json")
    assert done.returncode == 2
    assert "mori's own allocator" in json.loads(done.stdout)["error"]["message"]


def test_without_the_native_client_the_backend_is_not_available(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mori.umbp", None)
    assert main(["roundtrip", "--backend", "umbp", "--json", *SMALL]) == 3
    error: dict[str, Any] = json.loads(capfd.readouterr().out)["error"]
    assert error["kind"] == "BackendUnavailableError"
    assert "hicache-umbp[client]" in error["message"]


@pytest.mark.parametrize("master", [None, "10.1.1.1:50051"])
def test_the_printed_extra_config_loads_without_complaint(
    capfd: pytest.CaptureFixture[str], master: str | None
) -> None:
    options = [] if master is None else ["--master", master]
    assert main(["launch-args", "--backend", "umbp", "--json", *options]) == 0
    answer = json.loads(capfd.readouterr().out)
    extra = answer["extra_config"]
    assert (extra["module_path"], extra["class_name"]) == ("hicache_umbp", "UmbpBackend")
    assert load(UmbpConfig, extra, environ={}).master_address == (master or "")
    assert answer["hints"]


def test_a_master_that_cannot_be_is_refused() -> None:
    assert main(["launch-args", "--backend", "umbp", "--master", "h:99999"]) == 2
    assert main(["launch-args", "--backend", "umbp", "--master", "unix:///s"]) == 2


def test_the_plugin_names_the_class_that_sglang_loads() -> None:
    assert (plugin.module_path, plugin.class_name) == ("hicache_umbp", "UmbpBackend")
    assert launch_config(None)
