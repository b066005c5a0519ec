"""The table of mutants in the documentation; run as a module, writes it anew."""

from __future__ import annotations

import re
from pathlib import Path

from tests.suite.mutants import MUTANTS

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"
BEGIN, END = "<!-- mutants -->\n", "<!-- end of mutants -->\n"


def rows() -> str:
    lines = ["| broken backend | what it does wrong | found by |", "|---|---|---|"]
    lines += [f"| {mutant.name} | {mutant.wrong} | `{mutant.test}` |" for mutant in MUTANTS]
    return "\n".join(lines) + "\n"


def with_table(document: str) -> str:
    """A document with the table between its two marks as it is now."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{rows()}{END}", document, flags=re.DOTALL)


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
