"""The table of supported releases in ``docs/sglang.md``: what a run found, between two marks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tools.sglang_drift.expected import SINCE, SUPPORTED, UNTIL
from tools.sglang_drift.release import ROOT
from tools.sglang_drift.shapes import CALLS, NAMES

DOCUMENT = ROOT / "docs" / "sglang.md"
BEGIN = "<!-- supported releases: written by `nox -s drift -- --write` -->"
END = "<!-- end of supported releases -->"

HEAD = (
    "| SGLang | contract | DeepSeek V4 Flash over its own types and factory | what it brought |",
    "|---|---|---|---|",
)


def render(results: Mapping[str, str]) -> str:
    """The table, newest release first.

    Args:
        results: for each supported release, what its round trip restored.
    """
    rows = [
        f"| {version} | equal | {results[version]} | {_brought(version)} |"
        for version in reversed(SUPPORTED)
    ]
    return "\n".join([BEGIN, *HEAD, *rows, END])


def _brought(version: str) -> str:
    if version == SUPPORTED[0]:
        return "the oldest supported"
    before = SUPPORTED[SUPPORTED.index(version) - 1]
    new = [
        f"`{name}`"
        for name, since in sorted(SINCE.items())
        if since == version and not name.startswith((CALLS, NAMES))
    ]
    gone = [f"without `{name}`" for name, gone in sorted(UNTIL.items()) if gone.last == before]
    return ", ".join([*new, *gone])


def current(document: str) -> str | None:
    """The table as a document has it; None where the marks are not both there, in order."""
    start, end = document.find(BEGIN), document.find(END)
    return document[start : end + len(END)] if 0 <= start < end else None


def put(document: str, table: str) -> str:
    """The document with another table.

    Raises:
        ValueError: it lacks the marks.
    """
    old = current(document)
    if old is None:
        raise ValueError(f"the document lacks the lines {BEGIN!r} and {END!r}")
    return document.replace(old, table)


def problem(results: Mapping[str, str], *, write: bool, path: Path = DOCUMENT) -> str | None:
    """What is wrong with the document's table; with ``write`` it is written instead."""
    document, table = path.read_text(), render(results)
    if write:
        path.write_text(put(document, table))
        return None
    if current(document) == table:
        return None
    return (
        f"{path.name}: the table of supported releases is not what this run found; "
        f"run `nox -s drift -- --write`. It should be:\n{table}"
    )
