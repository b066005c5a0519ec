"""``docs/cases.md``, the sentences that reports show, and the tests of the suite agree."""

from __future__ import annotations

import re
from pathlib import Path

from hicache_shared.pytest_plugin.cases import RIGHT, right_of
from hicache_shared.testing import BackendSuite

CASES = Path(__file__).parents[2] / "docs" / "cases.md"
ROW = re.compile(r"^\| (\d+) \|[^|]*\|[^|]*\| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
ROWS = {int(number): (right, held_by) for number, right, held_by in ROW.findall(CASES.read_text())}


def test_a_report_says_of_a_case_what_the_document_says() -> None:
    assert {case: ROWS[case][0] for case in RIGHT} == RIGHT


def test_every_case_that_the_document_gives_to_the_suite_has_a_test_there() -> None:
    tests = "\n".join(name for name in dir(BackendSuite) if name.startswith("test_"))
    for case, (_, held_by) in ROWS.items():
        for pattern in re.findall(r"`(test_\w+)\*?`", held_by):
            assert pattern in tests, f"case {case}: the suite has no {pattern}"


def test_every_numbered_test_of_the_suite_is_a_case_that_a_report_can_explain() -> None:
    for name in dir(BackendSuite):
        number = re.match(r"test_case_(\d+)_", name)
        if number is not None:
            assert int(number[1]) in RIGHT, name
            assert right_of(f"{name}[mla-page_first]").endswith(f"(case {int(number[1])})")


def test_a_test_without_a_case_is_explained_by_the_claim_in_its_name() -> None:
    right = right_of("test_pages_come_back_byte_exact[mla]")
    assert right == "pages come back byte exact"
