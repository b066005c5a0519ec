"""What stands under SGLang's in-tree names; ``tests/sglang/takeover`` has SGLang itself."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest

from hicache_shared import takeover
from hicache_shared.errors import BackendUnavailableError, ConfigError
from hicache_shared.refused import RefusedBackend


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_shared.plugins.find", lambda name: None)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("mooncake", ["mooncake"]),
        ("mori,mooncake", ["mori", "mooncake"]),
        (" mooncake ,, mori,mooncake,", ["mooncake", "mori"]),
        (",", []),
    ],
)
def test_names_are_separated_by_commas(text: str, names: list[str]) -> None:
    assert list(takeover.chosen(text)) == names


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("wrong", ["umbp", "ucm", "Mooncake", "1", "mooncake mori"])
def test_a_name_that_cannot_be_taken_over_is_named_with_those_that_can(wrong: str) -> None:
    with pytest.raises(ConfigError) as error:
        takeover.chosen(f"mooncake,{wrong}")
    assert f"{takeover.VARIABLE}=mooncake,{wrong}: {wrong!r} cannot be taken over" in str(
        error.value
    )
    assert "mooncake, mori" in str(error.value)


def test_an_adapter_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_shared.plugins._entries", list)
    with pytest.raises(BackendUnavailableError, match="'umbp' is not installed: pip install"):
        takeover.chosen("mori")


@pytest.mark.usefixtures("installed")
def test_the_refused_backend_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: Any = RefusedBackend
    monkeypatch.setenv(takeover.VARIABLE, "umbp")
    with pytest.raises(ConfigError, match="'umbp' cannot be taken over"):
        refused(None, None)
    monkeypatch.setenv(takeover.VARIABLE, "mori")
    with pytest.raises(ConfigError, match="wrong when SGLang started"):
        refused(None, None)


@pytest.mark.parametrize("name", [*takeover.ADAPTERS, ""])
def test_the_classes_are_where_the_table_says(name: str) -> None:
    adapter = takeover.ADAPTERS.get(name, takeover.REFUSED)
    pytest.importorskip(adapter.module_path.split(".")[0])
    module = importlib.import_module(adapter.module_path)
    assert isinstance(getattr(module, adapter.class_name), type)


def test_without_the_variable_the_plugin_imports_nothing_of_sglang_and_no_contract() -> None:
    """SGLang runs it in each of its processes, at the very start."""
    program = (
        "import os, sys; os.environ.pop('HICACHE_ADAPTERS_OVERRIDE', None)\n"
        "from hicache_shared.takeover import register; register()\n"
        "assert 'hicache_shared.contract' not in sys.modules\n"
        "assert not any(name.split('.')[0] in ('numpy', 'torch', 'sglang') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
