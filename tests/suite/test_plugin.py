"""The plugin in runs of its own, in an empty folder: options, verdicts and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_shared.contract import HiCacheStorage
from hicache_shared.errors import ConfigError
from hicache_shared.testing.named_class import harness_of
from hicache_shared.testing.suite.fixtures import REQUIRE

MEMORY = "hicache_shared.memory_backend:MemoryBackend"
ZERO_COPY = '{"interface_v1": 1}'
PYTEST = [sys.executable, "-m", "pytest", "-p", "few", "-p", "no:cacheprovider", "-q"]
ONE = "test_case_13_one_absent_page_leaves_its_neighbours_whole"
OTHER = "test_case_16_a_hole_at_the_start_is_no_hit"
RAW = "test_case_10_an_object_is_exactly_the_page_that_the_pool_describes"

FEW = """
import pytest

KEPT = ("case_10_an_object", "case_13", "dropped", "test_my_", "test_something")

@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, name):
    if isinstance(collector, pytest.Class) and not any(part in name for part in KEPT):
        return []
"""
"""A plugin of the runs: a few tests of the suite are enough, and are found sooner."""

HEAD = """
import os
import pytest
from hicache_shared.errors import BackendUnavailableError
from hicache_shared.memory_backend import MemoryBackend
from hicache_shared.testing import BackendSuite, Capabilities, Harness

class Mine(Harness):
    name = "mine"
    capabilities = Capabilities(zero_copy=True)
    distributions = ("hicache-shared", "no-such-distribution")

    def make(self, config):
        return MemoryBackend(config, {})
"""
MAKE = "return MemoryBackend(config, {})"
WHOLE = f"{HEAD}\nclass TestMine(BackendSuite):\n    harness_type = Mine\n"


class Run:
    """A run of pytest: its exit status, what it printed, and its report."""

    def __init__(self, folder: Path, *options: str, require: bool = False, tests: str = "") -> None:
        (folder / "few.py").write_text(FEW)
        if tests:
            (folder / "test_mine.py").write_text(tests)
        report = folder / "reports" / "report.json"
        environ = {k: v for k, v in os.environ.items() if k not in (REQUIRE, "PYTEST_ADDOPTS")}
        done = subprocess.run(
            [*PYTEST, f"--hicache-report={report}", *options],
            capture_output=True,
            text=True,
            cwd=folder,
            env={**environ, REQUIRE: "1"} if require else environ,
        )
        self.code = done.returncode
        self.lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
        self.report: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}

    def behaviour(self, name: str, backend: str = "mine") -> dict[str, Any]:
        found: dict[str, Any] = self.report["backends"][backend]["behaviours"][name]
        return found

    def says(self, *words: str) -> bool:
        """Whether a line has all the words."""
        return any(all(word in line for word in words) for line in self.lines)


# -- a class by its name -------------------------------------------------------------------------


def test_a_class_by_name_is_tested_from_an_empty_folder(tmp_path: Path) -> None:
    """Without "interface_v1" in its extra config it gets flat pages."""
    (tmp_path / "flat.py").write_text(
        "from hicache_shared.memory_backend import MemoryBackend\n"
        "class Flat(MemoryBackend):\n"
        "    def batch_get_v1(self, *given):\n"
        "        raise NotImplementedError\n"
        "    batch_set_v1 = batch_get_v1\n"
    )
    # As SGLang, the reference takes a backend with a module path and no "interface_v1" for flat.
    extra = '--hicache-extra-config={"module_path": "flat"}'
    run = Run(tmp_path, "--hicache-backend=flat:Flat", extra, "-k", "case_13 and mla-page_first")
    assert run.code == 0, "\n".join(run.lines)
    assert run.behaviour(ONE, "Flat")["verdict"] == "passed"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nowhere:Class"], ["No module named 'nowhere'", "in this folder"]),
        (["broken:Class"], ["broken cannot be imported (SyntaxError"]),
        ([MEMORY, "few.py"], ["runs the suite alone, and not few.py; choose tests of it with -k"]),
        ([MEMORY, "--hicache-report=."], ["--hicache-report: . is a folder; give a file"]),
        (
            [MEMORY, "--hicache-extra-config={interface_v1: 1}"],
            ["--hicache-extra-config: expected a JSON object such as", ZERO_COPY, "got '{interf"],
        ),
        (
            [MEMORY, "--hicache-extra-config=[1]"],
            ["--hicache-extra-config: expected a JSON object such as", ZERO_COPY, "got '[1]'"],
        ),
    ],
    ids=["class", "syntax", "path", "folder", "no JSON", "no object"],
)
def test_a_wrong_option_is_a_usage_error_that_says_what_to_give(
    tmp_path: Path, options: list[str], words: list[str]
) -> None:
    backend, *more = options
    (tmp_path / "broken.py").write_text("class Class(:")
    run = Run(tmp_path, f"--hicache-backend={backend}", *more)
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert run.says("ERROR: ", *words), "\n".join(run.lines)
    assert not run.says("Traceback")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "def __init__(self, config, kwargs):\n        raise OSError('no disk')",
            [
                "cannot be made by cls(HiCacheStorageConfig, {}): OSError: no disk",
                '"namespace": "x"',
            ],
        ),
        (
            "def __init__(self, config):\n        pass",
            ["cannot be made by cls(HiCacheStorageConfig, {}): TypeError: ", "positional argument"],
        ),
        ("def close(self):\n        raise OSError('gone')", ["cannot be closed: OSError: gone"]),
    ],
    ids=["raises", "takes another number of arguments", "cannot be closed"],
)
def test_a_class_that_cannot_be_made_is_told_once_before_the_tests(
    tmp_path: Path, body: str, words: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from hicache_shared.memory_backend import MemoryBackend\n"
        f"class Mine(MemoryBackend):\n    {body}\n"
    )
    extra = '--hicache-extra-config={"namespace": "x"}'
    run = Run(tmp_path, "--hicache-backend=mine:Mine", extra)
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert run.says("ERROR: --hicache-backend: Mine ", *words), "\n".join(run.lines)
    assert not run.says("Traceback")


class NoBackend:
    pass


class HalfABackend(HiCacheStorage):
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return None


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        (
            "nowhere:Class",
            r"nowhere cannot be imported \(ModuleNotFoundError: No module .* in this folder",
        ),
        ("json:Nobody", r"json has no Nobody; give package.module:Class"),
        ("json", r"expected package.module:Class, got 'json'"),
        (":Class", r"expected package.module:Class, got ':Class'"),
        (f"{__name__}:NoBackend", r":NoBackend is not a subclass of .*HiCacheStorage"),
        (f"{__name__}:HalfABackend", r":HalfABackend is abstract: define batch_get, batch_set"),
    ],
)
def test_a_class_that_is_no_backend_is_refused_with_the_reason(dotted: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        harness_of(dotted, {})


# -- verdicts ------------------------------------------------------------------------------------

SOME = ["-k", "mla-page_first and (case_10 or case_13)"]


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a few tests, of which the backend can do one."""
    return Run(tmp_path_factory.mktemp("some"), *SOME, tests=WHOLE)


def test_a_capability_that_is_off_is_not_supported_and_never_passed(some: Run) -> None:
    assert some.code == 0
    off = some.behaviour(RAW)
    assert off["verdict"] == "not supported"
    assert "passed" not in off["counts"]
    assert off["reasons"] == ["not supported: the harness of mine has no 'raw'"]
    assert some.behaviour(ONE)["verdict"] == "passed"
    passed, off_runs = some.behaviour(ONE)["counts"]["passed"], off["counts"]["not supported"]
    assert some.says("mine: ", f"{passed} passed", f"{off_runs} not supported")
    assert some.says("not supported: the harness of mine has no 'raw'")


def test_what_is_overridden_is_never_passed_and_its_reason_is_shown(tmp_path: Path) -> None:
    other = f"    @overrides('no pages are absent')\n    def {ONE}(self): pass\n"
    imports = "from hicache_shared.testing import overrides\n"
    run = Run(tmp_path, "-k", "case_13 or case_10", tests=imports + WHOLE + other)
    assert run.behaviour(ONE)["verdict"] == "overridden"
    assert run.behaviour(ONE)["counts"] == {"overridden": 1}
    assert run.says(f"overridden {ONE}: no pages are absent")
    narrower = """
    @pytest.fixture(params=[("mla", "page_first")])
    @overrides('it knows one model')
    def pair(self, request): return request.param
"""
    run = Run(tmp_path, "-k", "case_13", tests=imports + WHOLE + narrower)
    assert run.behaviour(ONE)["counts"] == {"overridden": 1}
    assert run.says(f"overridden {ONE}: it knows one model")


def test_the_versions_of_what_is_installed_are_in_the_report(some: Run) -> None:
    assert list(some.report["backends"]["mine"]["versions"]) == ["hicache-shared"]


def test_what_is_left_out_is_not_run_by_name_and_number(some: Run) -> None:
    counts = some.behaviour(ONE)["counts"]
    assert counts["not run"] > counts["passed"] >= 1
    assert some.behaviour(OTHER)["verdict"] == "not run"
    assert some.says("mine: ", "passed", "not run")
    assert some.says("not run: test_", " more")


def test_several_processes_report_as_one_does(some: Run, tmp_path: Path) -> None:
    assert Run(tmp_path, *SOME, "-n2", tests=WHOLE).report == some.report


NO_CLIENT = """
class Absent(Mine):
    name = "absent"
    requires = ("no_such_client",)

class TestAbsent(BackendSuite):
    harness_type = Absent
"""
NO_SERVER = """
class Down(Mine):
    name = "down"

    def __init__(self):
        raise BackendUnavailableError("no server at :1")

class TestDown(BackendSuite):
    harness_type = Down
"""
ABSENT = {
    "absent": "package 'no_such_client', which absent needs, is not installed",
    "down": "no server at :1",
}


def test_an_absent_backend_is_skipped_with_the_reason(tmp_path: Path) -> None:
    run = Run(tmp_path, *SOME, tests=HEAD + NO_CLIENT + NO_SERVER)
    assert run.code == 0
    for backend, why in ABSENT.items():
        found = run.behaviour(ONE, backend)
        assert found["verdict"] == "skipped"
        assert found["reasons"] == [f"{why}; set {REQUIRE}=1 to fail instead"]
        assert run.says(f"{backend}: ", "skipped")


def test_an_absent_backend_that_is_required_is_a_failure(tmp_path: Path) -> None:
    run = Run(tmp_path, *SOME, tests=HEAD + NO_CLIENT + NO_SERVER, require=True)
    assert run.code == 1
    for backend, why in ABSENT.items():
        found = run.behaviour(ONE, backend)
        assert found["verdict"] == "failed"
        assert set(found["failures"].values()) == {f"{why}, and {REQUIRE} is set"}


def test_a_failure_is_reported_with_its_parameters_and_its_message(tmp_path: Path) -> None:
    broken = WHOLE.replace(MAKE, f"assert config.is_mla_model, 'no MHA here'\n        {MAKE}")
    run = Run(tmp_path, "-k", "case_13 and (mla-page_first or mha-page_first)", tests=broken)
    assert run.code == 1
    found = run.behaviour(ONE)
    assert found["verdict"] == "failed"
    assert found["counts"]["passed"] >= 1
    assert "no MHA here" in found["failures"]["mha-page_first"]
    assert "mla-page_first" not in found["failures"]
    assert run.says(f"FAILED {ONE}: ", "[mha-page_first]", "no MHA here")


# -- what does not run ---------------------------------------------------------------------------


def test_what_the_command_line_does_not_name_is_not_run(tmp_path: Path) -> None:
    run = Run(tmp_path, f"test_mine.py::TestMine::{ONE}[mla-page_first]", tests=WHOLE)
    assert run.behaviour(ONE)["counts"] == {"passed": 1}
    assert run.behaviour(RAW)["verdict"] == "not run"


def test_what_a_run_that_ends_early_leaves_is_not_run(tmp_path: Path) -> None:
    broken = WHOLE.replace(MAKE, "raise RuntimeError('broken')")
    run = Run(tmp_path, "-x", "-k", "case_13", tests=broken)
    counts = run.behaviour(ONE)["counts"]
    assert counts["failed"] == 1
    assert counts["not run"] > 1


def test_a_test_that_is_taken_out_of_the_suite_is_not_run_and_the_guard_fails(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, "-k", "dropped", tests=f"{WHOLE}    {ONE} = None\n")
    assert run.code == 1
    assert run.behaviour(ONE)["verdict"] == "not run"
    assert run.says("FAILED test_no_test_is_dropped", f"{ONE} is dropped: remove")


FAULTS = f"""{WHOLE}
    @pytest.mark.faults
    def test_my_server_is_killed(self, harness):
        pass
"""


def test_faults_of_servers_run_only_when_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, "-k", "my_server", tests=FAULTS)
    assert run.code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert run.behaviour("test_my_server_is_killed")["verdict"] == "not run"
    run = Run(tmp_path, "-k", "my_server", "--hicache-faults", tests=FAULTS)
    assert run.code == 0
    assert run.behaviour("test_my_server_is_killed")["verdict"] == "passed"


DIES = f"""{WHOLE}
    def test_my_process_dies(self, harness):
        os._exit(3)
"""


def test_a_worker_that_dies_is_a_failure_of_the_test_that_it_ran(tmp_path: Path) -> None:
    run = Run(tmp_path, "-n1", "-k", "my_process", tests=DIES)
    assert run.code == 1
    found = run.behaviour("test_my_process_dies")
    assert found["verdict"] == "failed"
    assert "crashed" in found["failures"][""]


@pytest.mark.parametrize("options", [(), ("-n1", "--dist=load")], ids=["one process", "a worker"])
def test_where_a_run_fails_once_the_other_parameters_of_the_test_are_left_out(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """A worker that died under it is a failure too, which the next worker knows of."""
    dies = "os._exit(3)" if options else "assert False"
    tests = f"""{WHOLE}
    @pytest.mark.parametrize("i", range(3))
    def test_my_process_dies(self, harness, i):
        {dies}
"""
    run = Run(tmp_path, *options, "-k", "my_process", "--hicache-fail-once", tests=tests)
    behaviour = run.behaviour("test_my_process_dies")
    assert behaviour["verdict"] == "failed"
    assert behaviour["counts"] == {"failed": 1, "skipped": 2}


def test_tests_of_other_memory_layouts_are_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path, "-k", "case_13", "--hicache-layouts=page_head,layer_first", tests=WHOLE)
    assert run.code == 0, "\n".join(run.lines)
    kinds = {"page_first": 0, "page_head": 2, "layer_first": 4}
    assert run.behaviour(ONE)["counts"]["passed"] == kinds["page_head"] + kinds["layer_first"]


def test_a_run_without_the_suite_says_nothing_of_it(tmp_path: Path) -> None:
    run = Run(tmp_path, tests="def test_something():\n    pass\n")
    assert run.code == 0
    assert not run.report
    assert not run.says("conformance")
