"""What was checked by hand: who the peers are, and why each of their failures is one."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.matrix.reports import FAILS, NOT_RUN, PASSES, MatrixError, Run


@dataclass(frozen=True)
class Notes:
    """The file of notes.

    Attributes:
        order: backends as the table shows them.
        about: backend -> what it is, and how it is run.
        beyond: test -> why SGLang never asks for what it claims.
        causes: peer -> test -> the cause of its failure.
        at_times: peer -> tests that fail in some runs only.
    """

    order: tuple[str, ...]
    about: Mapping[str, str]
    beyond: Mapping[str, str]
    causes: Mapping[str, Mapping[str, str]]
    at_times: Mapping[str, frozenset[str]]

    def verdict(self, backend: str, test: str, run: Run) -> str:
        """The verdict as the table shows it: the same in each run."""
        if test in self.at_times.get(backend, ()):
            return FAILS
        return run.verdicts.get(test, NOT_RUN)

    def problems(self, runs: Mapping[str, Run]) -> Iterator[str]:
        """What does not fit the runs, a sentence or two each."""
        for name in self.order:
            if name not in runs:
                yield f"no report has {name}: run `python3 -m nox -s tests sglang`"
        for name, run in runs.items():
            if name not in self.about:
                yield f"{name} is new: say what it is in [backends]"
            elif name in self.causes:
                yield from self._problems_of_peer(name, run)
            else:
                yield from _failures_of_ours(name, run)
        tests = {test for run in runs.values() for test in run.verdicts}
        for test in sorted(self.beyond.keys() - tests):
            yield f"[beyond] has {test}, which is no test of the suite: remove it"

    def surprises(self, name: str, run: Run) -> list[str]:
        """Tests that a peer failed and that have no note, or passed though they have one."""
        may_fail = self.causes.get(name, {}).keys()
        must_fail = may_fail - self.at_times.get(name, ())
        failed, passed = (
            {test for test, found in run.verdicts.items() if found == verdict}
            for verdict in (FAILS, PASSES)
        )
        return sorted((failed - may_fail) | (passed & must_fail))

    def _problems_of_peer(self, name: str, run: Run) -> Iterator[str]:
        for test in self.surprises(name, run):
            if run.verdicts[test] == FAILS:
                yield (
                    f"{name} fails {test}, which has no note. Find the cause in its source, and "
                    f'add it to [{name}]: {test} = "..."\n    {run.examples.get(test, "")}'
                )
            else:
                yield f"{name} passes {test}: remove its note from [{name}]"
        for test in sorted(self.causes[name].keys() - run.verdicts.keys()):
            yield f"[{name}] has {test}, which is no test of the suite: remove it"


def _failures_of_ours(name: str, run: Run) -> Iterator[str]:
    for test, verdict in sorted(run.verdicts.items()):
        if verdict == FAILS:
            yield f"{name} fails {test}: {run.examples.get(test, '')}"


def load(path: Path) -> Notes:
    """Read the file.

    Raises:
        MatrixError: a part of it is not as it should be.
    """
    try:
        told: dict[str, Any] = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise MatrixError(f"{path}: {error}") from error
    about: dict[str, str] = told.pop("backends")
    beyond: dict[str, str] = told.pop("beyond", {})
    causes: dict[str, dict[str, str]] = {}
    at_times: dict[str, frozenset[str]] = {}
    for peer, notes in told.items():
        if peer not in about:
            raise MatrixError(f"{path}: [{peer}] is not among [backends]")
        at_times[peer] = frozenset(notes.pop("at_times", ()))
        causes[peer] = notes
        if strange := at_times[peer] - notes.keys():
            raise MatrixError(f"{path}: [{peer}] at_times has {sorted(strange)} without a cause")
        if empty := [test for test, cause in notes.items() if not str(cause).strip()]:
            raise MatrixError(f"{path}: [{peer}] gives no cause for {', '.join(empty)}")
    return Notes(tuple(about), about, beyond, causes, at_times)
