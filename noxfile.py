"""The repository's sessions: ``python3 -m nox -l`` lists them.

Sessions install and test the wheels built from the tree, never the source folders.
Everything a session needs is set up by the session itself, system packages included.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
PYTHON = "3.12"
PYTHONS = ["3.11", PYTHON]

TESTS_FAILED = 1
"""pytest's exit code where tests ran, and some failed."""

if sys.version_info[:2] != (3, 12) and shutil.which("python3.12") is None:
    # nox would skip the sessions and call that a success.
    sys.exit("Python 3.12 is needed and was not found: README.md says how to get one")

SHARED = "shared"

MOONCAKE_VARIABLE = "HICACHE_MOONCAKE_CLIENT"
MOONCAKE_CLIENTS = {
    "non-cuda": ("client-non-cuda", "mooncake-transfer-engine-non-cuda"),
    "cuda12": ("client", "mooncake-transfer-engine"),
    "cuda13": ("client-cuda13", "mooncake-transfer-engine-cuda13"),
}
"""Extra of hicache-mooncake and distribution of each build of Mooncake's client."""

MOONCAKE_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "libstdc++.so.6": "libstdc++6",
}
"""Shared libraries that Mooncake's client needs, and the Debian package of each."""

UCM_LOGS = {"UCM_LOG_LEVEL": "error", "UCM_LOG_TO_FILE": "false"}
"""UCM reads them when Python starts; else it logs every store, and to ``log/`` in this folder."""

UMBP_VARIABLE = "HICACHE_UMBP_CLIENT"
UMBP_VERSION = "1.2.4"
ROCM_LIBRARIES = ("libamdhip64.so.7", "libhsa-runtime64.so.1")
"""Where these load, UMBP's client needs nothing else; elsewhere they get stand-ins."""

REPORTS = ROOT / ".nox" / "reports"
"""What the runs of the conformance suite found; ``matrix`` makes docs/matrix.md of it."""

PROCESSES = (f"--numprocesses={min(8, 2 * (os.cpu_count() or 1))}", "--dist=worksteal")
"""Tests wait for servers half of the time. Each process has its tests in the order of the files,
so that it starts the server of a file once."""

GPU_DEVICES = ("/dev/nvidia0", "/dev/kfd")
"""One of them is there where NVIDIA's or AMD's driver found a GPU."""

GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Check style, formatting and the changelog fragments."""
    session.install(*group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("towncrier", "build", "--draft", "--version", "next", silent=True)


@nox.session(python=PYTHON)
def types(session: nox.Session) -> None:
    """Check types with mypy, in strict mode."""
    session.install(*group("types"))
    folders = [
        name
        for name in ("tests", "benchmarks", "tools", "examples")
        if any(Path(name).rglob("*.py"))
    ]
    sources = [f"{folder}/src" for folder in distributions([*ADAPTERS])]
    session.run("mypy", *sources, "noxfile.py", *folders)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run all tests, on the reference and on the real backends; arguments go to pytest."""
    wheels = install(session, [*ADAPTERS], group("tests"))
    session.run(
        "pytest",
        "--ignore=tests/sglang",
        "--ignore=tests/peers",
        "--hicache-faults",
        *report(session, "ours"),
        *PROCESSES,
        *session.posargs,
        env={
            # A backend that does not start fails its tests; it does not skip them.
            "HICACHE_REQUIRE_BACKEND": "1",
            "HICACHE_WHEELS": str(wheels),
            "PYTHONPATH": None,
            **UCM_LOGS,
        },
    )


@nox.session(python=PYTHON)
def roundtrip(session: nox.Session) -> None:
    """Put a model's pages through a backend and compare every byte.

    Arguments go to ``hicache roundtrip``. Standard output is that command's alone.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--backend", default="mooncake")
    known, rest = parser.parse_known_args(session.posargs)
    install(session, [known.backend] if known.backend in ADAPTERS else [], [])
    session.run(
        "hicache",
        "roundtrip",
        "--backend",
        known.backend,
        *rest,
        env={"PYTHONPATH": None},
        stderr=None,  # nox would join it to standard output
    )


@nox.session(python=PYTHON)
def bench(session: nox.Session) -> None:
    """Run the benchmarks; arguments go to each of them."""
    install(session, [*ADAPTERS], group("tests"))
    for script in sorted(Path("benchmarks").glob("bench_*.py")):
        command = ["python", "-m", f"benchmarks.{script.stem}", *session.posargs]
        session.run(*command, env={"PYTHONPATH": None, **UCM_LOGS})


@nox.session(python=PYTHON)
def sglang(session: nox.Session) -> None:
    """Run the tests that need SGLang itself, on the CPU; arguments go to pytest.

    Without arguments, also the conformance suite on the backends of others.
    """
    session.install("--no-deps", *group("sglang"))
    groups = ("tests", "peers", "sglang-needs", "sglang-engine")
    install(session, [*ADAPTERS], [need for name in groups for need in group(name)])
    env = {
        "CUDA_VISIBLE_DEVICES": "",  # so that a machine with a GPU runs the same
        "HICACHE_REQUIRE_BACKEND": "1",
        "PYTHONPATH": None,
        **UCM_LOGS,
    }
    session.run("pytest", *(session.posargs or ["tests/sglang"]), env=env)
    if not session.posargs:
        for path in sorted(Path("tests/peers").glob("test_*.py")):
            run_peer(session, path, env)


def run_peer(session: nox.Session, path: Path, env: dict[str, str | None]) -> None:
    """Run the suite on a backend of others. What it fails is for the matrix, no failure here.

    What does not fit the matrix's notes runs once more, so that a fault that comes in one run of
    many, such as a crash of a native client, is not taken for what the backend does.
    """
    name = path.stem.removeprefix("test_")
    run_peer_once(session, path, env, report(session, name))
    first = REPORTS / f"{name}.json"
    command = ["python", "-m", "tools.matrix", "--surprises", str(first)]
    surprises = str(session.run(*command, silent=True)).split()
    again = report(session, f"again/{name}")
    if surprises:
        session.log(f"{name}: run once more, since it was not as noted: {', '.join(surprises)}")
        run_peer_once(session, path, env, [*again, "-k", " or ".join(surprises)])


def run_peer_once(
    session: nox.Session, path: Path, env: dict[str, str | None], more: list[str]
) -> None:
    """Run the suite, or a part of it, on a backend of others."""
    session.run(
        "pytest",
        str(path),
        # It may end its process or hang in native code: that is a failure of the test.
        *("--numprocesses=1", "--dist=load", "--timeout=90", "--timeout-method=thread"),
        *("--hicache-faults", "--hicache-fail-once"),
        "--hicache-layouts=page_first,page_head",
        # The libraries that SGLang imports warn of many things.
        *("-W", "default", "--quiet", "--tb=line", "--show-capture=no", "-rN"),
        *more,
        env=env,
        success_codes=[0, TESTS_FAILED],
    )


@nox.session(python=PYTHON)
def matrix(session: nox.Session) -> None:
    """Compare docs/matrix.md with what the last runs of ``tests`` and ``sglang`` found.

    ``nox -s matrix -- --write`` writes it anew.
    """
    check = [] if session.posargs == ["--write"] else ["--check"]
    first, again = (sorted(map(str, REPORTS.glob(f"{part}*.json"))) for part in ("", "again/"))
    session.run("python", "-m", "tools.matrix", *check, *first, "--again", *again)


@nox.session(python=PYTHON)
def gpu(session: nox.Session) -> None:
    """Run what needs a GPU, with the backend of HICACHE_E2E_BACKEND: see docs/e2e.md.

    Without a GPU it is skipped, and fails with HICACHE_REQUIRE_GPU=1. Arguments go to
    ``python -m tests.e2e``.
    """
    backend = os.environ.get("HICACHE_E2E_BACKEND", "mooncake")
    if not any(Path(device).exists() for device in GPU_DEVICES):
        missing = f"this machine has none of {', '.join(GPU_DEVICES)}"
        if os.environ.get("HICACHE_REQUIRE_GPU") == "1":
            session.error(f"{missing}, and HICACHE_REQUIRE_GPU=1 is set")
        session.skip(f"{missing}; set HICACHE_REQUIRE_GPU=1 to fail instead")
    session.install("--quiet", *group("sglang"))  # with its dependencies, for a GPU
    install(session, [backend], group("tests"))
    env = {"HICACHE_E2E_BACKEND": backend, "HICACHE_REQUIRE_BACKEND": "1", "PYTHONPATH": None}
    session.run("pytest", "tests/gpu", "-k", backend, env={**env, **UCM_LOGS})
    session.run("python", "-m", "tests.e2e.nightly", *session.posargs, env={**env, **UCM_LOGS})


@nox.session(python=PYTHON)
def drift(session: nox.Session) -> None:
    """Compare our copy of SGLang's storage contract with each supported release, from its wheel.

    ``nox -s drift -- --version 0.5.24`` looks at another release, ``newest`` at the newest one;
    ``--write`` writes the table in docs/sglang.md.
    """
    install(session, [], [])
    command = ["python", "-m", "tools.sglang_drift", *session.posargs]
    session.run(*command, env={"PYTHONPATH": None})


@nox.session(python=PYTHON)
def wheels(session: nox.Session) -> None:
    """Build every wheel into dist/ and check its metadata."""
    session.install(*group("wheels"))
    built = build(session, [*ADAPTERS], ROOT / "dist")
    session.run("twine", "check", "--strict", *map(str, built))


def report(session: nox.Session, name: str) -> list[str]:
    """pytest's option to write the report of a run, where it is a whole one on Python 3.12."""
    if session.python != PYTHON or session.posargs:
        return []
    path = REPORTS / f"{name}.json"
    path.unlink(missing_ok=True)
    return [f"--hicache-report={path}"]


def group(name: str) -> list[str]:
    """Requirements of a dependency group of pyproject.toml."""
    return list(nox.project.dependency_groups(GROUPS, name))


def distributions(backends: list[str]) -> list[str]:
    """Folders of hicache-shared and of the adapters for some backends."""
    return [SHARED, *(ADAPTERS[name].folder for name in backends)]


def build(session: nox.Session, backends: list[str], target: Path) -> list[Path]:
    """Build the wheels of hicache-shared and of some adapters into an emptied folder."""
    shutil.rmtree(target, ignore_errors=True)
    command = ["python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target)]
    session.run(*command, *(f"./{folder}" for folder in distributions(backends)), silent=True)
    return sorted(target.glob("*.whl"))


def install(session: nox.Session, backends: list[str], extra: list[str]) -> Path:
    """Install hicache-shared, adapters with their native clients, and further requirements.

    Returns:
        The folder of the wheels that were built and installed.
    """
    clients = {
        f"hicache_{name}": ADAPTERS[name].set_up_client(session)
        for name in backends
        if session.python in ADAPTERS[name].pythons
    }
    folder = Path(session.create_tmp()).resolve() / "wheels"
    built = build(session, backends, folder)
    # pip keeps an installed wheel of the same version, so ours are always put in anew.
    paths = [str(path) for path in built]
    session.install("--quiet", "--no-deps", "--force-reinstall", *paths, silent=True)
    wanted = [f"{path}{clients.get(path.name.split('-')[0], '')}" for path in built]
    constraints = folder.parent / "clients.txt"
    constraints.write_text("\n".join(group("clients")))
    session.install("--quiet", "--constraint", str(constraints), *wanted, *extra, silent=True)
    return folder


def mooncake_client(session: nox.Session) -> str:
    """Make ready for the chosen build of Mooncake's client."""
    chosen = os.environ.get(MOONCAKE_VARIABLE, "non-cuda")
    if chosen not in MOONCAKE_CLIENTS:
        session.error(f"{MOONCAKE_VARIABLE} is {chosen!r}; it can be {', '.join(MOONCAKE_CLIENTS)}")
    missing = [package for name, package in MOONCAKE_LIBRARIES.items() if not loads(name)]
    install_packages(session, "Mooncake's client", missing)
    # All builds share one import package: another one left in a reused environment goes.
    others = [name for key, (_, name) in MOONCAKE_CLIENTS.items() if key != chosen]
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *others, silent=True)
    return f"[{MOONCAKE_CLIENTS[chosen][0]}]"


def ucm_client(session: nox.Session) -> str:
    """UCM's client in its build for CUDA 12.9, whose PosixStore needs no CUDA."""
    return "[cu129]"


def umbp_client(session: nox.Session) -> str:
    """Install UMBP's client, with stand-ins for HIP and HSA where there is no ROCm."""
    version = os.environ.get(UMBP_VARIABLE, UMBP_VERSION)
    if all(map(loads, ROCM_LIBRARIES)):
        session.install("--quiet", f"amd-mori=={version}", silent=True)
        return "[client]"
    install_packages(session, "UMBP's client", [] if shutil.which("gcc") else ["gcc"])
    # It replaces the environment's Python, so another one runs it.
    command = [sys.executable, "-m", "tools.umbp_without_gpu", "--version", version]
    done = session.run(*command, session.virtualenv.location, external=True, silent=True)
    session.log(str(done).strip())
    return ""


@dataclass(frozen=True)
class Adapter:
    """An adapter's distribution and its native client.

    Attributes:
        folder: the distribution's.
        set_up_client: installs what the client needs, or the client itself; returns the
            distribution's extra that installs the client, in brackets, or nothing.
        pythons: those that the client has wheels for; on others the adapter is without.
    """

    folder: str
    set_up_client: Callable[[nox.Session], str]
    pythons: list[str]


ADAPTERS = {
    "ucm": Adapter("packages/ucm", ucm_client, ["3.12"]),
    "mooncake": Adapter("packages/mooncake", mooncake_client, PYTHONS),
    "umbp": Adapter("packages/umbp", umbp_client, ["3.12"]),
}


def install_packages(session: nox.Session, purpose: str, packages: list[str]) -> None:
    """Install Debian packages with apt-get, or say which to install."""
    if not packages:
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        session.error(
            f"{purpose} needs packages that this machine lacks. On Debian or Ubuntu run, as root: "
            f"apt-get update && {' '.join(command)}"
        )
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    session.run("apt-get", "update", external=True, silent=True)
    session.run(*command, env=env, external=True, silent=True)


def loads(library: str) -> bool:
    """Whether the dynamic linker finds a shared library, whatever package brought it."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
