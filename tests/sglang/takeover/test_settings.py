"""Users of SGLang's in-tree adapters keep their settings when ours take over."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from hicache_shared.config import CONFIG_FILE_KEY, SGLANG_KEYS, CommonConfig, settings_of


def in_tree_sources(folder: str) -> str:
    spec = importlib.util.find_spec("sglang.srt.mem_cache.storage")
    assert spec is not None
    assert spec.origin is not None
    files = (Path(spec.origin).parent / folder).glob("*_store.py")
    return "\n".join(path.read_text() for path in sorted(files))


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
    found = set(
        re.findall(r"envs\.((?:SGLANG_HICACHE_)?MOONCAKE_\w+)", in_tree_sources("mooncake_store"))
    )
    kind = config_type("mooncake")
    known = {name for setting in settings_of(kind) for name in setting.env}
    assert found <= known | {str(kind.config_file_env)}
