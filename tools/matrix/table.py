"""The table as JSON and as a page of documentation. Nothing in it differs from run to run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from tools.matrix.notes import Notes
from tools.matrix.reports import FAILS, NOT_RUN, NOT_SUPPORTED, PASSES, Behaviour, Run, behaviour_of

HEAD = """\
# What backends do

Each line is a test of the [conformance suite](conformance.md), each column a backend that it ran
on. A test runs over models, memory layouts and other parameters; it fails when one of these runs
does. Numbers are those of [cases](cases.md). `tools/matrix` makes this page from the reports of the
runs in CI and compares it with them in each; [matrix.json](matrix.json) has the same for programs.

Our backends ran with all memory layouts, and on the suite's own host pools over numpy. The others
were made by SGLang's own factory, with SGLang's own classes of host pools over torch tensors on the
CPU, and ran with the layouts `page_first` and `page_head` alone. A backend is called as SGLang's
controller calls one of its kind.

"fails" was looked into by hand, one by one; the causes are below the tables. "not supported" says
that the suite cannot test it there: no way behind the backend, no server to stop, or a form of
call that SGLang does not use with it. "not run" are tests that were left out.
"""

BEYOND = """\
## Beyond SGLang's calls

SGLang 0.5.23 never does what these tests do, for the reason beside each. A backend that fails them
may serve SGLang well; our own are held to them all the same.
"""

MARKS = {FAILS: "**fails**", PASSES: "passes", NOT_SUPPORTED: "not supported", NOT_RUN: "not run"}


def behaviours_of(runs: Mapping[str, Run]) -> list[Behaviour]:
    """Every test of the reports: those of cases by number, then the others by their claim."""
    tests = {test for run in runs.values() for test in run.verdicts}
    return sorted(map(behaviour_of, tests), key=lambda one: (one.case == 0, one))


def as_json(runs: Mapping[str, Run], notes: Notes) -> str:
    """docs/matrix.json."""
    table = {
        "backends": [
            {"name": name, "about": notes.about[name], "versions": runs[name].versions}
            for name in notes.order
        ],
        "behaviours": [
            {
                "test": one.test,
                "claim": one.claim,
                "case": one.case or None,
                "beyond": notes.beyond.get(one.test),
                "verdicts": _verdicts(one, runs, notes),
            }
            for one in behaviours_of(runs)
        ],
        "causes": {name: dict(sorted(causes.items())) for name, causes in notes.causes.items()},
    }
    return json.dumps(table, indent=1, sort_keys=True) + "\n"


def as_markdown(runs: Mapping[str, Run], notes: Notes) -> str:
    """docs/matrix.md."""
    return "\n".join(_lines(runs, notes)) + "\n"


def _lines(runs: Mapping[str, Run], notes: Notes) -> Iterator[str]:
    yield HEAD
    yield from _table(["backend", "what it is", "versions"], [*_backends(runs, notes)])
    behaviours = behaviours_of(runs)
    yield "\n## Under SGLang's calls\n"
    columns = ["behaviour", "case", *notes.order]
    within = [one for one in behaviours if one.test not in notes.beyond]
    yield from _table(columns, [_row(one, runs, notes) for one in within])
    yield f"\n{BEYOND}"
    outside = [one for one in behaviours if one.test in notes.beyond]
    yield from _table(columns, [_row(one, runs, notes) for one in outside])
    yield ""
    yield from _table(
        ["behaviour", "why SGLang does not do it"],
        [[one.claim, notes.beyond[one.test]] for one in outside],
    )
    yield "\n## What the others fail\n"
    for peer in notes.causes:
        yield f"### {peer}\n"
        yield from _table(["test", "case", "cause"], [*_causes(peer, behaviours, notes)])
        yield ""


def _backends(runs: Mapping[str, Run], notes: Notes) -> Iterator[list[str]]:
    for name in notes.order:
        versions = ", ".join(f"{key} {value}" for key, value in sorted(runs[name].versions.items()))
        yield [name, notes.about[name], versions]


def _row(one: Behaviour, runs: Mapping[str, Run], notes: Notes) -> list[str]:
    verdicts = _verdicts(one, runs, notes)
    return [one.claim, _case(one), *(MARKS[verdicts[name]] for name in notes.order)]


def _causes(peer: str, behaviours: Sequence[Behaviour], notes: Notes) -> Iterator[list[str]]:
    causes = notes.causes[peer]
    for one in behaviours:
        if one.test in causes:
            at_times = " (in some runs)" if one.test in notes.at_times[peer] else ""
            beyond = " (beyond SGLang's calls)" if one.test in notes.beyond else ""
            yield [f"`{one.test}`", _case(one), f"{causes[one.test]}{at_times}{beyond}"]


def _verdicts(one: Behaviour, runs: Mapping[str, Run], notes: Notes) -> dict[str, str]:
    return {name: notes.verdict(name, one.test, runs[name]) for name in notes.order}


def _case(one: Behaviour) -> str:
    return str(one.case) if one.case else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
