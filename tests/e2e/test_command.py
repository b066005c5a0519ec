"""The whole run against a fake of SGLang's HTTP API: it shows the accounting, not an engine."""

from __future__ import annotations

import json
import os
import select
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_shared.server import free_ports
from tests.e2e.client import Client, EngineError
from tests.e2e.command import main
from tests.e2e.fake import VOCABULARY, FakeEngine, FakeServer
from tests.e2e.server import OwnEngine
from tests.e2e.verdict import ExitCode
from tests.processes import alive

OPTIONS = ("--vocabulary", str(VOCABULARY), "--pages", "1", "3", "--tokens", "5", "--seed", "a")


def run(engine: FakeEngine, *options: str) -> ExitCode:
    with FakeServer(engine) as server:
        return ExitCode(main(["--url", server.url, *OPTIONS, *options]))


def outcome(
    capsys: pytest.CaptureFixture[str], engine: FakeEngine, *options: str
) -> dict[str, Any]:
    code = run(engine, "--json", *options)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    return found


def test_a_storage_that_keeps_its_pages_is_good(capsys: pytest.CaptureFixture[str]) -> None:
    found = outcome(capsys, FakeEngine())
    assert found["outcome"] == "GOOD"
    assert len(found["prompts"]) == 12  # six prompts, greedy and teacher-forced
    assert {each["verdict"] for each in found["prompts"]} == {"from storage"}


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"loses": True}, ExitCode.NOT_FROM_STORAGE),
        ({"keeps_device": True}, ExitCode.NOT_FROM_STORAGE),
        ({"garbles": True}, ExitCode.DIFFERS),
        ({"drifts": 0.2}, ExitCode.DIFFERS),
        ({"stuck": True}, ExitCode.NO_ENGINE),
        ({"wavers": frozenset({15, 16, 17, 47, 48, 49})}, ExitCode.INCONCLUSIVE),
        ({"threshold": 256}, ExitCode.INCONCLUSIVE),
    ],
)
def test_a_fault_has_its_exit_code(fault: dict[str, Any], code: ExitCode) -> None:
    assert run(FakeEngine(**fault)) is code


def test_a_drift_within_the_bounds_is_the_same() -> None:
    assert run(FakeEngine(drifts=0.2), "--logprob", "0.3", "--kl", "0.5") is ExitCode.GOOD


def test_another_backend_than_the_one_asked_for_is_not_from_storage() -> None:
    assert run(FakeEngine(), "--backend", "UcmBackend") is ExitCode.NOT_FROM_STORAGE


def test_prompts_that_waver_neither_pass_nor_fail(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(wavers=frozenset({48}))
    found = outcome(capsys, engine)
    assert found["outcome"] == "GOOD"
    wavering = {each["prompt"] for each in found["prompts"] if each["verdict"] == "unrepeatable"}
    assert wavering == {"48 tokens (3 x 16 + 0)"}


def test_the_backend_that_the_server_was_told_to_load_must_be_named() -> None:
    assert run(FakeEngine(named="HiCacheFile")) is ExitCode.NOT_FROM_STORAGE


def test_a_garbled_page_is_found_in_every_round(capsys: pytest.CaptureFixture[str]) -> None:
    found = outcome(capsys, FakeEngine(garbles=True))
    rounds = {(each["when"], each["verdict"]) for each in found["prompts"] if each["counts"]}
    assert rounds == {
        ("greedy, after a flush", "differs"),
        ("teacher-forced, after a flush", "differs"),
    }


def test_controls_are_run_without_any_cache() -> None:
    engine = FakeEngine()
    run(engine)
    # Six prompts: each once more, and its text scored.
    assert len(engine.uncached_salts) == 12
    assert len({salt.split(",")[1] for salt in engine.uncached_salts}) == 2


def test_a_server_that_wants_a_key_gets_it() -> None:
    assert run(FakeEngine(api_key="k"), "--api-key", "k") is ExitCode.GOOD
    assert run(FakeEngine(api_key="k"), "--start-s", "0") is ExitCode.NO_ENGINE


def test_a_seed_that_was_used_on_the_same_storage_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = FakeEngine()
    assert run(engine) is ExitCode.GOOD
    assert run(engine) is ExitCode.USAGE
    assert "give another --seed" in capsys.readouterr().err


def test_a_restart_command_brings_a_third_round(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(FakeEngine()) as server:
        call = f"import urllib.request as r; r.urlopen({server.url + '/restart'!r}, b'{{}}')"
        restart = shlex.join([sys.executable, "-c", call])
        code = main(["--url", server.url, *OPTIONS, "--json", "--restart", restart])
    found = json.loads(capsys.readouterr().out)
    assert code == ExitCode.GOOD
    assert {each["when"] for each in found["prompts"]} == {
        "greedy, after a flush",
        "teacher-forced, after a flush",
        "greedy, after a restart",
    }


def test_a_restart_that_did_not_happen_is_noticed() -> None:
    assert run(FakeEngine(), "--restart", "true") is ExitCode.NOT_FROM_STORAGE


def test_a_restart_command_that_fails_ends_the_run() -> None:
    assert run(FakeEngine(), "--restart", "false") is ExitCode.NO_ENGINE


def test_prompts_can_be_parts_of_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("what has been will be again")
    assert run(FakeEngine(), "--text", str(text)) is ExitCode.GOOD


def test_a_server_that_is_not_there_has_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(FakeEngine()) as server:
        url = server.url
    assert main(["--url", url, "--start-s", "0"]) == ExitCode.NO_ENGINE
    assert "no answer from" in capsys.readouterr().err


def test_a_server_that_ends_at_start_is_told_with_what_it_printed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    own = OwnEngine(command, Client("http://127.0.0.1:9"), tmp_path / "log", start_s=60)
    with pytest.raises(EngineError, match="ended at start: no such model"):
        own.start()


@pytest.mark.parametrize(
    ("options", "code"), [((), ExitCode.NOT_FROM_STORAGE), (("--no-restart",), ExitCode.GOOD)]
)
def test_a_storage_that_ends_with_its_engine_is_noticed_at_the_restart(
    tmp_path: Path, options: tuple[str, ...], code: ExitCode
) -> None:
    """The fake keeps its storage in its own process."""
    own = fake_of_its_own(tmp_path)
    launch = shlex.join(["env", "PYTHONPATH=.", *own.command])
    arguments = ["--launch", launch, "--url", own.client.url, *OPTIONS, *options]
    assert main(arguments) == code
    assert ends(int((tmp_path / "rank").read_text()))


def test_an_engine_ends_with_its_ranks(tmp_path: Path) -> None:
    with fake_of_its_own(tmp_path) as own:
        rank = int((tmp_path / "rank").read_text())
        assert own.client.info().page == 16
        assert alive(rank)
    assert ends(rank)


def ends(pid: int) -> bool:
    """Whether a process has ended, or does so after the signal that it was sent."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10)[0])
    finally:
        os.close(descriptor)


def fake_of_its_own(folder: Path) -> OwnEngine:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tests.e2e.fake", str(port), str(folder / "rank")]
    client = Client(f"http://127.0.0.1:{port}")
    return OwnEngine(command, client, folder / "log", environment={"PYTHONPATH": "."}, start_s=120)
