"""What all verbs share: finding backends, a clean standard output, a cheap import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, version

import pytest

from hicache_shared import plugins
from hicache_shared.cli import main
from hicache_shared.cli.output import own_stdout
from hicache_shared.errors import BackendUnavailableError, ConfigError


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, plugins.GROUP)


def test_version_is_the_distributions(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"hicache {version('hicache-shared')}\n"


def test_help_names_every_verb(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capfd.readouterr().out
    assert "roundtrip" in out
    assert "launch-args" in out


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hicache_shared.cli", "roundtrip", "--bogus"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--bogus" in done.stderr


def test_importing_the_command_loads_no_engine_and_no_native_client() -> None:
    code = (
        "import sys, hicache_shared.cli.app, hicache_shared.plugins as p; p.find('mooncake');"
        "print({'torch', 'sglang', 'mooncake', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_preferred_backend_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [entry("zeta", "z:z"), entry("mooncake", "m:m"), entry("ucm", "u:u")]
    monkeypatch.setattr(plugins, "_entries", lambda: found)
    assert plugins.installed() == ("ucm", "mooncake", "memory", "zeta")


def test_the_backend_that_was_taken_is_said_on_standard_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_entries", list)
    assert main(["roundtrip", "--model", "mla", "--layers-div", "30", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["backend"] == "memory"
    assert "hicache: backend memory" in err


def test_an_unknown_backend_lists_the_installed_ones_and_how_to_get_others(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_entries", list)
    assert main(["roundtrip", "--backend", "nope", "--json"]) == 2
    error = json.loads(capfd.readouterr().out)["error"]
    assert error["kind"] == "ConfigError"
    assert "installed are memory" in error["message"]
    assert "pip install 'hicache-mooncake[client]'" in error["message"]


def test_a_known_backend_that_is_not_installed_is_not_available(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_entries", list)
    assert main(["launch-args", "--backend", "mooncake", "--json"]) == 3
    answer = json.loads(capfd.readouterr().out)
    assert answer["backend"] == "mooncake"
    assert "pip install 'hicache-mooncake[client]'" in answer["error"]["message"]


@pytest.mark.parametrize("value", ["no_such_module:plugin", "hicache_shared.plugins:nothing"])
def test_a_plugin_that_does_not_load_is_not_available(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr(plugins, "_entries", lambda: [entry("odd", value)])
    with pytest.raises(BackendUnavailableError, match="does not load"):
        plugins.find("odd")


def test_a_plugin_of_another_kind_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_entries", lambda: [entry("odd", "hicache_shared.plugins:GROUP")])
    with pytest.raises(BackendUnavailableError, match="is no BackendPlugin"):
        plugins.find("odd")


def test_memory_is_always_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_entries", list)
    assert plugins.find("memory") is plugins.MEMORY
    with pytest.raises(ConfigError):
        plugins.find("")


def test_what_others_write_to_standard_output_goes_to_standard_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with own_stdout() as out:
        os.write(1, b"native\n")
        subprocess.run([sys.executable, "-c", "print('child')"], check=True)
        out.write("ours\n")
        print("ours too")
    os.write(1, b"after\n")
    print("and Python's", flush=True)
    captured = capfd.readouterr()
    assert captured.out == "ours\nours too\nafter\nand Python's\n"
    assert captured.err == "native\nchild\n"


def test_what_native_threads_write_after_a_command_is_not_behind_its_text() -> None:
    source = (
        "import atexit, os, sys; from hicache_shared.cli import main\n"
        "atexit.register(os.write, 1, b'late')\n"
        "sys.argv = ['hicache', 'launch-args', '--backend', 'memory', '--json']\n"
        "sys.exit(main())"
    )
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert json.loads(ended.stdout)["backend"] == "memory"
    assert ended.stderr.endswith("late")


def test_standard_output_is_as_it_was_after_an_error() -> None:
    before = os.fstat(1)
    with pytest.raises(RuntimeError, match="on purpose"), own_stdout():
        raise RuntimeError("on purpose")
    after = os.fstat(1)
    assert (before.st_dev, before.st_ino) == (after.st_dev, after.st_ino)
