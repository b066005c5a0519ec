"""CI tests the backends that a change concerns, and all of them when in doubt."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import changed_backends
from tools.changed_backends import PYTHONS, backends_of, matrix

ROOT = Path(__file__).parents[2]


def adapters() -> dict[str, tuple[str, ...]]:
    """``ADAPTERS`` of noxfile.py: names and Pythons."""
    text = (ROOT / "noxfile.py").read_text()
    (every,) = re.findall(r"^PYTHONS = (\[.*\])", text, re.MULTILINE)
    (python,) = re.findall(r'^PYTHON = ("[\d.]+")', text, re.MULTILINE)
    found = re.findall(r'^    "(\w+)": Adapter\("packages/\w+", \w+, (.+)\)', text, re.MULTILINE)
    values = {"PYTHONS": every.replace("PYTHON", python)}
    return {name: tuple(ast.literal_eval(values.get(given, given))) for name, given in found}


def test_the_backends_and_their_pythons_are_those_of_the_sessions() -> None:
    assert adapters() == PYTHONS


def test_every_package_is_covered_by_a_filter_of_its_own() -> None:
    packages = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())
    assert packages == sorted(PYTHONS)
    for name in packages:
        assert backends_of(f"packages/{name}/src/x.py") == {name}
        assert backends_of(f"packages/{name}/pyproject.toml") == {name}
        assert backends_of(f"tests/{name}/test_x.py") == {name}
        assert backends_of(f"tests/conformance/test_{name}.py") == {name}


@pytest.mark.parametrize(
    "path",
    [
        "shared/src/hicache_shared/plan.py",
        "shared/pyproject.toml",
        "noxfile.py",
        "pyproject.toml",
        "tests/conftest.py",
        "tests/backends.py",
        "tests/conformance/anything.py",
        ".github/workflows/ci.yml",
        ".github/actions/nox/action.yml",
        "tools/changed_backends.py",
        "packages/new/src/x.py",
        "something/nobody/knows",
    ],
)
def test_what_all_backends_share_and_what_is_unknown_concerns_all(path: str) -> None:
    assert backends_of(path) == set(PYTHONS)


@pytest.mark.parametrize("path", ["README.md", "docs/design.md", "changelog.d/+x.added.md"])
def test_documents_concern_no_backend(path: str) -> None:
    assert backends_of(path) == set()


def test_what_concerns_no_backend_is_tested_by_another_job() -> None:
    for prefix in changed_backends.NONE:
        assert not prefix.startswith(("shared", "packages", "tests/conformance")), prefix


def test_a_change_makes_one_job_a_backend_and_python() -> None:
    assert matrix(["docs/x.md"]) == []
    assert matrix(["docs/x.md", "packages/ucm/x"]) == [{"backend": "ucm", "python": "3.12"}]
    assert matrix(None) == matrix(["shared/x"])
    assert {(job["backend"], job["python"]) for job in matrix(None)} == {
        (name, python) for name, pythons in PYTHONS.items() for python in pythons
    }


def test_the_files_that_a_branch_changed_are_read_from_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        command = ["git", *who, *words]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    (tmp_path / "packages" / "ucm").mkdir(parents=True)
    (tmp_path / "packages" / "ucm" / "gone.py").touch()
    git("add", "-A")
    git("commit", "-qm", "base")
    base = git("rev-parse", "HEAD")
    git("mv", "packages/ucm/gone.py", "README.md")
    git("commit", "-qm", "change")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["changed_backends", base])
    changed_backends.main()
    assert capsys.readouterr().out.splitlines() == [
        "any=true",
        'matrix={"include": [{"backend": "ucm", "python": "3.12"}]}',
    ]
