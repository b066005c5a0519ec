"""The generated table of behaviours and backends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.matrix.__main__ import main

NOTES = """
[backends]
ours = "an adapter"
peer = "a peer"

[beyond]
test_calls_after_close = "it stops its threads first"

[peer]
test_case_01_prefixes = "It folds by minimum."
"""


def report(**verdicts: dict[str, str]) -> dict[str, Any]:
    """A report of the plugin: backend -> test -> verdict."""
    return {
        "schema": 1,
        "backends": {
            name: {
                "versions": {f"dist-{name}": "1.0"},
                "behaviours": {
                    test: {
                        "verdict": verdict,
                        "counts": {verdict: 1},
                        "failures": {"mla-page_first": "0 == 8"} if verdict == "failed" else {},
                        "reasons": [],
                    }
                    for test, verdict in tests.items()
                },
            }
            for name, tests in verdicts.items()
        },
    }


PASSING = {"test_case_01_prefixes": "passed", "test_calls_after_close": "passed"}
FAILING = {"test_case_01_prefixes": "failed", "test_calls_after_close": "not supported"}


class Table:
    """A folder of documents, and reports to make the table from."""

    def __init__(self, folder: Path) -> None:
        self.docs = folder
        self.notes(NOTES)

    def notes(self, text: str) -> None:
        (self.docs / "matrix-notes.toml").write_text(text)

    def run(
        self, *reports: dict[str, Any], again: dict[str, Any] | None = None, mode: str = ""
    ) -> int:
        paths = [self._file(f"{number}", told) for number, told in enumerate(reports)]
        second = [] if again is None else ["--again", self._file("again", again)]
        return main([*paths, *second, *([mode] if mode else [])], self.docs)

    def _file(self, name: str, told: dict[str, Any]) -> str:
        path = self.docs / f"{name}.json"
        path.write_text(json.dumps(told))
        return str(path)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def test_the_table_is_what_several_reports_say_together(table: Table) -> None:
    assert table.run(report(ours=PASSING), report(peer=FAILING)) == 0
    page = (table.docs / "matrix.md").read_text()
    assert "| prefixes | 1 | passes | **fails** |" in page
    assert "| calls after close |  | passes | not supported |" in page
    assert page.index("| prefixes |") < page.index("Beyond SGLang") < page.index("| calls after")
    assert "| `test_case_01_prefixes` | 1 | It folds by minimum. |" in page
    made = json.loads((table.docs / "matrix.json").read_text())
    assert made["behaviours"][0]["verdicts"] == {"ours": "passes", "peer": "fails"}
    assert made["backends"][1]["versions"] == {"dist-peer": "1.0"}


def test_reports_in_another_order_and_with_other_counts_give_the_same_table(table: Table) -> None:
    ours, peer = report(ours=PASSING), report(peer=FAILING)
    assert table.run(ours, peer) == 0
    peer["backends"]["peer"]["behaviours"]["test_case_01_prefixes"]["counts"]["failed"] = 7
    assert table.run(peer, ours, mode="--check") == 0


def test_of_two_runs_of_a_backend_the_stronger_verdict_counts(table: Table) -> None:
    assert table.run(report(ours=PASSING), report(peer=FAILING)) == 0
    again = report(peer=dict.fromkeys(FAILING, "not run"))
    assert table.run(again, report(ours=PASSING), report(peer=FAILING), mode="--check") == 0


def test_a_verdict_that_changed_is_shown_with_what_to_do(
    table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.run(report(ours=PASSING), report(peer=FAILING)) == 0
    changed = {**PASSING, "test_calls_after_close": "not supported"}
    assert table.run(report(ours=changed), report(peer=FAILING), mode="--check") == 1
    error = capsys.readouterr().err
    assert "-| calls after close |  | passes | not supported |" in error
    assert "+| calls after close |  | not supported | not supported |" in error
    assert "nox -s matrix -- --write" in error


@pytest.mark.parametrize(
    ("notes", "peer", "message"),
    [
        (NOTES, {**FAILING, "test_new": "failed"}, "peer fails test_new, which has no note"),
        (NOTES, PASSING, "peer passes test_case_01_prefixes: remove its note"),
        (NOTES, {"test_calls_after_close": "passed"}, "which is no test of the suite"),
        (f'{NOTES}\ntest_gone = "x"', FAILING, "[peer] has test_gone"),
        (NOTES.replace("[beyond]", '[beyond]\ntest_gone = "x"'), FAILING, "[beyond] has test_gone"),
        (NOTES.replace("It folds by minimum.", " "), FAILING, "gives no cause"),
        (NOTES.replace("[peer]", "[pear]"), FAILING, "[pear] is not among [backends]"),
    ],
)
def test_notes_that_do_not_fit_the_runs_are_refused(
    table: Table,
    capsys: pytest.CaptureFixture[str],
    notes: str,
    peer: dict[str, str],
    message: str,
) -> None:
    table.notes(notes)
    assert table.run(report(ours=PASSING), report(peer=peer)) == 1
    assert message in capsys.readouterr().err
    assert not (table.docs / "matrix.md").exists()


def test_a_failure_in_some_runs_is_a_failure_in_each(table: Table) -> None:
    table.notes(NOTES.replace("[peer]", '[peer]\nat_times = ["test_case_01_prefixes"]'))
    assert table.run(report(ours=PASSING), report(peer=FAILING)) == 0
    passed = {**FAILING, "test_case_01_prefixes": "passed"}
    assert table.run(report(ours=PASSING), report(peer=passed), mode="--check") == 0


def test_the_verdict_of_a_second_run_stands_in_for_the_first(table: Table) -> None:
    """A crash in one run of many is not what a backend does; what it does twice, is."""
    crashed = report(peer={**FAILING, "test_calls_after_close": "failed"})
    assert table.run(report(ours=PASSING), crashed) == 1
    left_out = {"test_case_01_prefixes": "not run"}
    second = report(peer={**left_out, "test_calls_after_close": "passed"})
    assert table.run(report(ours=PASSING), crashed, again=second) == 0
    verdicts = [
        one["verdicts"]["peer"]
        for one in json.loads((table.docs / "matrix.json").read_text())["behaviours"]
    ]
    assert verdicts == ["fails", "passes"]
    assert table.run(report(ours=PASSING), crashed, again=crashed) == 1


@pytest.mark.parametrize(
    ("peer", "surprises"),
    [
        (FAILING, ""),
        ({**FAILING, "test_new": "failed"}, "test_new"),
        ({**FAILING, "test_case_01_prefixes": "passed"}, "test_case_01_prefixes"),
        ({**FAILING, "test_case_01_prefixes": "not supported"}, ""),
    ],
)
def test_the_tests_that_do_not_fit_the_notes_are_told(
    table: Table, capsys: pytest.CaptureFixture[str], peer: dict[str, str], surprises: str
) -> None:
    assert table.run(report(peer=peer), mode="--surprises") == 0
    assert capsys.readouterr().out.split() == surprises.split()


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([report(ours=PASSING)], "no report has peer: run"),
        ([report(ours=FAILING), report(peer=FAILING)], "ours fails test_case_01_prefixes: [mla"),
        ([report(ours=PASSING, new={}), report(peer=FAILING)], "new is new"),
        ([{"schema": 9}], "has schema 9"),
    ],
)
def test_runs_without_a_verdict_to_show_are_refused(
    table: Table, capsys: pytest.CaptureFixture[str], reports: list[dict[str, Any]], message: str
) -> None:
    assert table.run(*reports) == 1
    assert message in capsys.readouterr().err


def test_reports_of_several_versions_of_a_client_are_refused(
    table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    older = report(peer=FAILING)
    older["backends"]["peer"]["versions"] = {"dist-peer": "0.9"}
    assert table.run(report(ours=PASSING), report(peer=FAILING), older) == 1
    assert "remove the older report" in capsys.readouterr().err
