"""The count of tests per backend that ends a run."""

from __future__ import annotations

from pathlib import Path

from tests.packaging.inner_run import inner_run

TESTS = """
import pytest

@pytest.mark.backend("memory")
@pytest.mark.parametrize("n", range(3))
def test_memory(n):
    assert n != 1

@pytest.mark.backend("real")
def test_real():
    pytest.skip("not here")

@pytest.mark.backend("real")
class TestReal:
    def test_inside_a_class(self):
        pass

@pytest.fixture
def broken():
    raise RuntimeError

@pytest.mark.backend("broken")
def test_broken(broken):
    pass

def test_of_no_backend():
    pass
"""


def test_the_summary_counts_every_outcome_of_every_backend(tmp_path: Path) -> None:
    code, lines = inner_run(tmp_path, {"test_some.py": TESTS})

    assert code == 1
    assert "broken: 1 error" in lines
    assert "memory: 2 passed, 1 failed" in lines
    assert "real: 1 passed, 1 skipped" in lines
    assert "none: 1 passed" in lines
    assert lines.index("none: 1 passed") == lines.index("real: 1 passed, 1 skipped") + 1
    assert "1 failed, 4 passed, 1 skipped, 1 error in " in lines[-1]


BROKEN = {"test_broken_file.py": "import no_such_module", "test_some.py": "def test_one(): pass"}


def test_a_file_that_cannot_be_collected_is_reported_and_named(tmp_path: Path) -> None:
    code, lines = inner_run(tmp_path, BROKEN)

    assert code == 2
    assert any("No module named 'no_such_module'" in line for line in lines)
    assert any(line.startswith("ERROR test_broken_file.py") for line in lines)
    assert "1 error in " in lines[-1]


def test_the_summary_counts_the_other_files_beside_one_that_cannot_be_collected(
    tmp_path: Path,
) -> None:
    code, lines = inner_run(tmp_path, BROKEN, "--continue-on-collection-errors")

    assert code == 1
    assert "none: 1 passed" in lines
    assert "1 passed, 1 error in " in lines[-1]
