"""Tests of a real backend skip only where its client is absent and nobody requires it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends import REQUIRE
from tests.packaging.inner_run import inner_run

TESTS = """
import pytest, sys
from tests import backends

PYTHON = ".".join(map(str, sys.version_info[:2]))
backends.CLIENTS.update(
    absent=backends.Client("no_such_client", only=(PYTHON,)),
    unmade=backends.Client("no_such_client", only=("2.7",)),
    present=backends.Client("json"),
)

@pytest.fixture
def server():
    raise RuntimeError("the server does not start")

@pytest.mark.backend("absent")
def test_of_an_absent_client(server):
    pass

@pytest.mark.backend("unmade")
def test_of_a_client_without_wheel_for_this_python(server):
    pass

@pytest.mark.backend("present")
def test_of_a_server_that_does_not_start(server):
    pass

@pytest.mark.backend("present")
def test_of_a_present_client():
    pass

@pytest.mark.backend("memory")
def test_of_a_backend_without_client():
    pass
"""
ABSENT = "the native client of absent (package 'no_such_client') is not installed"


@pytest.mark.parametrize(
    ("require", "absent", "reason"),
    [
        (False, "absent: 1 skipped", f"{ABSENT}; set {REQUIRE}=1 to fail instead"),
        (True, "absent: 1 error", f"{ABSENT}, and {REQUIRE} is set"),
    ],
    ids=["not required", "required"],
)
def test_an_absent_client_is_a_skip_or_where_required_a_fault(
    tmp_path: Path, require: bool, absent: str, reason: str
) -> None:
    code, lines = inner_run(tmp_path, {"test_some.py": TESTS}, require=require)

    assert code == 1
    assert absent in lines
    assert "unmade: 1 left out, its client has no wheel here" in lines
    assert any(reason in line for line in lines)
    assert "present: 1 passed, 1 error" in lines
    assert any("the server does not start" in line for line in lines)
    assert "memory: 1 passed" in lines
