"""``python3.12 -m tools.matrix REPORT... [--again REPORT...] [--check | --surprises]``."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from tools.matrix import notes, reports, table

DOCS = Path(__file__).parents[2] / "docs"
NOTES = "matrix-notes.toml"

DIFFERS = """\
docs/{name} differs from the runs. If they are right, write it anew and commit it:
    python3 -m nox -s matrix -- --write
"""


def main(arguments: list[str] | None = None, docs: Path = DOCS) -> int:
    """Write the table, or compare it. Returns 0, or 1 where something does not fit."""
    parser = argparse.ArgumentParser(prog="python3.12 -m tools.matrix", description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path, help="of pytest's --hicache-report")
    parser.add_argument(
        "--again", nargs="*", type=Path, default=[], help="of second runs, which stand in"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="write nothing; fail if it differs")
    mode.add_argument(
        "--surprises", action="store_true", help="print the tests that do not fit the notes"
    )
    options = parser.parse_args(arguments)
    try:
        runs = reports.read(options.reports, options.again)
        checked = notes.load(docs / NOTES)
    except reports.MatrixError as error:
        print(error, file=sys.stderr)
        return 1
    if options.surprises:
        for name, run in runs.items():
            print(*checked.surprises(name, run), sep="\n")
        return 0
    if problems := [*checked.problems(runs)]:
        print(f"the runs and docs/{NOTES} do not fit:", file=sys.stderr)
        print(*(f"- {problem}" for problem in problems), sep="\n", file=sys.stderr)
        return 1
    made = {
        "matrix.json": table.as_json(runs, checked),
        "matrix.md": table.as_markdown(runs, checked),
    }
    if options.check:
        same = [_is_same(docs / name, text) for name, text in made.items()]
        return 0 if all(same) else 1
    for name, text in made.items():
        (docs / name).write_text(text)
    return 0


def _is_same(path: Path, text: str) -> bool:
    """Whether the committed file is what the runs give; shows what differs."""
    before = path.read_text() if path.exists() else ""
    if before == text:
        return True
    lines = difflib.unified_diff(
        before.splitlines(), text.splitlines(), f"docs/{path.name}", "the runs", n=0, lineterm=""
    )
    print(*lines, sep="\n", file=sys.stderr)
    print(DIFFERS.format(name=path.name), file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())
