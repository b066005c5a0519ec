"""The workflows are valid, call sessions that there are, and let nothing past the gate."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tools.changed_backends import PYTHONS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
ACTION = ROOT / ".github" / "actions" / "nox" / "action.yml"
LOCAL = "./.github/actions/nox"
CI = FOLDER / "ci.yml"
FILES = [*WORKFLOWS, ACTION]


def load(path: Path) -> dict[str, Any]:
    return dict(YAML(typ="safe").load(path.read_text()))


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return dict(load(path)["jobs"])


def steps(path: Path) -> Iterator[dict[str, Any]]:
    groups = [load(path)["runs"]] if path == ACTION else [*jobs(path).values()]
    for group in groups:
        yield from group.get("steps", [])


def uses(path: Path) -> Iterator[str]:
    if path != ACTION:
        yield from (job["uses"] for job in jobs(path).values() if "uses" in job)
    yield from (step["uses"] for step in steps(path) if "uses" in step)


each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def test_there_are_workflows() -> None:
    assert {"ci.yml", "drift.yml", "release.yml"} <= {path.name for path in WORKFLOWS}


@each_file
def test_a_file_follows_githubs_schema(path: Path) -> None:
    schema = "vendor.github-actions" if path == ACTION else "vendor.github-workflows"
    done = validate(path, schema)
    assert done.returncode == 0, done.stdout


def test_the_validator_finds_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yml"
    path.write_text("on: push\njobs:\n  a:\n    runs-on: x\n    steps: {run: echo}\n")
    assert validate(path, "vendor.github-workflows").returncode == 1


def validate(path: Path, schema: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# -- sessions ---------------------------------------------------------------------------------


def sessions() -> set[str]:
    """The sessions of noxfile.py."""
    return {
        node.name
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(one).startswith("nox.session") for one in node.decorator_list)
    }


def called(path: Path) -> Iterator[str]:
    """Sessions that a workflow names: by the local action, or by a command of its own."""
    for step in steps(path):
        if step.get("uses") == LOCAL:
            yield step["with"]["session"]
        for words in re.findall(r"\bnox -s ((?:\w+ ?)+)", step.get("run", "")):
            yield from words.split()


@each_workflow
def test_every_session_that_a_workflow_calls_is_there(path: Path) -> None:
    assert set(called(path)) <= sessions()


def test_ci_calls_every_session_that_a_change_must_pass() -> None:
    words = re.findall(r"nox -s ([\w ]+)", (ROOT / ".ci" / "run").read_text())
    local = {name for line in words for name in line.split()}
    assert {"lint", "types", "tests", "sglang"} <= local
    assert local | {"wheels"} <= set(called(CI))


@each_workflow
def test_the_local_action_gets_inputs_that_it_has(path: Path) -> None:
    known = set(load(ACTION)["inputs"])
    for step in steps(path):
        if step.get("uses") == LOCAL:
            assert set(step["with"]) <= known


def pytest_paths() -> set[str]:
    """What CI's jobs give to pytest, for every backend."""
    given = [step["with"].get("arguments", "") for step in steps(CI) if step.get("uses") == LOCAL]
    each = [text.replace("${{ matrix.backend }}", name) for text in given for name in PYTHONS]
    return {word for text in each for word in text.split() if word.startswith("tests/")}


def test_paths_that_ci_gives_to_pytest_are_there() -> None:
    assert len(pytest_paths()) > len(PYTHONS)
    assert [path for path in pytest_paths() if not (ROOT / path).exists()] == []


def test_every_test_of_the_session_is_run_by_some_job() -> None:
    """``tests`` without arguments runs all folders; CI's jobs together must too."""
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        relative = path.relative_to(ROOT)
        if relative.parts[1] not in ("sglang", "peers"):
            assert {str(relative), str(relative.parent)} & pytest_paths(), relative


# -- the gate ---------------------------------------------------------------------------------


def test_the_gate_needs_every_other_job_and_always_runs() -> None:
    every = jobs(CI)
    gate = every.pop("gate")
    assert sorted(gate["needs"]) == sorted(every)
    assert gate["if"] == "always()"
    (step,) = gate["steps"]
    assert step["run"] == "exit 1"
    for bad in ("failure", "cancelled"):
        assert f"contains(needs.*.result, '{bad}')" in step["if"]


def test_only_the_backends_can_be_skipped() -> None:
    """The gate lets skipped jobs pass, so no other job may have a condition."""
    conditions = {name: job["if"] for name, job in jobs(CI).items() if "if" in job}
    assert conditions == {"gate": "always()", "backend": "needs.changes.outputs.any == 'true'"}
    assert not any("continue-on-error" in path.read_text() for path in WORKFLOWS)


# -- security ---------------------------------------------------------------------------------


@each_file
def test_actions_are_pinned_by_commit_with_their_version_beside_it(path: Path) -> None:
    text = path.read_text()
    for action in uses(path):
        if not action.startswith("./"):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
            assert re.search(rf"uses: {re.escape(action)} # v\d+\.\d+\.\d+\n", text), action


@each_file
def test_an_action_has_one_pin_everywhere(path: Path) -> None:
    pins = {action.split("@")[0]: action for file in FILES for action in uses(file)}
    assert all(pins[action.split("@")[0]] == action for action in uses(path))


WRITES = {
    ("release.yml", "attest"): {"id-token": "write", "attestations": "write"},
    ("release.yml", "publish"): {"id-token": "write"},
}
"""Every right to write that a job has."""


@each_workflow
def test_permissions_are_the_least(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for name, job in workflow["jobs"].items():
        given = job.get("permissions", {})
        rights = {right: level for right, level in given.items() if level != "read"}
        assert rights == WRITES.get((path.name, name), {}), name


@each_workflow
def test_every_workflow_has_a_concurrency_group_and_every_job_a_time_limit(path: Path) -> None:
    workflow = load(path)
    assert "concurrency" in workflow or "workflow_call" in workflow["on"]
    for name, job in workflow["jobs"].items():
        assert "uses" in job or job["timeout-minutes"] <= 360, name


@each_file
def test_checkouts_keep_no_credentials_and_commands_take_no_expressions(path: Path) -> None:
    """What a contributor writes (a branch name, a title) must not become a command."""
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        assert "${{" not in step.get("run", "")


@each_file
def test_no_address_of_a_registry_and_no_path_of_a_machine(path: Path) -> None:
    text = path.read_text()
    assert not re.search(
        r"https?://|index-url\s*[=:]?\s*\w+\.|(?<![\w.}])/(?:home|root|opt|mnt|work)/", text
    )
    assert "password" not in text
    assert "secrets." not in text


def test_a_release_is_what_ci_built_attested_and_published_without_a_token() -> None:
    release = jobs(FOLDER / "release.yml")
    assert release["ci"]["uses"] == "./.github/workflows/ci.yml"
    assert [release[name]["needs"] for name in ("check", "attest", "publish")] == [
        "ci",
        "check",
        "attest",
    ]
    assert release["publish"]["environment"] == "pypi"
    assert not any(step.get("uses") == LOCAL for step in steps(FOLDER / "release.yml"))


def test_drift_is_looked_for_every_day_on_the_newest_release() -> None:
    workflow = load(FOLDER / "drift.yml")
    assert workflow["on"]["schedule"]
    (step,) = [step for step in steps(FOLDER / "drift.yml") if step.get("uses") == LOCAL]
    assert step["with"] == {
        "session": "drift",
        "arguments": "--version ${{ inputs.version || 'newest' }}",
    }
