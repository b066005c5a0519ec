"""Without a GPU the tests of this folder skip, and fail where one is required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.accelerator import DEVICE, REQUIRE, missing

HERE = Path(__file__).parent


@pytest.mark.skipif(missing("cuda") is None, reason="there is a GPU")
@pytest.mark.parametrize(
    ("required", "status", "outcome"),
    [("", 0, "1 skipped"), ("0", 0, "1 skipped"), ("1", 1, "1 error")],
)
def test_without_a_gpu_tests_skip_or_where_it_is_required_fail(
    tmp_path: Path, required: str, status: int, outcome: str
) -> None:
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())
    (tmp_path / "test_some.py").write_text("def test_on_a_gpu(device): pass\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {HERE.parents[1]}\n")
    environ = {name: value for name, value in os.environ.items() if name != DEVICE}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environ, REQUIRE: required},
    )
    assert run.returncode == status, run.stdout
    assert outcome in run.stdout.splitlines()[-1]
    assert ("torch" in run.stdout and REQUIRE in run.stdout) or not status
