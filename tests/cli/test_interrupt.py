"""Ctrl-C and SIGTERM: a verdict all the same, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_shared.cli import main
from hicache_shared.cli.interrupt import Interrupted, interruptible
from hicache_shared.cli.output import print_json

SIGNALS = [signal.SIGINT, signal.SIGTERM]

PROGRAM = """
import signal, sys, time
from hicache_shared.cli import main, report

# A process that a shell started in the background ignores it, and so would this one.
signal.signal(signal.SIGINT, signal.default_int_handler)

def step(bar, text):
    print(text, file=sys.stderr, flush=True)
    if text == "storing pool kv":
        while True:  # pause() would sleep for ever where the signal comes just before it
            time.sleep(0.01)

report.Bar.step = step
sys.exit(main(sys.argv[1:]))
"""
"""The command, waiting for a signal where both passes have stored pages."""


def interrupt(
    number: signal.Signals, temporary: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, "roundtrip", "--model", "mla", "--layers-div", "30"]
    with subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        process_group=0,
    ) as process:
        assert process.stderr is not None
        seen = ""
        for line in process.stderr:
            seen += line
            if line == "storing pool kv\n":
                break
        # The whole group, as a terminal does it.
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, out, seen + err)


BACKENDS = [
    pytest.param("memory", marks=pytest.mark.backend("memory")),
    pytest.param("mooncake", marks=pytest.mark.backend("mooncake")),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_command_with_json_and_leaves_no_folder(
    tmp_path: Path, backend: str, number: signal.Signals
) -> None:
    done = interrupt(number, tmp_path, "--backend", backend, "--json")
    assert done.returncode == 128 + number, done.stderr
    answer = json.loads(done.stdout)
    assert answer["byte_exact"] is False
    assert answer["error"]["kind"] == "Interrupted"
    assert number.name in answer["error"]["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", SIGNALS)
def test_people_are_told_of_the_signal_in_one_line(tmp_path: Path, number: signal.Signals) -> None:
    done = interrupt(number, tmp_path, "--backend", "memory")
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert f"hicache: ended by {number.name}" in done.stderr
    assert "Traceback" not in done.stderr


def test_only_the_first_signal_interrupts_so_that_cleaning_up_is_finished() -> None:
    cleaned_up = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            cleaned_up.append(True)

    with pytest.raises(Interrupted), interruptible():
        work()
    assert cleaned_up


def test_a_signal_behind_the_verdict_adds_nothing_to_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with interruptible():
        print_json({})
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().out == "{}\n"


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_are_as_they_were_after_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    assert main(["launch-args", "--backend", "memory", "--json"]) == 0
    assert [signal.getsignal(number) for number in SIGNALS] == before
    json.loads(capfd.readouterr().out)
