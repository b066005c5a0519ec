"""The count of tests per backend that ends a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    (tmp_path / "conftest.py").write_bytes((Path(__file__).parents[1] / "conftest.py").read_bytes())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = backend(name): of a test\n")
    (tmp_path / "test_some.py").write_text(TESTS)

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )

    lines = run.stdout.splitlines()
    assert "broken: 1 error" in lines
    assert "memory: 2 passed, 1 failed" in lines
    assert "real: 1 passed, 1 skipped" in lines
    assert "none: 1 passed" in lines
    assert lines.index("none: 1 passed") == lines.index("real: 1 passed, 1 skipped") + 1
    assert "1 failed, 4 passed, 1 skipped, 1 error in " in lines[-1]
