"""``hicache launch-args``: flags that SGLang and the adapter's own loader take."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from hicache_mooncake.config import MooncakeConfig
from hicache_shared.cli import main
from hicache_shared.config import load

FLAG = "--hicache-storage-backend-extra-config"
IDENTITY = [
    "--model-path",
    "/models/it's here",
    "--revision",
    "5f0a2c1",
    "--kv-cache-dtype",
    "fp8_e4m3",
]


def printed(capfd: pytest.CaptureFixture[str], *options: str) -> tuple[list[str], str]:
    """The words a shell makes of what is printed, and standard error."""
    assert main(["launch-args", "--backend", "mooncake", *options]) == 0
    out, err = capfd.readouterr()
    # A backslash before a line's end continues it, for shlex as for a shell.
    return shlex.split(out.replace("\\\n", " ")), err


def extra_config(words: list[str]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(words[words.index(FLAG) + 1])
    return value


@pytest.mark.parametrize("options", [[], ["--master", "10.1.1.1:50051"], IDENTITY])
def test_the_printed_extra_config_loads_without_complaint(
    capfd: pytest.CaptureFixture[str], options: list[str]
) -> None:
    words, _ = printed(capfd, *options)
    extra = extra_config(words)
    config = load(MooncakeConfig, extra, environ={})
    assert config.master_server_address == extra["master_server_address"]
    assert extra["interface_v1"] == 1
    assert (extra["module_path"], extra["class_name"]) == ("hicache_mooncake", "MooncakeBackend")


@pytest.mark.parametrize("master", ["h:99999", "h", ""])
def test_a_master_that_cannot_be_is_refused_before_anything_is_printed(
    capfd: pytest.CaptureFixture[str], master: str
) -> None:
    assert main(["launch-args", "--backend", "mooncake", "--master", master]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert f"master_server_address: {master!r}" in err


def test_the_flags_enable_hierarchical_cache_with_a_page_layout(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words, _ = printed(capfd)
    assert words[0] == "--enable-hierarchical-cache"
    values = dict(zip(words[1::2], words[2::2], strict=True))
    assert values.pop(FLAG)
    assert values == {
        "--hicache-mem-layout": "page_first",
        "--hicache-io-backend": "kernel",
        "--hicache-storage-backend": "dynamic",
    }


def test_what_is_given_of_the_model_is_in_the_flags_and_in_the_config(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words, err = printed(capfd, *IDENTITY, "--master", "10.1.1.1:50051")
    assert words[:6] == IDENTITY
    config = load(MooncakeConfig, extra_config(words), environ={})
    assert config.model_id == "/models/it's here"
    assert config.revision == "5f0a2c1"
    assert config.kv_cache_dtype == "fp8_e4m3"
    assert config.master_server_address == "10.1.1.1:50051"
    assert "not in the extra config" not in err


def test_what_is_missing_of_the_model_is_a_hint_and_never_a_placeholder(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words, err = printed(capfd, "--revision", "5f0a2c1")
    assert {"model_id", "kv_cache_dtype"}.isdisjoint(extra_config(words))
    assert "not in the extra config: model_id, kv_cache_dtype" in err


def test_json_has_the_flags_as_a_list_and_the_config_as_an_object(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words, _ = printed(capfd, *IDENTITY)
    assert main(["launch-args", "--backend", "mooncake", "--json", *IDENTITY]) == 0
    out, err = capfd.readouterr()
    answer = json.loads(out)
    assert answer["backend"] == "mooncake"
    assert answer["flags"] == words
    assert answer["extra_config"] == extra_config(words)
    assert answer["hints"]
    assert err == ""
